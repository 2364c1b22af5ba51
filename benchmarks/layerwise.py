"""The layerwise matmul study: what gathering weights layer by layer costs, and how much of it hides under the products.

    python benchmarks/layerwise.py                               # TPUs or GPUs that are here, else predicted for v4-8
    python benchmarks/layerwise.py --version v5e --devices 16
    python benchmarks/layerwise.py --emulate 4 --draw            # for real, small, on CPU devices

The programs naive, ahead, ring and jit are in benchmarks/gathered.py.  A prediction compiles them for the slice with
its own compiler and replays the schedule: activations and weights in bfloat16, rows and width as published.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
from dataclasses import asdict, dataclass
from functools import partial
from glob import glob
from pathlib import Path

import jax
import jax.numpy as jnp
from gathered import PROGRAMS, ROWS, build, ring_mesh
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import GENERATIONS, Peak, generation, machine_peak, table_peak
from shmap_tp.plan.aot_compile import compile_ahead, coordinates
from shmap_tp.plan.hlo_parser import parse
from shmap_tp.plan.link_model import Links
from shmap_tp.plan.measure import step_seconds
from shmap_tp.plan.predict import CACHE
from shmap_tp.plan.schedule_simulator import simulate
from shmap_tp.plan.topologies import find_slice, topology_devices
from shmap_tp.runtime.distributed import emulate_cpu_devices

PUBLISHED = 39.8e-3
"""Seconds forward of the setting PUBLISHED_FOR, weights gathered one layer ahead."""
PUBLISHED_FOR = ("TPU v4", 4, 16384, 4096, 4)
"""(device kind, devices, width, rows of a device, layers): a v4-8."""
ASYNC = "xla_enable_async_all_gather=true"
"""Lets XLA for TPU start an all-gather and go on; off unless asked for on v3 and v4, on by default from v5e."""
PASSES = ("forward", "forward+backward")


def main() -> int:
    arguments = parser().parse_args()
    try:
        return run(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--version", choices=list(GENERATIONS), help="of the TPU (default: what is here, else v4)")
    made.add_argument("--devices", type=int, help="how many (default: all that are here, else 4)")
    made.add_argument("--emulate", type=int, metavar="N", help="run for real on N emulated CPU devices")
    made.add_argument("--width", type=int, help="of a layer (default 16384, emulated 512)")
    made.add_argument("--rows", type=int, help="of activations on each device (default 4096, emulated 256)")
    made.add_argument("--layers", type=int, default=4, help="products, one after the other (default 4)")
    made.add_argument("--steps", type=int, default=10, help="how many are timed (default 10)")
    made.add_argument("--options", default=ASYNC, help=f"of XLA for TPU, name=value,...; '' for none (default {ASYNC})")
    made.add_argument(
        "--draw", action="store_true", help="draw how activations and weights are cut (pip install -e '.[draw]')"
    )
    made.add_argument("--json", metavar="FILE", help="add the rows to FILE, one JSON object a line")
    return made


def run(arguments: argparse.Namespace) -> int:
    kind, devices = find_devices(arguments)
    small = kind == "emulated"
    work = Work(
        width=arguments.width or (512 if small else 16384),
        rows=arguments.rows or (256 if small else 4096),
        layers=arguments.layers,
        dtype=jnp.dtype(jnp.float32 if small else jnp.bfloat16),
    )
    if min(work.width, work.rows, work.layers, arguments.steps) < 1:
        raise UserError("--width, --rows, --layers and --steps must be 1 or more")
    if work.width % len(devices):
        raise UserError(f"--width {work.width} is not a multiple of the {len(devices)} devices; choose one that is")
    mesh = ring_mesh(devices)
    if arguments.draw:
        draw(work, mesh)
    peak = machine_peak(devices) if small else table_peak(devices[0].device_kind, len(devices))
    on_tpu = generation(devices[0].device_kind) is not None
    options = dict(option.split("=", 1) for option in arguments.options.split(",") if "=" in option and on_tpu)
    print(f"{kind.upper()}  {work} on {len(devices)} x {devices[0].device_kind}, options {options or 'none'}")
    print(f"  peak: {peak.source if peak else 'not known'}")
    print(HEADER)
    for name in PROGRAMS:
        for passes in PASSES:
            row = take(name, passes, work, mesh, kind, options, peak, arguments.steps)
            print(describe(row), flush=True)
            if arguments.json:
                with Path(arguments.json).open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    return 0


def find_devices(arguments: argparse.Namespace) -> tuple[str, list[jax.Device]]:
    """(measured, emulated or predicted, the devices).  Asks JAX for accelerators only where the machine has some:
    elsewhere libtpu would look for them for minutes."""
    if arguments.emulate is not None:
        if arguments.emulate < 1 or arguments.devices or arguments.version:
            raise UserError("--emulate N takes 1 device or more, and neither --devices nor --version; leave those out")
        jax.config.update("jax_platforms", "cpu")
        emulate_cpu_devices(arguments.emulate)
        return "emulated", jax.devices()[: arguments.emulate]
    if any(glob(name) for name in ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*")):
        here, version = jax.devices(), arguments.version
        count = arguments.devices or len(here)
        if count <= len(here) and (version is None or generation(here[0].device_kind) == GENERATIONS[version]):
            return "measured", here[:count]
    else:
        jax.config.update("jax_platforms", "cpu")
        os.environ["JAX_PLATFORMS"] = "cpu"
    return "predicted", topology_devices(find_slice(arguments.version or "v4", arguments.devices or 4, None, 1))


@dataclass(frozen=True)
class Work:
    """`layers` products of a [width, width] on the `rows` of each device."""

    width: int
    rows: int
    layers: int
    dtype: DTypeLike

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.width} x {self.width} in {self.dtype}, {self.rows} rows a device"

    def shapes(self, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, tuple[jax.ShapeDtypeStruct, ...]]:
        shape = partial(jax.ShapeDtypeStruct, dtype=self.dtype, sharding=NamedSharding(mesh, ROWS))
        return shape((self.rows * mesh.size, self.width)), (shape((self.width, self.width)),) * self.layers

    def flops(self, devices: int, passes: str) -> int:
        """Of all devices; the backward pass has two products for each of the forward's."""
        return 2 * self.rows * devices * self.width**2 * self.layers * (1 if passes == "forward" else 3)


