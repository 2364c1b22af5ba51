"""How a process ends that has to end now: its exit codes, and the way out from any thread."""

import os
import sys
from typing import NoReturn

LOST = 69
"""Exit code where other processes were not there in time, or one was lost (EX_UNAVAILABLE of sysexits.h)."""

STOPPED = 75
"""Exit code of a run that was told to stop and has saved: start it again with --resume (EX_TEMPFAIL of sysexits.h)."""


STOPPED_EARLY = STOPPED, "told to stop before a step was trained; there is nothing to save"

terminal: list[int] = []
"""The file descriptor of the stderr that this process was started with, where it now writes to a log."""


class Stopped(BaseException):
    """Told to stop while there was nothing to save.  No Exception, so that nobody takes it for a failure of theirs."""


def leave(code: int, said: str) -> NoReturn:
    """End this process now, from any thread, whatever the others are at."""
    last_words(code, said)
    os._exit(code)


def last_words(code: int, said: str) -> None:
    """Say why this process ends, past whatever the streams still hold."""
    line = f"{said}\n" if code == STOPPED else f"error: {said}\n"
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor in [2, *terminal]:
        os.write(descriptor, line.encode())
