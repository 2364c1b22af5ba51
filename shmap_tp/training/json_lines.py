"""Files with a JSON object per line, metrics.jsonl, time.jsonl and samples.jsonl, to which each start of a run appends.

A line that is not one of the file's own (cut short by a kill, NULs after a power failure, another program's) is never
an error, and stays where it is.  Memory: one block, or one line.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from shmap_tp.runtime.files import file_size, reading

BLOCK = 1 << 20

Accept = Callable[[Any], bool]
"""Whether a JSON value is one of the file's own lines."""


def read_lines(file: Path, accept: Accept) -> Iterator[dict[str, Any]]:
    """The file's own lines, in order; none if there is no file.  Raises UserError if it cannot be read."""
    if file_size(file) is not None:
        with reading(file), file.open("rb") as stream:
            yield from _own(stream, accept)


def read_lines_backwards(file: Path, accept: Accept) -> Iterator[dict[str, Any]]:
    """The file's own lines, the last one first; the others as in `read_lines`."""
    if file_size(file) is not None:
        with reading(file), file.open("rb") as stream:
            yield from _own(_lines_backwards(stream), accept)


def appending(file: Path) -> TextIO:
    """The file, open for lines at its end; one that a kill has cut short is ended.  Raises OSError."""
    with file.open("a+b") as stream:
        if stream.tell() and os.pread(stream.fileno(), 1, stream.tell() - 1) != b"\n":
            stream.write(b"\n")
    return file.open("a", buffering=1)


def _own(lines: Iterable[bytes], accept: Accept) -> Iterator[dict[str, Any]]:
    """The values of complete lines that are the file's own."""
    for line in lines:
        try:
            value = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and accept(value):
            yield value


def _lines_backwards(stream: BinaryIO) -> Iterator[bytes]:
    """Every line that is not empty, the last one first."""
    position, rest = stream.seek(0, os.SEEK_END), b""
    while position:
        size = min(BLOCK, position)
        position -= size
        stream.seek(position)
        rest, *lines = (stream.read(size) + rest).splitlines(keepends=True)
        yield from reversed(lines)
    if rest:
        yield rest
