"""Layerwise FSDP matmuls: the cost of gathering weights layer by layer, and how much of it overlaps the matmuls.

    python benchmarks/benchmark_layerwise.py                       # attached TPUs or GPUs, else a v4-8, predicted
    python benchmarks/benchmark_layerwise.py --version v5e --devices 16
    python benchmarks/benchmark_layerwise.py --emulate 4 --draw    # a small size, on emulated CPU devices

The programs naive, ahead, ring and jit are in benchmarks/layerwise_programs.py.  A prediction compiles them for the
slice with its own compiler and simulates the schedule: activations and weights in bfloat16, rows and width as
published.
"""

import argparse
import os
import shlex
import statistics
import sys
from dataclasses import asdict, dataclass
from functools import partial
from glob import glob
from pathlib import Path

import check_environment  # noqa: F401
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from layerwise_programs import PROGRAMS, ROWS, build, ring_mesh
from measuring import time_steps

from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import GENERATIONS, Peak, generation, machine_peak, table_peak
from shmap_tp.plan.flags import append_json, check_outputs
from shmap_tp.plan.hlo_parser import parse_hlo
from shmap_tp.plan.predict import CACHE
from shmap_tp.plan.schedule_simulator import simulate
from shmap_tp.plan.targets import compile_ahead_of_time, coordinates
from shmap_tp.plan.tpu import LinkModel, find_slice, topology_devices
from shmap_tp.runtime.command_line import run_command
from shmap_tp.runtime.distributed import emulate_cpu_devices

PUBLISHED = 39.8e-3
"""Published seconds of the forward pass for PUBLISHED_FOR, with weights prefetched one layer ahead."""
PUBLISHED_FOR = ("TPU v4", 4, 16384, 4096, 4)
"""(device kind, devices, width, rows per device, layers): a v4-8."""
ASYNC = "xla_enable_async_all_gather=true"
"""Makes all-gathers asynchronous in XLA for TPU; off by default on v3 and v4, on by default from v5e."""
PASSES = ("forward", "forward+backward")


def main() -> int:
    arguments = make_parser().parse_args()
    return run_command(lambda: run(arguments))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", choices=list(GENERATIONS), help="TPU version (default: the attached one, else v4)")
    parser.add_argument("--devices", type=int, help="number of devices (default: all attached ones, else 4)")
    parser.add_argument("--emulate", type=int, metavar="N", help="run on N emulated CPU devices")
    parser.add_argument("--width", type=int, help="width of a layer (default 16384, emulated 512)")
    parser.add_argument("--rows", type=int, help="rows of activations per device (default 4096, emulated 256)")
    parser.add_argument("--layers", type=int, default=4, help="number of layers (default 4)")
    parser.add_argument("--steps", type=int, default=10, help="number of timed steps (default 10)")
    parser.add_argument(
        "--options", default=ASYNC, help=f"options of XLA for TPU, name=value,...; '' for none (default {ASYNC})"
    )
    parser.add_argument(
        "--draw", action="store_true", help="draw the shardings of activations and weights (pip install -e '.[draw]')"
    )
    parser.add_argument("--json", metavar="FILE", help="append the rows to FILE, one JSON object per line")
    return parser


def run(arguments: argparse.Namespace) -> None:
    check_outputs(arguments)
    kind, devices = find_devices(arguments)
    small = kind == "emulated"
    stack = Stack(
        width=arguments.width or (512 if small else 16384),
        rows=arguments.rows or (256 if small else 4096),
        layers=arguments.layers,
        dtype=jnp.dtype(jnp.float32 if small else jnp.bfloat16),
    )
    if min(stack.width, stack.rows, stack.layers, arguments.steps) < 1:
        raise UserError("--width, --rows, --layers and --steps must be 1 or more")
    if stack.width % len(devices):
        raise UserError(f"--width {stack.width} is not a multiple of the {len(devices)} devices; use a multiple")
    mesh = ring_mesh(devices)
    if arguments.draw:
        draw(stack, mesh)
    peak = machine_peak(devices) if small else table_peak(devices[0].device_kind, len(devices))
    on_tpu = generation(devices[0].device_kind) is not None
    options = dict(option.split("=", 1) for option in arguments.options.split(",") if "=" in option and on_tpu)
    print(f"{kind.upper()}  {stack} on {len(devices)} x {devices[0].device_kind}, options {options or 'none'}")
    print(f"  peak: {peak.source if peak else 'not known'}")
    print(HEADER)
    for name in PROGRAMS:
        for passes in PASSES:
            row = run_program(name, passes, stack, mesh, kind, options, peak, arguments.steps)
            print(format_row(row), flush=True)
            if arguments.json:
                append_json(asdict(row), Path(arguments.json))


