"""How fast a training step runs on the GPUs of this machine, or of all machines of a Slurm job.

    python benchmarks/benchmark_gpu.py --dp 1 --mp 8
    python benchmarks/benchmark_gpu.py --dp 4 --mp 8 --model 6_9b mesh.processes=4      (on each of four nodes)
    python benchmarks/benchmark_gpu.py --dp 2 --mp 4 --emulate

--emulate runs a small model for real on CPU devices; --twin adds the same step as the compiler cuts it (gspmd.py).
There is no prediction for GPUs: their compiler tells no cycles.
"""

import sys
from argparse import Namespace

import jax
from gspmd import build_gspmd_programs

from shmap_tp.config import InputError
from shmap_tp.meeting import meet
from shmap_tp.plan.benchmark import configuration, door, emulated, flags, measured, report

DEFAULTS = {"gpu": ("gpt2_xl", 8, 1), "emulate": ("test", 1, 2)}
"""(model, windows of a microbatch on each part of dp, microbatches)"""


def run(arguments: Namespace) -> None:
    config = configuration(arguments, *DEFAULTS["emulate" if arguments.emulate else "gpu"])
    make = emulated if arguments.emulate else measured
    if not arguments.emulate:
        meet(config)
        if jax.default_backend() != "gpu":
            raise InputError(
                f"no GPU here that JAX can use, only {jax.default_backend()}; install its support with "
                f"pip install -e '.[cuda]', or run on CPU devices with --emulate"
            )
    made = make(config, arguments.steps)
    twin = make(config, arguments.steps, build_gspmd_programs) if arguments.twin else None
    report(made, arguments, "benchmark_gpu.py", twin)


def main() -> int:
    arguments = flags(__doc__).parse_intermixed_args()
    return door(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
