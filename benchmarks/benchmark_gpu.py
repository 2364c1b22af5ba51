"""Time a training step on the GPUs of this machine, or of all machines of a Slurm job.

    python benchmarks/benchmark_gpu.py --dp 1 --mp 8
    python benchmarks/benchmark_gpu.py --cfg conf/recipes/llama3_8b_8xh100.yaml
    python benchmarks/benchmark_gpu.py --dp 4 --mp 8 --model 6_9b mesh.processes=4      (on each of four nodes)
    python benchmarks/benchmark_gpu.py --dp 2 --mp 4 --emulate
    python benchmarks/benchmark_gpu.py --dp 8 --mp 1 --version h100
    python benchmarks/benchmark_gpu.py --dp 1 --mp 1 --compare-plan h100

--cfg times the step of a file, such as a recipe.  --emulate runs a small model on emulated CPU devices.
--compare-gspmd also runs the compiler-sharded baseline (gspmd_baseline.py), --torch the same step in plain PyTorch on
one GPU (pytorch_baseline.py).
--version h100 (h200, a100, b200) estimates the step on GPUs that are not attached, instead of timing it: memory and
collectives as compiled by XLA for GPU (pip install -e '.[plan-gpu]'), time by formulas that no GPU has confirmed.
--compare-plan h100 does both on attached GPUs: it plans the step for them, measures it, and compares time, memory and
the compiled programs.
"""

import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path

import check_environment  # noqa: F401
import jax
from gspmd_baseline import build_gspmd_programs
from measuring import format_comparison, measure_attached, measure_emulated, report, step_parser
from plan_comparison import compare_plan

from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.plan.flags import append_json, config_from_flags
from shmap_tp.plan.gpu import GPUS, find_nodes
from shmap_tp.plan.predict import Prediction, predict
from shmap_tp.plan.report import Row
from shmap_tp.runtime.command_line import run_command
from shmap_tp.runtime.distributed import initialize_distributed

DEFAULTS = {"gpu": ("gpt2_1_3b", 8, 1), "emulate": ("test", 1, 2)}
"""(model, sequences per microbatch on each dp rank, microbatches)"""


def configuration(arguments: Namespace) -> Config:
    """The configuration whose step is timed.  Raises UserError."""
    return config_from_flags(arguments, *DEFAULTS["emulate" if arguments.emulate else "gpu"])


def run(arguments: Namespace) -> None:
    config = configuration(arguments)
    if arguments.version:
        report(estimated(config, arguments), arguments, "benchmark_gpu.py")
        return
    measure = measure_emulated if arguments.emulate else measure_attached
    if arguments.torch and config.mesh.devices > 1:
        raise UserError("--torch runs on one GPU only; use it with --dp 1 --mp 1")
    if arguments.compare_plan and arguments.emulate:
        raise UserError("--compare-plan compares with attached GPUs; omit --emulate")
    pytorch = measure_pytorch() if arguments.torch else None
    if not arguments.emulate:
        initialize_distributed(config)
        if jax.default_backend() != "gpu":
            raise UserError(
                f"JAX finds no GPU, only {jax.default_backend()}; install GPU support with "
                f"pip install -e '.[cuda]', or run on CPU devices with --emulate"
            )
    result = measure(config, arguments.steps)
    baseline = measure(config, arguments.steps, build_gspmd_programs) if arguments.compare_gspmd else None
    report(result, arguments, "benchmark_gpu.py", baseline)
    if arguments.compare_plan and not jax.process_index():
        planned, text = planned_elsewhere(arguments)
        print(compare_plan(planned, result.row, text, result.text))
    if pytorch:
        pytorch.command = result.row.command
        print(format_comparison(result.row, pytorch))
        if arguments.json:
            append_json(pytorch.to_json(), Path(arguments.json))


def estimated(config: Config, arguments: Namespace) -> Prediction:
    """The step on GPUs that are not attached.  Raises UserError where a flag needs attached devices."""
    given = [flag for flag in ("emulate", "torch", "compare_gspmd", "compare_plan") if getattr(arguments, flag)]
    if given:
        raise UserError(f"--{given[0].replace('_', '-')} needs attached devices; omit it, or omit --version")
    return predict(config, find_nodes(arguments.version, config.mesh.devices))


def planned_elsewhere(arguments: Namespace) -> tuple[Row, str | None]:
    """The row and the module of the same step planned for --compare-plan, in a process of its own: a process that
    plans sees no GPU.  Raises UserError if it fails."""
    given = [
        word
        for name in ("cfg", "dp", "mp", "model", "batch", "context", "microbatches")
        if (value := getattr(arguments, name)) is not None
        for word in (f"--{name}", str(value))
    ]
    with tempfile.TemporaryDirectory() as folder:
        row, module = Path(folder) / "row.jsonl", Path(folder) / "module.txt"
        command = [sys.executable, __file__, *given, *arguments.overrides, "--version", arguments.compare_plan]
        command += ["--json", str(row), "--hlo", str(module)]
        done = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=False)
        if not row.exists():
            raise UserError(f"the step could not be planned (exit code {done.returncode}), see the error above")
        return Row(**json.loads(row.read_text())), module.read_text() if module.exists() else None


def measure_pytorch() -> Row:
    """The row of pytorch_baseline.py for the same flags.

    It runs in a process of its own before JAX is initialised, so that all of the GPU's memory is free again afterwards.
    Raises UserError if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "row.jsonl"
        given = [argument for argument in sys.argv[1:] if argument != "--torch"]
        script = Path(__file__).with_name("pytorch_baseline.py")
        done = subprocess.run([sys.executable, str(script), *given, "--json", str(file)], check=False)
        if done.returncode:
            raise UserError("the PyTorch step failed, see the error above; fix it, or omit --torch")
        return Row(**json.loads(file.read_text()))


def make_parser() -> ArgumentParser:
    parser = step_parser(__doc__)
    parser.add_argument(
        "--torch", action="store_true", help="also run the same step in plain PyTorch; print the ratios"
    )
    parser.add_argument("--version", choices=list(GPUS), help="estimate the step on GPUs that are not attached")
    parser.add_argument(
        "--compare-plan", choices=list(GPUS), help="measure, and compare with the step planned for these GPUs"
    )
    return parser


def main() -> int:
    arguments = make_parser().parse_intermixed_args()
    return run_command(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
