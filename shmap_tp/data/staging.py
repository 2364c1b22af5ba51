"""A directory that is written beside its target, and renamed to the target when it is complete.

A preparation of data/x owns three hidden paths beside it:

    .x.ID.lock       locked with flock for as long as the preparation lives
    .x.ID.partial    what it has written
    .x.ID.replaced   the data that it replaces, between two renames

The system releases a lock when its process ends, however it ends.  So a lock that can be taken belongs to a preparation
that was killed, and the next one removes what that left behind.  One that is under way is not touched.
"""

import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def remove_stale(target: Path) -> None:
    """Remove what killed preparations of `target` left; data that one of them was replacing is put back.

    Raises OSError if the directory of `target` cannot be read.
    """
    if not target.parent.is_dir():
        return
    ours = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.(lock|partial|replaced)")
    found = {path.with_suffix("") for path in target.parent.iterdir() if ours.fullmatch(path.name)}
    for stem in found:
        with _lock_of_dead(stem) as dead:
            if dead:
                _put_back(stem, target)
                shutil.rmtree(_beside(stem, ".partial"), ignore_errors=True)
                shutil.rmtree(_beside(stem, ".replaced"), ignore_errors=True)
                _beside(stem, ".lock").unlink(missing_ok=True)


@contextmanager
def staging(target: Path, overwrite: bool) -> Iterator[Path]:
    """An empty directory to write, which is renamed to `target` unless there is an error.

    What `target` held is deleted after the rename with `overwrite`; otherwise the rename raises OSError.  `target` is
    as it was after any error.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    stem, lock = _locked(target)
    partial = _beside(stem, ".partial")
    try:
        partial.mkdir()
        yield partial
        if overwrite and target.is_dir():
            target.rename(_beside(stem, ".replaced"))
        partial.rename(target)
    finally:
        _put_back(stem, target)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(_beside(stem, ".replaced"), ignore_errors=True)
        _beside(stem, ".lock").unlink(missing_ok=True)
        os.close(lock)


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
