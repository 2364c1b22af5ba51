"""Peak FLOP/s, memory and links of each kind of device, with the source of each figure.

A row describes one JAX device.  TPU v2, v3 and TPU7x chips appear as two JAX devices, so their rows hold half a chip;
a v4 or v5p chip appears as one (megacore).  A link is one cable of the torus in one direction.  `memory` is what a
program can use: for TPUs the limit that the compiler reports (libtpu 0.0.42), a little less than the advertised size.
`clock` is peak FLOP/s divided by the FLOPs of all matrix units per cycle; it converts compiler cycles into seconds.

CLOUD   cloud.google.com/tpu/docs, the system architecture and the page of each version
NORRIE  Norrie et al. 2021, "The Design Process for Google's Training Chips: TPUv2 and TPUv3", IEEE Micro 41(2)
BOOK    Austin et al. 2025, "How to Scale Your Model", chapter on TPUs, https://jax-ml.github.io/scaling-book/tpus
NVIDIA  data sheets
"""

import time
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

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
    "TPU v4": DeviceFigures(275e12, 30.75 * GIB, 1200e9, CLOUD, 1.05e9),
    "TPU v5 lite": DeviceFigures(197e12, 15.75 * GIB, 819e9, CLOUD, 1.503e9),
    "TPU v5": DeviceFigures(459e12, 95.74 * GIB, 2765e9, CLOUD, 1.75e9),
    "TPU v6 lite": DeviceFigures(918e12, 31.25 * GIB, 1640e9, CLOUD, 1.75e9),
    "TPU7x": DeviceFigures(2307e12 / 2, 94.75 * GIB, 7380e9 / 2, f"{CLOUD}, half of a chip's 2307 TFLOP/s", 2.2e9),
    "NVIDIA A100-SXM4-40GB": DeviceFigures(312e12, 40e9, 1555e9, NVIDIA),
    "NVIDIA A100-SXM4-80GB": DeviceFigures(312e12, 80e9, 2039e9, NVIDIA),
    "NVIDIA H100 80GB HBM3": DeviceFigures(989e12, 80e9, 3350e9, NVIDIA),
    "NVIDIA H200": DeviceFigures(989e12, 141e9, 4800e9, NVIDIA),
    "NVIDIA B200": DeviceFigures(2250e12, 180e9, 8000e9, NVIDIA),
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
        "TPU v5 lite",
        "v5e",
        1,
        2,
        4.5e10,
        16,
        (16, 16),
        (2, 2),
        "CLOUD, 4 x 100 GB/s both ways; the pod is 16 x 16",
    ),
    "v5p": Generation("TPU v5", "v5", 1, 3, 9e10, 4, (16, 16, 24), (2, 2, 1), "CLOUD, 4800 Gbit/s of 6 links, as v4"),
    "v6e": Generation(
        "TPU v6 lite",
        "v6e",
        1,
        2,
        9e10,
        16,
        (16, 16),
        (2, 2),
        "CLOUD, 4 x 200 GB/s both ways; the pod is 16 x 16",
        3.2e10,
    ),
    "tpu7x": Generation(
        "TPU7x", "tpu7x", 2, 3, 1e11, 4, (16, 16, 16), (2, 2, 1), "CLOUD, 1200 GB/s of 6 links both ways, as v4"
    ),
}
"""TPU versions by the name that `--version` takes."""


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
        return Peak(
            matmul_rate(), "float32 matmul of 2048 cubed, measured on this CPU at start, for all emulated devices"
        )
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
