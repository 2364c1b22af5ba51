"""The files of checkpoints: which steps have one, whether it is as it was saved, and the facts stored with it.

Only reads.  A read error says nothing about a checkpoint, and is raised; only a proven difference is a fault.
"""

import errno
import hashlib
import json
import logging
import os
import stat
from typing import Any

from etils import epath
from orbax.checkpoint import v1 as ocp

from shmap_tp.errors import StorageError

SAID_ELSEWHERE = "_SignalingThread.run() raised", "Failed to get metadata for checkpointable"
logging.getLogger("absl").addFilter(lambda record: not any(text in record.getMessage() for text in SAID_ELSEWHERE))
"""What Orbax logs about failures whose error is also raised here."""

MANIFEST = "sha256.json"
"""The hash of every other file of a checkpoint, by path; written last."""
SKIPPED = "skipped_in_a_row"
"""File of a checkpoint that was saved within a streak of skipped steps: their number."""
ORBAX_METADATA = "_CHECKPOINT_METADATA"

NO_FILE = "not a file: "
"""What `hashes` has in place of a hash for something that cannot be read to an end, followed by what it is."""
KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def checkpoint_steps(directory: epath.Path) -> list[int]:
    """The steps whose checkpoints this program saved in `directory`, newest first.  Anything else there is ignored."""

    def is_checkpoint(child: epath.Path) -> bool:
        is_step = child.name.isascii() and child.name.isdecimal() and child.name == str(int(child.name))
        return is_step and ((child / MANIFEST).exists() or (child / ORBAX_METADATA).exists())

    children = directory.iterdir() if directory.is_dir() else ()
    return sorted((int(child.name) for child in children if is_checkpoint(child)), reverse=True)


def find_faults(directory: epath.Path) -> list[str]:
    """One line for each damaged, missing or added file of the checkpoint in `directory`; [] if it is intact.

    Raises `StorageError` if a file cannot be read: that says nothing about the checkpoint.
    """
    try:
        if kind := _special(directory / MANIFEST):
            return [f"{MANIFEST} is {kind}, not a file"]
        expected = json.loads((directory / MANIFEST).read_text())
        actual = hashes(directory)
    except FileNotFoundError:
        return [f"{MANIFEST} is missing, so its save was not finished"]
    except (ValueError, RecursionError) as error:
        return [f"{MANIFEST} is damaged ({error})"]
    except Exception as error:  # buckets raise errors of many types
        reason = getattr(error, "strerror", None) or first_line(error)
        raise StorageError(
            f"checkpoint {directory} cannot be read: {reason}; nothing was changed.\n"
            f"Make it readable and start again, or name another checkpoint.dir"
        ) from error
    if not isinstance(expected, dict):
        return [f"{MANIFEST} is damaged (it lists no files)"]
    faults = []
    for name in sorted(expected.keys() | actual.keys()):
        if actual.get(name, "").startswith(NO_FILE):
            faults.append(f"{name} is {actual[name].removeprefix(NO_FILE)}, not a file")
        elif name not in actual:
            faults.append(f"file {name} is missing")
        elif name not in expected:
            faults.append(f"file {name} was added after the save: it is not in {MANIFEST}")
        elif expected[name] != actual[name]:
            faults.append(f"file {name} is damaged: its sha256 differs from the one in {MANIFEST}")
    return faults


def read_facts(directory: epath.Path) -> Any:
    """The `facts` that were saved with the checkpoint in `directory`, as JSON values of any type.

    Raises `StorageError` if its metadata cannot be read.
    """
    return _metadata(directory).custom_metadata


def saved_state(directory: epath.Path) -> Any:
    """The state in the checkpoint, with its shapes and dtypes in place of arrays.  Raises `StorageError` likewise."""
    metadata = _metadata(directory).metadata
    if not isinstance(metadata, dict) or metadata.get("state") is None:
        raise StorageError(_unusable(directory, "it does not list the arrays of a state"))
    return metadata["state"]


def _metadata(directory: epath.Path) -> Any:
    try:
        return ocp.checkpointables_metadata(directory)
    except Exception as error:  # Orbax does not check what it reads
        raise StorageError(_unusable(directory, f"{type(error).__name__}: {first_line(error)}")) from error


def _unusable(directory: epath.Path, why: str) -> str:
    return (
        f"the metadata of checkpoint {directory} cannot be used ({why}); nothing was changed.\n"
        f"Move the checkpoint elsewhere to resume from the one before it"
    )


def first_line(error: BaseException) -> str:
    """The beginning of the first line of an error's message."""
    return (str(error).strip().splitlines() or [""])[0].partition(" See full TensorStore details")[0][:200]


def hashes(directory: epath.Path) -> dict[str, str]:
    """sha256 of every file under `directory` except the manifest, by path relative to `directory`.

    What cannot be read to an end, such as a FIFO or a directory that contains itself, has NO_FILE and its kind instead.
    """

    def files(at: epath.Path, prefix: str, above: list[Any]) -> list[tuple[str, epath.Path, str | None]]:
        found, above = [], [*above, _identity(at)]
        for child in sorted(at.iterdir()):
            name, kind = prefix + child.name, _special(child)
            if kind is None and child.is_dir():
                if _identity(child) not in above:
                    found += files(child, f"{name}/", above)
                    continue
                kind = "a link to a directory that contains it"
            found.append((name, child, kind))
        return found

    return {
        name: NO_FILE + kind if kind else _sha256(file)
        for name, file, kind in files(directory, "", [])
        if name not in (MANIFEST, f"{MANIFEST}.tmp")
    }


def _special(path: epath.Path) -> str | None:
    """What `path` is if it is neither a file nor a directory.  In a bucket there is nothing else."""
    if "://" in str(path):
        return None
    try:
        return KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
    except FileNotFoundError:
        if os.path.islink(path):
            return "a link to nothing"
        raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "a loop of links"
        raise


def _identity(directory: epath.Path) -> Any:
    """Equal for two names of one directory."""
    if "://" in str(directory):
        return str(directory)
    status = os.stat(directory)
    return status.st_dev, status.st_ino


def _sha256(file: epath.Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
