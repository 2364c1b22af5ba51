"""Shared by the benchmarks: flags and the configuration built from them, timing on attached devices, output of rows."""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from shmap_tp.config.compose import CONF, quoted
from shmap_tp.config.packaged import as_installed
from shmap_tp.config.schema import Config, Precision
from shmap_tp.config.validate import resolve_auto
from shmap_tp.errors import UserError, shown
from shmap_tp.hardware.devices import DEVICES, machine_peak
from shmap_tp.hardware.xla_options import compile_with
from shmap_tp.layers.attention_selection import kernel_name
from shmap_tp.parallel.mesh import DP, MP, make_mesh
from shmap_tp.plan.aot_compile import parse_out_of_memory
from shmap_tp.plan.layout import ROW_INDENT, wrapped
from shmap_tp.plan.predict import Builder, Prediction, build_programs, facts_beside_text, program_name, step_dtype
from shmap_tp.plan.report import FORMULA, Row, config_fields, format_comparison, format_row, mesh_fields
from shmap_tp.pretrained.configuration import load
from shmap_tp.runtime.distributed import emulate_cpu_devices
from shmap_tp.runtime.files import replacing
from shmap_tp.training.step import CONFIGURED, Components, StepFunctions, build_step_functions

# Timing

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


# Flags, and output

Result = Measurement | Prediction


