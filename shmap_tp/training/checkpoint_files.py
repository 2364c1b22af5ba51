"""What is in checkpoints, for every reader: which there are, whether one is as it was saved, its configuration and its
parameters without the optimizer state.

Only reads, so the run may be under way.  A read error says nothing about a checkpoint, and is raised; only a proven
difference is a fault.
"""

import errno
import hashlib
import itertools
import json
import logging
import os
import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore
from etils import epath
from orbax.checkpoint import v1 as ocp

from shmap_tp.config.compose import from_values
from shmap_tp.config.run_directory import saved_checkpoint_dir
from shmap_tp.config.schema import Config
from shmap_tp.errors import StorageError, UserError
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.key_paths import types_by_path
from shmap_tp.runtime.files import first_contact
from shmap_tp.runtime.run_lock import is_in_use

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

INTERRUPTED_SECONDS = 5.0
"""How long an interrupt waits for a read to end: a process that ends while files are read may crash."""

Chunk = tuple[str, tuple[tuple[int, int], ...], np.ndarray]
"""(path of a parameter, the range of each dim, its values)."""


def absolute(directory: str) -> epath.Path:
    """The absolute path that Orbax needs.  The URL of a bucket (gs://) stays as it is."""
    return epath.Path(directory) if "://" in directory else epath.Path(directory).resolve()


def checkpoint_steps(directory: epath.Path) -> list[int]:
    """The steps whose checkpoints this program saved in `directory`, newest first.  Anything else there is ignored.

    Raises `StorageError` if a directory that may be a checkpoint cannot be read: an older one would be taken for the
    newest.
    """
    steps = names_of_steps(directory)
    return [step for step in steps if not _names(directory / str(step)).isdisjoint((MANIFEST, ORBAX_METADATA))]


def names_of_steps(directory: epath.Path) -> list[int]:
    """The names in `directory` that checkpoints have, whatever they are of, newest first."""
    names = [child.name for child in directory.iterdir()] if directory.is_dir() else []
    return sorted((int(name) for name in names if name.isdecimal() and name == str(int(name))), reverse=True)


def _names(directory: epath.Path) -> set[str]:
    """The names in `directory`; none if it is no directory.  Raises `StorageError` if it cannot be read."""
    try:
        return {child.name for child in directory.iterdir()} if directory.is_dir() else set()
    except (FileNotFoundError, NotADirectoryError):  # removed meanwhile
        return set()
    except OSError as error:
        raise StorageError(_unreadable(directory, error)) from error


def is_in_progress(directory: epath.Path) -> bool:
    """Whether a run that is under way has not finished to save the checkpoint in `directory`, or is deleting it: that
    it is not intact is no fault then."""
    return not (directory / MANIFEST).exists() and is_in_use(str(directory.parent))


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
        raise StorageError(_unreadable(directory, error)) from error
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
        return interruptible(lambda: ocp.checkpointables_metadata(directory))
    except Exception as error:  # Orbax does not check what it reads
        raise StorageError(_unusable(directory, f"{type(error).__name__}: {first_line(error)}")) from error


def interruptible(read: Callable[[], Any]) -> Any:
    """What `read` returns or raises; an interrupt of this thread is raised.

    It runs in a thread of its own, since Orbax takes any exception for an error of what it reads, and goes on after
    some: a Ctrl-C had no effect.
    """
    outcome: Future = Future()

    def run() -> None:
        try:
            outcome.set_result(read())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, daemon=True, name="read")
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.1)  # a signal may have reached another thread, and this one handles it
    except BaseException:
        thread.join(INTERRUPTED_SECONDS)
        raise
    return outcome.result()


def _unreadable(directory: epath.Path, error: Exception) -> str:
    reason = getattr(error, "strerror", None) or first_line(error)
    return (
        f"checkpoint {directory} cannot be read: {reason}; nothing was changed.\n"
        f"Make it readable and start again, or name another checkpoint.dir"
    )


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


def find_checkpoint(directory: str, step: int | None) -> epath.Path:
    """The checkpoint of `step`, or the newest intact one, of a run directory or a directory of checkpoints.

    `directory` may also be one checkpoint.  A damaged or unfinished checkpoint is skipped with a warning.
    Raises UserError if there is no checkpoint, or the one of `step` is missing or damaged.
    """
    try:
        return _find_checkpoint(directory, step)
    except OSError as error:
        raise UserError(f"{directory} cannot be read: {error.strerror or error}; name another directory") from error


