"""Time a training step on attached or emulated devices, and print and write the rows of a benchmark of it."""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from shmap_tp.config.choices import Precision
from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import DEVICES, machine_peak
from shmap_tp.hardware.xla_options import compile_with
from shmap_tp.layers.attention_selection import kernel_name
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.plan.flags import Parser, add_mesh_flags, add_step_flags, append_json, command_line
from shmap_tp.plan.predict import Builder, Prediction, build_programs, step_dtype
from shmap_tp.plan.report import EXPLICIT, FORMULA, GSPMD, ROW_INDENT, Row, config_fields, format_row, mesh_fields
from shmap_tp.plan.targets import coordinates, parse_out_of_memory
from shmap_tp.runtime.console import wrap_lines
from shmap_tp.runtime.distributed import emulate_cpu_devices
from shmap_tp.runtime.files import replacing
from shmap_tp.training.step import CONFIGURED, Components, StepFunctions, build_step_functions

WARM_UP = 2
"""Steps that run before the timed ones."""


@dataclass(frozen=True)
class Measurement:
    """A measured row, and the program it was measured on."""

    row: Row
    text: str | None
    mesh: Mesh


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
        "program": EXPLICIT if build is build_step_functions else GSPMD,
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


def measure_emulated(config: Config, steps: int, build: Builder = build_step_functions) -> Measurement:
    """Time the step on emulated CPU devices, in float32 unless the configuration asks for bfloat16."""
    jax.config.update("jax_platforms", "cpu")
    emulate_cpu_devices(config.mesh.devices)
    return measure(config, make_mesh(config.mesh), step_dtype(config, Precision.float32), steps, build)


def measure_attached(config: Config, steps: int, build: Builder = build_step_functions) -> Measurement:
    """Time the step on the attached devices, in bfloat16 unless the configuration asks for float32."""
    return measure(config, make_mesh(config.mesh), step_dtype(config), steps, build)


# Flags, and output

Result = Measurement | Prediction


def step_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the flags of every benchmark of a training step."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_step_flags(parser)
    add_mesh_flags(parser)
    parser.add_argument("--steps", type=int, default=10, help="number of timed steps (default 10)")
    parser.add_argument("--emulate", action="store_true", help="run a small model on emulated CPU devices")
    parser.add_argument(
        "--compare-gspmd", action="store_true", help="also run the compiler-sharded (GSPMD) baseline; print the ratios"
    )
    parser.add_argument("--json", metavar="FILE", help="append the row to FILE, one JSON object per line")
    parser.add_argument("--hlo", metavar="FILE", help="write the scheduled module to FILE (and FILE.meta.json)")
    return parser


def facts_beside_text(result: Result) -> dict:
    """What a reader of a compiled module needs in addition to its text; only TPUs have coordinates."""
    row, mesh = result.row, result.mesh
    return {
        "device_kind": row.device_kind,
        "coords": coordinates(mesh) if hasattr(mesh.devices.flat[0], "coords") else None,
        "model_flops_per_device": row.model_flops_per_device,
    }


def report(result: Result, arguments: argparse.Namespace, script: str, baseline: Result | None = None) -> None:
    """Print the row, and write the requested files.  Raises UserError where there is no module to write."""
    if jax.process_index():
        return
    for each in [result, baseline] if baseline else [result]:
        each.row.command = command_line(script)
        print(wrap_lines(format_row(each.row), ROW_INDENT))
        if arguments.json:
            append_json(each.row.to_json(), Path(arguments.json))
    if baseline:
        print(format_comparison(result.row, baseline.row))
    print(wrap_lines(FORMULA))
    if arguments.hlo and result.text is None:
        raise UserError(f"--hlo {arguments.hlo}: a program that does not fit has no schedule; make it fit first")
    if arguments.hlo:
        about = json.dumps(facts_beside_text(result)) + "\n"
        for name, text in ((arguments.hlo, result.text), (f"{arguments.hlo}.meta.json", about)):
            with replacing(Path(name)) as stream:
                stream.write(text)


def format_comparison(ours: Row, baseline: Row) -> str:
    """Ratios explicit : baseline of everything known of both; below 1 the explicit program is cheaper."""
    pairs = {
        "time": (ours.step_seconds, baseline.step_seconds),
        "memory": (ours.peak_bytes_per_device, baseline.peak_bytes_per_device),
        "compile time": (ours.compile_seconds, baseline.compile_seconds),
        "communication time": (ours.comm_seconds, baseline.comm_seconds),
    }
    ratios = [f"{name} {a / b:.2f}" for name, (a, b) in pairs.items() if a is not None and b]
    return f"explicit : {baseline.program}  " + ", ".join(ratios)
