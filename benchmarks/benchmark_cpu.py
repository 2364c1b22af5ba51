"""How much of this CPU's matrix-product rate a training step keeps, on emulated devices.

    python benchmarks/benchmark_cpu.py [--rounds 5] [--compile] [key=value ...]

The work: 4 devices, 33.6M parameters, context 256, batch 16, 2 microbatches, AdamW, float32.  Each round times one
step on each mesh and, beside it, the jitted product of two float32 matrices of 2048 cubed on one device, which uses all
cores; the ratio is of medians.  Model FLOPs count causal attention at half, and nothing that is computed twice.
`cpu ratio` divides by processor seconds instead of wall seconds: what other processes on the machine take is not in it.
"""

import argparse
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from shmap_tp.config import InputError
from shmap_tp.flops import flops_per_token
from shmap_tp.mesh import emulate, make_mesh
from shmap_tp.settings import CONF, load
from shmap_tp.step import Programs, build_programs

MESHES = [(1, 4), (2, 2), (4, 1)]
MATMUL = 2048


class Timed:
    """A function called over and over, by wall seconds and by processor seconds."""

    def __init__(self, call):
        self._call = call
        self.wall: list[float] = []
        self.cpu: list[float] = []
        call()

    def again(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        self._call()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)


def configuration(dp: int, mp: int, overrides: list[str]):
    work = ["model=cpu_33m", "train.batch=16", "train.microbatches=2", f"mesh.dp={dp}", f"mesh.mp={mp}"]
    return load(str(CONF / "config.yaml"), work + overrides)


def compiled_step(config) -> tuple[Programs, object, float]:
    """(the programs, the compiled step, seconds to trace and compile it)."""
    programs = build_programs(config, make_mesh(config.mesh, jax.devices()[:4]), jnp.float32)
    start = time.perf_counter()
    step = programs.step.lower(programs.shapes, programs.tokens).compile()
    return programs, step, time.perf_counter() - start


def stepper(config, programs: Programs, step):
    """A function that does one step and waits for all that it returns."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, config.model.vocabulary, programs.tokens.shape, np.int32)
    tokens = jax.device_put(tokens, programs.tokens.sharding)
    state = [programs.init()]

    def once() -> None:
        state[0], metrics = step(state[0], tokens)
        jax.block_until_ready((state[0], metrics))

    return once


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps on each mesh")
    parser.add_argument("--compile", action="store_true", help="also compile 32 layers, for the compile time")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    jax.config.update("jax_platforms", "cpu")
    emulate(4)

    x = jnp.full((MATMUL, MATMUL), 0.5, jnp.float32)
    product = jax.jit(lambda a: a @ a)
    matmul = Timed(lambda: product(x).block_until_ready())
    rows = {}
    try:
        for dp, mp in MESHES:
            config = configuration(dp, mp, arguments.overrides)
            programs, step, seconds = compiled_step(config)
            rows[dp, mp] = Timed(stepper(config, programs, step)), seconds
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for _ in range(arguments.rounds):
        for timed, _ in rows.values():
            matmul.again()
            timed.again()

    tokens = config.train.batch * config.model.context
    work, product_work = tokens * flops_per_token(config.model), 2 * MATMUL**3
    rate = product_work / statistics.median(matmul.wall)
    cpu_rate = product_work / statistics.median(matmul.cpu)
    print(f"measured, float32 matmul of {MATMUL} cubed: {rate / 1e9:.0f} GFLOP/s; {work / 1e9:.0f} GFLOP per step")
    print("| mesh | step s, median (min - max) | tokens/s | model GFLOP/s | ratio to matmul | cpu ratio | compile s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for (dp, mp), (timed, seconds) in rows.items():
        median = statistics.median(timed.wall)
        ratio, cpu_ratio = work / median / rate, work / statistics.median(timed.cpu) / cpu_rate
        print(
            f"| ({dp}, {mp}) | {median:.2f} ({min(timed.wall):.2f} - {max(timed.wall):.2f}) | {tokens / median:.0f} | "
            f"{work / median / 1e9:.0f} | {ratio:.2f} | {cpu_ratio:.2f} | {seconds:.1f} |"
        )
    if arguments.compile:
        seconds = compiled_step(configuration(2, 2, [*arguments.overrides, "model.layers=32"]))[2]
        print(f"32 layers on (2, 2): compiled in {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