@dataclass(frozen=True)
class Row:
    """What one program takes; `None` is what cannot be told: wires where it was run, a time where it does not fit."""

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
    """The products alone, at the peak."""
    peak_bytes_per_device: float
    published_seconds: float | None
    command: str


def take(name, passes, work: Work, mesh: Mesh, kind: str, options: dict, peak: Peak | None, steps: int) -> Row:
    """Measure or predict one program."""
    program = build(name, mesh, work.layers, backward=passes != "forward")
    find = predicted if kind == "predicted" else partial(timed, steps=steps)
    seconds, comm, exposed, most = find(program, work, mesh, options)
    first = mesh.devices.flat[0]
    setting = (first.device_kind, mesh.size, work.width, work.rows, work.layers)
    return Row(
        kind=kind,
        program=name,
        passes=passes,
        device_kind=first.device_kind,
        devices=mesh.size,
        width=work.width,
        rows=work.rows,
        layers=work.layers,
        options=options,
        seconds=seconds,
        comm_seconds=comm,
        exposed_comm_seconds=exposed,
        peak_seconds=work.flops(mesh.size, passes) / peak.flops if peak else None,
        peak_bytes_per_device=most,
        published_seconds=PUBLISHED if setting == PUBLISHED_FOR and passes == "forward" else None,
        command=shlex.join(["python", "benchmarks/layerwise.py", *sys.argv[1:]]),
    )


def predicted(program: jax.stages.Wrapped, work: Work, mesh: Mesh, options: dict):
    """(seconds, of which collectives, of which waited for, most bytes in use), by the replay; no seconds where the
    program does not fit."""
    compiled = compile_ahead(program.lower(*work.shapes(mesh)), mesh, CACHE, options or None)
    if not compiled.fits:
        return None, None, None, compiled.peak_bytes
    found = simulate(parse(compiled.text), Links.of(generation(mesh.devices.flat[0].device_kind), coordinates(mesh)))
    return found.seconds, found.comm_seconds, found.exposed_comm_seconds, compiled.peak_bytes


def timed(program: jax.stages.Wrapped, work: Work, mesh: Mesh, options: dict, *, steps: int):
    """(median seconds of `steps` runs on random numbers, None, None, most bytes in use)."""
    compiled = program.lower(*work.shapes(mesh)).compile(compiler_options=options or None)
    normal = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=NamedSharding(mesh, ROWS))
    x, weights = jax.tree.map(lambda one: normal(jax.random.key(0), one.shape, one.dtype), work.shapes(mesh))
    weights = jax.tree.map(lambda w: w * work.width**-0.5, weights)
    seconds = statistics.median(step_seconds(lambda: compiled(x, weights), steps))
    return seconds, None, None, compiled.memory_analysis().peak_memory_in_bytes


HEADER = """\
| program | passes | ms | collectives ms | exposed ms | at peak ms | ratio | published ms | ratio | MiB a device |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def describe(row: Row) -> str:
    """A row of the table under HEADER: milliseconds, and `-` for what cannot be told."""

    def cell(value: float | None, scale: float = 1e3, form: str = ".1f") -> str:
        return "-" if value is None else format(value * scale, form)

    def over(below: float | None) -> str:
        return "-" if row.seconds is None or below is None else f"{row.seconds / below:.2f}"

    cells = [cell(row.seconds), cell(row.comm_seconds), cell(row.exposed_comm_seconds)]
    cells += [cell(row.peak_seconds), over(row.peak_seconds)]
    cells += [cell(row.published_seconds), over(row.published_seconds), cell(row.peak_bytes_per_device, 2**-20, ".0f")]
    return "| " + " | ".join([row.program, row.passes, *cells]) + " |"


def draw(work: Work, mesh: Mesh) -> None:
    """How the activations and each layer's weights are cut, as JAX draws it."""
    x, weights = work.shapes(mesh)
    for name, array in (("activations", x), ("weights of a layer", weights[0])):
        print(f"{name} {array.shape}")
        try:
            jax.debug.visualize_sharding(array.shape, array.sharding)
        except ValueError as error:
            raise UserError("--draw needs the package rich, which is not here: pip install -e '.[draw]'") from error


if __name__ == "__main__":
    sys.exit(main())
