"""Files with a JSON object per line, metrics.jsonl and time.jsonl: read as a stream, or from their end.

A line that is not one of the file's own (cut short by a kill, NULs after a power failure, another program's) is never
an error.  It is ignored and stays where it is.  `drop_lost`, which removes lines at the end, copies them first if one
of them is such a line.

Memory: one block, or one line.
"""

import errno
import itertools
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

from shmap_tp.errors import ShmapTpError, StorageError
from shmap_tp.runtime.console import print_on_process_0
from shmap_tp.runtime.files import writing

BLOCK = 1 << 20
LONGEST = 1 << 24
"""Bytes of the longest line that is parsed."""

Accept = Callable[[Any], bool]
"""Whether a JSON value is one of the file's own lines."""


def read_lines(file: Path, accept: Accept) -> Iterator[dict[str, Any]]:
    """The file's own lines, in order; none if there is no file.  Raises StorageError if it cannot be read."""
    with reading(file) as stream:
        while stream and (line := stream.readline(LONGEST)):
            value = _parse(line, accept)
            if value is not None:
                yield value


def read_lines_backwards(file: Path, accept: Accept) -> Iterator[dict[str, Any]]:
    """The file's own lines, the last one first.  Raises StorageError if it cannot be read."""
    with reading(file) as stream:
        for _, line in _lines_backwards(stream) if stream else ():
            value = _parse(line, accept)
            if value is not None:
                yield value


def drop_lost(
    file: Path, accept: Accept, is_lost: Callable[[dict[str, Any]], bool], is_enough: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Remove everything from the first lost line on, so that the file can be appended to.

    Reads from the end up to a line that `is_enough`, and returns the lines that are not lost, the last one first.
    Raises StorageError if the file cannot be read or written.
    """
    kept: list[dict[str, Any]] = []
    others, copied = False, False
    with reading(file) as stream:
        if stream is None:
            return kept
        size = stream.seek(0, os.SEEK_END)
        end = size
        for begin, line in _lines_backwards(stream):
            value = _parse(line, accept)
            if value is None and begin + len(line) == size and not line.endswith(b"\n") and line.startswith(b'{"'):
                end = begin  # the last line, cut short by a kill
            elif value is None:
                others = True
            elif is_lost(value):
                end, copied, others = begin, copied or others, False
            else:
                kept.append(value)
                if is_enough(value):
                    break
    if copied:
        _copy_from(file, end)
    with writing(file), file.open("r+b") as stream:
        stream.truncate(end)
        if end and os.pread(stream.fileno(), 1, end - 1) != b"\n":
            stream.seek(end)
            stream.write(b"\n")
    return kept


@contextmanager
def reading(file: Path) -> Iterator[BinaryIO | None]:
    """The file, opened for reading bytes; None if there is none.  Raises StorageError if it cannot be read."""
    try:
        try:
            if not stat.S_ISREG(file.stat().st_mode) and not file.is_dir():  # opening a FIFO would wait for a writer
                raise OSError(errno.EINVAL, "it is not a file")
            stream = file.open("rb")
        except FileNotFoundError:
            stream = None
        with stream or nullcontext():
            yield stream
    except ShmapTpError:
        raise
    except OSError as error:
        raise StorageError(
            f"{file} cannot be read: {error.strerror}; nothing was changed.\n"
            f"Make it readable, or move it elsewhere, and start again"
        ) from error


def _parse(line: bytes, accept: Accept) -> dict[str, Any] | None:
    """The value of a complete line if it is the file's own, else None."""
    if not line.endswith(b"\n"):
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and accept(value) else None


def _lines_backwards(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of every line, the last one first; a line longer than LONGEST comes without its end."""
    position, rest = stream.seek(0, os.SEEK_END), b""
    while position:
        size = min(BLOCK, position)
        position -= size
        stream.seek(position)
        lines = [line + b"\n" for line in (stream.read(size) + rest).split(b"\n")]
        lines[-1] = lines[-1][:-1]  # what follows the last newline; empty if nothing does
        offsets = list(itertools.accumulate(map(len, lines[:-1]), initial=position))
        yield from ((offset, line) for offset, line in zip(offsets[:0:-1], lines[:0:-1], strict=True) if line)
        rest = lines[0] if len(lines[0]) <= LONGEST else lines[0][:1]
    if rest:
        yield 0, rest


def _copy_from(file: Path, begin: int) -> None:
    """Copy what follows `begin` to a new file beside it, and say so."""
    copy = next(each for n in itertools.count(1) if not (each := file.with_name(f"{file.name}.removed-{n}")).exists())
    with writing(copy), file.open("rb") as source, copy.open("xb") as target:
        source.seek(begin)
        shutil.copyfileobj(source, target)
    print_on_process_0(
        f"{file} has lines that this program did not write; what is removed from its end is kept in {copy.name}"
    )
