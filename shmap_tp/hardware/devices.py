"""Peak FLOP/s, memory and links of each kind of device, with the source of each figure.

A row describes one JAX device.  TPU v2, v3 and TPU7x chips appear as two JAX devices, so their rows hold half a chip;
a v4 or v5p chip appears as one (megacore).  A link is one cable of the torus in one direction.  `memory` is what a
program can use: for TPUs the limit that the compiler reports (libtpu 0.0.42), a little less than the advertised size.
`clock` is peak FLOP/s divided by the FLOPs of all matrix units per cycle; it converts compiler cycles into seconds.

CLOUD   cloud.google.com/tpu/docs, the system architecture and the page of each version
NORRIE  Norrie et al. 2021, "The Design Process for Google's Training Chips: TPUv2 and TPUv3", IEEE Micro 41(2)
BOOK    Austin et al. 2025, "How to Scale Your Model", chapter on TPUs, https://jax-ml.github.io/scaling-book/tpus
NVIDIA  data sheets

TPU slices have the names under which Cloud TPU rents them, such as v3-32 or v5litepod-16 (`find_slices`).
"""

import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import jax  # it sets TPU_SKIP_MDS_QUERY where it finds no chip
import jax.numpy as jnp

from shmap_tp.config.choices import MatmulPrecision
from shmap_tp.errors import UserError, shown

GIB = 2**30


@runtime_checkable
class Device(Protocol):
    """What a mesh, a torus and the selection of a kernel read of a device: a jax.Device, or the description of one.

    TPUs also have `coords`, `core_on_chip` and `slice_index`, and NVIDIA GPUs `compute_capability`; a device without
    them is on no torus, in slice 0, and has no kernels of cuDNN.
    """

    @property
    def device_kind(self) -> str: ...


@dataclass(frozen=True)
class DeviceFigures:
    """Peak figures of one JAX device; rates are per second."""

    flops: float
    """FLOP/s of dense bfloat16 matmuls."""
    memory: float
    """Bytes that a program can use."""
    memory_rate: float
    """Memory bandwidth, bytes/s."""
    source: str
    """Source of `flops`."""
    clock: float | None = None
    """Cycles/s; None for GPUs, whose compiler reports no cycles."""
    eight_bit: Mapping[str, float] = field(default_factory=dict)
    """FLOP/s of dense matmuls by format of 8 bits (int8, fp8), of those that its matrix units multiply, by the same
    pages as `flops`."""


@dataclass(frozen=True)
class Generation:
    """A TPU version: the shape of its slices and the torus that joins its chips."""

    kind: str
    """jax.Device.device_kind, which is the key of DEVICES."""
    platform: str
    """Prefix of the names of the compiler's topologies."""
    cores: int
    """JAX devices per chip."""
    dims: int
    """Number of dimensions of the torus."""
    link_rate: float
    """Bytes/s of one link in one direction."""
    wraps_at: int
    """A side of a slice wraps around if its length is a multiple of this."""
    largest: tuple[int, ...]
    """Sides of the largest slice."""
    host: tuple[int, ...]
    """Chips of one host, along each side."""
    source: str
    """Source of `link_rate` and `wraps_at`."""
    host_rate: float = 1.6e10
    """Bytes/s between a chip and its host's memory, in each direction.  BOOK: 1.6e10 for most TPUs, 3.2e10 for v6e."""
    mxu_side: int = 128
    """Rows, and columns, of a matrix-multiply unit (MXU).  CLOUD: 256 x 256 for v6e and TPU7x."""
    one_host: int = 4
    """Chips of the largest slice that has a single host, which may be more than the hosts of larger slices have
    (CLOUD)."""

    def wraps(self, side: int) -> bool:
        """Whether a side of `side` chips wraps around, so that its last chip is linked to its first."""
        return side % self.wraps_at == 0

    @property
    def has_kernels(self) -> bool:
        """Whether Pallas can multiply bfloat16 matrices; Mosaic (libtpu 0.0.42) does not support this on v2 and v3."""
        return self.platform not in ("v2", "v3")


CLOUD = "cloud.google.com/tpu/docs, bf16"
NVIDIA = "NVIDIA data sheet, bf16 dense"

NETWORK_RATE = 2.5e10
"""Bytes/s between a host and other slices (DCN) in one direction: two 100 Gbit/s cards (CLOUD, v5e)."""

