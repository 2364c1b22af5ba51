"""A Hugging Face directory written from parameters on any mesh.

The files are created first, with the place of every tensor.  Then each process writes the shards that it has (of
replicas the first) into their byte ranges, layer by layer: nothing is gathered, and no process holds more than its
shards and one layer of one of them.  The directory has another name until it is complete.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jaxtyping import Array

from shmap_tp.config.schema import ModelConfig
from shmap_tp.errors import StorageError, UserError
from shmap_tp.pretrained.families import FAMILIES
from shmap_tp.pretrained.family import Family
from shmap_tp.pretrained.layout import Layout
from shmap_tp.pretrained.source import INDEX, Source
from shmap_tp.pretrained.tensor_files import DTYPES, StoredTensor, create, place_tensors

MAX_SHARD_BYTES = 5 * 10**9
"""The largest file that is written, unless a single tensor is larger: the default of transformers 4."""
OUTPUT_DTYPES = {str(dtype): dtype for dtype in DTYPES.values()}


@dataclass(frozen=True)
class Target:
    """What a directory will contain besides the weights."""

    family: Family
    config: Mapping[str, Any]
    companions: tuple[Path, ...] = ()
    """Files that are copied: those of the tokenizer, and generation_config.json."""


def target_of(model: ModelConfig, source: Source | None) -> Target:
    """The family and config.json of `model`: those of `source`, if it was read from one.

    Raises UserError if no family can express the model.
    """
    if source is not None:
        config = dict(source.config)
        if model.positions == "learned":
            config[source.family.context_key] = model.context
        differences = source.family.differences(model, config)
        if not differences:
            return Target(source.family, config, tuple(source.companions()))
    candidates = [(family, family.config_of(model)) for family in FAMILIES]
    differing = [(family, config, family.differences(model, config)) for family, config in candidates]
    for family, config, differences in differing:
        if not differences:
            return Target(family, config, tuple(source.companions()) if source else ())
    family, _, differences = min(differing, key=lambda one: len(one[2]))
    listed = ", ".join(f"model.{key}={mine} (there {theirs})" for key, (mine, theirs) in differences.items())
    raise UserError(
        f"no supported architecture can express model {model.name}; the closest, {family.architecture}, differs in "
        f"{listed}"
    )


def save_parameters(
    out: Path, target: Target, model: ModelConfig, parameters: "Parameters", dtype: str, *, shard_bytes: int
) -> None:
    """Write the directory `out`, which does not exist or is empty; every process calls it.

    Raises UserError if `out` is not empty or `dtype` is not one of OUTPUT_DTYPES, StorageError if it cannot be written.
    """
    if dtype not in OUTPUT_DTYPES:
        raise UserError(f"dtype {dtype} cannot be written; use one of {', '.join(OUTPUT_DTYPES)}")
    layouts = target.family.layouts(model, parameters.stacked)
    files = _divide(_tensor_shapes(layouts, parameters.stacked, model.layers), OUTPUT_DTYPES[dtype], shard_bytes)
    with _complete_directory(out) as (directory, once):
        places: dict[str, StoredTensor] = {}
        for name, shapes in files.items():
            once(lambda name=name, shapes=shapes: create(directory / name, shapes, OUTPUT_DTYPES[dtype]))
            places |= place_tensors(directory / name, shapes, OUTPUT_DTYPES[dtype])
        once(lambda: _write_companions(directory, target, files, places, dtype))
        for path, array in parameters.arrays:
            row, layout = layouts[path]
            names = [row.theirs.format(layer=layer) for layer in range(model.layers if parameters.stacked[path] else 1)]
            _write_parameter(array, layout, [places[name] for name in names], parameters.stacked[path])


@dataclass(frozen=True)
class Parameters:
    """Parameters to be written, one after the other."""

    stacked: Mapping[str, bool]
    """Every path, and whether it is stacked over layers."""
    arrays: Iterable[tuple[str, Array]]
    """(path, array); an array is not used after the next one was asked for."""


def _tensor_shapes(
    layouts: Mapping[str, tuple[Any, Layout]], stacked: Mapping[str, bool], layers: int
) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor by its name, those outside of the blocks first, then block by block."""
    shapes = {row.theirs: layout.file_shape for path, (row, layout) in layouts.items() if not stacked[path]}
    for layer in range(layers):
        for path, (row, layout) in layouts.items():
            if stacked[path]:
                shapes[row.theirs.format(layer=layer)] = layout.file_shape
    return shapes


def _divide(
    shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype, shard_bytes: int
) -> dict[str, dict[str, tuple[int, ...]]]:
    """The tensors of each file, by its name."""
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        added = math.prod(shape) * dtype.itemsize
        if groups[-1] and size + added > shard_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = shape
        size += added
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def _write_companions(
    directory: Path, target: Target, files: Mapping[str, Any], places: Mapping[str, StoredTensor], dtype: str
) -> None:
    """config.json, the index if there are several files, generation_config.json and the tokenizer's files."""
    config = dict(target.config)
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = dtype
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if len(files) > 1:
        total = sum(tensor.size for tensor in places.values())
        index = {"metadata": {"total_size": total}, "weight_map": {n: places[n].file.name for n in sorted(places)}}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for file in target.companions:
        shutil.copyfile(file, directory / file.name)
    if not (directory / "generation_config.json").exists():
        tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
        (directory / "generation_config.json").write_text(json.dumps({"_from_model_config": True} | tokens) + "\n")


def _write_parameter(array: Array, layout: Layout, places: list[StoredTensor], stacked: bool) -> None:
    """Write the shards of `array` that this process has and no earlier device has."""
    for shard in array.addressable_shards:
        if shard.replica_id:
            continue
        ranges = tuple(part.indices(size)[:2] for part, size in zip(shard.index, array.shape, strict=True))
        if not stacked:
            layout.write(places[0], ranges, np.asarray(shard.data))
            continue
        for i, layer in enumerate(range(*ranges[0])):
            one = lax.dynamic_index_in_dim(shard.data, i, keepdims=False)
            layout.write(places[layer], ranges[1:], np.asarray(one))


@contextmanager
def _complete_directory(out: Path) -> Iterator[tuple[Path, Callable[[Callable[[], None]], None]]]:
    """(a new directory beside `out`, `once`), renamed to `out` at the end; removed if the block raises.

    `once(f)` calls f in process 0 while the others wait.
    """
    temporary = out.with_name(out.name + ".incomplete")

    def once(action: Callable[[], None]) -> None:
        with _all_or_none(out):
            if jax.process_index() == 0:
                action()

    def prepare() -> None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} exists and is not an empty directory; name another, or remove it")
        out.parent.mkdir(parents=True, exist_ok=True)
        if temporary.exists():  # left by an export that was killed
            shutil.rmtree(temporary)
        temporary.mkdir()

    def finish() -> None:
        for file in temporary.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        temporary.rename(out)

    once(prepare)
    try:
        with _all_or_none(out):
            yield temporary, once
        once(finish)
    except BaseException:
        if jax.process_index() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def _all_or_none(out: Path) -> Iterator[None]:
    """A block after which all processes wait for each other, and all raise if one has."""
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
    if jax.process_count() > 1:
        failed = np.any(multihost_utils.process_allgather(np.array([failure is not None])))
        if failed and failure is None:
            failure = StorageError(f"{out} could not be written by another process, which prints the reason")
    if isinstance(failure, OSError):
        reason = failure.strerror or str(failure)
        raise StorageError(f"{out} could not be written: {reason}; nothing is left there, free some space") from failure
    if failure is not None:
        raise failure
