"""A directory that is written beside its target, and renamed to the target when it is complete.

A preparation of data/x owns three hidden paths beside it:

    .x.ID.lock       locked with flock for as long as the preparation lives
    .x.ID.partial    what it has written, and finished parts of it (`parts.py`), of which its end removes the last
    .x.ID.replaced   the data that it replaces, between two renames

The system releases a lock when its process ends, however it ends.  So a lock that can be taken belongs to a preparation
that was killed, and the next one removes what that left behind, unless it can go on with its parts.  One that is under
way is not touched.
"""

import fcntl
import glob
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shmap_tp.data.parts import FIRST_PART
from shmap_tp.errors import LostProcessError


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
