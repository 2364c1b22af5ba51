"""A directory that is written beside its target, and renamed to the target when it is complete.

A preparation of data/x owns three hidden paths beside it:

    .x.ID.lock       locked with flock for as long as the preparation lives
    .x.ID.partial    what it has written, and finished parts of it, from which a preparation that was killed goes on
    .x.ID.replaced   the data that it replaces, between two renames

The system releases a lock when its process ends, however it ends.  So a lock that can be taken belongs to a preparation
that was killed, and the next one removes what that left behind, unless it can go on with its parts.  One that is under
way is not touched.

    parts.KEY/00012.HASH    the tokenized documents of part 12, with the beginning of the sha256 of the file

A part is written under another name first, so one that has its name is complete; one that has not its hash is not used,
nor are those after it.  KEY is a hash of everything on which the parts depend, see `key_of`.
"""

import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from shmap_tp.data.metadata import SPLITS
from shmap_tp.errors import LostProcessError

_PARTS = "parts."
FIRST_PART = f"{_PARTS}*/00000.*"
"""Pattern of the first part's path in a directory with one of parts."""
Documents = list[tuple[str, np.ndarray]]
"""(split, ids) of each."""
_DIVISION = "division"


def remove_stale(target: Path, name: str | None = None, heir: Path | None = None) -> None:
    """Remove what killed preparations of `target` left; data that one of them was replacing is put back.

    Finished parts stay; with `heir`, a directory, those called `name` are moved there, and others removed.
    Raises OSError if the directory of `target` cannot be read.
    """
    if not target.parent.is_dir():
        return
    ours = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.(lock|partial|replaced)")
    found = {path.with_suffix("") for path in target.parent.iterdir() if ours.fullmatch(path.name)}
    for stem in found:
        with _lock_of_dead(stem) as dead:
            if not dead:
                continue
            _put_back(stem, target)
            partial = _beside(stem, ".partial")
            if heir is not None and name and (partial / name).is_dir() and not (heir / name).exists():
                (partial / name).rename(heir / name)
            _remove(stem, but_parts=heir is None)


def has_parts(out: str) -> bool:
    """Whether an interrupted preparation of the directory `out` left parts."""
    target = Path(os.path.realpath(out))
    return any(target.parent.glob(f".{glob.escape(target.name)}.*.partial/{FIRST_PART}"))


@contextmanager
def staging(target: Path, overwrite: bool, parts: str | None = None) -> Iterator[Path]:
    """An empty directory to write, which is renamed to `target` unless there is an error.

    What `target` held is deleted after the rename with `overwrite`; otherwise the rename raises OSError.  `target` is
    as it was after any error.  The directory has those finished `parts`, a name, that a killed preparation left; an
    interrupt, or the loss of a process, leaves them there.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    stem, lock = _locked(target)
    partial, go_on = _beside(stem, ".partial"), False
    try:
        partial.mkdir()
        remove_stale(target, parts, partial)
        yield partial
        if overwrite and target.is_dir():
            target.rename(_beside(stem, ".replaced"))
        partial.rename(target)
    except (KeyboardInterrupt, LostProcessError):
        go_on = True
        raise
    finally:
        _put_back(stem, target)
        _remove(stem, but_parts=go_on)
        os.close(lock)


def _remove(stem: Path, but_parts: bool) -> None:
    """Remove what a preparation has written; `but_parts` and the lock, if it has finished one."""
    partial = _beside(stem, ".partial")
    shutil.rmtree(_beside(stem, ".replaced"), ignore_errors=True)
    if but_parts and any(partial.glob(FIRST_PART)):
        for path in partial.iterdir():
            if path.is_file():
                path.unlink()
    else:
        shutil.rmtree(partial, ignore_errors=True)
        _beside(stem, ".lock").unlink(missing_ok=True)


def _beside(stem: Path, suffix: str) -> Path:
    return stem.with_name(stem.name + suffix)


def _put_back(stem: Path, target: Path) -> None:
    """Rename the replaced data back to `target` if the new data did not get there."""
    replaced = _beside(stem, ".replaced")
    if replaced.is_dir() and not target.exists():
        replaced.rename(target)


def _locked(target: Path) -> tuple[Path, int]:
    """(the common path of a new preparation's three, the descriptor of its lock)."""
    while True:
        stem = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
        path = _beside(stem, ".lock")
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            return stem, lock  # a file system without locks: there nobody can take it, so nothing is ever stale
        if path.exists():
            return stem, lock
        os.close(lock)  # `remove_stale` took it between the two calls


@contextmanager
def _lock_of_dead(stem: Path) -> Iterator[bool]:
    """Holds the lock of a preparation that is dead, or that has none; False if it lives."""
    try:
        lock = os.open(_beside(stem, ".lock"), os.O_RDWR)
    except FileNotFoundError:
        yield True  # of a version without locks; or it has just ended, and there is nothing left
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        dead = False
    else:
        dead = True
    try:
        yield dead
    finally:
        os.close(lock)


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
