"""Checks of the commands in documents and help texts: each is followed up to its loaded and validated configuration.

Nothing is trained, compiled or written.  Training commands are called with --check; benchmarks and the planner are
stopped where they have their configuration; of other commands the arguments are parsed.
"""

import ast
import re
import shlex
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

from shmap_tp import cli, prepare, train, verify
from shmap_tp.config.compose import load
from tests.helpers.paths import ROOT

PLACEHOLDER = re.compile(r"\s\[(--|key=)[^]]*\]")
"""An optional argument in a usage line, such as [--steps 3]."""
OWN_COMMAND = re.compile(
    r"python (main\.py|-m shmap_tp|benchmarks/|docs/)|shmap-tp [a-z]|sbatch .*slurm\.sh|scripts/pod\.sh [a-z]"
)


class Checked(Exception):
    """Ends a benchmark as soon as its configuration is there."""


def commands(text: str) -> list[list[str]]:
    """The commands of a shell script, each as words; a backslash continues a line."""
    return [words for line in _joined(text) if (words := shlex.split(line, comments=True))]


def own_commands(text: str) -> list[list[str]]:
    """The commands of a shell script that `check_command` can check; the others may be anything."""
    return [shlex.split(line, comments=True) for line in _joined(text) if OWN_COMMAND.match(line)]


def commands_of_help(text: str) -> list[list[str]]:
    """The commands in a help text or a comment: lines that begin with one; two spaces begin its explanation."""
    lines = [line.strip().removeprefix("#").strip() for line in _joined(text)]
    lines = [re.split(r"\s{2,}|\s\((?:on|for) ", line)[0] for line in lines if OWN_COMMAND.match(line)]
    return [shlex.split(PLACEHOLDER.sub("", line), comments=True) for line in lines]


def _joined(text: str) -> list[str]:
    return re.sub(r"\s*\\\n\s*", " ", text).splitlines()


def help_texts() -> dict[str, str]:
    """Everything with example commands besides the documents, by name."""
    python = [*(ROOT / "shmap_tp").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "docs").rglob("*.py")]
    texts = {str(file.relative_to(ROOT)): ast.get_docstring(ast.parse(file.read_text())) or "" for file in python}
    for file in [*(ROOT / "conf").rglob("*.yaml"), *(ROOT / "scripts").glob("*.sh"), *ROOT.glob("*.sh")]:
        texts[str(file.relative_to(ROOT))] = "\n".join(re.findall(r"^#.*", file.read_text(), re.MULTILINE))
    texts["python main.py --help"] = train._parser("python main.py").format_help()
    texts["shmap-tp --help"] = cli.help_text()
    return {name: text for name, text in texts.items() if commands_of_help(text)}


def check_command(words: list[str]) -> None:
    """Raise an AssertionError, SystemExit or UserError if the command `words` would be refused."""
    match words:
        case ["python", "main.py", *rest] | ["shmap-tp", "train", *rest]:
            check_training(rest)
        case ["python", "-m", "shmap_tp.verify", *rest] | ["shmap-tp", "verify", *rest]:
            arguments = verify.parser().parse_args(rest)
            if arguments.command != "checkpoint":
                load(arguments.cfg, arguments.overrides)
        case ["python", "-m", "shmap_tp.prepare", *rest] | ["shmap-tp", "prepare", *rest]:
            prepare._parse(rest)
        case ["python", "-m", "shmap_tp.plan", *rest] | ["shmap-tp", "plan", *rest]:
            module = import_module("shmap_tp.plan.__main__")
            with arguments_of_process("plan", rest):
                check_step(module, lambda: module.main(module.parse_arguments()))
        case ["python", "benchmarks/sweep.py", *rest]:
            check_sweep(rest)
        case ["python", "benchmarks/benchmark_tpu.py" | "benchmarks/benchmark_gpu.py" as script, *rest]:
            module = import_module(Path(script).stem)
            with arguments_of_process(script, rest):
                check_step(module, module.main)
        case ["python", "benchmarks/pytorch_baseline.py", *rest]:  # it has the flags of benchmark_gpu.py
            check_command(["python", "benchmarks/benchmark_gpu.py", *rest])
        case ["python", script, *rest]:
            text = (ROOT / script).read_text()
            assert not [word for word in rest if word.startswith("--") and word not in text], words
        case ["scripts/pod.sh", _, *rest]:
            if "--" in rest:
                check_training(rest[rest.index("--") + 1 :])
        case ["sbatch", *rest]:
            check_training(rest[rest.index("scripts/slurm.sh") + 1 :])
        case _:
            raise AssertionError(f"{shlex.join(words)} cannot be checked; mark it sh run or sh hardware")


def arguments_of_process(script: str, words: list[str]) -> patch:
    return patch.object(sys, "argv", [script, *words])


def check_training(words: list[str]) -> None:
    """Call `main.py WORDS --check`."""
    assert train.main([*words, "--check"]) == 0, words


def check_step(module: object, run: Callable[[], object]) -> None:
    """Call `run`, which `module` has, until `config_from_flags` returns."""
    load_config = module.config_from_flags

    def stop(*arguments: object) -> None:
        load_config(*arguments)
        raise Checked

    with patch.object(module, "config_from_flags", stop):
        try:
            code = run()
        except Checked:
            return
    raise AssertionError(f"ended with {code} before there was a configuration")


def check_sweep(words: list[str]) -> None:
    """Compose the first configuration of a sweep; a sweep may contain some that are invalid."""
    sweep = import_module("sweep")
    given = [word for word in words if re.match(r"[a-z_.]+=", word)]
    text = (ROOT / "benchmarks" / "sweep.py").read_text()
    assert not [word for word in words if word.startswith("--") and f'"{word}"' not in text], words
    sweep.configuration(sweep.grid(given)[0])
