"""Whole arrays of some layers on each device, for an optimizer that needs them whole (Muon, Shampoo).

L layers, F and D dims of a matrix, r a mesh axis.  D/r: dim D sharded over r.

A stack of matrices that FSDP and tensor parallelism shard along their dims is exchanged for one that is sharded along
its layers, axis by axis, and its update is brought back:

    r shards both        [L F D/r]  --all-to-all over r-->  [L/r F D]       and back by an all-to-all
    r shards only dims   [L F D/r]  --all-gather over r-->  [L F D]         and back without communication
    r shards only layers [L F D]    --without communication-->  [L/r F D]   and back by an all-gather

An all-to-all moves each device's shard once, where gathering whole stacks would move and store n times as much.  As in
Jordan et al. 2024, "Muon", and its distributed versions, every matrix is updated by one device; where the layers cannot
be divided by an axis, its ranks compute the same.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from shmap_tp.parallel.collectives import all_gather_invariant, local_shard
from shmap_tp.parallel.partitioning import Declaration, ParameterKind, declarations, spec_axes


def whole_layer_specs(model: Any, specs: Any, kinds: Collection[ParameterKind], axis_sizes: Mapping[str, int]) -> Any:
    """`specs` of `model` (arrays or shapes), with parameters of `kinds` sharded along their layers alone, over as many
    axes as divide these; one that is not stacked is on every device."""

    def spec(leaf: Any, spec: P, declared: Declaration) -> P:
        if declared.kind not in kinds:
            return spec
        over: tuple[str, ...] = ()
        moves = _moves(spec)
        for axis in [*moves, *(axis for axis in axis_sizes if axis not in moves)] if declared.stacked else ():
            if leaf.shape[0] % math.prod(axis_sizes[each] for each in (*over, axis)) == 0:
                over = (*over, axis)
        return P(over or None, *[None] * (len(leaf.shape) - 1))

    return jax.tree.map(spec, model, specs, declarations(model))


def to_whole_layers(x: Float[Array, "..."], spec: P, whole: P) -> Float[Array, "..."]:
    """This device's part of an array: as `spec` says -> as `whole` says, which `whole_layer_specs` made of it."""
    if spec == whole:
        return x
    moves, over = _moves(spec), spec_axes(whole[0])
    for axis, dim in moves.items():
        x = lax.all_to_all(x, axis, 0, dim, tiled=True) if axis in over else all_gather_invariant(x, axis, dim)
    for axis in over:
        x = x if axis in moves else local_shard(x, axis, 0)
    return x


def from_whole_layers(x: Float[Array, "..."], spec: P, whole: P) -> Float[Array, "..."]:
    """The inverse of `to_whole_layers`."""
    if spec == whole:
        return x
    moves, over = _moves(spec), spec_axes(whole[0])
    for axis in reversed(over):
        x = x if axis in moves else all_gather_invariant(x, axis, 0)
    for axis, dim in reversed(moves.items()):
        x = lax.all_to_all(x, axis, dim, 0, tiled=True) if axis in over else local_shard(x, axis, dim)
    return x


def _moves(spec: P) -> dict[str, int]:
    """Each axis with the dim that it shards.  Of a dim's axes the last one, which counts fastest, comes first: only its
    shards are neighbours."""
    return {axis: dim for dim, entry in enumerate(spec) for axis in reversed(spec_axes(entry))}
