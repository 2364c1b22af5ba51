"""Predict a training step on a slice that is not here: the step the trainer runs, compiled for it, and replayed."""

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from shmap_tp.config import Config, Precision
from shmap_tp.hardware import table_peak
from shmap_tp.mesh import Torus, make_mesh
from shmap_tp.plan.ahead import Compiled, compile_ahead, coordinates
from shmap_tp.plan.links import Links
from shmap_tp.plan.module import parse
from shmap_tp.plan.replay import replay
from shmap_tp.plan.row import Row, of_config
from shmap_tp.plan.slices import Slice, topology_devices
from shmap_tp.step import Programs, build_programs

CACHE = Path(".cache/tpu")
"""Compiled programs, kept between runs."""

Builder = Callable[[Config, Mesh, DTypeLike], Programs]


@dataclass(frozen=True)
class Prediction:
    """A predicted row, and what it was made from."""

    row: Row
    compiled: Compiled
    mesh: Mesh
    programs: Programs

    @property
    def meta(self) -> dict:
        """What a reader of the scheduled module needs besides it."""
        return {
            "device_kind": self.row.device_kind,
            "coords": coordinates(self.mesh),
            "model_flops_per_device": self.row.model_flops_per_device,
        }


def predict(config: Config, asked: Slice, build: Builder = build_programs, cache: Path | None = CACHE) -> Prediction:
    """Compile the step of `config` for a slice (in bfloat16, if its precision is auto), and replay it where it fits.

    Raises InputError where the mesh does not cover the slice, or the compiler is missing.
    """
    devices = topology_devices(asked)
    mesh = make_mesh(config.mesh, devices)
    precision = Precision.bfloat16 if config.train.precision == Precision.auto else config.train.precision
    programs = build(config, mesh, jnp.dtype(str(precision)))
    compiled = compile_ahead(programs.step.lower(programs.shapes, programs.tokens), mesh, cache)
    spent = None
    if compiled.fits:
        spent = replay(parse(compiled.text), Links.of(asked.generation, coordinates(mesh)))
    torus = Torus.of(devices)
    kind = devices[0].device_kind
    row = Row(
        kind="predicted",
        device_kind=kind,
        chips=len(devices) // asked.generation.cores,
        topology=asked.topology,
        slices=asked.slices,
        tile=list(config.mesh.tile or torus.closest_tile(config.mesh.mp)),
        step_seconds=spent.seconds if spent else None,
        step_seconds_range=None,
        peak_bytes_per_device=compiled.peak_bytes,
        limit_bytes_per_device=compiled.limit_bytes,
        fits=compiled.fits,
        compile_seconds=compiled.seconds,
        comm_seconds=spent.comm_seconds if spent else None,
        exposed_comm_seconds=spent.exposed_comm_seconds if spent else None,
        places=dict(spent.places) if spent else {},
        versions={"jax": jax.__version__, "libtpu": importlib.metadata.version("libtpu")},
        **of_config(config, len(devices), table_peak(kind, len(devices))),
    )
    return Prediction(row, compiled, mesh, programs)
