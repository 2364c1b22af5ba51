"""How fast a training step runs on a TPU slice, and whether it fits: measured where the slice is here, else predicted.

    python benchmarks/benchmark_tpu.py --dp 4 --mp 8 --version v3
    python benchmarks/benchmark_tpu.py --dp 32 --mp 8 --version v5e --model 16b --json rows.jsonl
    python benchmarks/benchmark_tpu.py --dp 2 --mp 4 --emulate

On the devices of the version that is asked for it times the step.  Anywhere else the TPU compiler itself, which runs on
any Linux machine (pip install -e '.[tpu]'), compiles the same step for the slice, and the planner replays what it made;
such a row says `predicted`.  --emulate runs a small model for real on CPU devices.
"""

import argparse
import json
import os
import shlex
import sys
from glob import glob
from pathlib import Path

import jax
import jax.numpy as jnp

from shmap_tp.config import Config, InputError, Precision
from shmap_tp.hardware import GENERATIONS
from shmap_tp.mesh import emulate, join, make_mesh
from shmap_tp.plan.measure import measure
from shmap_tp.plan.predict import predict
from shmap_tp.plan.row import FORMULA, describe
from shmap_tp.plan.slices import find_slice
from shmap_tp.settings import CONF, load

DEFAULTS = {
    # version: (model, windows of a microbatch on each part of dp, microbatches)
    "v2": ("2_8b", 8, 32),
    "v3": ("6_9b", 2, 128),  # as many windows a step as the predecessor's 32 x 8, which do not fit beside fp32 masters
    "v4": ("6_9b", 8, 8),
    "v5e": ("6_9b", 2, 32),
    "v5p": ("6_9b", 8, 8),
    "v6e": ("6_9b", 8, 8),
    "tpu7x": ("6_9b", 8, 8),
    "emulate": ("test", 1, 2),
}


def main() -> int:
    arguments = parser().parse_intermixed_args()
    try:
        return run(arguments)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--dp", type=int, required=True, help="data-parallel size")
    made.add_argument("--mp", type=int, required=True, help="model-parallel size; dp x mp is the number of devices")
    made.add_argument("--version", default="v3", choices=list(GENERATIONS), help="of the TPU (default v3)")
    made.add_argument("--model", help="a shape of conf/model (default: v2 2_8b, others 6_9b, --emulate test)")
    made.add_argument("--batch", type=int, help="windows of an optimizer step, all devices and microbatches together")
    made.add_argument("--context", type=int, help="tokens of a window (default: the model's)")
    made.add_argument("--microbatches", type=int, help="parts that a step is computed in, one after the other")
    made.add_argument("--topology", help="chips along each side of a slice, as in 4x8x8 (default: the most compact)")
    made.add_argument("--slices", type=int, default=1, help="how many slices, the outer part of dp (default 1)")
    made.add_argument("--steps", type=int, default=10, help="how many are timed (default 10)")
    made.add_argument("--emulate", action="store_true", help="run a small model for real on emulated CPU devices")
    made.add_argument("--json", metavar="FILE", help="add the row to FILE, one JSON object a line")
    made.add_argument("--hlo", metavar="FILE", help="write the scheduled module to FILE, FILE.meta.json beside it")
    made.add_argument("overrides", nargs="*", metavar="key=value", help="any of the configuration: model.remat=dots")
    return made


def run(arguments: argparse.Namespace) -> int:
    check(arguments)
    config = configuration(arguments)
    if arguments.emulate:
        jax.config.update("jax_platforms", "cpu")
        emulate(arguments.dp * arguments.mp)
        made = measure(config, make_mesh(config.mesh), precision(config, Precision.float32), arguments.steps)
        text = made.text
    elif slice_is_here(config, arguments.version):
        made = measure(config, make_mesh(config.mesh), precision(config, Precision.bfloat16), arguments.steps)
        text = made.text
    else:
        devices = arguments.dp * arguments.mp
        made = predict(config, find_slice(arguments.version, devices, arguments.topology, arguments.slices))
        text = made.compiled.text
    made.row.command = shlex.join(["python", "benchmarks/benchmark_tpu.py", *sys.argv[1:]])
    if jax.process_index() == 0:
        report(made, text, arguments)
    return 0


def check(arguments: argparse.Namespace) -> None:
    """What the configuration does not: flags that would be passed over, files that could not be written at the end."""
    for name in ("dp", "mp", "batch", "context", "microbatches", "steps"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise InputError(f"--{name} {value} is too small; it must be 1 or more")
    if arguments.emulate and (arguments.topology is not None or arguments.slices != 1):
        raise InputError("--topology and --slices are of TPUs; leave them out, or leave out --emulate to predict")
    for name in ("json", "hlo"):
        file = getattr(arguments, name)
        if file and (Path(file).is_dir() or not Path(file).parent.is_dir()):
            raise InputError(f"--{name} {file}: no file can be written there; make the folder, or choose another")


def precision(config: Config, auto: Precision) -> jnp.dtype:
    """The dtype that is computed in; `auto` on these devices."""
    return jnp.dtype(str(auto if config.train.precision == Precision.auto else config.train.precision))


def configuration(arguments: argparse.Namespace) -> Config:
    """conf/config.yaml with the benchmark's defaults, then the flags, then the overrides."""
    model, rows, parts = DEFAULTS["emulate" if arguments.emulate else arguments.version]
    if arguments.batch is None:
        parts = arguments.microbatches or parts
        batch = arguments.dp * rows * parts
    else:
        batch = arguments.batch
        parts = arguments.microbatches or max(1, batch // max(1, arguments.dp * rows))
    flags = [
        f"model={arguments.model or model}",
        f"mesh.dp={arguments.dp}",
        f"mesh.mp={arguments.mp}",
        f"train.batch={batch}",
        f"train.microbatches={parts}",
    ]
    flags += [f"model.context={arguments.context}"] if arguments.context else []
    return load(str(CONF / "config.yaml"), flags + arguments.overrides)


def slice_is_here(config: Config, version: str) -> bool:
    """Whether JAX's own devices are the slice that is asked for.  Asks JAX only on a machine that has TPUs: elsewhere
    libtpu would look for them for minutes."""
    if not (glob("/dev/accel*") or glob("/dev/vfio/[0-9]*")):
        jax.config.update("jax_platforms", "cpu")
        os.environ["JAX_PLATFORMS"] = "cpu"
        return False
    join(config.mesh)
    devices = jax.devices()
    kinds = {GENERATIONS[version].kind, "TPU v5p" if version == "v5p" else ""}
    return devices[0].device_kind in kinds and len(devices) == config.mesh.dp * config.mesh.mp


def report(made, text: str | None, arguments: argparse.Namespace) -> None:
    """Print the row, and write the files that were asked for."""
    print(describe(made.row))
    print(f"  {FORMULA}")
    if arguments.json:
        with Path(arguments.json).open("a") as file:
            file.write(json.dumps(made.row.to_json()) + "\n")
    if arguments.hlo and text is None:
        raise InputError(f"--hlo {arguments.hlo}: a program that does not fit has no schedule; make it fit first")
    if arguments.hlo:
        Path(arguments.hlo).write_text(text)
        Path(f"{arguments.hlo}.meta.json").write_text(json.dumps(made.meta) + "\n")


if __name__ == "__main__":
    sys.exit(main())
