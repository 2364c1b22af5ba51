"""Predict a training step on a slice that is not attached: compile the trainer's step and simulate its schedule."""

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from shmap_tp.config.schema import Config, Precision
from shmap_tp.hardware.devices import DEVICES, table_peak
from shmap_tp.hardware.xla_options import compiler_options
from shmap_tp.layers.attention_selection import kernel_name
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.plan.aot_compile import Compiled, compile_ahead_of_time, coordinates
from shmap_tp.plan.hlo_parser import parse_hlo
from shmap_tp.plan.link_model import LinkModel
from shmap_tp.plan.memory import state_bytes
from shmap_tp.plan.report import EXPLICIT, GSPMD, PREDICTED, Row, config_fields, mesh_fields
from shmap_tp.plan.schedule_simulator import SimulatedSchedule, simulate
from shmap_tp.plan.topologies import Slice, topology_devices
from shmap_tp.training.step import CONFIGURED, Components, StepFunctions, build_step_functions

CACHE = Path(".cache/tpu")
"""Compiled programs, kept between runs."""

Builder = Callable[..., StepFunctions]
"""(config, mesh, dtype) -> the programs of a step; `build_step_functions` also takes components."""


def program_name(build: Builder) -> str:
    """The `program` field of a row: explicit for our step functions, gspmd for the GSPMD baseline."""
    return EXPLICIT if build is build_step_functions else GSPMD


def step_dtype(config: Config, auto: Precision = Precision.bfloat16) -> DTypeLike:
    """What the step of `config` computes in; `auto` if train.precision is auto."""
    return jnp.dtype(str(auto if config.train.precision == Precision.auto else config.train.precision))


def build_programs(
    build: Builder, config: Config, mesh: Mesh, dtype: DTypeLike, components: Components
) -> StepFunctions:
    """The programs of a step.  Only `build_step_functions` can be given components: the GSPMD baseline is written for
    the blocks of this project."""
    assert components == CONFIGURED or build is build_step_functions, "the GSPMD baseline takes no components"
    return build(config, mesh, dtype, components) if build is build_step_functions else build(config, mesh, dtype)


def facts_beside_text(row: Row, mesh: Mesh) -> dict:
    """What a reader of a compiled module needs in addition to its text; only TPUs have coordinates."""
    return {
        "device_kind": row.device_kind,
        "coords": coordinates(mesh) if hasattr(mesh.devices.flat[0], "coords") else None,
        "model_flops_per_device": row.model_flops_per_device,
    }


@dataclass(frozen=True)
class Prediction:
    """A predicted row, and the program it was predicted from."""

    row: Row
    compiled: Compiled
    mesh: Mesh
    programs: StepFunctions
    schedule: SimulatedSchedule | None
    """None if the program does not fit."""

    @property
    def text(self) -> str | None:
        """The scheduled module; None if the program does not fit."""
        return self.compiled.text

    @property
    def meta(self) -> dict:
        return facts_beside_text(self.row, self.mesh)


def predict(
    config: Config,
    target: Slice,
    build: Builder = build_step_functions,
    cache: Path | None = CACHE,
    *,
    record: bool = False,
    components: Components = CONFIGURED,
) -> Prediction:
    """Compile the step of `config` for a slice and simulate its schedule if it fits.

    The step computes in bfloat16 if train.precision is auto.  A configuration whose parameters, optimizer state and
    gradients alone exceed the memory is not compiled.  With `record` the schedule has a timeline.  `components` replace
    parts that the configuration names (docs/extending.md).
    Raises UserError where the mesh does not cover the slice, or the compiler is missing.
    """
    devices = topology_devices(target)
    mesh = make_mesh(config.mesh, devices)
    programs = build_programs(build, config, mesh, step_dtype(config), components)
    kind = devices[0].device_kind
    minimum = state_bytes(programs.shapes)
    if minimum > DEVICES[kind].memory:
        compiled = Compiled(None, minimum, DEVICES[kind].memory, None, 0.0)
    else:
        lowered = programs.step.lower(programs.shapes, programs.tokens)
        compiled = compile_ahead_of_time(lowered, mesh, cache, compiler_options(kind, config))
    schedule = None
    if compiled.text is not None:
        link_model = LinkModel.of(target.generation, coordinates(mesh))
        schedule = simulate(parse_hlo(compiled.text), link_model, record=record)
    row = Row(
        kind=PREDICTED,
        program=program_name(build),
        peak_bytes_per_device=compiled.peak_bytes,
        limit_bytes_per_device=compiled.limit_bytes,
        host_bytes_per_device=compiled.host_bytes,
        fits=compiled.fits,
        compile_seconds=compiled.seconds,
        versions={"jax": jax.__version__, "libtpu": importlib.metadata.version("libtpu")},
        **config_fields(
            config, kernel_name(programs.attention), len(devices), table_peak(kind, len(devices)), components
        ),
        **mesh_fields(mesh, config),
        **schedule_fields(schedule),
    )
    return Prediction(row, compiled, mesh, programs, schedule)


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
