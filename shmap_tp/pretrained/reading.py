"""Parameters of a Hugging Face directory, each device's shard read from the slices of tensors that it needs.

A parameter is read in pieces of about PIECE_BYTES per process, so that beside its shards a process holds little.  A
shard that several devices of a process have (replicas over dp) is read once for all of them.
"""

import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array
from tqdm import tqdm

from shmap_tp.config.schema import ModelConfig
from shmap_tp.errors import UserError
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.partitioning import is_stacked, leaves_by_path
from shmap_tp.parallel.weights import Int8, is_int8, quantize
from shmap_tp.pretrained.layout import PIECE_BYTES, Layout, tensors_within
from shmap_tp.pretrained.source import Source
from shmap_tp.pretrained.tensor_files import StoredTensor, pieces_of_array
from shmap_tp.runtime.console import print_on_process_0

Tensors = Mapping[tuple[int, ...], StoredTensor]
"""The tensors of a parameter by the indices of its first dims, layers and experts; one at () where it has neither."""


def paths_of(parameters: Transformer) -> dict[str, Any]:
    """The leaves of a tree of parameters by their paths, such as blocks.attention.query.weight."""
    return leaves_by_path(parameters, ".", is_int8)


def load_parameters(source: Source, model: ModelConfig, shapes: Transformer) -> Transformer:
    """The parameters of `source` with the dtypes and shardings of `shapes`.

    Raises UserError if a tensor is missing, has another shape, or belongs to no parameter.
    """
    stacked, described = paths_of(is_stacked(shapes)), paths_of(shapes)
    places = find_tensors(source, model, {path: stacked[path] for path in described})
    if source.skipped:
        print_on_process_0(source.skipped)
    total = sum(map(_bytes, described.values()))
    quiet = jax.process_index() != 0 or not sys.stderr.isatty()
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"reading {source.directory.name}", disable=quiet) as bar:
        arrays = []
        for path, leaf in described.items():
            if is_int8(leaf):
                arrays.append(_read_quantized(leaf, _reader(*places[path], np.dtype(np.float32))))
            else:
                arrays.append(_read_parameter(leaf, _reader(*places[path], leaf.dtype)))
            bar.update(_bytes(leaf))
    return jax.tree.unflatten(jax.tree.structure(shapes, is_leaf=is_int8), arrays)


def find_tensors(source: Source, model: ModelConfig, stacked: dict[str, bool]) -> dict[str, tuple[Layout, Tensors]]:
    """For each parameter path (with whether it is stacked over layers) its layout, and its tensors.

    Raises UserError if a tensor is missing, has another shape, or belongs to no parameter.
    """
    family, tensors = source.family, source.tensors
    if tensors and not any(name.startswith(family.prefix) for name in tensors):  # saved without its head
        tensors = {name if name.startswith("lm_head.") else family.prefix + name: t for name, t in tensors.items()}
    found, used = {}, set()
    for path, (row, layout) in family.layouts(model, stacked).items():
        names = {index: row.name(index) for index in np.ndindex(row.divided(model, stacked[path]))}
        for name in names.values():
            if name not in tensors:
                raise UserError(f"{source.directory} has no tensor {name}, which {source.config_file} asks for")
            if not _fits(tensors[name].shape, layout, row.ours):
                raise UserError(
                    f"{tensors[name].file}: {name} has the shape {list(tensors[name].shape)}, but "
                    f"{source.config_file} asks for {list(layout.file_shape)}"
                )
        of_path = {index: tensors[name] for index, name in names.items()}
        found[path] = _with_rows(layout, next(iter(of_path.values())), row.ours), of_path
        used |= set(names.values())
    _check_tied_head(source, tensors, found)
    unexpected = [name for name in sorted(tensors.keys() - used) if not family.is_skipped(name, stacked)]
    if unexpected:
        more = f" and {len(unexpected) - 1} others" if len(unexpected) > 1 else ""
        raise UserError(
            f"{tensors[unexpected[0]].file} has the tensor {unexpected[0]}{more}, for which a "
            f"{family.architecture} with this config.json has no parameter"
        )
    return found


