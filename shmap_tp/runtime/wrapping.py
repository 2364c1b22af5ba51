"""Lines that fit into the terminal, broken between words."""

import re
import shutil
from typing import Any

_COMMAND = r"\b(?:python|pip|gcloud|shmap-tp|gsutil|kubectl) .*"
_WHOLE = re.compile(rf"{_COMMAND}|`[^`]*`\S*|\S+")


def wrapped(text: str, stream: Any) -> str:
    """`text` as it is printed to `stream`, or None: unchanged, unless it is a terminal and a line is too long for it.

    Commands stay whole, so that they can be copied: from the name of a program to the end of the line, and what is in
    backticks.  A new line is indented as the line that it continues.
    """
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
