"""What the scripts that generate a part of a document share: the markers around it, and the command line."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent


@dataclass(frozen=True)
class GeneratedPart:
    """The lines of `document` between the markers `begin` and `end`, which stand on lines of their own."""

    document: Path
    begin: str
    end: str
    text: Callable[[], str]
    """Makes the lines between the markers."""

    def updated(self) -> str:
        """The document with this part made anew."""
        before, begin, rest = self.document.read_text().partition(self.begin)
        _, end, after = rest.partition(self.end)
        if not (begin and end):
            raise ValueError(f"{self.document} lacks its markers: {self.begin} and {self.end}")
        return f"{before}{begin}\n\n{self.text().strip()}\n\n{end}{after}"

    def main(self, description: str) -> int:
        """Rewrite the document, or with --check report by the exit code whether it is current."""
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if it is not current")
        arguments, updated = parser.parse_args(), self.updated()
        if arguments.check:
            return int(updated != self.document.read_text())
        self.document.write_text(updated)
        return 0
