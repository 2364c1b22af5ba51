"""XLA compiler options for the training step, by kind of device.

No value here is XLA's default, and each makes some step faster.  The predicted step times that justify them, and the
options that were tried and left out, are in `docs/performance-notes.md`.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax

from shmap_tp.config.choices import TensorParallelMode
from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import generation

SCHEDULER_MEMORY = "xla_tpu_scheduler_percent_shared_memory_limit"

ALL_MEMORY = {SCHEDULER_MEMORY: "100"}
"""Let collectives overlap computation even where memory is tight."""

HOST_OFFLOAD = {SCHEDULER_MEMORY: "200"}
"""For model.offload: the scheduler seems to count activations in host memory as device memory, so the limit is doubled.
A program with little offloading may not fit with this limit."""

ASYNC_ALL_GATHER = {"xla_enable_async_all_gather": "true"}
"""Let all-gathers overlap matmuls."""

ASYNC_FULL_ALL_GATHER = {"xla_tpu_prefer_async_allgather_to_allreduce": "true"}
"""Also let all-gathers over all devices of a 3D torus overlap, which XLA would replace by synchronous all-reduces; on
TPU7x only those of float8."""

SPARSE_CORE_COLLECTIVES = ASYNC_FULL_ALL_GATHER | dict.fromkeys(
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
"""Execute all-gathers and reduce-scatters on the SparseCores, so that the TensorCores compute meanwhile.  TPU7x does so
by default.  MaxText sets the last two options together with the others."""

ASYNC_PERMUTES = {"xla_tpu_use_aggressive_scheduling": "true", "xla_max_concurrent_async_collective_permutes": "2"}
"""Place more matmuls between start and end of a ppermute, and allow only the two directions of a ring at a time."""

SCOPED_VMEM_KIB = "xla_tpu_scoped_vmem_limit_kib"
"""Vector memory in KiB that one operation may use; more allows larger matmul tiles, which take longer to compile."""

SHORTER_FUSION_ESTIMATE = {"xla_lhs_output_fusion_latency_multiplier": "0.4"}
"""Estimate matmuls as shorter, to match the scheduler's estimate of ppermutes, which is too short; otherwise it starts
the ppermutes of collective matmul too late."""

COLLECTIVE_MATMUL_OPTIONS = {"TPU v4": SHORTER_FUSION_ESTIMATE, "TPU v5 lite": SHORTER_FUSION_ESTIMATE}
"""Additional options for mesh.tensor_parallel=collective_matmul, by jax.Device.device_kind."""

COMPILER_OPTIONS = {
    "TPU v2": ASYNC_ALL_GATHER,
    "TPU v3": ASYNC_ALL_GATHER,
    "TPU v4": ASYNC_ALL_GATHER | ASYNC_FULL_ALL_GATHER | ALL_MEMORY,
    "TPU v5 lite": ALL_MEMORY | {SCOPED_VMEM_KIB: "24576"},
    "TPU v5": ALL_MEMORY | ASYNC_PERMUTES | SPARSE_CORE_COLLECTIVES | {SCOPED_VMEM_KIB: "32768"},
    "TPU v6 lite": SPARSE_CORE_COLLECTIVES | {SCOPED_VMEM_KIB: "65536"},
    "TPU7x": ASYNC_FULL_ALL_GATHER | {SCOPED_VMEM_KIB: "61440"},
}
"""Options for every training step, by jax.Device.device_kind."""
COMPILER_OPTIONS["TPU v5p"] = COMPILER_OPTIONS["TPU v5"]


def compiler_options(kind: str, config: Config) -> dict[str, str]:
    """The options for the training step of `config` on devices of `kind`; run.compiler_options overrides the tables."""
    is_collective_matmul = config.mesh.tensor_parallel == TensorParallelMode.collective_matmul
    offload = HOST_OFFLOAD if config.model.offload and generation(kind) else {}
    collective_matmul = COLLECTIVE_MATMUL_OPTIONS.get(kind, {}) if is_collective_matmul else {}
    return COMPILER_OPTIONS.get(kind, {}) | offload | collective_matmul | dict(config.run.compiler_options)


def compile_with(lowered: jax.stages.Lowered, options: Mapping[str, str | bool]) -> Any:
    """Compile `lowered` with `options`.  Raises UserError if this version of XLA has no such option for these devices,
    or rejects its value."""
    try:
        return lowered.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        rejected = re.search("INVALID_ARGUMENT: ((No such compile|While setting|Failed to parse) .*)", str(error))
        if rejected is None:
            raise
        where = "run.compiler_options, or COMPILER_OPTIONS of shmap_tp/hardware/xla_options.py"
        raise UserError(f"{where}: {rejected[1].strip().rstrip(':')}") from error
