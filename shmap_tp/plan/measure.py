"""Time a training step on the devices that are here."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from shmap_tp.config.schema import Config
from shmap_tp.hardware.devices import DEVICES, machine_peak
from shmap_tp.hardware.xla_options import compile_with
from shmap_tp.layers.attention_selection import kernel_name
from shmap_tp.plan.aot_compile import coordinates, needed
from shmap_tp.plan.predict import Builder
from shmap_tp.plan.report import EXPLICIT, Row, mesh_fields, of_config
from shmap_tp.training.step import StepFunctions, build_step_functions

WARM_UP = 2
"""Steps that are run before those that are timed."""


@dataclass(frozen=True)
class Measurement:
    """A measured row, and the program it was measured on."""

    row: Row
    text: str | None
    mesh: Mesh

    @property
    def meta(self) -> dict:
        """What a reader of the module needs besides it; emulated devices and GPUs have no coordinates."""
        has_coordinates = hasattr(self.mesh.devices.flat[0], "coords")
        return {
            "device_kind": self.row.device_kind,
            "coords": coordinates(self.mesh) if has_coordinates else None,
            "model_flops_per_device": self.row.model_flops_per_device,
        }


def measure(
    config: Config, mesh: Mesh, dtype: DTypeLike, steps: int, build: Builder = build_step_functions
) -> Measurement:
    """Compile the step of `config`, run it WARM_UP times, then time `steps` more.

    Where the devices' memory is too small, the row says so.
    """
    devices = list(mesh.devices.flat)
    first = devices[0]
    programs = build(config, mesh, dtype)
    facts = of_config(config, kernel_name(programs.attention), len(devices), machine_peak(devices)) | {
        "program": EXPLICIT if build is build_step_functions else build.__module__,
        "kind": "emulated" if first.platform == "cpu" else "measured",
        "versions": {"jax": jax.__version__},
        "limit_bytes_per_device": DEVICES[first.device_kind].memory if first.device_kind in DEVICES else None,
        **mesh_fields(mesh, config),
    }
    start, step = time.perf_counter(), None
    try:
        step = compile_with(programs.step.lower(programs.shapes, programs.tokens), facts["compiler_options"])
        compile_seconds = time.perf_counter() - start
        seconds = step_seconds(stepper(config, programs, step), steps)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        needs = needed(error) or (most_bytes(step.memory_analysis()) if step else None, None)
        facts |= {"peak_bytes_per_device": needs[0], "fits": False, "compile_seconds": time.perf_counter() - start}
        return Measurement(Row(**facts), None, mesh)
    stats = (first.memory_stats() or {}) if first.platform != "cpu" else {}
    facts |= {
        "step_seconds": statistics.median(seconds),
        "step_seconds_range": [min(seconds), max(seconds)],
        "peak_bytes_per_device": stats.get("peak_bytes_in_use", most_bytes(step.memory_analysis())),
        "host_bytes_per_device": step.memory_analysis().host_temp_size_in_bytes,
        "fits": True,
        "compile_seconds": compile_seconds,
    }
    return Measurement(Row(**facts), step.as_text(), mesh)


def most_bytes(memory: Any) -> int:
    """What a device needs, where it does not say how much it used: the compiler's own figure; which, where the host
    keeps some, counts that with it, so that then all of the device's is counted as if there at once."""
    if not memory.host_temp_size_in_bytes:
        return memory.peak_memory_in_bytes
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes


def stepper(config: Config, programs: StepFunctions, step: jax.stages.Compiled) -> Callable[[], dict]:
    """A function that dispatches one more step on the same random tokens, and returns its metrics, unawaited."""
    generator = np.random.default_rng(0)
    whole = generator.integers(0, config.model.vocabulary, programs.tokens.shape, np.int32)
    tokens = jax.make_array_from_callback(whole.shape, programs.tokens.sharding, lambda index: whole[index])
    state = [programs.init()]

    def once() -> dict:
        state[0], metrics = step(state[0], tokens)
        return metrics

    return once


def step_seconds(once: Callable[[], dict], steps: int) -> list[float]:
    """Seconds of each of `steps` steps, by when each one's own outputs are there, the next being under way already.

    The outputs of a step are outputs of one program: none is there before all its work is done.
    """
    for _ in range(WARM_UP):
        jax.block_until_ready(once())
    pending, ends = once(), []
    for i in range(steps + 1):
        following = once() if i < steps else None
        jax.block_until_ready(pending)
        ends.append(time.perf_counter())
        pending = following
    return list(np.diff(ends))
