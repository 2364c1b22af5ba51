"""Files of JSON lines are read in bounded memory and only appended to; lines of others are not read."""

import json
import os
import tracemalloc
from typing import Any

import pytest

from shmap_tp.errors import UserError
from shmap_tp.runtime import files
from shmap_tp.runtime.files import appending, read_lines, read_lines_backwards

FOREIGN = [b"\0" * 40, b"{}", b"[]", b"", b'{"n": "many"}', b'{"n": 1' + b"0" * 5000 + b"}", b"\xff\xfe{"]
FOREIGN = [line + b"\n" for line in [*FOREIGN, b"[" * 100_000, b'{"n": 3, ']]


def is_own(line: dict[str, Any]) -> bool:
    return type(line.get("n")) is int


def own(*numbers: int) -> list[bytes]:
    return [json.dumps({"n": n}).encode() + b"\n" for n in numbers]


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
def test_lines_of_others_are_ignored_in_both_directions(tmp_path, monkeypatch, block):
    monkeypatch.setattr(files, "BLOCK", block)
    foreign = [line for line in FOREIGN if block > 7 or len(line) < 1000]
    file = tmp_path / "lines"
    file.write_bytes(b"".join([*own(1), *foreign, *own(2), *foreign, *own(3), b'{"n": 4}']))
    assert [line["n"] for line in read_lines(file, is_own)] == [1, 2, 3]
    assert [line["n"] for line in read_lines_backwards(file, is_own)] == [3, 2, 1]
    assert not list(read_lines(tmp_path / "none", is_own)) and not list(read_lines_backwards(tmp_path / "none", is_own))


@pytest.mark.parametrize("end", [b"", b'{"n": 3', b"\0\0\0", b'{"n": 1}\n'])
def test_a_start_appends_and_a_line_that_was_cut_short_is_ended(tmp_path, end):
    file = tmp_path / "lines"
    file.write_bytes(end)
    with appending(file) as stream:
        stream.write('{"n": 2}\n')
    assert file.read_bytes() == end + b"\n" * (not end.endswith(b"\n") and bool(end)) + own(2)[0]
    assert next(read_lines_backwards(file, is_own)) == {"n": 2}


def test_a_fifo_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "lines")
    for read in (read_lines, read_lines_backwards):
        with pytest.raises(UserError, match="lines is a FIFO, but a file is needed"):
            next(read(tmp_path / "lines", is_own))


def test_memory_does_not_grow_with_the_file(tmp_path):
    """20 MB of lines."""
    file = tmp_path / "lines"
    with file.open("wb") as stream:
        stream.writelines(b'{"n": %d, "more": "%s"}\n' % (n, b"x" * 10_000) for n in range(2000))
    tracemalloc.start()
    try:
        for read in (read_lines, read_lines_backwards):
            assert sum(1 for _ in read(file, is_own)) == 2000
        assert tracemalloc.get_traced_memory()[1] < 8e6
    finally:
        tracemalloc.stop()
