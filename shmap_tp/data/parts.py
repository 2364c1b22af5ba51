"""The finished parts of a preparation: tokenized documents in files, from which a preparation that was killed goes on.

    parts.KEY/00012.HASH    the documents of part 12, with the beginning of the sha256 of the file

A part is written under another name first, so one that has its name is complete; one that has not its hash is not used,
nor are those after it.  KEY is a hash of everything on which the parts depend, see `key_of`.
"""

import hashlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
        while (content := self._read(f"{number:05}")) is not None:
            with np.load(io.BytesIO(content)) as arrays:
                documents = np.split(arrays["ids"], np.cumsum(arrays["lengths"])[:-1])
                splits = arrays["splits"]
            yield [(SPLITS[split], ids) for split, ids in zip(splits, documents, strict=True)]
            number += 1

    def write(self, number: int, documents: Documents) -> None:
        """Write part `number`, of at least one document."""
        content = io.BytesIO()
        ids = np.concatenate([ids for _, ids in documents])
        splits = np.array([SPLITS.index(split) for split, _ in documents], np.uint8)
        np.savez(content, ids=ids, lengths=np.array([len(ids) for _, ids in documents]), splits=splits)
        self._write(f"{number:05}", content.getvalue())

    def division(self) -> list[Any] | None:
        """What was given to `write_division`."""
        content = self._read(_DIVISION)
        return None if content is None else json.loads(content)

    def write_division(self, division: list[Any]) -> None:
        """Write how the documents are divided into splits, JSON values."""
        self._write(_DIVISION, json.dumps(division).encode())

    def _write(self, name: str, content: bytes) -> None:
        self._directory.mkdir(exist_ok=True)
        temporary = self._directory / "unfinished"
        temporary.write_bytes(content)
        temporary.replace(self._directory / f"{name}.{_hash(content)}")

    def _read(self, name: str) -> bytes | None:
        """What was written by this name; None if there is nothing, or it is damaged."""
        for file in self._directory.glob(f"{name}.*"):
            content = file.read_bytes()
            if re.fullmatch(rf"{name}\.{_hash(content)}", file.name):
                return content
        return None


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
