"""Files of JSON lines are read in bounded memory; lines of others are neither read nor lost."""

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from shmap_tp.errors import StorageError
from shmap_tp.training import json_lines
from shmap_tp.training.json_lines import drop_lost, read_lines, read_lines_backwards

FOREIGN = [b"\0" * 40, b"{}", b"[]", b"", b'{"n": "many"}', b'{"n": 1' + b"0" * 5000 + b"}", b"\xff\xfe{"]
FOREIGN = [line + b"\n" for line in [*FOREIGN, b"[" * 100_000, b'{"n": 3, ']]


def is_own(line: dict[str, Any]) -> bool:
    return type(line.get("n")) is int


def own(*numbers: int) -> list[bytes]:
    return [json.dumps({"n": n}).encode() + b"\n" for n in numbers]


def drop_after(file: Path, last: int) -> list[int]:
    kept = drop_lost(file, is_own, lambda line: line["n"] > last, lambda line: line["n"] < last)
    return [line["n"] for line in kept]


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
def test_lines_of_others_are_ignored_in_both_directions(tmp_path, monkeypatch, block):
    monkeypatch.setattr(json_lines, "BLOCK", block)
    foreign = [line for line in FOREIGN if block > 7 or len(line) < 1000]
    file = tmp_path / "lines"
    file.write_bytes(b"".join([*own(1), *foreign, *own(2), *foreign, *own(3), b'{"n": 4}']))
    assert [line["n"] for line in read_lines(file, is_own)] == [1, 2, 3]
    assert [line["n"] for line in read_lines_backwards(file, is_own)] == [3, 2, 1]
    assert not list(read_lines(tmp_path / "none", is_own)) and not list(read_lines_backwards(tmp_path / "none", is_own))


def test_a_line_that_is_too_long_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "LONGEST", 100)
    monkeypatch.setattr(json_lines, "BLOCK", 30)
    file = tmp_path / "lines"
    long = b'{"n": 5, "more": "' + b"x" * 200 + b'"}\n'
    file.write_bytes(b"".join([*own(1), long, *own(2)]))
    assert [line["n"] for line in read_lines(file, is_own)] == [1, 2]
    assert [line["n"] for line in read_lines_backwards(file, is_own)] == [2, 1]


@pytest.mark.parametrize("foreign", FOREIGN, ids=range(len(FOREIGN)))
def test_lines_of_others_stay_and_those_after_a_lost_line_are_kept_in_a_copy(tmp_path, foreign, capsys):
    file = tmp_path / "lines"
    before = b"".join([*own(1, 2), foreign])
    file.write_bytes(before + b"".join(own(3, 4)))
    assert drop_after(file, 2) == [2, 1]
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["lines"] and not capsys.readouterr().out
    for number in (1, 2):
        file.write_bytes(b"".join([*own(1, 2, 3), foreign, *own(4)]))
        assert drop_after(file, 2) == [2, 1]
        assert file.read_bytes() == b"".join(own(1, 2))
        copy = tmp_path / f"lines.removed-{number}"
        assert copy.read_bytes() == b"".join([*own(3), foreign, *own(4)])
        assert copy.name in capsys.readouterr().out


@pytest.mark.parametrize("end, left", [(b'{"n": 3', b""), (b"\0\0\0", b"\0\0\0\n"), (b'"n"', b'"n"\n')])
def test_a_last_line_cut_short_is_removed_and_anything_else_becomes_a_line(tmp_path, end, left):
    file = tmp_path / "lines"
    file.write_bytes(b"".join([*own(1, 2), end]))
    assert drop_after(file, 2) == [2, 1]
    assert file.read_bytes() == b"".join([*own(1, 2), left])


def test_equal_and_unordered_numbers_are_no_error(tmp_path):
    file = tmp_path / "lines"
    file.write_bytes(b"".join(own(1, 2, 2, 5, 3, 2, 2, 7)))
    assert drop_after(file, 2) == [2, 2, 2, 2, 1]
    assert file.read_bytes() == b"".join(own(1, 2, 2))


@pytest.mark.parametrize("kind", ["directory", "fifo", "loop"])
def test_what_is_not_a_readable_file_is_refused(tmp_path, kind):
    file = tmp_path / "lines"
    {"directory": file.mkdir, "fifo": lambda: os.mkfifo(file), "loop": lambda: file.symlink_to(file)}[kind]()
    for read in (lambda: list(read_lines(file, is_own)), lambda: drop_after(file, 1)):
        with pytest.raises(StorageError, match=r"lines cannot be read: .*; nothing was changed") as error:
            read()
        assert len(str(error.value).splitlines()) == 2


def test_memory_does_not_grow_with_the_file(tmp_path):
    """20 MB of lines."""
    file = tmp_path / "lines"
    with file.open("wb") as stream:
        stream.writelines(b'{"n": %d, "more": "%s"}\n' % (n, b"x" * 10_000) for n in range(2000))
    tracemalloc.start()
    try:
        assert drop_after(file, 1990) == [1990, 1989]
        assert sum(1 for _ in read_lines(file, is_own)) == 1991
        assert tracemalloc.get_traced_memory()[1] < 8e6
    finally:
        tracemalloc.stop()
