"""What the search reads of a target, a TPU slice or nodes of GPUs, without asking a compiler."""

import importlib.util
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import jax
from jax.sharding import Mesh

from shmap_tp.hardware.devices import DEVICES
from shmap_tp.plan.aot_compile import coordinates
from shmap_tp.plan.gpu import targets as gpus
from shmap_tp.plan.gpu.links import HOST_RATE, GpuLinks
from shmap_tp.plan.gpu.predict import usable_bytes
from shmap_tp.plan.gpu.targets import Nodes
from shmap_tp.plan.link_model import LinkModel
from shmap_tp.plan.targets import Target
from shmap_tp.plan.topologies import Slice

TPU_HOST_MEMORY = 48e9
"""Bytes of host memory per chip that may be used: those of a v5e host, 192 GB for four chips (CLOUD); others have
more."""

CHIPS_OF_ONE_HOST = {"v5e": 8, "v6e": 8}
"""Chips of the largest slice with a single host, where that has more than the hosts of larger slices (CLOUD)."""


@dataclass(frozen=True, eq=False)
class PlannedTpu:
    """What a mesh and the selection of a kernel read of a TPU device.  It can run nothing."""

    device_kind: str
    coords: tuple[int, int, int]
    core_on_chip: int
    slice_index: int
    __class__ = jax.Device  # functions that take devices check for this type


@dataclass(frozen=True, eq=False)
class PlannedGpu:
    """The same of a GPU."""

    device_kind: str
    compute_capability: str
    __class__ = jax.Device


@dataclass(frozen=True)
class Machine:
    """Figures of a target; those of memory and of links are of one device."""

    kind: str
    """jax.Device.device_kind."""
    devices: int
    slices: int
    chips: int
    """What is rented by the hour: TPU chips, or GPUs."""
    hosts: int
    memory: float
    """Bytes that a program can use."""
    host_memory: float
    """Bytes of its host's memory that may hold activations; 0 where no step with offload has been compiled."""
    host_rate: float
    """Bytes/s to and from the host's memory, in each direction."""

    @property
    def flops(self) -> float:
        """Peak FLOP/s of one device."""
        return DEVICES[self.kind].flops

    @property
    def memory_rate(self) -> float:
        """Bytes/s of one device's memory."""
        return DEVICES[self.kind].memory_rate


@cache
def machine_of(target: Target) -> Machine:
    """The figures of a target."""
    if isinstance(target, Nodes):
        kind, memory = target.gpu.kind, usable_bytes(target.gpu)
        return Machine(kind, target.devices, 1, target.devices, target.nodes, memory, 0.0, HOST_RATE)
    generation = target.generation
    chips = math.prod(target.sides) * target.slices
    one_host = chips // target.slices <= CHIPS_OF_ONE_HOST.get(target.version, 0)
    hosts = target.slices if one_host else max(1, chips // math.prod(generation.host))
    host_memory = TPU_HOST_MEMORY / generation.cores if generation.has_kernels else 0.0
    return Machine(
        generation.kind, target.devices, target.slices, chips, hosts,
        DEVICES[generation.kind].memory, host_memory, generation.host_rate / generation.cores,
    )  # fmt: skip


@cache
def devices_of(target: Target) -> list[PlannedTpu] | list[PlannedGpu]:
    """Every device of a target, in order."""
    if isinstance(target, Nodes):
        capability = ".".join(map(str, target.gpu.capability))
        return [PlannedGpu(target.gpu.kind, capability) for _ in range(target.devices)]
    sides, generation = (*target.sides, 1)[:3], target.generation
    places = itertools.product(range(target.slices), *map(range, sides), range(generation.cores))
    return [PlannedTpu(generation.kind, (x, y, z), core, number) for number, x, y, z, core in places]


def link_model(target: Target, mesh: Mesh) -> LinkModel | GpuLinks:
    """The links between the devices of a mesh, which are numbered in its order."""
    return GpuLinks(target) if isinstance(target, Nodes) else LinkModel.of(target.generation, coordinates(mesh))


def neighbour_seconds(links: LinkModel | GpuLinks, size: float, group: Sequence[int]) -> float:
    """Seconds of one step of a ring: `size` bytes from each device of a group to the next, one hop away on a torus."""
    if isinstance(links, GpuLinks):
        return links.permute_seconds(size, [(group[0], group[-1])])
    return size / links.generation.link_rate


def compiler_missing(target: Target) -> str | None:
    """Why no step can be compiled for a target here, with the way out; None where one can."""
    if isinstance(target, Slice) and importlib.util.find_spec("libtpu") is None:
        return "libtpu is not installed (pip install -e '.[tpu]')"
    if isinstance(target, Nodes) and not gpus.is_installed():
        return f"{gpus.COMPILER} is not installed (pip install -e '.[plan-gpu]')"
    return None
