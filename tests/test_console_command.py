"""`shmap-tp`: one command with all programs, each the same as its module."""

import re
import subprocess
import sys
import tomllib

import pytest

import shmap_tp
from shmap_tp import cli, train
from tests.helpers.fresh_process import python
from tests.helpers.run_fixtures import FIRST, ROOT

COMMANDS = ["train", "prepare", "plan", "generate", "chat", "evaluate", "pretrained", "verify"]


def called(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_installed_command_is_the_function_main_of_cli():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"shmap-tp": "shmap_tp.cli:main"}


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]], ids=str)
def test_the_commands_are_listed_one_line_each(capsys, arguments):
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == COMMANDS
    assert all(len(line) <= 100 for line in lines)


def test_the_help_of_the_library_names_all_commands():
    listed = shmap_tp.__doc__.split("The commands are ")[1]
    assert re.findall(r"`(?:shmap-tp )?(\w+)`", listed) == COMMANDS


def test_listing_the_commands_needs_no_jax():
    done = python(
        "import runpy, sys; sys.argv = ['shmap-tp']\n"
        "try: runpy.run_module('shmap_tp', run_name='__main__')\n"
        "except SystemExit as done: assert done.code == 0\n"
        "assert 'jax' not in sys.modules and 'hydra' not in sys.modules"
    )
    assert done.returncode == 0 and "verify" in done.stdout, done.stderr


def test_an_unknown_command_is_explained_in_two_lines(capsys):
    assert cli.main(["trian", "--cfg", FIRST]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"error: shmap-tp has no command 'trian'\nuse one of {', '.join(COMMANDS)}\n"


@pytest.mark.parametrize(
    ("name", "argument", "code"),
    [
        ("prepare", "--help", 0),
        ("prepare", "--nonsense", 2),
        ("plan", "--help", 0),
        ("verify", "--nonsense", 2),
        ("pretrained", "--help", 0),
    ],
)
def test_a_command_is_its_module(name, argument, code):
    """The same help, the same answer to bad input, the same exit code."""
    command, module = called("-m", "shmap_tp", name, argument), called("-m", f"shmap_tp.{name}", argument)
    assert (command.returncode, command.stdout, command.stderr) == (module.returncode, module.stdout, module.stderr)
    assert command.returncode == code, command.stderr
    assert f"shmap_tp.{name}" in command.stdout + command.stderr


def test_the_three_ways_to_train_have_the_same_help_but_for_their_names():
    given = [["main.py"], ["-m", "shmap_tp", "train"], ["-m", "shmap_tp.train"]]
    names = ["python main.py", "shmap-tp train", "python -m shmap_tp.train"]
    helps = []
    for arguments, name in zip(given, names, strict=True):
        done = called(*arguments, "--help")
        assert done.returncode == 0 and done.stdout.startswith(f"usage: {name} ["), done.stderr
        helps.append([line for line in done.stdout.replace(name, "COMMAND").splitlines() if "COMMAND" not in line][3:])
    assert helps[0] == helps[1] == helps[2]


@pytest.mark.parametrize("code", [0, 2, 69])
def test_the_command_exits_with_the_code_of_the_training(monkeypatch, code):
    seen = []
    monkeypatch.setattr(train, "main", lambda argv, command: seen.append((argv, command)) or code)
    monkeypatch.setattr(train.signal, "signal", lambda number, handler: None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--cfg", FIRST, "train.steps=3"])
    assert ended.value.code == code
    assert seen == [(["--cfg", FIRST, "train.steps=3"], "shmap-tp train")]


def test_a_file_is_never_searched_for_in_the_packaged_configuration(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main(["--cfg", "conf/config.yaml"]) == 2
    assert "--cfg conf/config.yaml: no such file" in capsys.readouterr().err
