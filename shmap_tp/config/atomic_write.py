"""Writing a file so that it has either its old or its new content, whenever the process ends."""

from typing import Any


def write_atomically(file: Any, text: str) -> None:
    """Write `text` to a file beside `file`, a pathlib or epath Path, and rename that to it.  Raises OSError."""
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)
