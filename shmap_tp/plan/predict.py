"""Predict a training step on devices that are not attached: compile the trainer's step and simulate its schedule.

For TPUs the time is that of the compiled schedule.  For GPUs memory and collectives are those of the compiled program,
and the time is an estimate, not calibrated: no GPU has confirmed it.
"""

import importlib.metadata
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import Mesh
from jax.typing import DTypeLike

from shmap_tp.config.choices import AttentionKernel, Documents, Precision
from shmap_tp.config.schema import Config
from shmap_tp.hardware.devices import DEVICES, table_peak
from shmap_tp.hardware.xla_options import compiler_options
from shmap_tp.layers.attention_selection import kernel_name
from shmap_tp.layers.experts import even_share
from shmap_tp.parallel.mesh import axis_sizes, make_mesh
from shmap_tp.parallel.partitioning import shard_bytes
from shmap_tp.plan.gpu import COMPILER, CUDNN, Gpu, Nodes, node_devices, usable_bytes
from shmap_tp.plan.hlo_parser import parse_hlo
from shmap_tp.plan.ledger import Entry, communication_in_jaxpr, format_bytes, without_trivial_axes
from shmap_tp.plan.report import ESTIMATED, EXPLICIT, GSPMD, PREDICTED, Row, config_fields, mesh_fields
from shmap_tp.plan.schedule_simulator import SimulatedSchedule, simulate
from shmap_tp.plan.targets import Compiled, PlannedDevice, Target, compile_ahead_of_time, compile_for_gpu, link_model
from shmap_tp.plan.tpu import topology_devices
from shmap_tp.training.step import CONFIGURED, Components, StepFunctions, build_step_functions

CACHE = Path(".cache/tpu")
"""Compiled programs for TPUs, kept between runs."""

Builder = Callable[..., StepFunctions]
"""(config, mesh, dtype, components, end_of_text) -> the programs of a step: `build_step_functions`, or a baseline."""


def step_dtype(config: Config, auto: Precision = Precision.bfloat16) -> DTypeLike:
    """What the step of `config` computes in; `auto` if train.precision is auto."""
    return jnp.dtype(str(auto if config.train.precision == Precision.auto else config.train.precision))


def build_programs(
    build: Builder, config: Config, mesh: Mesh, dtype: DTypeLike, components: Components
) -> StepFunctions:
    """The programs of a step; where documents are isolated, id 0 ends one.  Raises UserError."""
    isolated = config.data.documents == Documents.isolated
    return build(config, mesh, dtype, components, 0 if isolated else None)


def step_communication(config: Config, dtype: DTypeLike, components: Components = CONFIGURED) -> list[Entry]:
    """What one optimizer step of `config` communicates, computing in `dtype`, as it is traced; no device is needed.

    Raises ValueError where it is unknown how often something runs.
    """
    chosen = replace(config, model=replace(config.model, attention=AttentionKernel.chunked))  # no kernel communicates
    devices = math.prod(axis_sizes(config.mesh).values())  # also of an axis that MeshConfig does not know
    mesh = make_mesh(config.mesh, [PlannedDevice("cpu") for _ in range(devices)])
    programs = build_programs(build_step_functions, chosen, mesh, dtype, components)
    return _traced_communication(programs.step.trace(programs.shapes, programs.tokens), mesh)


def _traced_communication(traced: jax.stages.Traced, mesh: Mesh) -> list[Entry]:
    """The entries without axes of size 1, whose collectives do nothing."""
    return without_trivial_axes(communication_in_jaxpr(traced.jaxpr.jaxpr), dict(mesh.shape))


@dataclass(frozen=True)
class Prediction:
    """A predicted row, and the program it was predicted from."""

    row: Row
    compiled: Compiled
    mesh: Mesh
    programs: StepFunctions
    traced: jax.stages.Traced
    schedule: SimulatedSchedule | None
    """None if the program does not fit."""

    @property
    def text(self) -> str | None:
        """The scheduled module; None if the program does not fit."""
        return self.compiled.text

    @property
    def communication(self) -> list[Entry]:
        """What the traced step communicates."""
        return _traced_communication(self.traced, self.mesh)


