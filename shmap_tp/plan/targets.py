"""What can be planned for, TPU slices and nodes of NVIDIA GPUs: by name, with their figures and their links."""

import importlib.util
import itertools
import math
from dataclasses import dataclass
from functools import cache

from jax.sharding import Mesh

from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import DEVICES, GENERATIONS
from shmap_tp.plan.aot_compile import coordinates
from shmap_tp.plan.gpu import (
    COMPILER,
    GPUS,
    GPUS_PER_NODE,
    HOST_RATE,
    GpuLinks,
    Nodes,
    find_nodes,
    is_installed,
    usable_bytes,
)
from shmap_tp.plan.tpu import LinkModel, Slice, find_slice

VERSIONS = [*GENERATIONS, *GPUS]
"""What `--version` takes."""
VERSION = "v3"
"""Where it is not given."""

Target = Slice | Nodes
Links = LinkModel | GpuLinks


def find_target(version: str, devices: int, topology: str | None, slices: int) -> Target:
    """The slices or nodes of `version` with this number of devices.  Raises UserError where there are none."""
    if version not in GPUS:
        return find_slice(version, devices, topology, slices)
    for name, value in (("topology", topology), ("slices", slices if slices != 1 else None)):
        if value is not None:
            raise UserError(f"--{name} {value}: GPUs have none; omit it")
    return find_nodes(version, devices)


def devices_of_nodes(versions: list[str], nodes: int | None) -> int | None:
    """The GPUs of `--nodes`; None where it is not given.  Raises UserError where one of `versions` is a TPU."""
    if nodes is None:
        return None
    for version in versions:
        if version not in GPUS:
            raise UserError(f"--nodes {nodes} is for GPUs ({', '.join(GPUS)}); give --devices for {version}")
    if nodes < 1:
        raise UserError(f"--nodes {nodes} is too small; it must be 1 or more")
    return nodes * GPUS_PER_NODE


TPU_HOST_MEMORY = 48e9
"""Bytes of host memory per chip that may be used: those of a v5e host, 192 GB for four chips (CLOUD); others have
more."""

CHIPS_OF_ONE_HOST = {"v5e": 8, "v6e": 8}
"""Chips of the largest slice with a single host, where that has more than the hosts of larger slices (CLOUD)."""


@dataclass(frozen=True, eq=False)
class PlannedDevice:
    """A `Device` that is not attached, on which programs can be traced."""

    device_kind: str
    compute_capability: str = "0"
    """The compute capability of a GPU."""

    platform = "cpu"


@dataclass(frozen=True, eq=False)
class PlannedTpu:
    """A `Device`: a TPU device that is not attached."""

    device_kind: str
    coords: tuple[int, int, int]
    core_on_chip: int
    slice_index: int


@dataclass(frozen=True)
class Machine:
    """Figures of a target; memory and links are of one device."""

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
def devices_of(target: Target) -> list[PlannedTpu] | list[PlannedDevice]:
    """Every device of a target, in order."""
    if isinstance(target, Nodes):
        capability = ".".join(map(str, target.gpu.capability))
        return [PlannedDevice(target.gpu.kind, capability) for _ in range(target.devices)]
    sides, generation = (*target.sides, 1)[:3], target.generation
    places = itertools.product(range(target.slices), *map(range, sides), range(generation.cores))
    return [PlannedTpu(generation.kind, (x, y, z), core, number) for number, x, y, z, core in places]


def link_model(target: Target, mesh: Mesh) -> Links:
    """The links between the devices of a mesh, which are numbered in its order."""
    return GpuLinks(target) if isinstance(target, Nodes) else LinkModel.of(target.generation, coordinates(mesh))


def compiler_missing(target: Target) -> str | None:
    """Why no step can be compiled for a target here, with the way out; None where one can."""
    if isinstance(target, Slice) and importlib.util.find_spec("libtpu") is None:
        return "libtpu is not installed (pip install -e '.[tpu]')"
    if isinstance(target, Nodes) and not is_installed():
        return f"{COMPILER} is not installed (pip install -e '.[plan-gpu]')"
    return None
