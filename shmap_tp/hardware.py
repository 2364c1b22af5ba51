"""What devices can do at most: peak FLOP/s, memory, links, each figure with its source.

One row is one JAX device.  TPU v2, v3 and TPU7x show two devices a chip, so their rows hold half a chip; v4 and v5p
show one (megacore).  A link is one cable of the torus in one direction.  `memory` is what a program may use: for TPUs
the limit that the compiler itself reports (libtpu 0.0.42), a little less than the memory that is sold.  `clock` is peak
FLOP/s over the FLOPs of all matrix units in a cycle: it turns the compiler's cycles into seconds.

CLOUD   cloud.google.com/tpu/docs, the system architecture and the page of each version
NORRIE  Norrie et al. 2021, "The Design Process for Google's Training Chips: TPUv2 and TPUv3", IEEE Micro 41(2)
BOOK    Austin et al. 2025, "How to Scale Your Model", chapter on TPUs, https://jax-ml.github.io/scaling-book/tpus
NVIDIA  data sheets
"""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shmap_tp.config import Config, InputError, Wire

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """What one JAX device of this kind can do.  Rates are per second."""

    flops: float
    """Dense bfloat16 matrix products, FLOP/s."""
    memory: float
    """Bytes that a program may use."""
    memory_rate: float
    """Bytes/s between the memory and the cores."""
    source: str
    """Where `flops` comes from, in words."""
    clock: float | None = None
    """Cycles/s; None for GPUs, whose compiler tells no cycles."""


@dataclass(frozen=True)
class Generation:
    """One version of TPU: what its slices look like, and the torus between the chips."""

    kind: str
    """jax.Device.device_kind, the key of DEVICES."""
    platform: str
    """The name that the compiler's topologies start with."""
    cores: int
    """JAX devices of a chip."""
    dims: int
    """Dimensions of the torus."""
    link_rate: float
    """Bytes/s of one link in one direction."""
    wraps_at: int
    """A side of the slice closes to a ring where it is a multiple of this."""
    largest: tuple[int, ...]
    """Sides of the largest slice."""
    host: tuple[int, ...]
    """Chips of a host, along each side."""
    source: str
    """Where `link_rate` and `wraps_at` come from."""
    host_rate: float = 1.6e10
    """Bytes/s of a chip to its host's memory, and as much from it.  BOOK: 1.6e10 for most TPUs, 3.2e10 for v6e."""

    def wraps(self, side: int) -> bool:
        """Whether a side of so many chips closes to a ring."""
        return side % self.wraps_at == 0

    @property
    def has_kernels(self) -> bool:
        """Whether Pallas can multiply bfloat16 matrices: Mosaic (libtpu 0.0.42) has no such product for v2 and v3."""
        return self.platform not in ("v2", "v3")


CLOUD = "cloud.google.com/tpu/docs, bf16"
NVIDIA = "NVIDIA data sheet, bf16 dense"
NETWORK_RATE = 2.5e10
"""Bytes/s of a host to other slices, in one direction: two 100 Gbit/s cards (CLOUD, v5e)."""

DEVICES = {
    "TPU v2": Device(45e12 / 2, 7.48 * GIB, 700e9 / 2, f"{CLOUD}, half of a chip's 45 TFLOP/s", 0.70e9),
    "TPU v3": Device(
        123e12 / 2, 15.48 * GIB, 900e9 / 2, f"{CLOUD}, half of a chip's 123 TFLOP/s (others print 140)", 0.94e9
    ),
    "TPU v4": Device(275e12, 30.75 * GIB, 1200e9, CLOUD, 1.05e9),
    "TPU v5 lite": Device(197e12, 15.75 * GIB, 819e9, CLOUD, 1.503e9),
    "TPU v5": Device(459e12, 95.74 * GIB, 2765e9, CLOUD, 1.75e9),
    "TPU v6 lite": Device(918e12, 31.25 * GIB, 1640e9, CLOUD, 1.75e9),
    "TPU7x": Device(2307e12 / 2, 94.75 * GIB, 7380e9 / 2, f"{CLOUD}, half of a chip's 2307 TFLOP/s", 2.2e9),
    "NVIDIA A100-SXM4-40GB": Device(312e12, 40e9, 1555e9, NVIDIA),
    "NVIDIA A100-SXM4-80GB": Device(312e12, 80e9, 2039e9, NVIDIA),
    "NVIDIA H100 80GB HBM3": Device(989e12, 80e9, 3350e9, NVIDIA),
    "NVIDIA H200": Device(989e12, 141e9, 4800e9, NVIDIA),
}
"""By jax.Device.device_kind."""
DEVICES["TPU v5p"] = DEVICES["TPU v5"]  # some releases of libtpu call it so

