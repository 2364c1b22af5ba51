"""Printing: control characters are escaped, lines fit into the terminal, only process 0 of a run prints, and a progress
bar stays below what is printed."""

import re
import shutil
import sys
from typing import Any

from shmap_tp.errors import escaped, printable

_COMMAND = r"\b(?:python|pip|gcloud|shmap-tp|gsutil|kubectl) .*"
_WHOLE = re.compile(rf"{_COMMAND}|`[^`]*`\S*|\S+")


def print_on_process_0(text: str) -> None:
    """Print a line and flush it, in process 0 only."""
    import jax  # here, since what is prepared needs no JAX, and each of its processes would wait for the import

    if jax.process_index() == 0:
        write_line(text)


def write_line(text: str) -> None:
    """Print a line and flush it, broken between words in a terminal.  A progress bar that is there is taken away and
    drawn again below."""
    from tqdm import tqdm  # here, since a command that prints an error has not imported it

    tqdm.write(wrapped(text, sys.stdout))
    sys.stdout.flush()


def print_error(error: Exception, stream: Any = None) -> None:
    """Print an error's message to `stream`, by default stderr, its further lines indented: each line that begins with
    "error: " is an error of this program, whatever a message quotes."""
    stream = sys.stderr if stream is None else stream
    print(wrapped(error_text(str(error)), stream), file=stream, flush=True)


def write_text(text: str, end: str = "") -> None:
    """Write a part of a text that a model reads or writes to stdout, escaped in a terminal only."""
    print(escaped(text) if sys.stdout.isatty() else text, end=end, flush=True)


def error_text(message: str) -> str:
    """The lines of an error."""
    return f"error: {message}".replace("\n", "\n  ")


def wrapped(text: str, stream: Any) -> str:
    """`text`, `printable`, as it is printed to `stream`, or None; in a terminal a line that is too long is several.

    Commands stay whole, so that they can be copied: from the name of a program to the end of the line, and what is in
    backticks.  A new line is indented as the line that it continues.
    """
    text = printable(text)
    if stream is None or not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(part for line in text.split("\n") for part in _lines(line, width))


def _lines(line: str, width: int) -> list[str]:
    """One line of text as lines of at most `width` characters, as far as its words allow it."""
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    lines, begin, end = [], len(indent), len(indent)
    for word in _WHOLE.finditer(line):
        if word.end() - begin > width - len(indent) and end > begin:
            lines.append(indent + line[begin:end])
            begin = word.start()
        end = word.end()
    return [*lines, indent + line[begin:end]]
