"""Estimate a training step on GPUs that are not attached: memory and collectives as compiled, time by formulas.

XLA for GPU compiles the trainer's step (`targets`).  Its memory and its collectives are those of the program that would
run; the time is an estimate, not calibrated: no GPU has confirmed it.
"""

import importlib.metadata
import os
import time

import jax

from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import GIB, table_peak
from shmap_tp.hardware.xla_options import compile_with, compiler_options
from shmap_tp.layers.attention_selection import kernel_name
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.plan.aot_compile import Compiled
from shmap_tp.plan.gpu.costs import GpuCosts
from shmap_tp.plan.gpu.links import GpuLinks
from shmap_tp.plan.gpu.targets import COMPILER, Gpu, Nodes, attention_of, node_devices
from shmap_tp.plan.hlo_parser import parse_hlo
from shmap_tp.plan.memory import state_bytes
from shmap_tp.plan.predict import Prediction, schedule_fields, step_dtype
from shmap_tp.plan.report import ESTIMATED, EXPLICIT, Row, config_fields, mesh_fields
from shmap_tp.plan.schedule_simulator import SimulatedSchedule, simulate_with
from shmap_tp.plan.transfers import TransferCosts
from shmap_tp.training.step import CONFIGURED, StepFunctions, build_step_functions

PLANNING_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
"""XLA options of the planner only: without a GPU to tune them, Triton's tiles would be 16 x 8.  On a GPU XLA may choose
Triton for a matmul; the shapes stay the same."""

UNCOUNTED = 3 * GIB
"""Memory of a GPU that XLA does not count: NCCL's buffers (1 to 2 GiB), CUDA's context, cuDNN's workspace."""
POOL = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def usable_bytes(gpu: Gpu) -> float:
    """What a program can use: JAX's memory pool, by default 75 % of the memory, and never what is UNCOUNTED.

    Raises UserError where POOL is set to no fraction.
    """
    given = os.environ.get(POOL, "0.75")
    try:
        fraction = float(given)
    except ValueError:
        raise UserError(f"{POOL}={given} is no number; give a fraction such as 0.9, or unset it") from None
    return min(fraction * gpu.device.memory, gpu.device.memory - UNCOUNTED)


def estimate(config: Config, target: Nodes, *, record: bool = False) -> Prediction:
    """Compile the step of `config` for GPU nodes, and estimate its time if it fits.

    The step computes in bfloat16 if train.precision is auto.  Raises UserError where the mesh does not cover the GPUs,
    the compiler is missing, or the step cannot be compiled for them.
    """
    devices = node_devices(target)
    mesh = make_mesh(config.mesh, devices)
    with attention_of(target.gpu):
        programs = build_step_functions(config, mesh, step_dtype(config), CONFIGURED)
        compiled = _compile(config, target.gpu, programs)
    schedule = _simulate(compiled, target, record) if compiled.fits else None
    kind = target.gpu.kind
    row = Row(
        kind=ESTIMATED,
        program=EXPLICIT,
        peak_bytes_per_device=compiled.peak_bytes,
        limit_bytes_per_device=compiled.limit_bytes,
        host_bytes_per_device=compiled.host_bytes,
        fits=compiled.fits,
        compile_seconds=compiled.seconds,
        versions={name: importlib.metadata.version(name) for name in ("jax", COMPILER)},
        **config_fields(config, kernel_name(programs.attention), len(devices), table_peak(kind, len(devices))),
        **mesh_fields(mesh, config),
        **schedule_fields(schedule),
    )
    return Prediction(row, compiled, mesh, programs, schedule)


def _compile(config: Config, gpu: Gpu, programs: StepFunctions) -> Compiled:
    """XLA compiles a program that does not fit all the same; its text is dropped then, as the TPU compiler does."""
    limit, minimum = usable_bytes(gpu), state_bytes(programs.shapes)
    if minimum > limit:
        return Compiled(None, minimum, limit, None, 0.0)
    start = time.perf_counter()
    lowered = programs.step.lower(programs.shapes, programs.tokens)
    try:
        program = compile_with(lowered, PLANNING_OPTIONS | compiler_options(gpu.kind, config))
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"XLA cannot compile this step for {gpu.kind}: {str(error).splitlines()[0]}") from error
    memory, seconds = program.memory_analysis(), time.perf_counter() - start
    fits = memory.peak_memory_in_bytes <= limit
    return Compiled(
        program.as_text() if fits else None,
        memory.peak_memory_in_bytes,
        limit,
        memory.argument_size_in_bytes,
        seconds,
        memory.host_temp_size_in_bytes,
    )


def _simulate(compiled: Compiled, target: Nodes, record: bool) -> SimulatedSchedule:
    module = parse_hlo(compiled.text)
    transfers = TransferCosts(module, GpuLinks(target))
    return simulate_with(module, transfers, GpuCosts(module, target.gpu), record)
