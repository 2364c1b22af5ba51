"""What happens when nobody reads the output any more: `| head` has ended, a terminal is closed, the log's disk is full.

A training run goes on without its output, since metrics.jsonl has the same; every other command ends.  Characters that
the terminal's encoding lacks are printed as escapes, and bytes that are not of it are read as surrogates.
"""

import errno
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from shmap_tp.errors import StorageError

CLOSED = 141
"""Exit code of a command whose output is no longer read: 128 + SIGPIPE, as in a shell."""


class LastingOutput:
    """A text stream that goes on, into the null device, once its own file cannot be written."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            _discard(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            _discard(self._stream)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def outlive_readers() -> None:
    """From here on, stdout and stderr may fail without ending this process."""
    _set_errors(sys.stdout, "backslashreplace")
    sys.stdout, sys.stderr = LastingOutput(sys.stdout), LastingOutput(sys.stderr)


def end_without_readers(command: Callable[[], int | None]) -> int | None:
    """The exit code of `command`; CLOSED once nobody reads its output, StorageError's where a full disk takes none."""
    _set_errors(sys.stdout, "backslashreplace")
    _set_errors(sys.stdin, "surrogateescape")
    try:
        code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):
            _discard(stream)
        return CLOSED
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _discard(sys.stdout)
        print("error: the output cannot be written: the disk is full; write it elsewhere", file=sys.stderr)
        return StorageError.exit_code


def _set_errors(stream: TextIO, errors: str) -> None:
    """What becomes of characters that the encoding of `stream` does not have."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors=errors)


def _discard(stream: TextIO) -> None:
    """Let what is written to `stream` go to the null device, and what it still has, too."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, stream.fileno())
    os.close(descriptor)
    with suppress(OSError):
        stream.flush()