ALL_MEMORY = {"xla_tpu_scheduler_percent_shared_memory_limit": "100"}
"""Let what is async flow where memory is tight, too."""
WITH_HOST = {"xla_tpu_scheduler_percent_shared_memory_limit": "200"}
"""Where the host keeps some of the activations: XLA's scheduler seems to take what lies there for the device's, and to
let less flow for want of memory.  Seconds a step on v5e-256, predicted, with 200 and with 100: 16B 8.47 and 8.52, 32B
10.24 and 10.50, 128B 11.87 and 12.05, but 64B 10.87 and 10.82; 400 is as 200 (32B, 128B).  Where it keeps none, more
than all there is may not fit; nor, perhaps, where it keeps little: run.compiler_options."""
GATHERS = {"xla_enable_async_all_gather": "true"}
"""Let all-gathers flow under products: off by itself on v2, v3 and v4."""
WHOLE_GATHERS = {"xla_tpu_prefer_async_allgather_to_allreduce": "true"}
"""Those over all devices of a 3D torus, too, of which XLA would make all-reduces, which do not flow."""
SPARSE_CORES = WHOLE_GATHERS | dict.fromkeys(
    [
        "xla_tpu_enable_sparse_core_collective_offload_all_gather",
        "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather",
        "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather",
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter",
        "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter",
        "xla_tpu_use_tc_device_shape_on_sc",
        "xla_sc_disable_megacore_partitioning",
    ],
    "true",
)
"""Have the SparseCores make all-gathers and reduce-scatters, under the products: left to the TensorCore, they stop it.
On TPU7x they do by themselves: the program of 6B on (16, 1) is the same with these and without (libtpu 0.0.42).
The last two go with that in MaxText (github.com/AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py)."""
RINGS = {"xla_tpu_use_aggressive_scheduling": "true", "xla_max_concurrent_async_collective_permutes": "2"}
"""Set more products between the start of a ppermute and its end; and no more in flight than the two ways of a ring."""
TILES = "xla_tpu_scoped_vmem_limit_kib"
"""KiB of the vector memory that one operation may have (by itself 16 MiB of a v5e).  With more, products are cut in
larger tiles, and take longer to compile."""
HOPS = {"xla_lhs_output_fusion_latency_multiplier": "0.4"}
"""With the ring wire: XLA's scheduler takes a hop to be shorter than it is by our count of bytes, and lets it set out
too late to flow under its products.  With this it takes those to be shorter, too."""
WITH_RING = {"TPU v4": HOPS, "TPU v5 lite": HOPS}
"""By jax.Device.device_kind.  Seconds a step, predicted, with and without: GPT-J's shape on v5e-256, (32, 8), parallel
block, 10.8 and 11.2, of which 1.8 and 5.9 % are exposed; 16B on v4 4x4x4, (8, 8), attention before the MLP, 22.9 and
24.2.  With 0.6 10.8 and 23.1, with 0.2 23.6 there; on v5p, which has RINGS, 0.6 changes nothing (60B 40.5, 20B 14.5).
Where gradients go home in a ring, and the wire is another, 0.6 helps one model and not another: on v5e 128B 11.6
instead of 11.9, but 64B 11.1 instead of 10.9, 6B 0.683 instead of 0.668 (run.compiler_options)."""
COMPILER_OPTIONS = {
    "TPU v2": GATHERS,
    "TPU v3": GATHERS,
    "TPU v4": GATHERS | WHOLE_GATHERS | ALL_MEMORY,
    "TPU v5 lite": ALL_MEMORY | {TILES: "24576"},
    "TPU v5": ALL_MEMORY | RINGS | SPARSE_CORES | {TILES: "32768"},
    "TPU v6 lite": SPARSE_CORES | {TILES: "65536"},
}
"""What the step is compiled with, by jax.Device.device_kind: options that are off by themselves, and help.

GATHERS: on v4, of four gathered layers 38.7 ms instead of 52 (predicted, benchmarks/layerwise.py).
Seconds a step, predicted, with and without, each pair of one program, if not today's:
ALL_MEMORY: 16B on v4 4x4x4, (8, 8), ring wire, 24.9 and 36.8; 128B on v5e-256 12.6 and 12.7; of 16B there, and of 6B on
v4-32 and v5e-16, nothing changes.
RINGS: 60B on v5p 4x4x4, (4, 16), ring wire, 43.7 and 54.2 (three ppermutes in flight 44.3, four 44.0); 70B with weights
shared over dp alone, their gradients in a ring, 8.08 and 8.09.  v4 goes without: 16B there, (4, 16), parallel block,
23.4 and 22.8, (8, 8) 21.8 and 21.7.
SPARSE_CORES: 32B on v5p 4x4x4, (16, 4), ring wire, 7.88 and 8.17, of which 2.3 and 5.8 % are exposed; Llama 2 70B
there, weights shared over dp alone, 20.8 and, with its gradients in a ring, 23.2, compiled in 113 and 419 s, both
beside others.  Llama 3.1 70B on v6e-256, 5 microbatches, 37.9 and, with them in a ring, five times 8.66.
WHOLE_GATHERS: 128B on v4 4x8x8, (256, 1), gradients in a ring, 18.9 and 24.9, of which 3.6 and 17.8 % are exposed.
GATHERS on V3-32 and V2-32: 6.9B on (4, 8) with full remat 34.1 and 35.1, with dots 30.4 and 30.8 (none flows there, but
XLA gathers none twice to save memory, as without), 6B on (16, 2) 1.78 and 1.92; 2.8B 30.8 and 31.2.  With ALL_MEMORY,
too, 6.9B with dots 32.3.
TILES: with programs of before, on v5e-256 16B 8.89 and 9.07, 32B 10.6 and 11.2, 64B 11.1 and 11.7, 128B 12.1 and 12.2;
6B on v5e-16 0.668 and 0.710.  With 32768 a quarter longer to compile, 16B 8.78, 32B 10.5.  Only with large tiles are
activations and norms as fast inside the products that they come before or after: 16B 8.52, and 8.89 with each of them
apart; without TILES 9.89 and 9.42 (on v4, which has none larger, 128B on 256 chips takes 25.3 inside, 24.7 apart).
Of ring wires of before on v5p 4x4x4 20B 14.6 and 15.0, 60B 41.4 and 43.2; 70B as above 7.48 and 7.84; with 24576
14.7, 42.5, 7.55.
On v6e-256, Llama 3.1 70B 8.67 and 10.80, 8B 1.13 and 1.24, compiled in 183 and 132 s, alone; 32768 changes nothing
there, nor 24576 on v4.
On v5e xla_max_concurrent_async_collective_permutes=2 helps one model and not another (run.compiler_options): 16B on 256
chips, gradients in a ring, 8.72 and 8.78, TILES being 32768; with an earlier program 128B 12.7 and 12.2.
Tried with libtpu 0.0.42 and left out, predicted:
xla_enable_async_all_reduce with xla_tpu_enable_async_collective_fusion_fuse_all_reduce on v5e hides a third of the
gradients' all-reduces of a 16B model with chunked attention, and nothing beside a kernel; on v4 it does not compile.
xla_tpu_enable_ag_backward_pipelining, xla_tpu_enable_ici_ag_pipelining and xla_tpu_enable_ici_rs_pipelining: 6B on
v5e-16, gradients in a ring, 0.952 instead of 0.739.
xla_lhs_enable_release_start_policy: 60B on v5p 56.4 instead of 43.2.
Without effect: xla_tpu_host_transfer_overlap_limit=16 where a host keeps activations; for 16B on v5e
xla_tpu_use_aggressive_scheduling and xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter; for 6B on v5e-16
xla_tpu_rwb_fusion=false and xla_tpu_prefer_latch_optimized_rhs_layouts; for 6B on v4-32
xla_tpu_licm_size_inflation_ratio=0; for the ring wire on v4 xla_latency_hiding_scheduler_rerun, and on v5p
xla_lhs_prioritize_async_depth_over_stall and xla_tpu_scheduler_using_real_cost_model.
xla_tpu_async_collective_fusion_with_start_done_only takes gathers out of the products, which are then fewer to compile
(16B 8.86 instead of 8.89): but whether a gather goes on by itself, as the replay would have it, only a device can tell.
"""
COMPILER_OPTIONS["TPU v5p"] = COMPILER_OPTIONS["TPU v5"]


