"""The documents, and the fenced blocks in them."""

from dataclasses import dataclass
from pathlib import Path

from tests.helpers.paths import ROOT

DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/README.md")]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    file: Path
    line: int
    info: tuple[str, ...]
    text: str

    @property
    def place(self) -> str:
        return f"{name_of(self.file)}:{self.line}"


def blocks(file: Path) -> list[Block]:
    found, begin, info, lines = [], 0, (), []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if not line.lstrip().startswith("```"):
            lines.append(line)
        elif begin:
            found.append(Block(file, begin, info, "\n".join(lines)))
            begin = 0
        else:
            begin, info, lines = number, tuple(line.strip().strip("`").split()), []
    assert not begin, f"{name_of(file)}:{begin}: a fenced block has no end"
    return found
