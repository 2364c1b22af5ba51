"""How a command starts and ends: Ctrl-C, errors that are explained, and output that nobody reads any more.

A command parses its arguments, imports what it needs within `importing`, and is called by `run_command` and
`end_without_readers`.

    Ctrl-C in imports   ends the process at once, without a traceback: some modules crash if an exception interrupts
                        their import, and a callback of the garbage collector swallows it.  A process that was started
                        with Ctrl-C ignored, as a background job of a shell script is, goes on ignoring it.
    Ctrl-C in a command ends it, also where Python drops the exception, as in callbacks of JAX's garbage collection:
                        then it is raised again.
    no reader           `| head` has ended, a terminal is closed, the log's disk is full: a training run goes on without
                        its output, since metrics.jsonl has the same, and every other command ends.
    closed at the start a stream of `>&-` is the null device.
    characters          that the terminal's encoding lacks are printed as escapes, and bytes that are not of it are read
                        as surrogates.
"""

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from shmap_tp.errors import ShmapTpError, StorageError
from shmap_tp.runtime.console import print_error
from shmap_tp.runtime.exit_codes import INTERRUPTED, end_process

CLOSED = 141
"""Exit code of a command whose output is no longer read: 128 + SIGPIPE, as in a shell."""


def run_command(command: Callable[[], int | None]) -> int:
    """Call `command` and return the exit code: its own or 0, that of an error, which is printed in one or two lines, or
    INTERRUPTED after Ctrl-C."""
    try:
        with _interrupting_again():
            return command() or 0
    except ShmapTpError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


@contextmanager
def _interrupting_again() -> Iterator[None]:
    """Context in which a KeyboardInterrupt that Python drops, because a callback cannot raise, is raised again soon,
    after the callback, unless the context has ended."""
    report, timers = sys.unraisablehook, list[threading.Timer]()

    def raise_again(dropped: "sys.UnraisableHookArgs") -> None:
        if dropped.exc_type is KeyboardInterrupt:
            timers.append(threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)))
            timers[-1].start()
        else:
            report(dropped)

    sys.unraisablehook = raise_again
    try:
        yield
    finally:
        sys.unraisablehook = report
        for timer in timers:
            timer.cancel()


def end_at_ctrl_c() -> None:
    """From here on Ctrl-C ends this process, instead of raising KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def raising() -> Iterator[None]:
    """Context in which Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt, in the main thread, except those that are
    ignored, as SIGHUP is under nohup; output so far is written."""
    sys.stdout.flush()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.stdout.flush()


@contextmanager
def importing() -> Iterator[None]:
    """Context of imports, in the main thread, after which Ctrl-C raises KeyboardInterrupt again."""
    end_at_ctrl_c()
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)


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


def _open_closed_streams() -> None:
    """Give each standard stream with which this process was not started (`>&-`) the null device.

    Python has None in its place; and the next file that is opened would get its number, and messages to it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # each open takes the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8", errors="backslashreplace"))  # noqa: SIM115


def outlive_readers() -> None:
    """From here on, stdout and stderr may fail without ending this process."""
    _open_closed_streams()
    _set_errors(sys.stdout, "backslashreplace")
    sys.stdout, sys.stderr = LastingOutput(sys.stdout), LastingOutput(sys.stderr)


def end_without_readers(command: Callable[[], int | None]) -> int | None:
    """The exit code of `command`; CLOSED once nobody reads its output, StorageError's where a full disk takes none.

    After an interrupt the process ends here.
    """
    _open_closed_streams()
    _set_errors(sys.stdout, "backslashreplace")
    _set_errors(sys.stdin, "surrogateescape")
    try:
        code = command()
        sys.stdout.flush()
        if code == INTERRUPTED:  # programs that still run on the devices would crash the interpreter at its exit
            sys.stderr.flush()
            end_process(code)
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
    """Send everything that `stream` still has, and everything that is written to it from now on, to the null device."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, stream.fileno())
    os.close(descriptor)
    with suppress(OSError):
        stream.flush()
