"""Time a training step on the attached devices."""

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
from shmap_tp.plan.aot_compile import parse_out_of_memory
from shmap_tp.plan.predict import Builder, build_programs, facts_beside_text, program_name
from shmap_tp.plan.report import Row, config_fields, mesh_fields
from shmap_tp.training.step import CONFIGURED, Components, StepFunctions, build_step_functions

WARM_UP = 2
"""Steps that run before the timed ones."""


@dataclass(frozen=True)
class Measurement:
    """A measured row, and the program it was measured on."""

    row: Row
    text: str | None
    mesh: Mesh

    @property
    def meta(self) -> dict:
        return facts_beside_text(self.row, self.mesh)


def measure(
    config: Config,
    mesh: Mesh,
    dtype: DTypeLike,
    steps: int,
    build: Builder = build_step_functions,
    *,
    components: Components = CONFIGURED,
) -> Measurement:
    """Compile the step of `config`, run it WARM_UP times, then time `steps` more.

    `components` replace parts that the configuration names (docs/extending.md).  If it runs out of memory
    the row says so (`fits`).
    """
    devices = list(mesh.devices.flat)
    first = devices[0]
    programs = build_programs(build, config, mesh, dtype, components)
    kernel = kernel_name(programs.attention)
    fields = config_fields(config, kernel, len(devices), machine_peak(devices), components) | {
        "program": program_name(build),
        "kind": "emulated" if first.platform == "cpu" else "measured",
        "versions": {"jax": jax.__version__},
        "limit_bytes_per_device": DEVICES[first.device_kind].memory if first.device_kind in DEVICES else None,
        **mesh_fields(mesh, config),
    }
    start, step = time.perf_counter(), None
    try:
        step = compile_with(programs.step.lower(programs.shapes, programs.tokens), fields["compiler_options"])
        compile_seconds = time.perf_counter() - start
        seconds = time_steps(step_caller(config, programs, step), steps, overlap=first.platform != "cpu")
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        needed, _ = parse_out_of_memory(error) or (peak_bytes(step.memory_analysis()) if step else None, None)
        fields |= {"peak_bytes_per_device": needed, "fits": False, "compile_seconds": time.perf_counter() - start}
        return Measurement(Row(**fields), None, mesh)
    stats = (first.memory_stats() or {}) if first.platform != "cpu" else {}
    fields |= {
        "step_seconds": statistics.median(seconds),
        "step_seconds_range": [min(seconds), max(seconds)],
        "peak_bytes_per_device": stats.get("peak_bytes_in_use", peak_bytes(step.memory_analysis())),
        "host_bytes_per_device": step.memory_analysis().host_temp_size_in_bytes,
        "fits": True,
        "compile_seconds": compile_seconds,
    }
    return Measurement(Row(**fields), step.as_text(), mesh)


def peak_bytes(memory: Any) -> int:
    """Peak device memory by the compiler's analysis, for devices that do not report their memory use.

    With host offload the compiler's peak includes host memory; then the sum of all device allocations, an upper bound.
    """
    if not memory.host_temp_size_in_bytes:
        return memory.peak_memory_in_bytes
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes


def step_caller(config: Config, programs: StepFunctions, step: jax.stages.Compiled) -> Callable[[], dict]:
    """A function that dispatches one more step on the same random tokens and returns its metrics without waiting."""
    generator = np.random.default_rng(0)
    ids = generator.integers(0, config.model.vocabulary, programs.tokens.shape, np.int32)
    tokens = jax.make_array_from_callback(ids.shape, programs.tokens.sharding, lambda index: ids[index])
    state = [programs.init()]

    def dispatch() -> dict:
        state[0], metrics = step(state[0], tokens)
        return metrics

    return dispatch


def time_steps(dispatch: Callable[[], dict], steps: int, *, overlap: bool = True) -> list[float]:
    """Seconds of each of `steps` steps, from the completion of one to the completion of the next.

    With `overlap` the next step is dispatched before the current one is awaited.  A CPU may compute a short step while
    it is dispatched: there each step is awaited before the next.  All outputs of a step come from one program, so they
    are ready only when all of its work is done.
    """
    for _ in range(WARM_UP):
        jax.block_until_ready(dispatch())
    if not overlap:
        times = [time.perf_counter()]
        for _ in range(steps):
            jax.block_until_ready(dispatch())
            times.append(time.perf_counter())
        return list(np.diff(times))
    pending, ends = dispatch(), []
    for i in range(steps + 1):
        following = dispatch() if i < steps else None
        jax.block_until_ready(pending)
        ends.append(time.perf_counter())
        pending = following
    return list(np.diff(ends))
