"""Reading files that somebody else wrote: what cannot be read becomes a message for the user."""

import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shmap_tp.errors import UserError

_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
_LONGEST = 200  # characters of a path in a message


def shown(path: object) -> str:
    """`path` in a message: its last characters if it is very long."""
    text = str(path)
    return text if len(text) <= _LONGEST else f"...{text[-_LONGEST:]}"


def first_line(error: Exception) -> str:
    """The first line of an exception's message, or the name of its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Context in which `path` is read.  Raises UserError if the file system refuses."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"{shown(path)} cannot be read: {reason}; correct its permissions or its place, or name another"
        ) from error


def file_size(path: Path) -> int | None:
    """Size of a regular file in bytes, None if it does not exist.

    Raises UserError if it cannot be reached, or is of another kind: reading a FIFO would wait for ever.
    """
    with reading(path):
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:  # a NUL in the path
            raise UserError(f"{str(path)!r} contains a NUL, which no file name has; correct the name") from None
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a device")
        raise UserError(f"{shown(path)} is {kind}, but a file is needed; remove it or name another")
    return status.st_size


def parse_json(text: bytes | str, place: object) -> Any:
    """The value of JSON text that was read at `place`.  Raises UserError if it is not JSON or too deeply nested."""
    try:
        return json.loads(text)
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:  # also of bytes that are not UTF-8
        reason = first_line(error)
    raise UserError(f"{place}: not JSON: {reason}; correct it, or write it again") from None


def read_json_file(file: Path) -> Any:
    """The content of a JSON file.  Raises UserError if it cannot be read or is not JSON."""
    with reading(file):
        return parse_json(file.read_bytes(), file)