def find_devices(arguments: argparse.Namespace) -> tuple[str, list[jax.Device]]:
    """(measured, emulated or predicted, the devices).

    JAX is initialised for accelerators only where device files exist: elsewhere libtpu would search for minutes.
    """
    if arguments.emulate is not None:
        if arguments.emulate < 1 or arguments.devices or arguments.version:
            raise UserError("--emulate N needs N >= 1 and excludes --devices and --version; omit those")
        jax.config.update("jax_platforms", "cpu")
        emulate_cpu_devices(arguments.emulate)
        return "emulated", jax.devices()[: arguments.emulate]
    if any(glob(name) for name in ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*")):
        attached, version = jax.devices(), arguments.version
        count = arguments.devices or len(attached)
        same_version = version is None or generation(attached[0].device_kind) == GENERATIONS[version]
        if count <= len(attached) and same_version:
            return "measured", attached[:count]
    else:
        jax.config.update("jax_platforms", "cpu")
        os.environ["JAX_PLATFORMS"] = "cpu"
    return "predicted", topology_devices(find_slice(arguments.version or "v4", arguments.devices or 4, None, 1))


@dataclass(frozen=True)
class Stack:
    """`layers` matmuls with [width, width] weights, `rows` rows of activations per device."""

    width: int
    rows: int
    layers: int
    dtype: DTypeLike

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.width} x {self.width} in {self.dtype}, {self.rows} rows per device"

    def shapes(self, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, tuple[jax.ShapeDtypeStruct, ...]]:
        shape = partial(jax.ShapeDtypeStruct, dtype=self.dtype, sharding=NamedSharding(mesh, ROWS))
        return shape((self.rows * mesh.size, self.width)), (shape((self.width, self.width)),) * self.layers

    def flops(self, devices: int, passes: str) -> int:
        """FLOPs of all devices; the backward pass has two matmuls for each of the forward pass."""
        return 2 * self.rows * devices * self.width**2 * self.layers * (1 if passes == "forward" else 3)


@dataclass(frozen=True)
class Row:
    """The result of one program.  `None`: unknown, such as communication time of a measured program."""

    kind: str
    program: str
    passes: str
    device_kind: str
    devices: int
    width: int
    rows: int
    layers: int
    options: dict
    seconds: float | None
    comm_seconds: float | None
    exposed_comm_seconds: float | None
    peak_seconds: float | None
    """The matmuls alone, at peak FLOP/s."""
    peak_bytes_per_device: float
    published_seconds: float | None
    command: str


def run_program(name, passes, stack: Stack, mesh: Mesh, kind: str, options: dict, peak: Peak | None, steps: int) -> Row:
    """Measure or predict one program."""
    program = build(name, mesh, stack.layers, backward=passes != "forward")
    evaluate = predict if kind == "predicted" else partial(measure, steps=steps)
    seconds, comm, exposed, peak_bytes = evaluate(program, stack, mesh, options)
    first = mesh.devices.flat[0]
    setting = (first.device_kind, mesh.size, stack.width, stack.rows, stack.layers)
    return Row(
        kind=kind,
        program=name,
        passes=passes,
        device_kind=first.device_kind,
        devices=mesh.size,
        width=stack.width,
        rows=stack.rows,
        layers=stack.layers,
        options=options,
        seconds=seconds,
        comm_seconds=comm,
        exposed_comm_seconds=exposed,
        peak_seconds=stack.flops(mesh.size, passes) / peak.flops if peak else None,
        peak_bytes_per_device=peak_bytes,
        published_seconds=PUBLISHED if setting == PUBLISHED_FOR and passes == "forward" else None,
        command=shlex.join(["python", "benchmarks/benchmark_layerwise.py", *sys.argv[1:]]),
    )


def predict(program: jax.stages.Wrapped, stack: Stack, mesh: Mesh, options: dict):
    """(seconds, communication, exposed communication, peak bytes) by simulation; no seconds if it does not fit."""
    compiled = compile_ahead_of_time(program.lower(*stack.shapes(mesh)), mesh, CACHE, options or None)
    if not compiled.fits:
        return None, None, None, compiled.peak_bytes
    found = simulate(
        parse_hlo(compiled.text), LinkModel.of(generation(mesh.devices.flat[0].device_kind), coordinates(mesh))
    )
    return found.seconds, found.comm_seconds, found.exposed_comm_seconds, compiled.peak_bytes


def measure(program: jax.stages.Wrapped, stack: Stack, mesh: Mesh, options: dict, *, steps: int):
    """(median seconds of `steps` runs on random numbers, None, None, peak bytes)."""
    compiled = program.lower(*stack.shapes(mesh)).compile(compiler_options=options or None)
    normal = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=NamedSharding(mesh, ROWS))
    x, weights = jax.tree.map(lambda one: normal(jax.random.key(0), one.shape, one.dtype), stack.shapes(mesh))
    weights = jax.tree.map(lambda w: w * stack.width**-0.5, weights)
    seconds = statistics.median(time_steps(lambda: compiled(x, weights), steps))
    return seconds, None, None, compiled.memory_analysis().peak_memory_in_bytes


HEADER = """\
| program | passes | ms | communication ms | exposed ms | at peak ms | ratio | published ms | ratio | MiB per device |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def format_row(row: Row) -> str:
    """A row of the table under HEADER, in milliseconds; `-` for unknown values."""

    def cell(value: float | None, scale: float = 1e3, form: str = ".1f") -> str:
        return "-" if value is None else format(value * scale, form)

    def over(below: float | None) -> str:
        return "-" if row.seconds is None or below is None else f"{row.seconds / below:.2f}"

    cells = [cell(row.seconds), cell(row.comm_seconds), cell(row.exposed_comm_seconds)]
    cells += [cell(row.peak_seconds), over(row.peak_seconds)]
    cells += [cell(row.published_seconds), over(row.published_seconds), cell(row.peak_bytes_per_device, 2**-20, ".0f")]
    return "| " + " | ".join([row.program, row.passes, *cells]) + " |"


def draw(stack: Stack, mesh: Mesh) -> None:
    """Draw the shardings of the activations and of a layer's weights."""
    x, weights = stack.shapes(mesh)
    for name, array in (("activations", x), ("weights of a layer", weights[0])):
        print(f"{name} {array.shape}")
        try:
            jax.debug.visualize_sharding(array.shape, array.sharding)
        except ValueError as error:
            raise UserError(
                "--draw needs the package rich, which is not installed: pip install -e '.[draw]'"
            ) from error


if __name__ == "__main__":
    sys.exit(main())
