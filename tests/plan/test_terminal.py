"""What the planner prints is no wider than the terminal, and a command in several lines is the same command."""

import subprocess

import pytest

from shmap_tp.plan.terminal import fitted_table, shell_command, wrapped

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
    text = wrapped("a heading\n" + "many words " * 20, 4)
    first, *rest = text.splitlines()
    assert first == "a heading" and max(map(len, rest)) <= min(width, 100)
    assert all(line.startswith("    many") or line.startswith("    words") for line in rest[1:])


def test_a_command_in_several_lines_is_the_same_command(width):
    words = ["echo", "model=6b", "a b", "'", *["train.batch=16"] * 12]
    text = shell_command(words, 2)
    assert max(map(len, text.splitlines())) <= min(width, 100)
    printed = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True).stdout
    assert printed.split() == " ".join(words[1:]).split()