class Parser(argparse.ArgumentParser):
    """A parser whose errors take two lines, as those of the configuration do, and not the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n--help lists the flags\n")


def step_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the flags of every benchmark of a training step."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cfg", metavar="FILE", help=as_installed("take the step from FILE, such as a recipe of conf/recipes/")
    )
    parser.add_argument("--dp", type=int, help="data-parallel size (default: that of --cfg)")
    parser.add_argument("--mp", type=int, help="model-parallel size; dp x mp is the number of devices")
    parser.add_argument("--model", help=as_installed("a model of conf/model/ (default: see DEFAULTS in this file)"))
    parser.add_argument("--batch", type=int, help="sequences per optimizer step, over all devices and microbatches")
    parser.add_argument("--context", type=int, help="tokens per sequence (default: the model's)")
    parser.add_argument("--microbatches", type=int, help="microbatches per optimizer step (gradient accumulation)")
    parser.add_argument("--steps", type=int, default=10, help="number of timed steps (default 10)")
    parser.add_argument("--emulate", action="store_true", help="run a small model on emulated CPU devices")
    parser.add_argument(
        "--compare-gspmd", action="store_true", help="also run the compiler-sharded (GSPMD) baseline; print the ratios"
    )
    parser.add_argument("--json", metavar="FILE", help="append the row to FILE, one JSON object per line")
    parser.add_argument("--hlo", metavar="FILE", help="write the scheduled module to FILE (and FILE.meta.json)")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="configuration overrides, such as model.remat=all_matmuls"
    )
    return parser


def config_from_flags(arguments: argparse.Namespace, model: str, sequences: int, microbatches: int) -> Config:
    """The file of --cfg, or else conf/config.yaml, with the flags applied.

    Without --cfg, defaults where flags are missing: this model, `microbatches` microbatches of `sequences` sequences on
    each dp rank, sequence parallelism, ZeRO-1, and joined documents, as in published figures.  With --cfg, its own
    values.  Raises UserError.
    """
    check_flags(arguments)
    if arguments.cfg:
        return _config_from_file(arguments)
    if arguments.dp is None or arguments.mp is None:
        raise UserError("give --dp and --mp, or --cfg FILE, which contains them")
    microbatches = arguments.microbatches or microbatches
    batch = arguments.batch
    if batch is None:
        batch = arguments.dp * sequences * microbatches
    elif arguments.microbatches is None:
        microbatches = max(1, batch // max(1, arguments.dp * sequences))
    settings = [
        f"model={'pretrained' if vars(arguments).get('from_pretrained') else arguments.model or model}",
        f"mesh.dp={arguments.dp}",
        f"mesh.mp={arguments.mp}",
        f"train.batch={batch}",
        f"train.microbatches={microbatches}",
        "mesh.tensor_parallel=sequence",
        "mesh.zero=zero1",
        "data.documents=joined",
        f"mesh.slices={_slices(arguments)}",
    ]
    settings += [f"model.context={arguments.context}"] if arguments.context is not None else []
    directory = vars(arguments).get("from_pretrained")
    settings += [f"model.from_pretrained={quoted(directory)}"] if directory else []
    return resolve_auto(load(str(CONF / "config.yaml"), settings + arguments.overrides))


def plannable(config: Config) -> Config:
    """`config`.  Raises UserError for a step that has more than a plan counts."""
    if config.train.dpo_beta is not None:
        raise UserError(
            f"train.dpo_beta={config.train.dpo_beta}: a plan does not count the forward pass of the reference; plan "
            f"with train.dpo_beta=null, and add a third to its time"
        )
    if config.run.components is not None:
        raise UserError(
            f"run.components={shown(config.run.components)}: a plan is of the parts that the configuration names; plan "
            f"with run.components=null, or in Python with predict(..., components=...)"
        )
    return config


def _config_from_file(arguments: argparse.Namespace) -> Config:
    """The file of --cfg with the flags that are given applied."""
    flags = vars(arguments)
    keys = {"model": "model", DP: "mesh.dp", MP: "mesh.mp", "batch": "train.batch", "context": "model.context"}
    keys |= {"microbatches": "train.microbatches", "slices": "mesh.slices"}
    given = [f"{key}={flags[flag]}" for flag, key in keys.items() if flags.get(flag) is not None]
    return resolve_auto(load(arguments.cfg, given + arguments.overrides))


def _slices(arguments: argparse.Namespace) -> int:
    given = vars(arguments).get("slices")
    return 1 if given is None else given


def check_outputs(arguments: argparse.Namespace) -> None:
    """Raise UserError for a file that could not be written when all is computed."""
    seen: dict[Path, str] = {}
    for name in ("json", "hlo", "plot", "recipe"):
        if file := vars(arguments).get(name):
            if (other := seen.setdefault(Path(file).absolute(), name)) != name:
                raise UserError(f"--{other} and --{name} are both {shown(file)}; choose another file for one of them")
            try:
                _open_for_writing(Path(file))
            except OSError as error:  # such as a missing directory, one of another user, a name that is too long
                raise UserError(
                    f"--{name} {shown(file)}: cannot be written; create its directory, or choose another file"
                ) from error


def _open_for_writing(file: Path) -> None:
    """Raises OSError where `file` cannot be written.  It keeps its content, or goes away again.  A pipe or a device is
    not opened."""
    if file.exists() and not file.is_file() and not file.is_dir():
        return
    is_new = not file.exists()
    file.open("ab").close()
    if is_new:
        file.unlink()


def check_flags(arguments: argparse.Namespace) -> None:
    """Check what the configuration does not: flags that would be ignored, and output files that cannot be written."""
    given = vars(arguments)
    for name in (DP, MP, "batch", "context", "microbatches", "steps"):
        if given[name] is not None and given[name] < 1:
            raise UserError(f"--{name} {given[name]} is too small; it must be 1 or more")
    if given.get("emulate") and (given.get("topology") is not None or given.get("slices") is not None):
        raise UserError("--topology and --slices apply to TPUs only; omit them, or omit --emulate to predict")
    slices = _slices(arguments)
    if slices < 1:
        raise UserError(f"--slices {slices} is too small; it must be 1 or more")
    if given[DP] is not None and given[DP] % slices:
        raise UserError(
            f"--slices {slices} does not divide --dp {given[DP]}: mp must lie within one slice; choose a divisor"
        )
    check_outputs(arguments)


def measure_emulated(config: Config, steps: int, build: Builder = build_step_functions) -> Measurement:
    """Time the step on emulated CPU devices, in float32 unless the configuration asks for bfloat16."""
    jax.config.update("jax_platforms", "cpu")
    emulate_cpu_devices(config.mesh.devices)
    return measure(config, make_mesh(config.mesh), step_dtype(config, Precision.float32), steps, build)


def measure_attached(config: Config, steps: int, build: Builder = build_step_functions) -> Measurement:
    """Time the step on the attached devices, in bfloat16 unless the configuration asks for float32."""
    return measure(config, make_mesh(config.mesh), step_dtype(config), steps, build)


def report(result: Result, arguments: argparse.Namespace, script: str, baseline: Result | None = None) -> None:
    """Print the row, and write the requested files.  Raises UserError where there is no module to write."""
    if jax.process_index():
        return
    for each in [result, baseline] if baseline else [result]:
        each.row.command = command_line(script)
        print(wrapped(format_row(each.row), ROW_INDENT))
        if arguments.json:
            append_json(each.row.to_json(), Path(arguments.json))
    if baseline:
        print(format_comparison(result.row, baseline.row))
    print(wrapped(FORMULA))
    if arguments.hlo and result.text is None:
        raise UserError(f"--hlo {arguments.hlo}: a program that does not fit has no schedule; make it fit first")
    if arguments.hlo:
        about = json.dumps(result.meta) + "\n"
        for name, text in ((arguments.hlo, result.text), (f"{arguments.hlo}.meta.json", about)):
            with replacing(Path(name)) as stream:
                stream.write(text)


def command_line(script: str = "") -> str:
    """The command that this process runs, to be repeated; of the planner, or of a script of benchmarks/."""
    return shlex.join(["python", *([f"benchmarks/{script}"] if script else ["-m", "shmap_tp.plan"]), *sys.argv[1:]])


def append_json(row: dict, file: Path) -> None:
    """Append one line to a file of JSON objects."""
    try:
        with file.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}; choose another --json") from error
