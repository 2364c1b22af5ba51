"""Seconds of the collectives of a step: the analytic ledger, timed by the link model, by how they overlap."""

from collections.abc import Iterable
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from shmap_tp.config.schema import Config, FsdpGradients, MeshConfig, TensorParallelMode, Zero
from shmap_tp.parallel.mesh import DP, MP, DataParallelGroups, make_mesh
from shmap_tp.parallel.tensor_parallel import TENSOR_PARALLEL
from shmap_tp.plan.communication.analytic import activations
from shmap_tp.plan.communication.ledger import Entry, Operation, group_name
from shmap_tp.plan.communication.model_calls import IN_A_LAYER, gradients_are_partial
from shmap_tp.plan.communication.parameters import Parameter, fsdp_uses, gathers_between_slices, update
from shmap_tp.plan.search.machine import devices_of, link_model, neighbour_seconds
from shmap_tp.plan.targets import Target

_TRACED: dict[str, list[Entry]] = {}
"""What a microbatch of one sequence communicates over mp: a trace takes some tenths of a second."""


class Links:
    """The link model of a target, and the group of each axis of a mesh to which the first device of a slice belongs."""

    def __init__(self, mesh: MeshConfig, target: Target):
        self.groups = DataParallelGroups.of(mesh)
        self.model = link_model(target, make_mesh(mesh, devices_of(target)))
        within = mesh.dp // mesh.slices
        numbers = np.arange(within * mesh.mp).reshape(within, mesh.mp)
        self.axes = {DP: numbers[:, 0].tolist(), MP: numbers[0].tolist(), f"{DP} {MP}": numbers.ravel().tolist()}
        self.between_rings = self.axes[DP][: within // self.groups.ring]

    def seconds(self, entry: Entry) -> float:
        """Seconds of all repetitions of an entry of the ledger."""
        if self.groups.slices > 1 and entry.axis == group_name(DP, self.groups.inter_slice):
            full = float(entry.bytes) * (self.groups.slices if entry.operation == Operation.all_gather else 1)
            return entry.count * self.model.inter_slice_seconds(entry.operation, full, self.groups.slices)
        inter_ring = self.groups.inter_ring
        is_between_rings = inter_ring is not None and entry.axis == group_name(DP, inter_ring)
        group = self.between_rings if is_between_rings else self.axes[entry.axis.partition(":")[0]]
        if entry.operation == Operation.ppermute:  # rings are closed walks between neighbours
            return entry.count * neighbour_seconds(self.model, float(entry.bytes), group)
        slices = self.groups.slices if entry.axis in (DP, f"{DP} {MP}") else 1
        size = float(entry.bytes) * (slices * len(group) if entry.operation == Operation.all_gather else 1)
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

    all_reduce, sequence, collective_matmul    over mp, for the mode of this name
    overlapped    gathers of FSDP weights, and reductions of FSDP gradients in rings
    scatters      reduce-scatters of FSDP gradients
    once          after the last microbatch, and between slices
    """
    found = dict.fromkeys([*map(str, TensorParallelMode), "overlapped", "scatters", "once"], 0.0)
    links, mode = links_of(config.mesh, target), str(config.mesh.tensor_parallel)
    if config.mesh.mp > 1:
        found[mode] = sum(map(links.seconds, _activation_entries(config)))
    for entry in fsdp_uses(config, every, "bfloat16") if config.mesh.dp > 1 else []:
        is_overlapped = entry.operation in (Operation.all_gather, Operation.ppermute)
        found["overlapped" if is_overlapped else "scatters"] += links.seconds(entry)
    partial = gradients_are_partial(TENSOR_PARALLEL[config.mesh.tensor_parallel])
    last: Iterable[Entry] = [
        *gathers_between_slices(config, every), *update(config, every, partial_over_mp=partial)
    ]  # fmt: skip
    found["once"] = sum(links.seconds(entry) for entry in last if config.mesh.dp > 1 or MP in entry.axis)
    return found


def _activation_entries(config: Config) -> list[Entry]:
    """Those of all microbatches: traced for one sequence, and sized for those of a microbatch.

    What a layer of model/blocks.py communicates by itself is the gradient of a weight, and has one size.
    """
    train = replace(config.train, batch=1, microbatches=1)
    mesh = replace(config.mesh, dp=1, tile=None, zero=Zero.none, fsdp_gradients=FsdpGradients.reduce_scatter, slices=1)
    one = replace(config, model=replace(config.model, offload=[]), train=train, mesh=mesh)
    key = repr((one.model, mesh))  # none of what is replaced changes the communication over mp
    if key not in _TRACED:
        _TRACED[key] = activations(one, jnp.bfloat16)
    microbatches = config.train.microbatches
    sequences = config.train.batch // (microbatches * config.mesh.dp)
    return [
        replace(
            entry, count=entry.count * microbatches,
            bytes=entry.bytes * (1 if entry.what.endswith(IN_A_LAYER) else sequences),
        )
        for entry in _TRACED[key]
    ]  # fmt: skip
