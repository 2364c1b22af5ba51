"""Seconds of the collectives of a training step, by the analytic ledger and the link model."""

import math
from collections.abc import Iterable, Sequence
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
from shmap_tp.parallel.mesh import CP, DP_SLICE, EP, MP, axis_sizes, make_mesh
from shmap_tp.parallel.tensor_parallel import TENSOR_PARALLEL
from shmap_tp.plan.communication.analytic import activations
from shmap_tp.plan.communication.from_jaxpr import IN_A_LAYER
from shmap_tp.plan.communication.ledger import Entry, Operation, without_trivial_axes
from shmap_tp.plan.communication.parameters import Parameter, fsdp_uses, gathers_between_slices, update
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
        size = float(entry.bytes) * (slices * len(group) if gathers else 1)
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


def collective_seconds(config: Config, every: list[Parameter], target: Target) -> dict[str, float]:
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
    for entry in fsdp_uses(config, every, "bfloat16") if ranks > 1 else []:
        is_overlapped = entry.operation in (Operation.all_gather, Operation.ppermute)
        found["overlapped" if is_overlapped else "scatters"] += links.seconds(entry)
    partial = TENSOR_PARALLEL[config.mesh.tensor_parallel].time_axes
    last: Iterable[Entry] = [
        *gathers_between_slices(config, every), *update(config, every, partial_over=partial)
    ]  # fmt: skip
    found["once"] = sum(links.seconds(entry) for entry in last if ranks > 1 or MP in entry.axis.split())
    return found


def activation_entries(config: Config) -> list[Entry]:
    """Those of all microbatches: traced for one sequence, and sized for those of a microbatch.

    What a layer of model/blocks.py communicates over mp by itself is the gradient of a weight, and has one size.
    """
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
    """Whether it is what a layer communicates by itself, but for the keys and values of cut rows, and what is sent to
    experts."""
    return entry.what.endswith(IN_A_LAYER) and {CP, EP}.isdisjoint(entry.axis.split())


def _traced_once(one: Config) -> list[Entry]:
    """What this model communicates.  A ring of many devices takes seconds to trace, so collective matmul is traced once
    for all policies of rematerialisation with which sequence parallelism communicates the same."""
    if one.mesh.tensor_parallel != TensorParallelMode.collective_matmul:
        return activations(one, jnp.bfloat16)
    alike = activation_entries(replace(one, mesh=replace(one.mesh, tensor_parallel=TensorParallelMode.sequence)))
    key = repr((replace(one.model, remat=Remat.full), one.mesh, alike))
    if key not in _TRACED:
        _TRACED[key] = activations(one, jnp.bfloat16)
    return _TRACED[key]