def compiler_options(kind: str, config: Config) -> dict[str, str]:
    """For `compile_with`: those that are known to help this step, and over them those of run.compiler_options."""
    with_host = WITH_HOST if config.model.offload and generation(kind) else {}
    with_ring = WITH_RING.get(kind, {}) if config.mesh.wire == Wire.ring else {}
    return COMPILER_OPTIONS.get(kind, {}) | with_host | with_ring | dict(config.run.compiler_options)


def compile_with(lowered: jax.stages.Lowered, options: Mapping[str, str]) -> Any:
    """The program.  Raises InputError where XLA has no such option for these devices, or it cannot have this value: of
    those given, or of the table, which a later XLA may not know."""
    try:
        return lowered.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        refused = re.search("INVALID_ARGUMENT: ((No such compile|While setting|Failed to parse) .*)", str(error))
        if refused is None:
            raise
        whose = "run.compiler_options, or COMPILER_OPTIONS of shmap_tp/hardware.py"
        raise InputError(f"{whose}: {refused[1].strip().rstrip(':')}") from error


GPU_LINK_RATE = {"NVIDIA A100": 300e9, "NVIDIA H100": 450e9, "NVIDIA H200": 450e9}
"""Bytes/s of all NVLinks of one GPU in one direction, by the beginning of its kind.  NVIDIA data sheets."""

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
"""By the name that `--version` takes."""


def generation(kind: str) -> Generation | None:
    """The generation of TPU that a device kind belongs to, or None."""
    kind = "TPU v5" if kind == "TPU v5p" else kind
    return next((found for found in GENERATIONS.values() if found.kind == kind), None)


@dataclass(frozen=True)
class Peak:
    """Dense matrix-product rate of all devices of a run, in FLOP/s, and its source in words."""

    flops: float
    source: str


def machine_peak(devices: list[jax.Device]) -> Peak | None:
    """Peak of all `devices` together: from the table, or on a CPU (which has no table) measured now.

    None where the device kind is not in the table: an MFU from a guessed peak is worse than none.
    """
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        return Peak(
            matmul_rate(), "this CPU's own float32 matmul of 2048 cubed, measured at start, all emulated devices"
        )
    return table_peak(kind, len(devices))


def table_peak(kind: str, devices: int) -> Peak | None:
    """Peak of so many devices of a kind, by the table; None where it is not in there."""
    if kind not in DEVICES:
        return None
    return Peak(DEVICES[kind].flops * devices, f"{devices} x {kind}: {DEVICES[kind].source}")


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
