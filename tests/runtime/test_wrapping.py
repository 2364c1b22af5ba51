"""Long lines are broken between words, in a terminal only."""

import io
import sys

import pytest

from shmap_tp.errors import UserError
from shmap_tp.runtime.command_line import run_command
from shmap_tp.runtime.console import write_line
from shmap_tp.runtime.wrapping import wrapped


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """In the place of stdout and stderr, 40 columns wide."""
    found = Terminal()
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stdout", found)
    monkeypatch.setattr(sys, "stderr", found)
    return found


MESSAGE = "mesh.mp=3 does not divide heads=16 (model 6_9b); use mesh.mp in {1, 2, 4, 8, 16}"


def test_an_error_is_broken_between_words_and_a_line_that_is_printed_keeps_its_indent(monkeypatch):
    def command() -> None:
        write_line(f"  {MESSAGE}")
        raise UserError(MESSAGE)

    shown = terminal(monkeypatch)
    assert run_command(command) == 2
    printed, _, error = shown.getvalue().partition("error: ")
    lines = [*printed.splitlines(), *f"error: {error}".splitlines()]
    assert len(lines) > 3 and max(map(len, lines)) <= 40
    assert all(line.startswith("  ") for line in printed.splitlines())
    assert " ".join(error.splitlines()) == " ".join(printed.split()) == MESSAGE


def test_commands_stay_whole_and_a_file_gets_the_line_as_it_is(monkeypatch):
    shown = terminal(monkeypatch)
    quoted = "prepare it with `python -m shmap_tp.prepare --source stdlib --out data/mine`; --help lists others"
    assert "`python -m shmap_tp.prepare --source stdlib --out data/mine`;" in wrapped(quoted, shown)
    resume = "  to resume   python main.py --cfg runs/first/config.yaml train.steps=600 --resume"
    assert wrapped(resume, shown).splitlines()[-1].strip() == resume.partition("resume   ")[2]
    assert wrapped(MESSAGE * 9, io.StringIO()) == MESSAGE * 9