def _find_checkpoint(directory: str, step: int | None) -> epath.Path:
    root = absolute(directory)
    if step is None and root.name.isdecimal() and root.is_dir():
        root, step = root.parent, int(root.name)
    root = directory_of_checkpoints(root)
    steps = sorted(checkpoint_steps(root)) if root.is_dir() else []
    if not steps:
        raise UserError(
            f"{directory} holds no checkpoint; name the run.dir or the checkpoint.dir of a run that has saved one"
        )
    if step is not None and step not in steps:
        raise UserError(f"{root} holds no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    for candidate in [step] if step is not None else reversed(steps):
        faults = find_faults(root / str(candidate))
        if not faults:
            return root / str(candidate)
        if step is not None:
            raise UserError(f"checkpoint {root / str(step)} cannot be used: {faults[0]}")
        if not is_in_progress(root / str(candidate)):
            warnings.warn(f"checkpoint {root / str(candidate)} is skipped: {faults[0]}", stacklevel=5)
    raise UserError(f"no checkpoint in {root} is intact (there: {', '.join(map(str, steps))})")


def directory_of_checkpoints(root: epath.Path) -> epath.Path:
    """`root`, or if it is a run directory the checkpoint.dir that its config.yaml names, where that is now.

    Raises OSError.
    """
    if "://" in str(root):
        first_contact(root.exists)
    if (root / "checkpoints").is_dir():
        return root / "checkpoints"
    file = root / "config.yaml"
    saved = saved_checkpoint_dir(file if "://" in str(root) else Path(file))
    return root if saved is None else absolute(saved)


def saved_config(checkpoint: epath.Path) -> Config:
    """The configuration that was saved with a checkpoint.

    Raises UserError if it has none, or if its keys are those of another version.
    """
    facts = read_facts(checkpoint)
    saved = facts.get("config") if isinstance(facts, dict) else None
    if not isinstance(saved, dict):
        raise UserError(f"checkpoint {checkpoint} holds no configuration: it was not saved by a training run")
    try:
        return from_values(saved, f"checkpoint {checkpoint}")
    except UserError as error:
        raise UserError(
            f"checkpoint {checkpoint} was saved by a version of shmap_tp with another configuration ({error});\n"
            f"use that version to read it"
        ) from error


def restore_parameters(checkpoint: epath.Path, shapes: Transformer, held: Transformer | None = None) -> Transformer:
    """The parameters in `checkpoint`, with the shardings of `shapes`: bit for bit, or rounded to the dtypes of `held`.

    Raises UserError if the checkpoint's parameters have other names, shapes or dtypes than `shapes` (Orbax would cast a
    dtype silently), or cannot be read.
    """
    saved = _saved(checkpoint, shapes)
    others = {name: jax.tree.map(lambda _: ocp.PLACEHOLDER, part) for name, part in saved.items() if name != "params"}
    return _load(checkpoint, others | {"params": shapes if held is None else held})


def read_chunks(checkpoint: epath.Path, shapes: Transformer) -> Iterator[Chunk]:
    """The parameters in `checkpoint`, one chunk of its files after the other, so that only a few are in memory.

    A chunk is at most `checkpoint.CHUNK_BYTES`; before that limit was introduced, it was a shard of the mesh that saved
    the checkpoint.  Raises UserError as `restore_parameters` does.
    """
    _saved(checkpoint, shapes)
    for path in types_by_path(shapes):
        name = path.replace("/", ".")
        try:
            array = _open_array(checkpoint, f"params.{name}")
            size = array.chunk_layout.read_chunk.shape
            for corner in itertools.product(*(range(0, n, step) for n, step in zip(array.shape, size, strict=True))):
                ends = [min(a + step, n) for a, step, n in zip(corner, size, array.shape, strict=True)]
                ranges = tuple(zip(corner, ends, strict=True))
                yield name, ranges, array[tuple(slice(*one) for one in ranges)].read().result()
        except ValueError as error:  # TensorStore's
            raise UserError(f"checkpoint {checkpoint} cannot be read: {first_line(error)}") from error


def _open_array(checkpoint: epath.Path, name: str) -> tensorstore.TensorStore:
    """The array `name` as Orbax stores it: zarr 3, in an OCDBT database over the files of the directory.

    https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html
    """
    directory = f"{checkpoint}/state/"
    base = directory if "://" in directory else {"driver": "file", "path": directory}
    store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    return tensorstore.open({"driver": "zarr3", "kvstore": store}, open=True, read=True).result()


def _saved(checkpoint: epath.Path, shapes: Transformer) -> dict[str, Any]:
    """What is saved in `checkpoint`, described.  Raises UserError if its parameters are not those of `shapes`."""
    saved = dict(saved_state(checkpoint))
    found, wanted = types_by_path(saved["params"]), types_by_path(shapes)
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise UserError(
                f"checkpoint {checkpoint} holds params/{name} as {found.get(name)}, needed is {wanted.get(name)};\n"
                f"read it with the version of shmap_tp that saved it"
            )
    return saved


def _load(checkpoint: epath.Path, state: dict[str, Any]) -> Transformer:
    """The parameters of `state`, the others of which are placeholders."""
    try:
        return interruptible(lambda: ocp.load_checkpointables(checkpoint, {"state": state}))["state"]["params"]
    except Exception as error:
        raise UserError(
            f"checkpoint {checkpoint} cannot be restored: {first_line(error.__cause__ or error)}"
        ) from error
