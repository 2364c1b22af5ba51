"""The exceptions that end a command with a message for the user, without a traceback.

A message is one or two plain lines: the rule, the place, both numbers, the way out.  A command catches `ShmapTpError`,
prints "error: " and the message to stderr, and exits with the error's `exit_code`.  Anything else that is raised is a
defect of this program, and keeps its traceback.  `shown` and `first_line` are for what a message quotes.
"""

import unicodedata

LONGEST_SHOWN = 200


class ShmapTpError(Exception):
    """Base class of all errors whose message is written for the user."""

    exit_code = 2
    """Exit code of a process that ends with this error."""


class UserError(ShmapTpError, ValueError):
    """The user's input cannot be used: a configuration value, a command-line argument, a data file, a directory."""


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
    """`value` for a message: without control characters, and shortened where it is long."""
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to print it in digits
        return f"an integer of {value.bit_length()} bits"
    text = "".join(f"\\x{ord(c):02x}" if has_control_characters(c) else c for c in str(value))
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 20]}... ({len(text)} characters)"


def has_control_characters(text: str) -> bool:
    """Whether `text` has line breaks, NULs, other control characters, or bytes that are not UTF-8."""
    return any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in text)


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or the name of its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