DEVICES = {
    "TPU v2": DeviceFigures(45e12 / 2, 7.48 * GIB, 700e9 / 2, f"{CLOUD}, half of a chip's 45 TFLOP/s", 0.70e9),
    "TPU v3": DeviceFigures(
        123e12 / 2, 15.48 * GIB, 900e9 / 2, f"{CLOUD}, half of a chip's 123 TFLOP/s (others print 140)", 0.94e9
    ),
    "TPU v4": DeviceFigures(275e12, 30.75 * GIB, 1200e9, CLOUD, 1.05e9, {"int8": 275e12}),
    "TPU v5 lite": DeviceFigures(197e12, 15.75 * GIB, 819e9, CLOUD, 1.503e9, {"int8": 393e12}),
    "TPU v5": DeviceFigures(459e12, 95.74 * GIB, 2765e9, CLOUD, 1.75e9, {"int8": 918e12}),
    "TPU v6 lite": DeviceFigures(918e12, 31.25 * GIB, 1640e9, CLOUD, 1.75e9, {"int8": 1836e12}),
    "TPU7x": DeviceFigures(
        2307e12 / 2, 94.75 * GIB, 7380e9 / 2, f"{CLOUD}, half of a chip's 2307 TFLOP/s", 2.2e9, {"fp8": 4614e12 / 2}
    ),
    "NVIDIA A100-SXM4-40GB": DeviceFigures(312e12, 40e9, 1555e9, NVIDIA, eight_bit={"int8": 624e12}),
    "NVIDIA A100-SXM4-80GB": DeviceFigures(312e12, 80e9, 2039e9, NVIDIA, eight_bit={"int8": 624e12}),
    "NVIDIA H100 80GB HBM3": DeviceFigures(989e12, 80e9, 3350e9, NVIDIA, eight_bit={"int8": 1979e12, "fp8": 1979e12}),
    "NVIDIA H200": DeviceFigures(989e12, 141e9, 4800e9, NVIDIA, eight_bit={"int8": 1979e12, "fp8": 1979e12}),
    "NVIDIA B200": DeviceFigures(2250e12, 180e9, 8000e9, NVIDIA, eight_bit={"int8": 4500e12, "fp8": 4500e12}),
}
"""Figures by jax.Device.device_kind."""
DEVICES["TPU v5p"] = DEVICES["TPU v5"]  # the name in some releases of libtpu

GENERATIONS = {
    "v2": Generation("TPU v2", "v2", 2, 2, 6.2e10, 16, (16, 16), (2, 2), "NORRIE, 496 Gbit/s; the pod is 16 x 16"),
    "v3": Generation("TPU v3", "v3", 2, 2, 8.2e10, 32, (32, 32), (2, 2), "NORRIE, 656 Gbit/s; the pod is 32 x 32"),
    "v4": Generation(
        "TPU v4", "v4", 1, 3, 4.5e10, 4, (16, 16, 16), (2, 2, 1), "CLOUD, cubes of 4 joined by optical switches"
    ),
    "v5e": Generation(
        "TPU v5 lite", "v5e", 1, 2, 4.5e10, 16, (16, 16), (2, 2), "CLOUD, 4 x 100 GB/s both ways; the pod is 16 x 16",
        one_host=8,
    ),
    "v5p": Generation("TPU v5", "v5", 1, 3, 9e10, 4, (16, 16, 24), (2, 2, 1), "CLOUD, 4800 Gbit/s of 6 links, as v4"),
    "v6e": Generation(
        "TPU v6 lite", "v6e", 1, 2, 9e10, 16, (16, 16), (2, 2), "CLOUD, 4 x 200 GB/s both ways; the pod is 16 x 16",
        host_rate=3.2e10, mxu_side=256, one_host=8,
    ),
    "tpu7x": Generation(
        "TPU7x", "tpu7x", 2, 3, 1e11, 4, (16, 16, 16), (2, 2, 1), "CLOUD, 1200 GB/s of 6 links both ways, as v4",
        mxu_side=256,
    ),
}  # fmt: skip
"""TPU versions by the name that `--version` takes."""


def require_units(precision: MatmulPrecision, kind: str) -> None:
    """Raise UserError if devices of a kind in the table do not multiply in `precision`; those of CPUs are emulated."""
    if precision == MatmulPrecision.bfloat16 or kind not in DEVICES or precision in DEVICES[kind].eight_bit:
        return
    there = " or ".join([*DEVICES[kind].eight_bit, MatmulPrecision.bfloat16])
    raise UserError(f"train.matmul_precision={precision}: {kind} has no units for it; use {there}")