def predict(
    config: Config,
    target: Target,
    build: Builder = build_step_functions,
    cache: Path | None = CACHE,
    *,
    record: bool = False,
    components: Components = CONFIGURED,
) -> Prediction:
    """Compile the step of `config` for devices that are not attached, and simulate its schedule if it fits.

    The step computes in bfloat16 if train.precision is auto.  A configuration whose parameters, optimizer state and
    gradients alone exceed the memory is not compiled.  With `record` the schedule has a timeline.  `components` replace
    parts that the configuration names (docs/extending.md).  Programs for TPUs are kept in `cache`.
    Raises UserError where the mesh does not cover the devices, the compiler is missing, or it cannot compile the step.
    """
    gpu = target.gpu if isinstance(target, Nodes) else None
    devices = node_devices(target) if gpu else topology_devices(target)
    mesh, kind = make_mesh(config.mesh, devices), devices[0].device_kind
    options, limit = compiler_options(kind, config), usable_bytes(gpu) if gpu else DEVICES[kind].memory
    with answered_for(gpu) if gpu else nullcontext():
        programs = build_programs(build, config, mesh, step_dtype(config), components)
        traced = programs.step.trace(programs.shapes, programs.tokens)
        if (minimum := state_bytes(programs)) > limit:
            compiled = Compiled(None, minimum, limit, None, 0.0)
        else:
            lowered = traced.lower()
            compiled = (
                compile_for_gpu(lowered, kind, options, limit)
                if gpu
                else compile_ahead_of_time(lowered, mesh, cache, options)
            )
    schedule = None
    if compiled.text is not None:
        share = even_share(config.model, config.mesh)
        schedule = simulate(parse_hlo(compiled.text), link_model(target, mesh), record=record, chosen_share=share)
    compiler = COMPILER if gpu else "libtpu"
    peak = table_peak(kind, len(devices))
    row = Row(
        kind=ESTIMATED if gpu else PREDICTED,
        program=EXPLICIT if build is build_step_functions else GSPMD,
        peak_bytes_per_device=compiled.peak_bytes,
        limit_bytes_per_device=compiled.limit_bytes,
        host_bytes_per_device=compiled.host_bytes,
        fits=compiled.fits,
        compile_seconds=compiled.seconds,
        versions={name: importlib.metadata.version(name) for name in ("jax", compiler)},
        **config_fields(config, kernel_name(programs.attention), len(devices), peak, components),
        **mesh_fields(mesh, config),
        **schedule_fields(schedule),
    )
    return Prediction(row, compiled, mesh, programs, traced, schedule)


def schedule_fields(schedule: SimulatedSchedule | None) -> dict:
    """The fields of a Row that come from the simulation."""
    if schedule is None:
        return {}
    return {
        "step_seconds": schedule.seconds,
        "comm_seconds": schedule.comm_seconds,
        "exposed_comm_seconds": schedule.exposed_comm_seconds,
        "scopes": dict(schedule.scopes),
    }


# Memory, by kind


def gradient_bytes(programs: StepFunctions) -> int:
    """Bytes of one device for a gradient of each parameter that is trained."""
    return shard_bytes(eqx.filter(programs.shapes.params, programs.trained))


def state_bytes(programs: StepFunctions) -> int:
    """The least that a step needs: parameters, optimizer state, and gradients of what is trained."""
    shapes = programs.shapes
    return shard_bytes(shapes.params) + gradient_bytes(programs) + shard_bytes(shapes.optimizer)


def memory_by_kind(programs: StepFunctions, compiled: Compiled) -> dict[str, float]:
    """Bytes per device by kind; the last kind is the remainder of the peak.

    parameters, optimizer state   exact, from shapes and shardings
    gradients                     one float32 accumulator per parameter that is trained
    activations, temporaries      the remainder: saved activations, bfloat16 copies of weights, temporaries, padding
    """
    kinds = {
        "parameters": shard_bytes(programs.shapes.params),
        "optimizer state": shard_bytes(programs.shapes.optimizer),
        "gradients": gradient_bytes(programs),
    }
    return kinds | {"activations, temporaries": max(0, compiled.peak_bytes - sum(kinds.values()))}


def format_memory(kinds: dict[str, float], compiled: Compiled) -> str:
    """An aligned table: bytes, and percent of the device's memory."""
    rows = [*kinds.items(), ("total (peak)", compiled.peak_bytes), ("available", compiled.limit_bytes)]
    lines = [f"  {name:<26}{format_bytes(int(size)):>10} {size / compiled.limit_bytes:>6.1%}" for name, size in rows]
    if compiled.host_bytes:
        lines.append(f"  {'offloaded to host memory':<26}{format_bytes(compiled.host_bytes):>10}")
    return "\n".join(lines)


# What tracing cuDNN's attention asks of this machine: the one place of the planner that uses private names of JAX.
#
# `jax.nn.dot_product_attention(implementation="cudnn")` asks the GPU of this machine for its compute capability, and
# the installed cuDNN for its version, while it is traced, in `jax._src.cudnn.fused_attention_stablehlo`.  A planner has
# neither.  No argument or option of JAX answers instead: the questions come before lowering, so that
# `trace(...).lower(lowering_platforms=("cuda",))` changes nothing, and a described topology is no local device.  To
# write the call with `jax.ffi.ffi_call` would repeat JAX's description of cuDNN's graph, and plan another program than
# the trainer runs.


def answered_for(gpu: Gpu) -> Any:
    """A context in which tracing cuDNN's attention is given the compute capability of `gpu`, and the version CUDNN."""
    return mock.patch.multiple(
        fused_attention_stablehlo,
        check_compute_capability=lambda wanted: gpu.capability >= tuple(map(int, wanted.split("."))),
        is_cuda_compute_capability_equal=lambda wanted: gpu.capability == tuple(map(int, wanted.split("."))),
        check_cudnn_version=lambda: CUDNN[0] * 10000 + CUDNN[1] * 100 + CUDNN[2],
    )
