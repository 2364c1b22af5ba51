"""Printing: control characters are escaped, lines fit into the terminal, only process 0 of a run prints, and a progress
bar stays below what is printed.  The planner's lines, tables and commands are no wider than the terminal."""

import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence
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


# Lines, tables and commands of the planner

LONGEST = 100
"""Columns of a line of text at most; those of a table where stdout is no terminal and COLUMNS is not set."""
NARROWEST = 16
"""Columns of a text that is wrapped, also where the terminal has fewer."""


def columns() -> int:
    """Columns of the terminal."""
    return shutil.get_terminal_size((LONGEST, 24)).columns


def wrap_lines(text: str, indent: int = 2, width: int | None = None) -> str:
    """`text`, its longer lines wrapped at words; what continues a line is indented.  `width`: by default the
    terminal's."""
    width = min(LONGEST, max(width or columns(), 2 * indent))
    rules = textwrap.TextWrapper(width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(rules.fill(line) if len(line) > width else line for line in text.split("\n"))


def shell_command(words: Sequence[str], indent: int) -> str:
    """A command that can be pasted into a shell, in lines that end in a backslash."""
    width, lines = min(LONGEST, columns()) - 2, [" " * indent]
    for word in map(shlex.quote, words):
        if lines[-1].strip() and len(lines[-1]) + len(word) + 1 > width:
            lines.append(" " * 2 * indent)
        lines[-1] += f" {word}" if lines[-1].strip() else word
    return " \\\n".join(lines)


def fitted_table(
    rows: Sequence[Sequence[str]], optional: Sequence[str] = (), right: Collection[str] = (), *, wrap: str, least: int
) -> str:
    """Aligned columns under the names in the first row.  Where the table is wider than the terminal, the texts of the
    column `wrap` are wrapped; where that leaves them fewer than `least` columns, those of `optional` are left out, one
    after the other.  `right`: columns that are aligned to the right."""
    names, chosen = list(rows[0]), list(range(len(rows[0])))
    widths, at = [max(len(row[i]) for row in rows) for i in chosen], names.index(wrap)
    longest = widths[at]

    def room() -> int:
        """Columns that the others leave."""
        return columns() - sum(widths[i] + 2 for i in chosen if i != at)

    for name in optional:
        if room() < min(longest, least) and name in names:
            chosen.remove(names.index(name))
    widths[at] = min(longest, max(NARROWEST, room()))
    lines = []
    for row in rows:
        parts = textwrap.wrap(row[at], widths[at], break_long_words=False, break_on_hyphens=False) or [""]
        for number, part in enumerate(parts):
            cells = [part if i == at else row[i] * (number == 0) for i in range(len(row))]
            aligned = [cells[i].rjust(widths[i]) if names[i] in right else cells[i].ljust(widths[i]) for i in chosen]
            lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)
