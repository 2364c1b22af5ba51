"""Seconds of the collectives of a training step by the link model: those of the model as it is traced, for each mesh,
mode and policy once, and those of its parameters by the rules of `weights.py`."""

import math
from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from shmap_tp.config.schema import (
    Config,
    FsdpGradients,
    MeshConfig,
    Remat,
    TensorParallelMode,
    Zero,
)
from shmap_tp.model.sharded_model import CONFIGURED_MODEL, parameter_shapes
from shmap_tp.model.tracing import trace_gradients
from shmap_tp.parallel.mesh import DP_SLICE, EP, MP, axis_sizes, make_mesh
from shmap_tp.parallel.tensor_parallel import TENSOR_PARALLEL
from shmap_tp.plan.communication.from_jaxpr import communication_in_jaxpr
from shmap_tp.plan.communication.ledger import Direction, Entry, Operation, without_trivial_axes
from shmap_tp.plan.search.weights import Weight, weight_communication
from shmap_tp.plan.targets import Target, devices_of, link_model

_TRACED: dict[str, list[Entry]] = {}
"""What a model communicates in a microbatch of one sequence: a trace takes some tenths of a second."""


class Links:
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


_LINKS: dict[tuple[str, Target], Links] = {}


def links_of(mesh: MeshConfig, target: Target) -> Links:
    """The links of a mesh, computed once."""
    mesh = replace(mesh, zero=Zero.none)  # it changes no link
    key = repr(mesh), target
    if key not in _LINKS:
        _LINKS[key] = Links(mesh, target)
    return _LINKS[key]


def collective_seconds(config: Config, every: list[Weight], target: Target) -> dict[str, float]:
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
    for entry in (e for one in every for e in weight_communication(one, sizes, microbatches, "bfloat16", partial)):
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
