"""Time a training step on a TPU slice: measured if the slice is attached, else predicted.

    python benchmarks/benchmark_tpu.py --dp 4 --mp 8 --version v3
    python benchmarks/benchmark_tpu.py --cfg conf/recipes/6_9b_v3-32.yaml --version v3
    python benchmarks/benchmark_tpu.py --dp 32 --mp 8 --version v5e --model 16b --json rows.jsonl
    python benchmarks/benchmark_tpu.py --dp 2 --mp 4 --emulate

To predict, the TPU compiler, which runs on any Linux machine (pip install -e '.[tpu]'), compiles the step for the
slice, and the planner simulates the compiled schedule.  --cfg takes the step from a file, such as a recipe.
--emulate runs a small model on emulated CPU devices.  --compare-gspmd also runs the compiler-sharded baseline
(gspmd_baseline.py).
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from glob import glob

import check_environment  # noqa: F401
import jax
from gspmd_baseline import build_gspmd_programs
from measuring import Result, measure_attached, measure_emulated, report, step_parser

from shmap_tp.config.schema import Config
from shmap_tp.hardware.devices import GENERATIONS
from shmap_tp.plan.flags import config_from_flags
from shmap_tp.plan.predict import Builder, predict
from shmap_tp.plan.tpu import find_slice
from shmap_tp.runtime.command_line import run_command
from shmap_tp.runtime.distributed import initialize_distributed
from shmap_tp.training.step import build_step_functions

DEFAULTS = {
    # version: (model, sequences per microbatch on each dp rank, microbatches)
    "v2": ("2_8b", 8, 32),
    "v3": ("6_9b", 8, 32),
    "v4": ("6_9b", 8, 8),
    "v5e": ("6_9b", 2, 32),
    "v5p": ("6_9b", 8, 8),
    "v6e": ("6_9b", 8, 8),
    "tpu7x": ("6_9b", 8, 8),
    "emulate": ("test", 1, 2),
}


def configuration(arguments: Namespace) -> Config:
    """The configuration whose step is measured or predicted.  Raises UserError."""
    return config_from_flags(arguments, *DEFAULTS["emulate" if arguments.emulate else arguments.version])


def run(arguments: Namespace) -> None:
    config = configuration(arguments)
    run_step = choose_runner(config, arguments)
    baseline = run_step(build_gspmd_programs) if arguments.compare_gspmd else None
    report(run_step(build_step_functions), arguments, "benchmark_tpu.py", baseline)


def choose_runner(config: Config, arguments: Namespace) -> Callable[[Builder], Result]:
    """A function that measures or predicts the program of a Builder."""
    if arguments.emulate:
        return lambda build: measure_emulated(config, arguments.steps, build)
    if slice_is_attached(config, arguments.version):
        return lambda build: measure_attached(config, arguments.steps, build)
    target = find_slice(arguments.version, config.mesh.devices, arguments.topology, config.mesh.slices)
    return lambda build: predict(config, target, build)


def slice_is_attached(config: Config, version: str) -> bool:
    """Whether the attached devices are the requested slice.

    JAX is initialised for TPUs only where device files exist: elsewhere libtpu would search for TPUs and log errors.
    """
    if not (glob("/dev/accel*") or glob("/dev/vfio/[0-9]*")):
        jax.config.update("jax_platforms", "cpu")
        return False
    initialize_distributed(config)
    devices = jax.devices()
    kinds = {GENERATIONS[version].kind, "TPU v5p" if version == "v5p" else ""}
    return devices[0].device_kind in kinds and len(devices) == config.mesh.devices


def make_parser() -> ArgumentParser:
    parser = step_parser(__doc__)
    parser.add_argument("--version", default="v3", choices=list(GENERATIONS), help="TPU version (default v3)")
    parser.add_argument("--topology", help="chips along each side of a slice, such as 4x8x8 (default: most compact)")
    parser.add_argument("--slices", type=int, help="number of slices that dp spans (default 1)")
    return parser


def main() -> int:
    arguments = make_parser().parse_intermixed_args()
    return run_command(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
