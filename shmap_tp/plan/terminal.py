"""Lines, tables and commands as the planner prints them: no wider than the terminal."""

import shlex
import shutil
import textwrap
from collections.abc import Collection, Sequence

LONGEST = 100
"""Columns of a line of text at most; those of a table where stdout is no terminal and COLUMNS is not set."""
NARROWEST = 16
"""Columns of a text that is wrapped, also where the terminal has fewer."""
ROW_INDENT = 17
"""Columns before the figures of a row (`report.format_row`, `generation.format_generation`)."""


def columns() -> int:
    """Of the terminal."""
    return shutil.get_terminal_size((LONGEST, 24)).columns


def wrapped(text: str, indent: int = 2, width: int | None = None) -> str:
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
    rows: Sequence[Sequence[str]],
    optional: Sequence[str] = (),
    right: Collection[str] = (),
    *,
    wrap: str,
    least: int,
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
