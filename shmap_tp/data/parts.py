"""The finished parts of a preparation: tokenized documents in files, from which a preparation that was killed goes on.

    parts.KEY/00012.HASH    the documents of part 12, with the beginning of the sha256 of the file

A part is written under another name first, so one that has its name is complete; one that has not its hash is not used,
nor are those after it.  KEY is a hash of everything on which the parts depend, see `key_of`.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from shmap_tp.data.metadata import SPLITS

_PARTS = "parts."
FIRST_PART = f"{_PARTS}*/00000.*"
"""Pattern of the first part's path in a directory with one of parts."""
Documents = list[tuple[str, np.ndarray]]
"""(split, ids) of each."""
_DIVISION = "division"


def key_of(facts: Any) -> str:
    """The name of the directory of parts that depend on `facts`, JSON values."""
    return _PARTS + hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


class Parts:
    """Parts in a directory, which is made for the first.  All methods raise OSError if it cannot be read or written."""

    def __init__(self, directory: Path):
        self._directory = directory

    def finished(self) -> Iterator[Documents]:
        """The documents of each part, from the first to the last before one that is missing or damaged."""
        number = 0
        while (file := self._file(f"{number:05}")) is not None:
            with np.load(file) as arrays:
                documents = np.split(arrays["ids"], np.cumsum(arrays["lengths"]))[:-1]
                splits = arrays["splits"]
            yield [(SPLITS[split], ids) for split, ids in zip(splits, documents, strict=True)]
            number += 1

    def write(self, number: int, documents: Documents) -> None:
        """Write part `number`."""
        ids = np.concatenate([np.empty(0, np.uint16), *(ids for _, ids in documents)])
        lengths = np.array([len(ids) for _, ids in documents], np.int64)
        splits = np.array([SPLITS.index(split) for split, _ in documents], np.uint8)
        with self._written(f"{number:05}") as file:
            np.savez(file, ids=ids, lengths=lengths, splits=splits)

    def division(self) -> list[Any] | None:
        """What was given to `write_division`."""
        file = self._file(_DIVISION)
        return None if file is None else json.loads(file.read_bytes())

    def write_division(self, division: list[Any]) -> None:
        """Write how the documents are divided into splits, JSON values."""
        with self._written(_DIVISION) as file:
            file.write(json.dumps(division).encode())

    @contextmanager
    def _written(self, name: str) -> Iterator[IO[bytes]]:
        """A file to write, which is called `name` and its hash at the end."""
        self._directory.mkdir(exist_ok=True)
        unfinished = self._directory / "unfinished"
        with unfinished.open("wb") as file:
            yield file
        unfinished.replace(self._directory / f"{name}.{_hash(unfinished)}")

    def _file(self, name: str) -> Path | None:
        """The intact file of this name."""
        found = self._directory.glob(f"{name}.*")
        return next((file for file in found if file.name == f"{name}.{_hash(file)}"), None)


def _hash(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:16]
