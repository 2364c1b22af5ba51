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
from collections.abc import Mapping
from typing import Any

import jax

from shmap_tp.config.schema import Config, TensorParallelMode
from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import generation

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
    with_ring = WITH_RING.get(kind, {}) if config.mesh.tensor_parallel == TensorParallelMode.collective_matmul else {}
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
        raise UserError(f"{whose}: {refused[1].strip().rstrip(':')}") from error
