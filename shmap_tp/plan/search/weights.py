"""The parameters of a model on a mesh, as the formulas of the search count them, and what their placement communicates.

Which axes shard a parameter and how the others place it is read from the model's own declarations
(`partitioning.partition_specs`, `fsdp.place_parameters`): nothing here names a layer.  A search has too many meshes and
ZeRO stages to trace the step of each.  The tests compare these rules with the traced step.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from shmap_tp.config.schema import MeshConfig, ModelConfig
from shmap_tp.model.sharded_model import CONFIGURED_MODEL, ModelComponents, parameter_shapes
from shmap_tp.parallel.fsdp import Fsdp, Placement, Replicated, Zero1, is_ring_reduced, place_parameters, within_slice
from shmap_tp.parallel.mesh import DP, DP_RING, DP_SLICE, axis_sizes
from shmap_tp.parallel.partitioning import axes_in, is_stacked, partition_specs, path_name
from shmap_tp.plan.communication.ledger import Direction, Entry, Operation


@dataclass(frozen=True)
class Weight:
    """A parameter, as the axes that it declares leave it to one device."""

    name: str
    values: int
    """Number of values of one layer."""
    layers: int
    """How many are stacked; 1 outside the blocks."""
    in_block: bool
    declared: tuple[str, ...]
    """The axes that its declaration shards it over."""
    placement: Placement
    shards: int
    """Over how many ranks its placement shards the update, and the optimizer state."""
    uses: int
    """How often a microbatch uses it: 2 for an embedding that is also the head."""
    trained: bool
    """Whether it has a gradient and moments."""
    dtype: str
    """What it is stored in."""


def weights(
    model: ModelConfig, mesh: MeshConfig, dtype: DTypeLike, components: ModelComponents = CONFIGURED_MODEL
) -> list[Weight]:
    """Every parameter of the model on a mesh, in the order of its tree; `dtype` is that of the activations."""
    shapes, sizes = parameter_shapes(model, components, dtype=dtype), axis_sizes(mesh)
    trained = components.trained(model, shapes)
    placements = place_parameters(mesh, shapes, trained).placements

    def describe(path: tuple, leaf: jax.ShapeDtypeStruct, spec: Any, placement: Placement, *is_: bool) -> Weight:
        stacked, trained = is_
        layers = leaf.shape[0] if stacked else 1
        is_head_too = shapes.head is None and leaf is shapes.embedding.weight
        return Weight(
            name=path_name(path, ".").removesuffix(".weight"),
            values=math.prod(leaf.shape) // layers // _ranks(axes_in(spec), sizes),
            layers=layers,
            in_block=stacked,
            declared=axes_in(spec),
            placement=placement,
            shards=1 if isinstance(placement, Replicated) else _ranks(placement.axes, sizes),
            uses=1 + is_head_too,
            trained=trained,
            dtype=str(leaf.dtype),
        )

    declared = partition_specs(shapes, sizes)
    found = jax.tree_util.tree_map_with_path(describe, shapes, declared, placements, is_stacked(shapes), trained)
    return jax.tree.leaves(found, is_leaf=lambda node: isinstance(node, Weight))


def _ranks(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)


def weight_communication(
    weight: Weight, sizes: Mapping[str, int], microbatches: int, dtype: str, partial_over: tuple[str, ...]
) -> list[Entry]:
    """What a step communicates of a parameter and its gradient, by the rules of `fsdp.py`.

    FSDP gathers it in `dtype` within a slice for each use, in a block once more in the backward pass, and reduces its
    gradient; between slices once a step.  Other gradients are reduced after the last microbatch, and the updates of
    ZeRO-1 gathered.  Gradients are partial sums over the axes `partial_over`, too, where the parameter is replicated.
    """
    found: list[Entry] = []
    placement, axes, stack = weight.placement, weight.placement.axes, weight.values * weight.layers
    within = within_slice(axes)

    def send(
        operation: Operation, over: tuple[str, ...], values: int, direction: Direction, dtype: str, count: int = 1
    ) -> None:
        size = values * jnp.dtype(dtype).itemsize
        found.append(Entry(weight.name, operation, " ".join(over), dtype, size, count, direction))

    if isinstance(placement, Fsdp):
        uses = weight.uses * weight.layers * microbatches
        for direction in (Direction.forward, Direction.recompute)[: 1 + weight.in_block]:
            send(Operation.all_gather, within, weight.values // _ranks(within, sizes), direction, dtype, uses)
        piece = weight.values // sizes[DP]
        if weight.trained and not is_ring_reduced(placement):
            send(Operation.reduce_scatter, within, weight.values, Direction.backward, dtype, uses)
        elif weight.trained:
            send(Operation.ppermute, (DP,), piece, Direction.backward, dtype, uses * (sizes[DP] - 1))
            if DP_RING in sizes:
                send(Operation.reduce_scatter, (DP_RING,), piece, Direction.backward, dtype, uses)
        if DP_SLICE in axes:
            send(Operation.all_gather, (DP_SLICE,), stack // weight.shards, Direction.once, weight.dtype)
    if not weight.trained:
        return found
    if not isinstance(placement, Replicated) and DP_SLICE in axes:
        send(Operation.reduce_scatter, (DP_SLICE,), stack // _ranks(within, sizes), Direction.once, "float32")
    if isinstance(placement, Zero1):
        send(Operation.reduce_scatter, within, stack, Direction.once, "float32")
        send(Operation.all_gather, axes, stack // weight.shards, Direction.once, "float32")
    if isinstance(placement, Replicated) and axes:
        send(Operation.all_reduce, axes, stack, Direction.once, "float32")
    for axis in partial_over:
        if axis not in weight.declared:
            send(Operation.all_reduce, (axis,), stack // weight.shards, Direction.once, "float32")
    return found


def state_bytes(every: list[Weight], momentum: int) -> float:
    """Parameters, and of those that are trained moments and gradients, of one device; `momentum`: bytes of a value of
    the first moment."""
    total = 0.0
    for weight in every:
        size, wide = weight.values * weight.layers, jnp.dtype("float32").itemsize
        stored = jnp.dtype(weight.dtype).itemsize + (wide if weight.trained else 0)
        total += stored * size / (weight.shards if isinstance(weight.placement, Fsdp) else 1)
        total += (momentum + wide) * size / weight.shards if weight.trained else 0
    return total
