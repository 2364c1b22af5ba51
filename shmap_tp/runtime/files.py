"""What a disk refuses, in words: where a run may write, and what it could not write."""

import errno
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shmap_tp.errors import UserError


def make_directory(key: str, directory: str) -> None:
    """Make the directory that `key` names.  Raises InputError where it cannot be written."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError(errno.EACCES, "no permission")
    except OSError as error:
        raise UserError(f"{key}={directory} cannot be written: {error.strerror}; choose another") from error


@contextmanager
def writing(what: object) -> Iterator[None]:
    """Raises InputError where the disk does not take `what`, a full one above all.

    Of Orbax's own files TensorStore tells it, as a ValueError that has the system's number in its text.
    """
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError) as error:
        if "Gloo" in str(error):  # another process was lost while all wrote: no disk's doing
            raise
        number = re.search(r"os_error_code='(\d+)'", str(error))
        reason = os.strerror(int(number[1])) if number else getattr(error, "strerror", None) or str(error)[:200]
        raise UserError(
            f"{what} could not be written: {reason}; the checkpoints that are complete are intact:\n"
            f"make room, then go on from the newest with checkpoint.resume=if_present (without any, it starts again)"
        ) from error


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    """Make these, as JSON, the lines of `file`; until all are there, it has those of before."""
    written = file.with_suffix(".tmp")
    with writing(file):
        written.write_text("".join(json.dumps(line) + "\n" for line in lines))
        written.replace(file)
