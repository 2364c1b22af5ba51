"""What a device can do at most: the peak that an MFU is a fraction of, and where that figure comes from."""

import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Peak:
    """Dense matrix-product rate of one JAX device, in FLOP/s, and its source in words."""

    flops: float
    source: str


CLOUD = "cloud.google.com/tpu/docs/system-architecture-tpu-vm, bf16"
NVIDIA = "NVIDIA data sheet, bf16 dense"

# By jax.Device.device_kind.  v2, v3 and TPU7x show two JAX devices per chip, so these are half a chip's figure.
PEAKS = {
    "TPU v2": Peak(45e12 / 2, f"{CLOUD}, half of a chip's 45 TFLOP/s"),
    "TPU v3": Peak(123e12 / 2, f"{CLOUD}, half of a chip's 123 TFLOP/s (others print 140)"),
    "TPU v4": Peak(275e12, CLOUD),
    "TPU v5 lite": Peak(197e12, CLOUD),
    "TPU v5": Peak(459e12, CLOUD),
    "TPU v5p": Peak(459e12, CLOUD),
    "TPU v6 lite": Peak(918e12, CLOUD),
    "TPU7x": Peak(2307e12 / 2, f"{CLOUD}, half of a chip's 2307 TFLOP/s"),
    "NVIDIA A100-SXM4-40GB": Peak(312e12, NVIDIA),
    "NVIDIA A100-SXM4-80GB": Peak(312e12, NVIDIA),
    "NVIDIA H100 80GB HBM3": Peak(989e12, NVIDIA),
    "NVIDIA H200": Peak(989e12, NVIDIA),
}


def machine_peak(devices: list[jax.Device]) -> Peak | None:
    """Peak of all `devices` together: from the table, or on a CPU (which has no table) measured now.

    None where the device kind is not in the table: an MFU from a guessed peak is worse than none.
    """
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        return Peak(
            matmul_rate(), "this CPU's own float32 matmul of 2048 cubed, measured at start, all emulated devices"
        )
    if kind not in PEAKS:
        return None
    return Peak(PEAKS[kind].flops * len(devices), f"{len(devices)} x {kind}: {PEAKS[kind].source}")


def matmul_rate(size: int = 2048, repeats: int = 5) -> float:
    """Best of `repeats` jitted float32 products of two [size, size] matrices on one device, in FLOP/s."""
    x = jnp.full((size, size), 0.5, jnp.float32)
    multiply = jax.jit(lambda a, b: a @ b)
    multiply(x, x).block_until_ready()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        multiply(x, x).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)
