"""How fast a training step runs on the GPUs of this machine, or of all machines of a Slurm job.

    python benchmarks/benchmark_gpu.py --dp 1 --mp 8
    python benchmarks/benchmark_gpu.py --dp 4 --mp 8 --model 6_9b mesh.processes=4      (on each of four nodes)
    python benchmarks/benchmark_gpu.py --dp 2 --mp 4 --emulate

--emulate runs a small model for real on CPU devices; --compare-gspmd adds the same step as the compiler cuts it (gspmd.py);
--torch the same in plain PyTorch (pytorch.py), on one GPU, before ours.
There is no prediction for GPUs: their compiler tells no cycles.
"""

import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import jax
from gspmd import build_gspmd_programs

from shmap_tp.errors import UserError
from shmap_tp.plan.benchmark import append, configuration, emulated, flags, measured, report, run_command
from shmap_tp.plan.report import Row, compare
from shmap_tp.runtime.distributed import initialize_distributed

DEFAULTS = {"gpu": ("gpt2_xl", 8, 1), "emulate": ("test", 1, 2)}
"""(model, windows of a microbatch on each part of dp, microbatches)"""


def run(arguments: Namespace) -> None:
    config = configuration(arguments, *DEFAULTS["emulate" if arguments.emulate else "gpu"])
    make = emulated if arguments.emulate else measured
    if arguments.torch and config.mesh.dp * config.mesh.mp > 1:
        raise UserError("--torch is of one GPU; use it with --dp 1 --mp 1")
    theirs = in_pytorch() if arguments.torch else None
    if not arguments.emulate:
        initialize_distributed(config)
        if jax.default_backend() != "gpu":
            raise UserError(
                f"no GPU here that JAX can use, only {jax.default_backend()}; install its support with "
                f"pip install -e '.[cuda]', or run on CPU devices with --emulate"
            )
    made = make(config, arguments.steps)
    baseline = make(config, arguments.steps, build_gspmd_programs) if arguments.baseline else None
    report(made, arguments, "benchmark_gpu.py", baseline)
    if theirs:
        theirs.command = made.row.command
        print(compare(made.row, theirs))
        if arguments.json:
            append(theirs.to_json(), Path(arguments.json))


def in_pytorch() -> Row:
    """The row of pytorch.py for the same flags.  In a process of its own, which gives back all of the GPU's memory, and
    before JAX takes it.  Raises InputError where it fails, having said why."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "row.jsonl"
        given = [argument for argument in sys.argv[1:] if argument != "--torch"]
        script = Path(__file__).with_name("pytorch.py")
        done = subprocess.run([sys.executable, str(script), *given, "--json", str(file)], check=False)
        if done.returncode:
            raise UserError("PyTorch's step failed, as said above; mend that, or leave out --torch")
        return Row(**json.loads(file.read_text()))


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--torch", action="store_true", help="the same step in plain PyTorch, too, and the ratios")
    arguments = parser.parse_intermixed_args()
    return run_command(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
