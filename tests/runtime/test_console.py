"""What is printed: broken between words in a terminal only, without control characters, above a progress bar.  What the
planner prints is no wider than the terminal, and a command in several lines is the same command."""

import io
import subprocess
import sys

import pytest
from tqdm import tqdm

from shmap_tp.errors import UserError
from shmap_tp.runtime.command_line import run_command
from shmap_tp.runtime.console import (
    fitted_table,
    print_on_process_0,
    shell_command,
    wrap_lines,
    wrapped,
    write_line,
    write_text,
)
from shmap_tp.runtime.exit_codes import print_final_message


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


FORGED = "the key \x1b[2J\nerror: all is well\x9b2J\u2028" + 10_000 * "x" + "; remove it"
ESCAPED = r"the key \x1b[2J", r"  error: all is well\x9b2J\x2028xxx"


@pytest.mark.parametrize("how", ["the error of a command", "the last message of a process", "a line", "an answer"])
def test_a_text_of_others_cannot_control_the_terminal_or_look_like_an_error_of_this_program(monkeypatch, capfd, how):
    def refuse() -> None:
        raise UserError(FORGED)

    if how == "the error of a command":
        run_command(refuse)
    elif how == "the last message of a process":
        print_final_message(2, FORGED)
    elif how == "a line":
        write_line(FORGED.replace("\n", "\n  "))
    else:
        shown = terminal(monkeypatch)
        write_text("\x1b[2J\thello\n")
        assert shown.getvalue() == "\\x1b[2J\thello\n"
        return
    said = "".join(capfd.readouterr())
    first, second = said.splitlines()
    assert first.removeprefix("error: ") == ESCAPED[0] and second.startswith(ESCAPED[1])
    assert len(second) <= 1000 and "characters) ..." in second and second.endswith("; remove it")


def test_a_line_replaces_the_progress_bar_and_the_bar_is_drawn_again_below_it(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    with tqdm(total=10, initial=3, ncols=40, bar_format="{n_fmt}/{total_fmt} steps"):
        print_on_process_0("said")
        line, bar = terminal.getvalue().split("\n")
    before, cleared, said = line.rsplit("\r", 2)
    assert before.endswith("3/10 steps") and not cleared.strip() and said == "said"
    assert bar.endswith("\r3/10 steps")


# Lines, tables and commands of the planner

ROWS = [
    ["", "seconds", "basis", "candidate"],
    ["*", "0.678", "compiled", "(16, 1) fsdp, 1 mb, remat all_matmuls, offload " * 2],
]


@pytest.fixture(params=["45", "80", "300"])
def width(request, monkeypatch) -> int:
    monkeypatch.setenv("COLUMNS", request.param)
    return int(request.param)


def test_a_table_that_is_too_wide_drops_columns_and_wraps_the_last(width):
    lines = fitted_table(ROWS, ["basis"], wrap="candidate", least=40).splitlines()
    assert max(map(len, lines)) <= width
    assert ("basis" in lines[0]) == (width > 60) and (len(lines) == 2) == (width > 80)
    assert " ".join(" ".join(lines[1:]).split()).endswith(ROWS[1][-1].strip()), "nothing of the last column is lost"


def test_lines_are_wrapped_at_words(width):
    text = wrap_lines("a heading\n" + "many words " * 20, 4)
    first, *rest = text.splitlines()
    assert first == "a heading" and max(map(len, rest)) <= min(width, 100)
    assert all(line.startswith("    many") or line.startswith("    words") for line in rest[1:])


def test_a_command_in_several_lines_is_the_same_command(width):
    words = ["echo", "model=6b", "a b", "'", *["train.batch=16"] * 12]
    text = shell_command(words, 2)
    assert max(map(len, text.splitlines())) <= min(width, 100)
    printed = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True).stdout
    assert printed.split() == " ".join(words[1:]).split()
