"""What is in checkpoints, for every reader: which there are, their configuration, and their parameters without the
optimizer state.

Only reads, so the run may be under way.
"""

import itertools
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore
from etils import epath
from orbax.checkpoint import v1 as ocp

from shmap_tp.config.compose import from_values
from shmap_tp.config.schema import Config
from shmap_tp.config.yaml_files import saved_checkpoint_dir
from shmap_tp.errors import ShmapTpError, StorageError, UserError, first_line, shown
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.partitioning import types_by_path
from shmap_tp.runtime.agreement import on_process_0
from shmap_tp.runtime.files import first_contact, reading
from shmap_tp.runtime.run_lock import is_in_use
from shmap_tp.runtime.workers import interruptible
from shmap_tp.training.integrity import MANIFEST, find_faults, unreadable

SAID_ELSEWHERE = "_SignalingThread.run() raised", "Failed to get metadata for checkpointable"
logging.getLogger("absl").addFilter(lambda record: not any(text in record.getMessage() for text in SAID_ELSEWHERE))
"""What Orbax logs about failures whose error is also raised here."""

SKIPPED = "skipped_in_a_row"
"""File of a checkpoint that was saved within a streak of skipped steps: their number."""
ORBAX_METADATA = "_CHECKPOINT_METADATA"

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
    names = [child.name for child in directory.iterdir()] if directory.is_dir() else []
    steps = sorted((int(name) for name in names if name.isdecimal() and name == str(int(name))), reverse=True)
    return [step for step in steps if not _names(directory / str(step)).isdisjoint((MANIFEST, ORBAX_METADATA))]


def _names(directory: epath.Path) -> set[str]:
    """The names in `directory`; none if it is no directory.  Raises `StorageError` if it cannot be read."""
    try:
        return {child.name for child in directory.iterdir()} if directory.is_dir() else set()
    except (FileNotFoundError, NotADirectoryError):  # removed meanwhile
        return set()
    except OSError as error:
        raise StorageError(unreadable(directory, error)) from error


def is_in_progress(directory: epath.Path) -> bool:
    """Whether a run that is under way has not finished to save the checkpoint in `directory`, or is deleting it: that
    it is not intact is no fault then."""
    return not (directory / MANIFEST).exists() and is_in_use(str(directory.parent))


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


def _unusable(directory: epath.Path, why: str) -> str:
    return (
        f"the metadata of checkpoint {directory} cannot be used ({why}); nothing was changed.\n"
        f"Move the checkpoint elsewhere to resume from the one before it"
    )


def find_checkpoint(directory: str, step: int | None) -> epath.Path:
    """The checkpoint of `step`, or the newest intact one, of a run directory or a directory of checkpoints.

    `directory` may also be one checkpoint.  A damaged or unfinished checkpoint is skipped with a warning.
    Raises UserError if there is no checkpoint, or the one of `step` is missing or damaged.
    """
    if step is not None and (isinstance(step, bool) or not isinstance(step, int | np.integer)):
        raise UserError(f"step={shown(step)} must be an integer, as in step=3")
    with reading(directory):
        root = absolute(directory)
        if step is None and root.name.isdecimal() and root.is_dir():
            root, step = root.parent, int(root.name)
        root = directory_of_checkpoints(root)
        steps = on_process_0("steps", lambda: sorted(checkpoint_steps(root)) if root.is_dir() else [])
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
                warnings.warn(f"checkpoint {root / str(candidate)} is skipped: {faults[0]}", stacklevel=4)
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
    return load_state(checkpoint, others | {"params": shapes if held is None else held}, UserError)["params"]


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
    if fault := difference(types_by_path(saved["params"]), types_by_path(shapes)):
        raise UserError(
            f"checkpoint {checkpoint} holds params/{fault};\nread it with the version of shmap_tp that saved it"
        )
    return saved


def difference(saved: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
    """The first array whose dtype or shape differs from what is needed, in words; None if all are as needed."""
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            return f"{name} as {saved.get(name)}, needed is {wanted.get(name)}"
    return None


def load_state(checkpoint: epath.Path, state: Any, kind: type[ShmapTpError]) -> Any:
    """The arrays of a checkpoint that `state` describes.  Raises an error of this `kind` if Orbax cannot read them."""
    try:
        return interruptible(lambda: ocp.load_checkpointables(checkpoint, {"state": state}))["state"]
    except Exception as error:  # Orbax does not check what it reads
        raise kind(f"checkpoint {checkpoint} cannot be restored: {first_line(error.__cause__ or error)}") from error
