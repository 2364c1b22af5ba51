"""A directory that is written beside its target, and renamed to the target when it is complete.

A preparation of data/x owns three hidden paths beside it:

    .x.lock       locked for as long as the preparation lives; another one waits
    .x.partial    what it has written, and finished parts of it, from which a preparation that was killed goes on
    .x.replaced   the data that it replaces, between two renames

The system releases a lock when its process ends, however it ends.  So what is there when the lock is taken is of a
preparation that was killed, and is removed, but for parts with which the next one goes on.

    parts.KEY/00012.HASH    the tokenized documents of part 12, with the beginning of the sha256 of the file

A part is written under another name first, so one that has its name is complete; one that has not its hash is not used,
nor are those after it.  KEY is a hash of everything on which the parts depend, see `key_of`.
"""

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from shmap_tp.data.metadata import SPLITS
from shmap_tp.errors import LostProcessError
from shmap_tp.runtime.files import locked

_PARTS = "parts."
FIRST_PART = f"{_PARTS}*/00000.*"
"""Pattern of the first part's path in a directory with one of parts."""
Documents = list[tuple[str, np.ndarray]]
"""(split, ids) of each."""
_DIVISION = "division"


def has_parts(out: str) -> bool:
    """Whether an interrupted preparation of the directory `out` left parts."""
    return any(_beside(Path(os.path.realpath(out)), "partial").glob(FIRST_PART))


def recover(target: Path) -> None:
    """Remove what a killed preparation of `target` left, but for finished parts; data that it was replacing is put
    back.  One that is under way is waited for."""
    partial, replaced = _beside(target, "partial"), _beside(target, "replaced")
    if partial.is_dir() or replaced.is_dir():
        with locked(_beside(target, "lock")):
            _put_back(replaced, target)
            if not any(partial.glob(FIRST_PART)):
                shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def staging(target: Path, overwrite: bool, parts: str | None = None) -> Iterator[Path]:
    """An empty directory to write, which is renamed to `target` unless there is an error.

    What `target` held is deleted after the rename with `overwrite`; otherwise OSError is raised if it has become one.
    `target` is as it was after any error.  The directory has those finished `parts`, a name, that a killed preparation
    left; an interrupt, or the loss of a process, leaves them there.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    own = ""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(_beside(target, "lock")))
        except PermissionError:  # the lock is another user's, whose preparation may be under way
            raise
        except OSError:  # a file system without locks, where others may be under way
            own = f"{uuid.uuid4().hex}."
            _beside(target, "lock").unlink(missing_ok=True)
        partial, replaced, go_on = _beside(target, f"{own}partial"), _beside(target, f"{own}replaced"), False
        try:
            _put_back(replaced, target)
            partial.mkdir(exist_ok=True)
            _clear(partial, parts)
            if not overwrite and target.is_dir() and any(target.iterdir()):
                raise FileExistsError(errno.EEXIST, "it was prepared meanwhile")
            yield partial
            if overwrite and target.is_dir():
                target.rename(replaced)
            partial.rename(target)
        except (KeyboardInterrupt, LostProcessError):
            go_on = any(partial.glob(FIRST_PART))
            raise
        finally:
            _put_back(replaced, target)
            if go_on:
                _clear(partial, parts)
            else:
                shutil.rmtree(partial, ignore_errors=True)


def _beside(target: Path, ending: str) -> Path:
    return target.with_name(f".{target.name}.{ending}")


def _put_back(replaced: Path, target: Path) -> None:
    """Rename the replaced data back to `target`, or remove it if the new data got there."""
    if replaced.is_dir() and not target.exists():
        replaced.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)


def _clear(partial: Path, parts: str | None) -> None:
    """Remove what is there but for these parts."""
    for path in partial.iterdir():
        if path.is_file():
            path.unlink()
        elif path.name != parts:
            shutil.rmtree(path)


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