def _check_tied_head(source: Source, tensors: Mapping[str, StoredTensor], found: Mapping[str, Any]) -> None:
    """Raises UserError if the files have a head that differs from the embedding although config.json ties them:
    transformers would use that head."""
    head = tensors.get(source.family.head)
    if head is None or "head.weight" in found:
        return
    embedding = found["embedding.weight"][1][()]
    is_same = (head.shape, head.dtype) == (embedding.shape, embedding.dtype) and head.sample() == embedding.sample()
    if not is_same:
        raise UserError(
            f"{head.file}: {source.family.head} differs from the embedding, which {source.config_file} uses in its "
            f"place;\nset tie_word_embeddings to false there, or remove the tensor"
        )


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


def _reader(layout: Layout, tensors: Tensors, dtype: np.dtype) -> Reader:
    """Reads a part of one parameter."""

    def read(index: tuple[slice, ...], shape: tuple[int, ...]) -> np.ndarray:
        ranges = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        out = np.empty([stop - start for start, stop in ranges], dtype)
        divided = len(ranges) - len(layout.our_shape)
        for place, number in tensors_within(ranges[:divided]):
            out[place] = layout.read(tensors[number], ranges[divided:], dtype)
        return out

    return read


def _read_parameter(leaf: jax.ShapeDtypeStruct, read: Reader) -> Array:
    """The whole parameter, read piece by piece of every shard."""
    shard = leaf.sharding.shard_shape(leaf.shape)
    local = {str(index) for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()}
    parts = list(pieces_of_array(shard, leaf.dtype.itemsize, PIECE_BYTES // len(local)))
    if len(parts) == 1:
        return _read_piece(leaf, read, *parts[0])
    whole = jax.jit(lambda: jnp.zeros(leaf.shape, leaf.dtype), out_shardings=leaf.sharding)()
    insert = _inserting(leaf.sharding)
    for first, size in parts:
        whole = jax.block_until_ready(insert(whole, _read_piece(leaf, read, first, size), first))
    return whole


def _read_quantized(leaf: Int8, read: Reader) -> Int8:
    """The whole parameter, of which one layer after the other is read and quantized, so that a device never has more
    than one of them as it was read."""
    sharding = leaf.values.sharding
    one = jax.ShapeDtypeStruct((1, *leaf.shape[1:]), jnp.float32, sharding=sharding)
    shardings = jax.tree.map(lambda part: part.sharding, leaf)

    @partial(jax.jit, donate_argnums=0, out_shardings=shardings)
    def insert(whole: Int8, w: Array, layer: Array) -> Int8:
        place = partial(lax.dynamic_update_slice_in_dim, start_index=layer, axis=0)
        return jax.tree.map(place, whole, quantize(w, leaf.inputs))

    zeros = jax.jit(lambda: jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), leaf), out_shardings=shardings)
    whole = zeros()
    for layer in range(leaf.shape[0]):
        w = _read_parameter(one, lambda index, _, at=layer: read((slice(at, at + 1), *index[1:]), leaf.shape))
        whole = jax.block_until_ready(insert(whole, w, np.int32(layer)))
    return whole


def _inserting(sharding: NamedSharding) -> Callable[[Array, Array, tuple[int, ...]], Array]:
    """(whole, piece, first) -> `whole`, which is donated, with the piece of every shard in its place."""

    def insert(whole: Array, piece: Array, first: tuple[Array, ...]) -> Array:
        return lax.dynamic_update_slice(whole, piece, first)

    specs = (sharding.spec, sharding.spec, P())
    sharded = jax.shard_map(insert, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec)
    return jax.jit(sharded, donate_argnums=0)


def _read_piece(leaf: jax.ShapeDtypeStruct, read: Reader, first: tuple[int, ...], size: tuple[int, ...]) -> Array:
    """The piece [first, first + size) of every shard of `leaf`, one shard's after the other's."""
    shard = leaf.sharding.shard_shape(leaf.shape)
    shape = tuple(n * whole // part for n, whole, part in zip(size, leaf.shape, shard, strict=True))
    done: dict[tuple[int, ...], np.ndarray] = {}

    def of_shard(index: tuple[slice, ...]) -> np.ndarray:
        number = tuple(one.indices(length)[0] // n for one, length, n in zip(index, shape, size, strict=True))
        if number not in done:
            starts = [k * part + at for k, part, at in zip(number, shard, first, strict=True)]
            done[number] = read(tuple(slice(at, at + n) for at, n in zip(starts, size, strict=True)), leaf.shape)
        return done[number]

    return jax.make_array_from_callback(shape, leaf.sharding, of_shard)


def _bytes(leaf: Any) -> int:
    return sum(math.prod(part.shape) * np.dtype(part.dtype).itemsize for part in jax.tree.leaves(leaf))
