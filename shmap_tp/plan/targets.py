"""What can be planned for, TPU slices and nodes of NVIDIA GPUs: by name, with their figures and their links, and
programs compiled for them."""

import gzip
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import re
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import jax
from jax.sharding import Mesh

from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import DEVICES, GENERATIONS, GIB, Device
from shmap_tp.hardware.xla_options import compile_with
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
    one_host = chips // target.slices <= generation.one_host
    hosts = target.slices if one_host else chips // math.prod(generation.host)
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


# Compilation ahead of time; for TPUs with a cache on disk.  The cache key is a hash of everything that determines the
# result: the StableHLO text, the kind and coordinates of the devices in mesh order, the compiler options (including
# LIBTPU_INIT_ARGS), and the versions of JAX and libtpu.

PLANNING_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
"""XLA options of the planner for GPUs: without a GPU to tune them, Triton's tiles would be 16 x 8.  On a GPU XLA may
choose Triton for a matmul; the shapes stay the same."""

MEMORY_REPORT = "memory-usage-report.txt"
"""Suffix of the file in which the compiler lists its memory allocations."""


@dataclass(frozen=True)
class Compiled:
    """A compiled program, for one device of a mesh."""

    text: str | None
    """The scheduled module; None if the program does not fit into memory."""
    peak_bytes: int | float
    """Peak device memory; for a program that does not fit, what the compiler says it needs.  The compiler's own peak,
    used where nothing is offloaded to the host, includes up to 128 MiB of a TPU's vector memory."""
    limit_bytes: int | float
    argument_bytes: int | None
    seconds: float
    """Compile time, of the run that compiled it."""
    host_bytes: int = 0
    """Memory in use on the host (offloaded activations); not part of `peak_bytes`."""

    @property
    def fits(self) -> bool:
        return self.text is not None


def coordinates(mesh: Mesh) -> list[list[int]]:
    """[x, y, z, core] of each device of a TPU mesh, in mesh order.

    With several slices, only those of the first: the compiler makes the module of one slice and numbers the devices
    within it.
    """
    first = getattr(mesh.devices.flat[0], "slice_index", 0)
    return [_coordinates_of(device) for device in mesh.devices.flat if getattr(device, "slice_index", 0) == first]


def _coordinates_of(device: Device) -> list[int]:
    return [*device.coords, device.core_on_chip]


def compile_ahead_of_time(
    lowered: jax.stages.Lowered, mesh: Mesh, cache: Path | None, options: dict | None = None
) -> Compiled:
    """Compile `lowered` for the devices of `mesh`, or read the result from the directory `cache` (None: no cache).

    Raises UserError where the compiler cannot compile it.
    """
    kind = mesh.devices.flat[0].device_kind
    entry = cache / f"{_cache_key(lowered, mesh, options)}.json.gz" if cache else None
    if entry and (found := _read(entry)):
        return found
    compiled = _compile(lowered, DEVICES[kind].memory, options)
    if entry:
        try:
            _write(entry, compiled)
        except OSError as error:
            warnings.warn(f"the compiled step is not kept: {entry.parent}: {error.strerror}", stacklevel=2)
    return compiled


def _read(entry: Path) -> Compiled | None:
    """What an entry of the cache holds; None where there is none, or it is damaged."""
    try:
        return Compiled(**json.loads(gzip.decompress(entry.read_bytes())))
    except (OSError, EOFError, zlib.error, ValueError, TypeError):
        return None


def _write(entry: Path, compiled: Compiled) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    partial = entry.with_suffix(f".{os.getpid()}")  # another process may write the same entry
    partial.write_bytes(gzip.compress(json.dumps(asdict(compiled)).encode(), 3))
    partial.replace(entry)


def _cache_key(lowered: jax.stages.Lowered, mesh: Mesh, options: dict | None) -> str:
    devices = list(mesh.devices.flat)
    slices = [getattr(device, "slice_index", 0) for device in devices]
    versions = [importlib.metadata.version(name) for name in ("jax", "libtpu")]
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    places = [_coordinates_of(device) for device in devices]
    inputs = [lowered.as_text(), devices[0].device_kind, places, slices, versions, options or {}, flags, MEMORY_REPORT]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:24]


def compile_for_gpu(lowered: jax.stages.Lowered, kind: str, options: dict, limit: float) -> Compiled:
    """Compile `lowered` for GPUs of this kind, of which a program can use `limit` bytes.

    XLA compiles a program that does not fit all the same; its text is dropped then, as the TPU compiler does.  Raises
    UserError where it cannot be compiled.
    """
    start = time.perf_counter()
    try:
        program = compile_with(lowered, PLANNING_OPTIONS | options)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"XLA cannot compile this step for {kind}: {str(error).splitlines()[0]}") from error
    memory, seconds = program.memory_analysis(), time.perf_counter() - start
    peak, host = memory.peak_memory_in_bytes, memory.host_temp_size_in_bytes
    text = program.as_text() if peak <= limit else None
    return Compiled(text, peak, limit, memory.argument_size_in_bytes, seconds, host)


_OUT_OF_MEMORY = (
    re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"),
    re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"),
)

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}


def parse_out_of_memory(error: jax.errors.JaxRuntimeError) -> tuple[float, float] | None:
    """(bytes needed, bytes available) of a compiler's out-of-memory error; None for any other error."""
    found = next((match for form in _OUT_OF_MEMORY if (match := form.search(str(error)))), None)
    return (float(found[1]) * _UNITS[found[2]], float(found[3]) * _UNITS[found[4]]) if found else None


def _compile(lowered: jax.stages.Lowered, limit: float, options: dict | None) -> Compiled:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as reports:
        try:
            program = compile_with(lowered, (options or {}) | {"xla_dump_to": reports})
        except jax.errors.JaxRuntimeError as error:
            if (needed_and_available := parse_out_of_memory(error)) is None:
                reason = str(error).strip().splitlines()[0]
                raise UserError(
                    f"libtpu cannot compile this step: {reason};\nchange its settings or options"
                ) from error
            return Compiled(None, *needed_and_available, None, time.perf_counter() - start)
        seconds = time.perf_counter() - start
        memory = program.memory_analysis()
        host = memory.host_temp_size_in_bytes
        peak = _reported_device_bytes(Path(reports)) if host else memory.peak_memory_in_bytes
    return Compiled(_written(program.as_text), peak, limit, memory.argument_size_in_bytes, seconds, host)


def _written(schedule: Callable[[], str]) -> str:
    """The text of `schedule`.  Raises UserError where this version of the compiler cannot write it."""
    try:
        return schedule()
    except jax.errors.JaxRuntimeError as error:
        version, reason = importlib.metadata.version("libtpu"), str(error).strip().splitlines()[0]
        raise UserError(
            f"libtpu {version} compiled this step and cannot write its schedule: {reason};\n"
            f"install the version that JAX names: pip install 'jax[tpu]=={jax.__version__}'"
        ) from error


def _reported_device_bytes(reports: Path) -> int:
    """Device memory of a program, from the compiler's memory report.

    Needed with host offload, where memory_analysis() counts host memory as device memory.  Raises UserError where this
    version of the compiler writes no report.
    """
    text = "".join(report.read_text() for report in reports.glob(f"*{MEMORY_REPORT}"))
    found = re.search(r"Memory Space: default .*\nTotal bytes: (\d+)", text)
    if found is None:
        version = importlib.metadata.version("libtpu")
        raise UserError(f"libtpu {version} does not report the memory of a step with model.offload; 0.0.42 does")
    return int(found[1])
