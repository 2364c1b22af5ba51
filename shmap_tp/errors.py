"""The exceptions that end a command with a message for the user, without a traceback.

A message is one or two plain lines: the rule, the place, both numbers, the way out.  A command catches `ShmapTpError`,
prints "error: " and the message to stderr, and exits with the error's `exit_code`.  Anything else that is raised is a
defect of this program, and keeps its traceback.  Messages quote what other people's files hold, and every line that is
printed is `printable`, whatever it quotes.  `shown` and `first_line` make one line of a quoted value or error.
"""

import unicodedata
from collections.abc import Iterable

LONGEST_SHOWN = 200
"""Characters of a value in a message."""
LONGEST_LINE = 1000
"""Characters of a printed line."""


class ShmapTpError(Exception):
    """Base class of all errors whose message is written for the user."""

    exit_code = 2
    """Exit code of a process that ends with this error."""


class UserError(ShmapTpError, ValueError):
    """The user's input cannot be used: a configuration value, a command-line argument, a data file, a directory."""


def refuse_first(faults: Iterable[str]) -> None:
    """Raise UserError with the first of `faults`, the messages of broken rules; later ones are not sought."""
    for fault in faults:
        raise UserError(fault)


class HardwareError(ShmapTpError):
    """A device or a link computed a wrong result: replicas of the same array differ."""


class StorageError(ShmapTpError):
    """A disk or a bucket refused a read or a write, for example because it is full."""


class DivergedError(ShmapTpError):
    """Training stopped because too many consecutive steps had a non-finite or spiking loss."""


class LostProcessError(ShmapTpError):
    """Another process of the run did not start in time, or stopped responding."""

    exit_code = 69
    """EX_UNAVAILABLE of sysexits.h."""


def shown(value: object) -> str:
    """`value` for a message: without control characters, shortened where it is long, and null, true and false as in
    YAML and JSON."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to print it in digits
        return f"an integer of {value.bit_length()} bits"
    text = escaped(str(value), kept="")
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 20]}... ({len(text)} characters)"


def escaped(text: str, kept: str = "\n\t") -> str:
    """`text` with its control characters, which a terminal would obey, as escapes such as \\x1b; but `kept`."""
    return "".join(f"\\x{ord(c):02x}" if c not in kept and has_control_characters(c) else c for c in text)


def printable(text: str) -> str:
    """`text` as a command prints it: `escaped`, and without the middle of a line that is longer than LONGEST_LINE.

    A message quotes names and texts of files that others have written.  Each of its lines still has its beginning, and
    its end, which says what to do.
    """
    return "\n".join(
        line
        if len(line) <= LONGEST_LINE
        else f"{line[: LONGEST_LINE - 240]} ... ({len(line):,} characters) ... {line[-200:]}"
        for line in escaped(text).split("\n")
    )


def has_control_characters(text: str) -> bool:
    """Whether `text` has line breaks, NULs, other control characters, or bytes that are not UTF-8."""
    return any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in text)


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, without the details of TensorStore, or the name of its class."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return first.partition(" See full TensorStore details")[0][:500]
