"""Predict a training step on a slice that is not here: the step the trainer runs, compiled for it, and replayed."""

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
from shmap_tp.plan.aot_compile import Compiled, compile_ahead, coordinates
from shmap_tp.plan.hlo_parser import parse
from shmap_tp.plan.link_model import Links
from shmap_tp.plan.memory import state_bytes
from shmap_tp.plan.report import EXPLICIT, Row, mesh_fields, of_config
from shmap_tp.plan.schedule_simulator import simulate
from shmap_tp.plan.topologies import Slice, topology_devices
from shmap_tp.training.step import StepFunctions, build_step_functions

CACHE = Path(".cache/tpu")
"""Compiled programs, kept between runs."""

Builder = Callable[[Config, Mesh, DTypeLike], StepFunctions]


@dataclass(frozen=True)
class Prediction:
    """A predicted row, and what it was made from."""

    row: Row
    compiled: Compiled
    mesh: Mesh
    programs: StepFunctions

    @property
    def text(self) -> str | None:
        """The scheduled module; None where it does not fit."""
        return self.compiled.text

    @property
    def meta(self) -> dict:
        """What a reader of the scheduled module needs besides it."""
        return {
            "device_kind": self.row.device_kind,
            "coords": coordinates(self.mesh),
            "model_flops_per_device": self.row.model_flops_per_device,
        }


def predict(
    config: Config, asked: Slice, build: Builder = build_step_functions, cache: Path | None = CACHE
) -> Prediction:
    """Compile the step of `config` for a slice (in bfloat16, if its precision is auto), and replay it where it fits.

    What cannot fit whatever the compiler does, because the state and the gradients alone do not, is not compiled.
    Raises InputError where the mesh does not cover the slice, or the compiler is missing.
    """
    devices = topology_devices(asked)
    mesh = make_mesh(config.mesh, devices)
    precision = Precision.bfloat16 if config.train.precision == Precision.auto else config.train.precision
    programs = build(config, mesh, jnp.dtype(str(precision)))
    kind = devices[0].device_kind
    least = state_bytes(programs.shapes)
    if least > DEVICES[kind].memory:
        compiled = Compiled(None, least, DEVICES[kind].memory, None, 0.0)
    else:
        lowered = programs.step.lower(programs.shapes, programs.tokens)
        compiled = compile_ahead(lowered, mesh, cache, compiler_options(kind, config))
    row = Row(
        kind="predicted",
        program=EXPLICIT if build is build_step_functions else build.__module__,
        peak_bytes_per_device=compiled.peak_bytes,
        limit_bytes_per_device=compiled.limit_bytes,
        host_bytes_per_device=compiled.host_bytes,
        fits=compiled.fits,
        compile_seconds=compiled.seconds,
        versions={"jax": jax.__version__, "libtpu": importlib.metadata.version("libtpu")},
        **of_config(config, kernel_name(programs.attention), len(devices), table_peak(kind, len(devices))),
        **mesh_fields(mesh, config),
        **_spent(compiled, asked, mesh),
    )
    return Prediction(row, compiled, mesh, programs)


def _spent(compiled: Compiled, asked: Slice, mesh: Mesh) -> dict:
    """The fields of a Row that a replay fills; none where there is nothing to replay."""
    if compiled.text is None:
        return {}
    spent = simulate(parse(compiled.text), Links.of(asked.generation, coordinates(mesh)))
    return {
        "step_seconds": spent.seconds,
        "comm_seconds": spent.comm_seconds,
        "exposed_comm_seconds": spent.exposed_comm_seconds,
        "places": dict(spent.places),
    }