def generation(kind: str) -> Generation | None:
    """The TPU version of a device kind; None if it is no TPU."""
    kind = "TPU v5" if kind == "TPU v5p" else kind
    return next((version for version in GENERATIONS.values() if version.kind == kind), None)


@dataclass(frozen=True)
class Peak:
    """Peak FLOP/s of dense matmuls over all devices of a run, and the source of the figure."""

    flops: float
    source: str


def machine_peak(devices: list[jax.Device]) -> Peak | None:
    """Peak of all `devices` together: from the table, or measured now on CPU, which is not in the table.

    None for other device kinds that are not in the table: no MFU is better than one from a guessed peak.
    """
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        return Peak(matmul_rate(), "float32 matmul of 2048 cubed, measured on this CPU at start, for all its devices")
    return table_peak(kind, len(devices))


def table_peak(kind: str, devices: int) -> Peak | None:
    """Peak of `devices` devices of `kind` from the table; None if the kind is not in it."""
    if kind not in DEVICES:
        return None
    return Peak(DEVICES[kind].flops * devices, f"{devices} x {kind}: {DEVICES[kind].source}")


def matmul_rate(size: int = 2048, repeats: int = 5) -> float:
    """FLOP/s of the fastest of `repeats` jitted float32 matmuls of two [size, size] matrices on one device."""
    x = jnp.full((size, size), 0.5, jnp.float32)
    multiply = jax.jit(lambda a, b: a @ b)
    multiply(x, x).block_until_ready()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        multiply(x, x).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


# TPU slices by the names under which they are rented.  The number in a name counts cores for v2, v3, v4 and v5p, and
# chips for v5litepod and v6e.
# Source: https://cloud.google.com/tpu/docs/v5e and the pages of the other versions.

VERSIONS = {"v2": "v2", "v3": "v3", "v4": "v4", "v5litepod": "v5e", "v5p": "v5p", "v6e": "v6e"}
"""Keys of GENERATIONS by the first part of a name."""
_CORES_ON_CHIP = {"v2": 2, "v3": 2, "v4": 2, "v5p": 2}
"""Cores of a chip, for the versions whose names count cores."""


@dataclass(frozen=True)
class RentedSlices:
    """One or more slices of a type, as one run uses them."""

    type: str
    """The name of one, such as v3-32."""
    slices: int
    devices: int
    """JAX devices of all slices together."""
    hosts: int
    """Hosts of all slices together."""

    def __str__(self) -> str:
        return f"{self.slices} x {self.type}" if self.slices > 1 else self.type


def find_slices(name: str) -> RentedSlices:
    """The slices of `name`: a type, or a number and a type as in 2xv5litepod-256.  Raises UserError if there are no
    such slices."""
    found = re.fullmatch(r"(?:([1-9][0-9]{0,3})x)?([a-z0-9]+)-([1-9][0-9]{0,4})", name)
    if found is None or found[2] not in VERSIONS:
        raise UserError(
            f"--type {shown(name) or repr('')} is no type of TPU slice; use "
            f"{', '.join(f'{version}-N' for version in VERSIONS)}, such as v3-32, or 2xv5litepod-256 for two slices"
        )
    slices, version, size = int(found[1] or 1), found[2], int(found[3])
    figures = GENERATIONS[VERSIONS[version]]
    chips, rest = divmod(size, _CORES_ON_CHIP.get(version, 1))
    hosts, rest_of_host = (1, 0) if chips <= figures.one_host else divmod(chips, math.prod(figures.host))
    if rest or rest_of_host:
        raise UserError(f"{version}-{size}: no such slice; see https://cloud.google.com/tpu/docs/regions-zones")
    if slices > 1 and version in ("v2", "v3"):
        raise UserError(f"{name}: slices of {version} cannot be combined; use one, or several of v4 or later")
    devices = chips * figures.cores
    return RentedSlices(f"{version}-{size}", slices, slices * devices, slices * hosts)


# libtpu, the TPU compiler and driver, on a machine without a TPU.  `pip install '.[tpu]'` installs it anywhere, for the
# planner.  JAX then tries it as a backend, and libtpu prints several lines about a machine that it does not know before
# it finds no TPU.

ANY_TPU = {"TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}
"""Environment variables that describe a machine which libtpu knows.  Any will do where there is no TPU."""


def describe_machine_without_tpu() -> None:
    """Let libtpu take this machine for one that it knows, if it has no TPU.  Must be called before JAX first uses a
    backend."""
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":
        for name, value in ANY_TPU.items():
            os.environ.setdefault(name, value)
