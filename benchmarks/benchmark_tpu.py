"""How fast a training step runs on a TPU slice, and whether it fits: measured where the slice is here, else predicted.

    python benchmarks/benchmark_tpu.py --dp 4 --mp 8 --version v3
    python benchmarks/benchmark_tpu.py --dp 32 --mp 8 --version v5e --model 16b --json rows.jsonl
    python benchmarks/benchmark_tpu.py --dp 2 --mp 4 --emulate

On the devices of the version that is asked for it times the step.  Anywhere else the TPU compiler itself, which runs on
any Linux machine (pip install -e '.[tpu]'), compiles the same step for the slice, and the planner replays what it made;
such a row says `predicted`.  --emulate runs a small model for real on CPU devices; --compare-gspmd adds the same step as the
compiler cuts it (gspmd.py).
"""

import sys
from argparse import Namespace
from collections.abc import Callable
from glob import glob

import jax
from gspmd import build_gspmd_programs

from shmap_tp.config.schema import Config
from shmap_tp.hardware.devices import GENERATIONS
from shmap_tp.plan.benchmark import Made, configuration, emulated, flags, measured, report, run_command
from shmap_tp.plan.predict import Builder, predict
from shmap_tp.plan.topologies import find_slice
from shmap_tp.runtime.distributed import initialize_distributed
from shmap_tp.training.step import build_step_functions

DEFAULTS = {
    # version: (model, windows of a microbatch on each part of dp, microbatches)
    "v2": ("2_8b", 8, 32),  # the predecessor's: 32 accumulations of 8 windows on each of 4 parts of dp
    "v3": ("6_9b", 8, 32),
    "v4": ("6_9b", 8, 8),
    "v5e": ("6_9b", 2, 32),
    "v5p": ("6_9b", 8, 8),
    "v6e": ("6_9b", 8, 8),
    "tpu7x": ("6_9b", 8, 8),
    "emulate": ("test", 1, 2),
}


def run(arguments: Namespace) -> None:
    config = configuration(arguments, *DEFAULTS["emulate" if arguments.emulate else arguments.version])
    make = way(config, arguments)
    baseline = make(build_gspmd_programs) if arguments.baseline else None
    report(make(build_step_functions), arguments, "benchmark_tpu.py", baseline)


def way(config: Config, arguments: Namespace) -> Callable[[Builder], Made]:
    """How the program that a Builder makes becomes a row: run here, or predicted."""
    if arguments.emulate:
        return lambda build: emulated(config, arguments.steps, build)
    if slice_is_here(config, arguments.version):
        return lambda build: measured(config, arguments.steps, build)
    asked = find_slice(arguments.version, arguments.dp * arguments.mp, arguments.topology, arguments.slices)
    return lambda build: predict(config, asked, build)


def slice_is_here(config: Config, version: str) -> bool:
    """Whether JAX's own devices are the slice that is asked for.  JAX is asked on machines with TPUs only: elsewhere
    libtpu would look for them, and complain."""
    if not (glob("/dev/accel*") or glob("/dev/vfio/[0-9]*")):
        jax.config.update("jax_platforms", "cpu")
        return False
    initialize_distributed(config)
    devices = jax.devices()
    kinds = {GENERATIONS[version].kind, "TPU v5p" if version == "v5p" else ""}
    return devices[0].device_kind in kinds and len(devices) == config.mesh.dp * config.mesh.mp


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--version", default="v3", choices=list(GENERATIONS), help="of the TPU (default v3)")
    parser.add_argument("--topology", help="chips along each side of a slice, as in 4x8x8 (default: the most compact)")
    parser.add_argument("--slices", type=int, default=1, help="how many slices dp spans (default 1)")
    arguments = parser.parse_intermixed_args()
    return run_command(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
