"""Seconds of the collectives of a training step by the link model: those of the model as it is traced, for each mesh,
mode and policy once, and those of its parameters by rules of their own (`placement_communication`).

Which axes shard a parameter and how the others place it is read from the model's own declarations
(`partitioning.partition_specs`, `fsdp.place_parameters`): nothing here names a layer.  A search has too many meshes and
ZeRO stages to trace the step of each.  The tests compare these rules with the traced step.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from shmap_tp.config.choices import FsdpGradients, Remat, TensorParallelMode, Zero
from shmap_tp.config.schema import Config, MeshConfig, ModelConfig
from shmap_tp.model.sharded_model import CONFIGURED_MODEL, ModelComponents, parameter_shapes
from shmap_tp.model.tracing import trace_gradients
from shmap_tp.parallel.fsdp import Fsdp, Placement, Replicated, Zero1, is_ring_reduced, place_parameters, within_slice
from shmap_tp.parallel.mesh import DP, DP_RING, DP_SLICE, EP, MP, axis_sizes, make_mesh
from shmap_tp.parallel.partitioning import axes_in, is_stacked, partition_specs, path_name
from shmap_tp.parallel.tensor_parallel import TENSOR_PARALLEL
from shmap_tp.plan.ledger import Direction, Entry, Operation, communication_in_jaxpr, without_trivial_axes
from shmap_tp.plan.targets import Target, devices_of, link_model


@dataclass(frozen=True)
class LocalParameter:
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


def local_parameters(
    model: ModelConfig, mesh: MeshConfig, dtype: DTypeLike, components: ModelComponents = CONFIGURED_MODEL
) -> list[LocalParameter]:
    """Every parameter of the model on a mesh, in the order of its tree; `dtype` is that of the activations."""
    shapes, sizes = parameter_shapes(model, components, dtype=dtype), axis_sizes(mesh)
    trained = components.trained(model, shapes)
    placements = place_parameters(mesh, shapes, trained).placements

    def describe(
        path: tuple, leaf: jax.ShapeDtypeStruct, spec: Any, placement: Placement, *is_: bool
    ) -> LocalParameter:
        stacked, trained = is_
        layers = leaf.shape[0] if stacked else 1
        is_head_too = shapes.head is None and leaf is shapes.embedding.weight
        return LocalParameter(
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
    return jax.tree.leaves(found, is_leaf=lambda node: isinstance(node, LocalParameter))


def _ranks(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)


def placement_communication(
    weight: LocalParameter, sizes: Mapping[str, int], microbatches: int, dtype: str, partial_over: tuple[str, ...]
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


def planned_state_bytes(every: list[LocalParameter], momentum: int) -> float:
    """Bytes of one device for parameters, and for the moments and gradients of trained ones; `momentum`: bytes of a
    value of the first moment."""
    total = 0.0
    for weight in every:
        size, wide = weight.values * weight.layers, jnp.dtype("float32").itemsize
        stored = jnp.dtype(weight.dtype).itemsize + (wide if weight.trained else 0)
        total += stored * size / (weight.shards if isinstance(weight.placement, Fsdp) else 1)
        total += (momentum + wide) * size / weight.shards if weight.trained else 0
    return total


_TRACED: dict[str, list[Entry]] = {}
"""What a model communicates in a microbatch of one sequence: a trace takes some tenths of a second."""


class MeshLinks:
    """The link model of a target, and the group of devices of each set of axes to which the first device of a slice
    belongs."""

    def __init__(self, mesh: MeshConfig, target: Target):
        self.model, self.sizes = link_model(target, make_mesh(mesh, devices_of(target))), axis_sizes(mesh)

    def group(self, axes: Sequence[str]) -> list[int]:
        """The devices of one slice that these axes connect, by their number in it."""
        of_slice = {name: size for name, size in self.sizes.items() if name != DP_SLICE}
        numbers = np.arange(math.prod(of_slice.values())).reshape(tuple(of_slice.values()))
        return numbers[tuple(slice(None) if name in axes else 0 for name in of_slice)].ravel().tolist()

    def seconds(self, entry: Entry) -> float:
        """Seconds of all repetitions of an entry of the ledger."""
        axes = entry.axis.split()
        slices = self.sizes.get(DP_SLICE, 1) if DP_SLICE in axes else 1
        gathers = entry.operation == Operation.all_gather
        if axes == [DP_SLICE]:
            full = float(entry.bytes) * (slices if gathers else 1)
            return entry.count * self.model.inter_slice_seconds(entry.operation, full, slices)
        group = self.group(axes)
        if entry.operation == Operation.ppermute:  # rings are closed walks between neighbours
            return entry.count * self.model.neighbour_seconds(float(entry.bytes), group)
        is_part = gathers or entry.operation == Operation.all_to_all  # the ledger has what a device sends
        size = float(entry.bytes) * (slices * len(group) if is_part else 1)
        operation = Operation.all_reduce if entry.operation == Operation.max else entry.operation
        seconds = self.model.collective_seconds(operation, size, group)
        if slices > 1:  # each device exchanges its shard of a slice with the other slices
            seconds += self.model.inter_slice_seconds(operation, size / len(group), slices)
        return entry.count * seconds


_LINKS: dict[tuple[str, Target], MeshLinks] = {}


def links_of(mesh: MeshConfig, target: Target) -> MeshLinks:
    """The links of a mesh, computed once."""
    mesh = replace(mesh, zero=Zero.none)  # it changes no link
    key = repr(mesh), target
    if key not in _LINKS:
        _LINKS[key] = MeshLinks(mesh, target)
    return _LINKS[key]


def collective_seconds(config: Config, every: list[LocalParameter], target: Target) -> dict[str, float]:
    """Seconds by how the compiler overlaps them, before any overlap.

    all_reduce, sequence, collective_matmul    what the model itself communicates, in the mode of this name; `sequence`
                  also has what is sent to experts in any mode, as nothing overlaps it
    overlapped    gathers of FSDP weights, and reductions of FSDP gradients in rings
    scatters      reduce-scatters of FSDP gradients
    once          after the last microbatch, and between slices
    """
    found = dict.fromkeys([*map(str, TensorParallelMode), "overlapped", "scatters", "once"], 0.0)
    links, mode = links_of(config.mesh, target), str(config.mesh.tensor_parallel)
    sizes = axis_sizes(config.mesh)
    for entry in without_trivial_axes(activation_entries(config), sizes):
        found[TensorParallelMode.sequence if EP in entry.axis.split() else mode] += links.seconds(entry)
    ranks = config.mesh.dp * config.mesh.cp
    partial, microbatches = TENSOR_PARALLEL[config.mesh.tensor_parallel].time_axes, config.train.microbatches
    for entry in (e for one in every for e in placement_communication(one, sizes, microbatches, "bfloat16", partial)):
        if ranks > 1 or MP in entry.axis.split():
            found[_overlap(entry)] += links.seconds(entry)
    return found


def _overlap(entry: Entry) -> str:
    """How the compiler overlaps a collective of a parameter."""
    if entry.direction == Direction.once:
        return "once"
    return "overlapped" if entry.operation in (Operation.all_gather, Operation.ppermute) else "scatters"


def activation_entries(config: Config) -> list[Entry]:
    """What the model communicates in all microbatches: traced for one sequence, and sized for those of a microbatch."""
    train = replace(config.train, batch=config.mesh.ep, microbatches=1)
    ep = config.mesh.ep  # the least dp there can be, and so the least batch
    mesh = replace(config.mesh, dp=ep, tile=None, zero=Zero.none, fsdp_gradients=FsdpGradients.reduce_scatter, slices=1)
    one = replace(config, model=replace(config.model, offload=[]), train=train, mesh=mesh)
    key = repr((one.model, one.mesh))  # none of what is replaced changes what the model communicates
    if key not in _TRACED:
        _TRACED[key] = _traced_once(one)
    microbatches = config.train.microbatches
    sequences = config.train.batch // (microbatches * config.mesh.dp)
    return [
        replace(
            entry, count=entry.count * microbatches,
            bytes=entry.bytes * (1 if _is_of_weight(entry) else sequences),
        )
        for entry in _TRACED[key]
    ]  # fmt: skip


def _is_of_weight(entry: Entry) -> bool:
    """Whether it is the gradient of a replicated weight, in float32, whose size no sequence changes."""
    return entry.axis == MP and entry.dtype == "float32"


def _traced_once(one: Config) -> list[Entry]:
    """What this model communicates.  A ring of many devices takes seconds to trace, so collective matmul is traced once
    for all policies of rematerialisation with which sequence parallelism communicates the same."""
    if one.mesh.tensor_parallel != TensorParallelMode.collective_matmul:
        return _trace(one)
    alike = activation_entries(replace(one, mesh=replace(one.mesh, tensor_parallel=TensorParallelMode.sequence)))
    key = repr((replace(one.model, remat=Remat.full), one.mesh, alike))
    if key not in _TRACED:
        _TRACED[key] = _trace(one)
    return _TRACED[key]


def _trace(one: Config) -> list[Entry]:
    """What the model of one sequence communicates, from the embedding to the final norm and back."""
    shapes, mode = parameter_shapes(one.model, dtype=jnp.bfloat16), TENSOR_PARALLEL[one.mesh.tensor_parallel]
    tokens = 1, one.model.context // one.mesh.cp
    about = {"dtype": jnp.bfloat16, "is_trained": CONFIGURED_MODEL.trained(one.model, shapes)}
    return communication_in_jaxpr(trace_gradients(shapes, mode, tokens, sizes=axis_sizes(one.mesh), **about))
