"""Whole matrices on each device, for an optimizer that needs them whole (Muon).

N matrices, those of all layers that have the same shape and PartitionSpec (such as query and output; up and down); R
rows, C columns, r a mesh axis.  D/r: dim D sharded over r.

A stack of matrices that FSDP and tensor parallelism shard along their dims is exchanged for one that is sharded along
N, axis by axis, and the result is brought back:

    r shards R or C       [N R C/r]  --all-to-all over r-->  [N/r R C]      and back by an all-to-all
    r shards neither      [N R C]    --without communication-->  [N/r R C]  and back by an all-gather
    r shards the experts  [N/r R C]  stays as it is

An all-to-all moves each device's shard once, where gathering whole stacks would move and store n times as much.  Zeros
fill N up to a multiple of the devices: each matrix is on one device, and no device has more than N / devices, rounded
up.  As in Jordan et al. 2024, "Muon", and its distributed versions (Liu et al. 2025, "Muon is Scalable for LLM
Training", section 2.3, https://arxiv.org/abs/2502.16982).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from shmap_tp.parallel.collectives import all_gather_invariant, local_shard, mark_varying, varying_axes
from shmap_tp.parallel.mesh import spec_axes
from shmap_tp.parallel.partitioning import Declaration, ParameterKind, declarations

MatrixFunction = Callable[[Float[Array, "N R C"]], Float[Array, "N R C"]]


@dataclass(frozen=True)
class UpdateSharding:
    """How the updates of an optimizer are on the mesh."""

    specs: Any
    """A tree like the updates: the PartitionSpec of each."""
    axes: tuple[str, ...]
    """All axes of the mesh."""
    dtype: DTypeLike
    """In which matrices are exchanged."""


def is_matrix(declared: Declaration) -> bool:
    """Whether this is a matrix in each layer, or one in each expert, and no embedding, head, scale or bias."""
    return declared.kind in (ParameterKind.matrix, ParameterKind.experts)


def on_whole_matrices(function: MatrixFunction) -> optax.GradientTransformationExtraArgs:
    """The updates of matrices (`is_matrix`) replaced by `function` of them; the others as they are.

    `function` gets some of the matrices as [N, rows, columns], in the dtype of the layout, and treats each by itself.
    The rows may be the outputs of one matrix and the inputs of another, so `function` must commute with transposition.
    Heads count as one dim together with their elements.  Matrices of zeros may be among them.

    Communication  an all-to-all over each axis that shards a matrix there and one back, an all-gather over each axis
                   that shards nothing of it; all in the dtype of the layout.  None inside `function`.
    """

    def update(updates: Any, state: Any, params: Any = None, *, layout: UpdateSharding, **_: Any) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(updates)
        specs, described = tree.flatten_up_to(layout.specs), tree.flatten_up_to(declarations(updates))
        alike = defaultdict(list)
        for i, (leaf, spec, declared) in enumerate(zip(leaves, specs, described, strict=True)):
            if is_matrix(declared):
                leading = declared.stacked + (declared.kind == ParameterKind.experts)
                columns = len(declared.inputs if declared.outputs_first else declared.outputs)
                alike[leaf.shape, spec, leading, columns].append(i)
        for (_, spec, *dims), members in alike.items():
            results = _on_stack(function, [leaves[i] for i in members], spec, dims, layout)
            for i, result in zip(members, results, strict=True):
                leaves[i] = result
        return jax.tree.unflatten(tree, leaves), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def _on_stack(
    function: MatrixFunction, shards: list[Array], spec: P, dims: Sequence[int], layout: UpdateSharding
) -> list[Array]:
    """`function` of arrays that have the same shape and PartitionSpec, each given and returned as this device's shard.
    `dims`: how many lead (layers, experts), and how many of the last are columns."""
    leading, columns = dims
    shape, dtype = shards[0].shape, shards[0].dtype
    stack = jnp.concatenate([x.astype(layout.dtype).reshape(-1, *shape[leading:]) for x in shards])
    held = {axis for entry in spec[:leading] for axis in spec_axes(entry)}
    spec, over = P(None, *spec[leading:]), tuple(axis for axis in layout.axes if axis not in held)
    count = stack.shape[0]
    missing = -count % math.prod(lax.axis_size(axis) for axis in over)
    zeros = mark_varying(jnp.zeros((missing, *stack.shape[1:]), stack.dtype), tuple(varying_axes(stack)))
    there = to_whole(jnp.concatenate([stack, zeros]), spec, over)
    result = function(there.reshape(there.shape[0], -1, math.prod(there.shape[-columns:])))
    back = result.astype(layout.dtype).reshape(there.shape)
    results = jnp.split(from_whole(back, spec, over)[:count], len(shards))
    return [x.reshape(shape).astype(dtype) for x in results]


def to_whole(x: Float[Array, "N ..."], spec: P, over: tuple[str, ...]) -> Float[Array, "n ..."]:
    """This device's shards, as `spec` says, of N matrices -> those of the matrices that it has whole; N is divided by
    the axes `over`."""
    moves = _moves(spec)
    for axis, dim in moves.items():
        x = lax.all_to_all(x, axis, 0, dim, tiled=True)
    for axis in over:
        x = x if axis in moves else local_shard(x, axis, 0)
    return x


def from_whole(x: Float[Array, "n ..."], spec: P, over: tuple[str, ...]) -> Float[Array, "N ..."]:
    """The inverse of `to_whole`."""
    moves = _moves(spec)
    for axis in reversed(over):
        x = x if axis in moves else all_gather_invariant(x, axis, 0)
    for axis, dim in reversed(moves.items()):
        x = lax.all_to_all(x, axis, dim, 0, tiled=True)
    return x


def _moves(spec: P) -> dict[str, int]:
    """Each axis with the dim that it shards.  The last of a dim's axes, which counts fastest, comes first: only its
    shards are neighbours."""
    return {axis: dim for dim, entry in enumerate(spec) for axis in reversed(spec_axes(entry))}
