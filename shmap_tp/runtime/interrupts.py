"""Ctrl-C while a command still imports its modules ends the process at once, without a traceback.

Some modules crash if an exception interrupts their import, and a callback of the garbage collector swallows it.  A
process that was started with Ctrl-C ignored, as a background job of a shell script is, goes on ignoring it.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def end_at_ctrl_c() -> None:
    """From here on Ctrl-C ends this process, instead of raising KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_at_ctrl_c() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
    """Context of imports, in the main thread."""
    end_at_ctrl_c()
    try:
        yield
    finally:
        raise_at_ctrl_c()
