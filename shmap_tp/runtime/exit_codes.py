"""Exit codes, and how any thread of a process can end it at once with a message."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from shmap_tp.errors import ShmapTpError, printable
from shmap_tp.runtime.console import error_text

STOPPED = 75
"""The run was stopped and has saved its state; start it again with --resume (EX_TEMPFAIL of sysexits.h)."""
STOPPED_EARLY = STOPPED, "stopped before the first training step; there is nothing to save"
"""(exit code, message) of a run that is stopped before it has trained."""
INTERRUPTED = 130
"""Ctrl-C of a command that has nothing to save, and the second Ctrl-C of a run that is saving; as in a shell."""

launch_stderr: list[int] = []
"""Descriptor of the stderr with which this process was started, if its stderr was redirected to a log file since."""

before_exit: list[Callable[[], None]] = []
"""What is done before a process ends without unwinding, such as releasing the lock of a run."""
BEFORE_EXIT_SECONDS = 5.0
"""How long a process that is to end waits for that; a bucket may not answer."""


class StoppedEarly(BaseException):
    """A stop was requested before the first training step.  Not an Exception, so that no handler takes it for a
    failure."""


def stop_at_signals() -> None:
    """From here on, until something else handles them, SIGTERM and Ctrl-C end this process with code STOPPED."""

    def stop(*_: object) -> None:  # flushes nothing: it may interrupt a write to the same stream
        with suppress(OSError):  # nobody may read it any more
            os.write(2, f"{STOPPED_EARLY[1]}\n".encode())
        os._exit(STOPPED)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def exit_now(code: int, message: str) -> NoReturn:
    """Print `message` and end this process immediately, from any thread; nothing is unwound."""
    print_final_message(code, message)
    end_process(code)


def end_process(code: int) -> NoReturn:
    """End this process, from any thread, after `before_exit` or BEFORE_EXIT_SECONDS; nothing else is unwound."""
    for action in before_exit:
        thread = threading.Thread(target=action, daemon=True)
        thread.start()
        thread.join(BEFORE_EXIT_SECONDS)
    os._exit(code)


def exit_with_error(error: ShmapTpError) -> NoReturn:
    """Print `error` and end this process immediately with its exit code, from any thread."""
    exit_now(error.exit_code, str(error))


def print_final_message(code: int, message: str) -> None:
    """Flush Python's streams, then write `message` to stderr and, if that was redirected, to the original stderr."""
    line = printable(message if code == STOPPED else error_text(message)) + "\n"
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody may read it any more
            stream.flush()
    for descriptor in [2, *launch_stderr]:
        with suppress(OSError):
            os.write(descriptor, line.encode())
