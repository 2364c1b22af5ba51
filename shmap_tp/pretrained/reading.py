"""Parameters of a Hugging Face directory, each device's shard read from the byte ranges that it needs.

A parameter is read in pieces of at most PIECE_BYTES per process, so that beside its shards a process holds little.  An
index that several devices of a process have (replicas over dp) is read once for all of them.
"""

import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array
from tqdm import tqdm

from shmap_tp.config.schema import ModelConfig
from shmap_tp.errors import UserError
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.partitioning import is_stacked
from shmap_tp.pretrained.layout import Layout
from shmap_tp.pretrained.source import Source
from shmap_tp.pretrained.tensor_files import StoredTensor

PIECE_BYTES = 256 * 2**20
"""About how much of a parameter a process reads before it is copied to the devices."""


def paths_of(parameters: Transformer) -> dict[str, Any]:
    """The leaves of a tree of parameters by their paths, such as blocks.attention.query.weight."""
    leaves = jax.tree_util.tree_flatten_with_path(parameters)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def load_parameters(source: Source, model: ModelConfig, shapes: Transformer) -> Transformer:
    """The parameters of `source` with the dtypes and shardings of `shapes`.

    Raises UserError if a tensor is missing, has another shape, or belongs to no parameter.
    """
    stacked, described = paths_of(is_stacked(shapes)), paths_of(shapes)
    places = find_tensors(source, model, {path: stacked[path] for path in described})
    total = sum(_bytes(leaf.shape, leaf.dtype) for leaf in described.values())
    quiet = jax.process_index() != 0 or not sys.stderr.isatty()
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"reading {source.directory.name}", disable=quiet) as bar:
        arrays = []
        for path, leaf in described.items():
            arrays.append(_read_parameter(leaf, _reader(*places[path], stacked[path], leaf.dtype)))
            bar.update(_bytes(leaf.shape, leaf.dtype))
    return jax.tree.unflatten(jax.tree.structure(shapes), arrays)


def find_tensors(
    source: Source, model: ModelConfig, stacked: dict[str, bool]
) -> dict[str, tuple[Layout, list[StoredTensor]]]:
    """For each parameter path (with whether it is stacked over layers) its layout, and its tensor or those of its
    layers.

    Raises UserError if a tensor is missing, has another shape, or belongs to no parameter.
    """
    family, tensors = source.family, source.tensors
    if tensors and not any(name.startswith(family.prefix) for name in tensors):  # saved without its head
        tensors = {name if name.startswith("lm_head.") else family.prefix + name: t for name, t in tensors.items()}
    found, used = {}, set()
    for path, (row, layout) in family.layouts(model, stacked).items():
        names = [row.theirs.format(layer=layer) for layer in range(model.layers if stacked[path] else 1)]
        for name in names:
            if name not in tensors:
                raise UserError(f"{source.directory} has no tensor {name}, which {source.config_file} asks for")
            if not _fits(tensors[name].shape, layout, row.ours):
                raise UserError(
                    f"{tensors[name].file}: {name} has the shape {list(tensors[name].shape)}, but "
                    f"{source.config_file} asks for {list(layout.file_shape)}"
                )
        found[path] = _with_rows(layout, tensors[names[0]], row.ours), [tensors[name] for name in names]
        used |= set(names)
    unexpected = [name for name in sorted(tensors.keys() - used) if not family.is_skipped(name, stacked)]
    if unexpected:
        more = f" and {len(unexpected) - 1} others" if len(unexpected) > 1 else ""
        raise UserError(
            f"{tensors[unexpected[0]].file} has the tensor {unexpected[0]}{more}, for which a "
            f"{family.architecture} with this config.json has no parameter"
        )
    return found


def _fits(shape: tuple[int, ...], layout: Layout, path: str) -> bool:
    """Whether a tensor has the shape of its layout; of learned positions it may have more rows than the context."""
    if path == "positions.weight":
        return len(shape) == 2 and shape[0] >= layout.file_shape[0] and shape[1] == layout.file_shape[1]
    return shape == layout.file_shape


def _with_rows(layout: Layout, tensor: StoredTensor, path: str) -> Layout:
    """`layout`, with the number of rows that learned positions have in the file."""
    return Layout(layout.pattern, {**layout.sizes, "t": tensor.shape[0]}) if path == "positions.weight" else layout


Reader = Callable[[tuple[slice, ...], tuple[int, ...]], np.ndarray]
"""(index, shape of the whole array) -> that part of the array."""


def _reader(layout: Layout, tensors: list[StoredTensor], stacked: bool, dtype: np.dtype) -> Reader:
    """Reads a part of one parameter."""

    def read(index: tuple[slice, ...], shape: tuple[int, ...]) -> np.ndarray:
        ranges = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        if not stacked:
            return layout.read(tensors[0], ranges, dtype)
        out = np.empty([stop - start for start, stop in ranges], dtype)
        for i, layer in enumerate(range(*ranges[0])):
            out[i] = layout.read(tensors[layer], ranges[1:], dtype)
        return out

    return read


def _read_parameter(leaf: jax.ShapeDtypeStruct, read: Reader) -> Array:
    """The whole parameter, read piece by piece along a dim that is not sharded."""
    dim = _unsharded_dim(leaf)
    local = {str(index) for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()}
    size = len(local) * _bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
    pieces = 1 if dim is None else min(leaf.shape[dim], math.ceil(size / PIECE_BYTES))
    if pieces == 1:
        return _read_piece(leaf, read, 0, 0, leaf.shape[0])
    length = math.ceil(leaf.shape[dim] / pieces)
    whole = jax.jit(lambda: jnp.zeros(leaf.shape, leaf.dtype), out_shardings=leaf.sharding)()
    for start in range(0, leaf.shape[dim], length):
        piece = _read_piece(leaf, read, dim, start, min(start + length, leaf.shape[dim]))
        whole = jax.block_until_ready(_insert(whole, piece, start, dim))
    return whole


@jax.jit(static_argnums=3, donate_argnums=0)
def _insert(whole: Array, piece: Array, start: Array | int, dim: int) -> Array:
    return lax.dynamic_update_slice_in_dim(whole, piece, start, dim)


def _read_piece(leaf: jax.ShapeDtypeStruct, read: Reader, dim: int, start: int, stop: int) -> Array:
    """`leaf` from `start` to `stop` along `dim`, with its sharding."""
    shape = (*leaf.shape[:dim], stop - start, *leaf.shape[dim + 1 :])
    done: dict[tuple, np.ndarray] = {}

    def part(index: tuple[slice, ...]) -> np.ndarray:
        key = tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))
        if key not in done:
            moved = [slice(*one) for one in key]
            moved[dim] = slice(key[dim][0] + start, key[dim][1] + start)
            done[key] = read(tuple(moved), leaf.shape)
        return done[key]

    return jax.make_array_from_callback(shape, leaf.sharding, part)


def _unsharded_dim(leaf: jax.ShapeDtypeStruct) -> int | None:
    """The longest dim of those that are not sharded, or the first where it is one (stacked layers); None if all are."""
    shard = leaf.sharding.shard_shape(leaf.shape)
    whole = [dim for dim, (part, size) in enumerate(zip(shard, leaf.shape, strict=True)) if part == size]
    if not whole:
        return None
    return 0 if whole[0] == 0 and len(leaf.shape) > 2 else max(whole, key=lambda dim: leaf.shape[dim])


def _bytes(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize
