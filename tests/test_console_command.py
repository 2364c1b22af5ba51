"""`shmap-tp`: one command with all programs, each the same as its module."""

import re
import subprocess
import sys
from typing import NoReturn

import pytest

import shmap_tp
from shmap_tp import cli, train
from tests.helpers.fresh_process import python
from tests.helpers.run_fixtures import FIRST, ROOT

COMMANDS = ["train", "prepare", "report", "plan", "generate", "chat", "evaluate", "pretrained", "verify"]


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]], ids=str)
def test_the_commands_are_listed_one_line_each(capsys, arguments):
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == COMMANDS
    assert all(len(line) <= 100 for line in lines)
    in_the_library = shmap_tp.__doc__.split("The commands are ")[1]
    assert re.findall(r"`(?:shmap-tp )?(\w+)`", in_the_library) == COMMANDS


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


def called(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("argument, code", [("--help", 0), ("--nonsense", 2)])
def test_a_command_is_its_module(argument, code):
    """The same help, the same answer to bad input, the same exit code."""
    command = called("-m", "shmap_tp", "prepare", argument)
    assert command == called("-m", "shmap_tp.prepare", argument) and command[0] == code


@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_an_argument_that_it_does_not_know(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", [])
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--nonsense"])
    usage = f"usage: {'shmap-tp train' if name == 'train' else f'python -m shmap_tp.{name}'} ["
    assert ended.value.code == 2 and ("error: unrecognized" if name == "plan" else usage) in capsys.readouterr().err


def test_the_three_ways_to_train_have_the_same_help_but_for_their_names():
    given = [["main.py"], ["-m", "shmap_tp", "train"], ["-m", "shmap_tp.train"]]
    names = ["python main.py", "shmap-tp train", "python -m shmap_tp.train"]
    helps = []
    for arguments, name in zip(given, names, strict=True):
        code, out, err = called(*arguments, "--help")
        assert code == 0 and out.startswith(f"usage: {name} ["), err
        helps.append([line for line in out.replace(name, "COMMAND").splitlines() if "COMMAND" not in line][3:])
    assert helps[0] == helps[1] == helps[2]


@pytest.mark.parametrize("code", [0, 2, 69, 75, 130])
def test_the_command_exits_with_the_code_of_the_training(monkeypatch, code):
    """Unless all is done, without the end of the interpreter, which programs that still run or compile could crash."""
    seen, ended_at_once = [], []

    def end_at_once(code: int) -> NoReturn:
        ended_at_once.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(train, "main", lambda argv, command: seen.append((argv, command)) or code)
    monkeypatch.setattr(train.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(train.os, "_exit", end_at_once)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--cfg", FIRST, "train.steps=3"])
    assert ended.value.code == code and ended_at_once == [code] * (code != 0)
    assert seen == [(["--cfg", FIRST, "train.steps=3"], "shmap-tp train")]


def test_a_file_is_never_searched_for_in_the_packaged_configuration(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main(["--cfg", "conf/config.yaml"]) == 2
    assert "--cfg conf/config.yaml: there is no such file" in capsys.readouterr().err
