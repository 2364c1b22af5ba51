"""What the benchmarks share: their flags, the configuration these make, and how a row is handed over."""

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from shmap_tp.config.compose import CONF, load
from shmap_tp.config.schema import Config, Precision
from shmap_tp.config.validate import resolve_auto
from shmap_tp.errors import UserError
from shmap_tp.parallel.mesh import DP, MP, make_mesh
from shmap_tp.plan.measure import Measurement, measure
from shmap_tp.plan.predict import Builder, Prediction
from shmap_tp.plan.report import FORMULA, compare, describe
from shmap_tp.runtime.distributed import emulate_cpu_devices
from shmap_tp.training.step import build_step_functions

Made = Measurement | Prediction


def flags(description: str) -> argparse.ArgumentParser:
    """The flags that every benchmark of a step takes."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--dp", type=int, required=True, help="data-parallel size")
    made.add_argument("--mp", type=int, required=True, help="model-parallel size; dp x mp is the number of devices")
    made.add_argument("--model", help="a shape of conf/model; see DEFAULTS of this file for what is taken otherwise")
    made.add_argument("--batch", type=int, help="windows of an optimizer step, all devices and microbatches together")
    made.add_argument("--context", type=int, help="tokens of a window (default: the model's)")
    made.add_argument("--microbatches", type=int, help="parts that a step is computed in, one after the other")
    made.add_argument("--steps", type=int, default=10, help="how many are timed (default 10)")
    made.add_argument("--emulate", action="store_true", help="run a small model for real on emulated CPU devices")
    made.add_argument(
        "--compare-gspmd", action="store_true", help="the same step as the compiler cuts it, too, and the ratios"
    )
    made.add_argument("--json", metavar="FILE", help="add the row to FILE, one JSON object a line")
    made.add_argument("--hlo", metavar="FILE", help="write the scheduled module to FILE, FILE.meta.json beside it")
    made.add_argument(
        "overrides", nargs="*", metavar="key=value", help="any of the configuration: model.remat=all_matmuls"
    )
    return made


def configuration(arguments: argparse.Namespace, model: str, rows: int, parts: int) -> Config:
    """conf/config.yaml with what the flags say.  Where they do not: this model, `parts` microbatches of `rows` windows
    on each part of dp, sequence parallelism, and dp sharing the optimizer's state.  Raises InputError."""
    check(arguments)
    parts = arguments.microbatches or parts
    batch = arguments.batch
    if batch is None:
        batch = arguments.dp * rows * parts
    elif arguments.microbatches is None:
        parts = max(1, batch // max(1, arguments.dp * rows))
    given = [
        f"model={arguments.model or model}",
        f"mesh.dp={arguments.dp}",
        f"mesh.mp={arguments.mp}",
        f"train.batch={batch}",
        f"train.microbatches={parts}",
        "mesh.tensor_parallel=sequence",
        "mesh.zero=zero1",
        f"mesh.slices={vars(arguments).get('slices', 1)}",
    ]
    given += [f"model.context={arguments.context}"] if arguments.context is not None else []
    return resolve_auto(load(str(CONF / "config.yaml"), given + arguments.overrides))


def check(arguments: argparse.Namespace) -> None:
    """What the configuration does not: flags that would be passed over, files that could not be written at the end."""
    given = vars(arguments)
    for name in (DP, MP, "batch", "context", "microbatches", "steps"):
        if given[name] is not None and given[name] < 1:
            raise UserError(f"--{name} {given[name]} is too small; it must be 1 or more")
    if given.get("emulate") and (given.get("topology") is not None or given.get("slices", 1) != 1):
        raise UserError("--topology and --slices are of TPUs; leave them out, or leave out --emulate to predict")
    slices = given.get("slices", 1)
    if slices < 1 or (given[DP] is not None and given[DP] % slices):
        raise UserError(
            f"--slices {slices} does not divide --dp {given[DP]}: mp reaches over one slice only; choose a divisor"
        )
    for name in ("json", "hlo"):
        file = given.get(name)
        if file and (Path(file).is_dir() or not Path(file).parent.is_dir()):
            raise UserError(f"--{name} {file}: no file can be written there; make the folder, or choose another")


def emulated(config: Config, steps: int, build: Builder = build_step_functions) -> Measurement:
    """Run for real on as many CPU devices as the mesh has, in float32 unless the configuration asks for bfloat16."""
    jax.config.update("jax_platforms", "cpu")
    emulate_cpu_devices(config.mesh.dp * config.mesh.mp)
    return measure(config, make_mesh(config.mesh), _dtype(config, Precision.float32), steps, build)


def measured(config: Config, steps: int, build: Builder = build_step_functions) -> Measurement:
    """Time the step on JAX's own devices, in bfloat16 unless the configuration asks for float32."""
    return measure(config, make_mesh(config.mesh), _dtype(config, Precision.bfloat16), steps, build)


def _dtype(config: Config, auto: Precision) -> DTypeLike:
    """What is computed in; `auto` on these devices."""
    return jnp.dtype(str(auto if config.train.precision == Precision.auto else config.train.precision))


def report(made: Made, arguments: argparse.Namespace, script: str, baseline: Made | None = None) -> None:
    """Print the row, and write the files that were asked for.  Raises InputError where there is no module to write."""
    if jax.process_index():
        return
    for each in [made, baseline] if baseline else [made]:
        each.row.command = shlex.join(["python", f"benchmarks/{script}", *sys.argv[1:]])
        print(describe(each.row))
        if arguments.json:
            append(each.row.to_json(), Path(arguments.json))
    if baseline:
        print(compare(made.row, baseline.row))
    print(FORMULA)
    if arguments.hlo and made.text is None:
        raise UserError(f"--hlo {arguments.hlo}: a program that does not fit has no schedule; make it fit first")
    if arguments.hlo:
        Path(arguments.hlo).write_text(made.text)
        Path(f"{arguments.hlo}.meta.json").write_text(json.dumps(made.meta) + "\n")


def append(row: dict, file: Path) -> None:
    """Add one line to a file of JSON objects."""
    try:
        with file.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}; choose another --json") from error


def run_command(run: Callable[[], None]) -> int:
    """Call `run`; an InputError ends in two lines and exit code 2."""
    try:
        run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
