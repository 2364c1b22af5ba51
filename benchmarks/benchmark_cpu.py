"""Time a training step on emulated CPU devices, relative to the matmul rate of this CPU and to the GSPMD baseline.

    python benchmarks/benchmark_cpu.py [--rounds 5] [--compile] [--compare-gspmd] [--json FILE] [key=value ...]

The step: 4 devices, 33.6M parameters, context 256, batch 16, 2 microbatches, AdamW, float32.  Each round times one
step on each mesh and one float32 matmul of 2048 x 2048 matrices on one device, which uses all cores; `ratio` is that of
the medians.  Model FLOPs count causal attention at half and no recomputation.  `cpu ratio` uses processor seconds
instead of wall seconds, which excludes the load of other processes.

`--compare-gspmd` also times the GSPMD baseline (gspmd_baseline.py), in every round, in alternating order, and prints
the median over the rounds of the ratio explicit : GSPMD; below 1 the explicit step is cheaper.  Temporaries and
collectives are those of one device.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import check_environment  # noqa: F401
import jax
import jax.numpy as jnp
from gspmd_baseline import build_gspmd_programs
from jax.stages import Compiled
from measuring import step_caller

from shmap_tp.config.compose import CONF, load
from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.model.flops import flops_per_token
from shmap_tp.parallel.mesh import DP, MP, make_mesh
from shmap_tp.plan.compiled_communication import communication_in_hlo
from shmap_tp.runtime.distributed import emulate_cpu_devices
from shmap_tp.runtime.files import replacing
from shmap_tp.training.step import StepFunctions, build_step_functions

MESHES = [(1, 4), (2, 2), (4, 1)]
MATMUL = 2048


class OnMesh(NamedTuple):
    """One program on one mesh."""

    timer: "Timer"
    step: Compiled
    compile_seconds: float


class Timer:
    """Times repeated calls of a function, in wall seconds and in processor seconds."""

    def __init__(self, call: Callable[[], object]):
        self._call = call
        self.wall: list[float] = []
        self.cpu: list[float] = []
        call()

    def call_once(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        self._call()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)


def configuration(dp: int, mp: int, overrides: list[str]) -> Config:
    settings = ["model=cpu_33m", "train.batch=16", "train.microbatches=2", f"mesh.dp={dp}", f"mesh.mp={mp}"]
    return load(str(CONF / "base.yaml"), settings + overrides)


def compiled_step(config: Config, build: Callable[..., StepFunctions]) -> tuple[StepFunctions, Compiled, float]:
    """(step functions, the compiled step, seconds to trace and compile it)."""
    jax.clear_caches()
    programs = build(config, make_mesh(config.mesh, jax.devices()[:4]), jnp.float32)
    start = time.perf_counter()
    step = programs.step.lower(programs.shapes, programs.tokens).compile()
    return programs, step, time.perf_counter() - start


def rows_of(build: Callable[..., StepFunctions], overrides: list[str]) -> dict[tuple[int, int], OnMesh]:
    rows = {}
    for mesh in MESHES:
        config = configuration(*mesh, overrides)
        programs, step, seconds = compiled_step(config, build)
        dispatch = step_caller(config, programs, step)
        rows[mesh] = OnMesh(Timer(lambda dispatch=dispatch: jax.block_until_ready(dispatch())), step, seconds)
    return rows


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f})"


def print_rates(rows: dict[tuple[int, int], OnMesh], matmul: Timer, config: Config) -> None:
    tokens = config.train.batch * config.model.context
    work, product_work = tokens * flops_per_token(config.model), 2 * MATMUL**3
    rate = product_work / statistics.median(matmul.wall)
    cpu_rate = product_work / statistics.median(matmul.cpu)
    print(
        f"measured: float32 matmul of {MATMUL} x {MATMUL} at {rate / 1e9:.0f} GFLOP/s; {work / 1e9:.0f} GFLOP per step"
    )
    print("| mesh | step s, median (min - max) | tokens/s | model GFLOP/s | ratio to matmul | cpu ratio | compile s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for mesh, (timer, _, seconds) in rows.items():
        median = statistics.median(timer.wall)
        ratio, cpu_ratio = work / median / rate, work / statistics.median(timer.cpu) / cpu_rate
        print(
            f"| {mesh} | {spread(timer.wall)} | {tokens / median:.0f} | "
            f"{work / median / 1e9:.0f} | {ratio:.2f} | {cpu_ratio:.2f} | {seconds:.1f} |"
        )


def collectives(step: Compiled, mesh: tuple[int, int]) -> tuple[str, str]:
    """Count and bytes of the collectives of one device: (in loops, outside loops)."""
    entries = communication_in_hlo(step.as_text(), {DP: mesh[0], MP: mesh[1]})
    loops, outside = ([e for e in entries if (e.count > 1) == in_loop] for in_loop in (True, False))
    return tuple(
        f"{sum(e.count for e in each)}, {sum(e.total for e in each) / 2**20:.1f} MiB" for each in (loops, outside)
    )


def print_comparison(explicit: dict[tuple[int, int], OnMesh], baseline: dict[tuple[int, int], OnMesh]) -> None:
    print("\nexplicit : GSPMD\n| mesh | wall, median (min - max) | processor |\n| --- | --- | --- |")
    for mesh in explicit:
        ours, theirs = explicit[mesh].timer, baseline[mesh].timer
        wall = [a / b for a, b in zip(ours.wall, theirs.wall, strict=True)]
        cpu = [a / b for a, b in zip(ours.cpu, theirs.cpu, strict=True)]
        print(f"| {mesh} | {spread(wall)} | {spread(cpu)} |")
    print("\n| mesh | program | step s | processor s | compile s | temp MiB | collectives in loops | outside |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for mesh in explicit:
        for name, (timer, step, seconds) in {"explicit": explicit[mesh], "GSPMD": baseline[mesh]}.items():
            in_loops, outside = collectives(step, mesh)
            temp = step.memory_analysis().temp_size_in_bytes / 2**20
            print(
                f"| {mesh} | {name} | {spread(timer.wall)} | {spread(timer.cpu)} | {seconds:.1f} | {temp:.0f} | "
                f"{in_loops} | {outside} |"
            )


def as_json(name: str, rows: dict[tuple[int, int], OnMesh], matmul: Timer, config: Config) -> list[dict]:
    """One object per mesh; seconds are medians over the rounds, rates are in FLOP/s."""
    tokens = config.train.batch * config.model.context
    work, product = tokens * flops_per_token(config.model), 2 * MATMUL**3
    wall, cpu = statistics.median(matmul.wall), statistics.median(matmul.cpu)
    allocator = [f"{name}={value}" for name, value in os.environ.items() if name == "GLIBC_TUNABLES"]
    return [
        {
            "kind": "emulated",
            "program": name,
            "model": config.model.name,
            "mesh": mesh,
            "step_seconds": statistics.median(row.timer.wall),
            "step_seconds_range": [min(row.timer.wall), max(row.timer.wall)],
            "processor_seconds": statistics.median(row.timer.cpu),
            "tokens_per_second": tokens / statistics.median(row.timer.wall),
            "matmul_rate": product / wall,
            "ratio": work / statistics.median(row.timer.wall) / (product / wall),
            "processor_ratio": work / statistics.median(row.timer.cpu) / (product / cpu),
            "temporary_bytes": row.step.memory_analysis().temp_size_in_bytes,
            "compile_seconds": row.compile_seconds,
            "collectives": collectives(row.step, mesh),
            "command": shlex.join([*allocator, "python", "benchmarks/benchmark_cpu.py", *sys.argv[1:]]),
        }
        for mesh, row in rows.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="number of timed steps on each mesh")
    parser.add_argument(
        "--compile", action="store_true", help="also compile a model of 32 layers, for its compile time"
    )
    parser.add_argument("--compare-gspmd", action="store_true", help="also time the compiler-sharded (GSPMD) baseline")
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE, one JSON object per line")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    jax.config.update("jax_platforms", "cpu")
    emulate_cpu_devices(4)

    x = jnp.full((MATMUL, MATMUL), 0.5, jnp.float32)
    product = jax.jit(lambda a: a @ a).lower(x).compile()
    matmul = Timer(lambda: product(x).block_until_ready())
    builds = [build_step_functions, build_gspmd_programs] if arguments.compare_gspmd else [build_step_functions]
    try:
        programs = [rows_of(build, arguments.overrides) for build in builds]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for number in range(arguments.rounds):
        for mesh in MESHES:
            matmul.call_once()
            for rows in programs[:: 1 if number % 2 == 0 else -1]:
                rows[mesh].timer.call_once()

    config = configuration(*MESHES[0], arguments.overrides)
    print_rates(programs[0], matmul, config)
    if arguments.compare_gspmd:
        print_comparison(*programs)
    if arguments.json:
        lines = [
            as_json(name, rows, matmul, config) for name, rows in zip(("explicit", "gspmd"), programs, strict=False)
        ]
        with replacing(Path(arguments.json)) as stream:
            stream.writelines(json.dumps(line) + "\n" for rows in lines for line in rows)
    if arguments.compile:
        config = configuration(2, 2, [*arguments.overrides, "model.layers=32"])
        print(f"32 layers on (2, 2): compiled in {compiled_step(config, build_step_functions)[2]:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
