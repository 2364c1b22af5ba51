"""The compiler's estimate for the matmuls of a model on a TPU, each compiled alone, beside its bounds.

    python benchmarks/benchmark_matmuls.py --version v5p --model llama3_70b --mp 4 --rows 8 64 512
    python benchmarks/benchmark_matmuls.py --version v6e --model llama3_8b --mp 8 --rows 64 --slots 1280

The matrices are the shards of one device of `--mp`, in bfloat16; libtpu compiles them on any Linux machine.  With
`--slots` each row is a sequence that decodes a token: its scores and values over so many slots of the cache are listed,
too.  Bounds: the bytes of the weight or cache over the memory bandwidth, and the FLOPs over the peak.
"""

import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from functools import partial

import check_environment  # noqa: F401
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shmap_tp.config.compose import CONF, load
from shmap_tp.config.schema import ModelConfig
from shmap_tp.config.values import padded_vocabulary
from shmap_tp.hardware.devices import DEVICES, GENERATIONS
from shmap_tp.plan.hlo_parser import parse_hlo
from shmap_tp.plan.tpu import find_slice, topology_devices
from shmap_tp.runtime.command_line import run_command

Shape = tuple[int, ...]


def products(model: ModelConfig, mp: int, rows: int, slots: int | None) -> Iterator[tuple[str, str, Shape, Shape]]:
    """(name, as einsum has it, x, weight or cache) of each kind of product on one of `mp` devices."""
    heads, ffn = model.heads * model.head_dim // mp, model.ffn // mp
    yield "query", "ni,io->no", (rows, model.width), (model.width, heads)
    yield "output", "ni,io->no", (rows, heads), (heads, model.width)
    yield "gate or up", "ni,io->no", (rows, model.width), (model.width, ffn)
    yield "down", "ni,io->no", (rows, ffn), (ffn, model.width)
    yield "head", "ni,io->no", (rows, model.width), (model.width, padded_vocabulary(model) // mp)
    if slots:
        batch, queries = rows * model.kv_heads // mp, model.heads // model.kv_heads
        cache = batch, slots, model.head_dim
        yield "scores", "bqk,bsk->bqs", (batch, queries, model.head_dim), cache
        yield "values", "bqs,bsk->bqk", (batch, queries, slots), cache


def estimated_cycles(product: str, shapes: tuple[Shape, Shape], mesh: Mesh) -> int:
    """The compiler's cycles for one product, on one device."""
    sharding = NamedSharding(mesh, P())
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]
    text = jax.jit(partial(jnp.einsum, product)).lower(*arguments).compile().as_text()
    return sum(one.estimated_cycles or 0 for one in parse_hlo(text).entry.instructions.values())


def main(arguments: Namespace) -> None:
    model = load(str(CONF / "base.yaml"), [f"model={arguments.model}", "mesh.dp=1", "mesh.mp=1"]).model
    mesh = Mesh(topology_devices(find_slice(arguments.version, 4, None, 1))[:1], ("dp",))
    device = DEVICES[GENERATIONS[arguments.version].kind]
    print("product      rows  weight or cache     cycles        us  us, memory  us, peak  times the bound")
    for rows in arguments.rows:
        for name, product, x, weight in products(model, arguments.mp, rows, arguments.slots):
            cycles, size = estimated_cycles(product, (x, weight), mesh), math.prod(weight)
            bounds = 2 * size / device.memory_rate, 2 * x[-2] * size / device.flops
            times = "".join(f"{1e6 * each:10.1f}" for each in (cycles / device.clock, *bounds))
            shape, ratio = " x ".join(map(str, weight)), cycles / device.clock / max(bounds)
            print(f"{name:10} {rows:6}  {shape:>15} {cycles:10,}{times}  {ratio:15.2f}", flush=True)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--version", default="v5p", choices=list(GENERATIONS), help="TPU version (default v5p)")
    parser.add_argument("--model", default="llama3_70b", help="a file of conf/model (default llama3_70b)")
    parser.add_argument("--mp", type=int, default=4, help="devices that share each matrix (default 4)")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 512], help="rows of x (default 8 64 512)")
    parser.add_argument("--slots", type=int, help="slots of the cache of each sequence")
    parsed = parser.parse_args()
    sys.exit(run_command(lambda: main(parsed)))
