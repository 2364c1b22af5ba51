"""Whether a checkpoint is as it was saved: the hash of every file, computed by all processes.

A read error says nothing about a checkpoint, and is raised; only a proven difference is a fault.
"""

import hashlib
import json
import re
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from etils import epath

from shmap_tp.errors import ShmapTpError, StorageError, first_line
from shmap_tp.runtime.agreement import divided, on_process_0
from shmap_tp.runtime.distributed import joined_processes

MANIFEST = "sha256.json"
"""The hash of every other file of a checkpoint, by path; written last."""
HASHING_THREADS = 8
"""How many files a process hashes at the same time, each in a block of 4 MiB of memory."""


def find_faults(directory: epath.Path) -> list[str]:
    """One line for each damaged, missing or added file of the checkpoint in `directory`; [] if it is intact.

    Must be called by all processes, of which each hashes its part (`hashes`), and which all get the same.
    Raises `StorageError` if a file cannot be read: that says nothing about the checkpoint.
    """
    expected = on_process_0("manifest", lambda: _manifest(directory))
    if isinstance(expected, str):
        return [expected]
    actual, faults = hashes(directory), []
    for name in sorted(expected.keys() | actual.keys()):
        if name not in actual:
            faults.append(f"file {name} is missing")
        elif name not in expected:
            faults.append(f"file {name} was added after the save: it is not in {MANIFEST}")
        elif actual[name] is None:
            faults.append(f"{name} is not a file, or is being deleted")
        elif expected[name] != actual[name]:
            faults.append(f"file {name} is damaged: its sha256 differs from the one in {MANIFEST}")
    return faults


def _manifest(directory: epath.Path) -> dict[str, str] | str:
    """The hashes that were saved; or why there are none, in words."""
    file = directory / MANIFEST
    try:
        with _read_errors(directory):
            content = file.read_bytes() if _is_file(file.stat()) else b"null"
        found = json.loads(content)
    except FileNotFoundError:
        return f"{MANIFEST} is missing, so its save was not finished"
    except (ValueError, RecursionError) as error:
        return f"{MANIFEST} is damaged ({error})"
    return found if isinstance(found, dict) else f"{MANIFEST} is damaged (it lists no files)"


def hashes(directory: epath.Path) -> dict[str, str | None]:
    """sha256 of every file under `directory` except the manifest, by path relative to `directory`; None of what is no
    file, such as a FIFO, which is not read.

    Must be called by all processes: process 0 lists the files, each process hashes those of its `shares`, and all get
    the hashes of all.  Communication: names and hashes, by the key-value store of the processes.
    """

    def plan() -> list[dict[str, bool]]:
        with _read_errors(directory):
            sizes = dict(_files(directory, ""))
        return [{name: sizes[name] is not None for name in share} for share in shares(sizes, joined_processes())]

    def hash_of(name: str, is_file: bool) -> str | None:
        with suppress(FileNotFoundError):  # deleted meanwhile
            return _sha256(directory / name) if is_file else None

    def work(files: dict[str, bool]) -> dict[str, str | None]:
        with _read_errors(directory), ThreadPoolExecutor(HASHING_THREADS) as threads:
            return dict(zip(files, threads.map(hash_of, files, files.values()), strict=True))

    return {name: sha256 for part in divided("hashes", plan, work) for name, sha256 in part.items()}


def shares(sizes: dict[str, int | None], processes: int) -> list[list[str]]:
    """The files that each process hashes, whatever processes saved them: at most 1/`processes` of the bytes and one
    file, which Orbax ends after 2 GiB (in a bucket 400 MiB) and a chunk.

    A process gets the files that it wrote as long as it has less than its share; other files go to the process that has
    least.
    """
    found: list[list[str]] = [[] for _ in range(processes)]
    loads, share = [0] * processes, sum(size or 0 for size in sizes.values()) / processes
    for name, size in sorted(sizes.items(), key=lambda item: -(item[1] or 0)):
        writer = re.search(r"process_([0-9]+)", name)
        process = int(writer[1]) if writer else processes
        if process >= processes or loads[process] >= share:
            process = loads.index(min(loads))
        found[process].append(name)
        loads[process] += size or 0
    return found


def _files(at: epath.Path, prefix: str) -> Iterator[tuple[str, int | None]]:
    """(path, size) of everything below a directory but the manifest; the size is None of what is no file."""
    for child in sorted(at.iterdir()):
        name, status = prefix + child.name, None
        with suppress(FileNotFoundError):  # a link to nothing, or deleted meanwhile
            status = child.stat()
        if status and status.is_directory:
            yield from _files(child, f"{name}/")
        elif name not in (MANIFEST, f"{MANIFEST}.tmp"):
            yield name, status.length if status and _is_file(status) else None


def _is_file(status: Any) -> bool:
    """Whether what has this status, that of epath, can be read to an end.  In a bucket there is nothing else."""
    return status.mode is None or stat.S_ISREG(status.mode)


@contextmanager
def _read_errors(directory: epath.Path) -> Iterator[None]:
    """Context that reads the checkpoint in `directory`.  Raises StorageError if it cannot be read."""
    try:
        yield
    except (ShmapTpError, FileNotFoundError):
        raise
    except Exception as error:  # buckets raise errors of many types
        raise StorageError(unreadable(directory, error)) from error


def _sha256(file: epath.Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def unreadable(directory: epath.Path, error: Exception) -> str:
    reason = getattr(error, "strerror", None) or first_line(error)
    return (
        f"checkpoint {directory} cannot be read: {reason}; nothing was changed.\n"
        f"Make it readable and start again, or name another checkpoint.dir"
    )
