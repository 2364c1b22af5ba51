"""Texts, and the command that prepares them."""

import json
from pathlib import Path

import numpy as np

from shmap_tp import prepare as command
from shmap_tp.data.metadata import DTYPES, META

WORDS = [f"document {i}: the quick brown fox, naïve café {i * i}" for i in range(200)]


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = command.main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def jsonl(path: Path, texts=WORDS, field="text") -> Path:
    path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)))
    return path


def documents(directory: Path, split: str) -> list[list[int]]:
    """The documents of a prepared split, without their end-of-text tokens."""
    meta = json.loads((directory / META).read_text())
    ids = np.fromfile(directory / f"{split}.bin", DTYPES[meta["dtype"]])
    assert len(ids) == meta["tokens"][split] and ids[-1] == meta["end_of_text"]
    ends = np.flatnonzero(ids == meta["end_of_text"])
    return [part.tolist() for part in np.split(ids, ends + 1)[:-1]]


def texts(directory: Path, split: str) -> list[str]:
    return [bytes(part[:-1]).decode() for part in documents(directory, split)]


def write_ids(path: Path, ids, dtype: str = "<u2") -> Path:
    np.asarray(ids, dtype).tofile(path)
    return path
