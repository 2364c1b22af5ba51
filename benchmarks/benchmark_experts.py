"""Time a layer of experts beside an MLP of the same active FLOPs, forward and backward, in pairs.

    python benchmarks/benchmark_experts.py                     # one device, its grouped matmul
    python benchmarks/benchmark_experts.py --ep 2 --emulate 2  # tokens sent to their experts, on emulated CPU devices

E experts of F hidden units, of which each token chooses C; the MLP has C F.  The router's weights are random, so that
loads are uneven as at the start of a training run.  Each round calls both once, in alternating order; the ratio is the
median over rounds of experts : MLP, in seconds of the host's processors.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import check_environment  # noqa: F401
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shmap_tp.config.compose import CONF, load
from shmap_tp.layers.context import Context
from shmap_tp.layers.experts import Experts
from shmap_tp.layers.grouped_matmul import select_grouped_matmul
from shmap_tp.layers.mlp import MLPS
from shmap_tp.layers.positions import Alibi
from shmap_tp.parallel.collectives import all_reduce
from shmap_tp.parallel.mesh import batch_axes, make_mesh, token_axes
from shmap_tp.parallel.partitioning import partition_specs
from shmap_tp.parallel.tensor_parallel import AllReduce
from shmap_tp.runtime.command_line import run_command
from shmap_tp.runtime.distributed import emulate_cpu_devices


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value, meaning in (
        ("experts", 8, "E"), ("per-token", 2, "C"), ("width", 512, "D"), ("ffn", 1024, "F"),
        ("tokens", 4096, "of each device"), ("ep", 1, "devices that share the experts"), ("rounds", 15, "pairs"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"{meaning} ({value})")
    parser.add_argument("--capacity", type=float, default=1.25, help="model.expert_capacity, with --ep (1.25)")
    parser.add_argument("--emulate", type=int, metavar="N", help="run on N emulated CPU devices")
    return parser


def main() -> int:
    """Run the command and return its exit code."""
    arguments = parser().parse_args()
    return run_command(lambda: compare(arguments))


def compare(arguments: argparse.Namespace) -> None:
    """Print the median seconds of both layers, and of their ratio."""
    if arguments.emulate:
        emulate_cpu_devices(arguments.emulate)
    given = dict(
        width=arguments.width, ffn=arguments.ffn, experts=arguments.experts, experts_per_token=arguments.per_token,
        expert_capacity=arguments.capacity if arguments.ep > 1 else "null", block="sequential", mlp="swiglu",
    )  # fmt: skip
    words = [*(f"model.{key}={value}" for key, value in given.items()), f"mesh.ep={arguments.ep}"]
    config = load(str(CONF / "base.yaml"), [*words, f"mesh.dp={arguments.ep}", "mesh.mp=1", "mesh.processes=1"])
    mesh = make_mesh(config.mesh, jax.devices()[: arguments.ep])
    context = Context(AllReduce(), Alibi(8), grouped_matmul=select_grouped_matmul(jax.devices()[0]))
    key_experts, key_mlp, key_x = jax.random.split(jax.random.key(0), 3)
    std = dict(std=arguments.width**-0.5, std_out=arguments.ffn**-0.5)
    experts = Experts(config.model, **std, key=key_experts)
    mlp = MLPS[config.model.mlp](arguments.width, arguments.per_token * arguments.ffn, **std, key=key_mlp)
    x = jax.random.normal(key_x, (arguments.ep, arguments.tokens, arguments.width))
    of_experts = timed(mesh, experts, lambda layer, x: layer(x, context)[0], x)
    of_mlp = timed(mesh, mlp, lambda layer, x: layer(x, context.tp), x)
    seconds = []
    for round in range(arguments.rounds):
        pair = [of_experts, of_mlp] if round % 2 else [of_mlp, of_experts]
        found = [time_of() for time_of in pair]
        seconds.append(found if round % 2 else found[::-1])
    each = [statistics.median(column) for column in zip(*seconds, strict=True)]
    ratio = statistics.median(experts / mlp for experts, mlp in seconds)
    print(f"experts {1e3 * each[0]:.1f} ms, MLP {1e3 * each[1]:.1f} ms, ratio {ratio:.3f}")


def timed(mesh: jax.sharding.Mesh, layer: object, call: Callable, x: jax.Array) -> Callable[[], float]:
    """A function that returns the processor seconds of the layer and all of its gradients, compiled and warm."""
    specs, rows = partition_specs(layer, dict(mesh.shape)), PartitionSpec(batch_axes(mesh.axis_names))

    def loss(layer: object, x: jax.Array) -> jax.Array:
        total = jax.shard_map(
            lambda layer, x: all_reduce(jnp.sum(jnp.square(call(layer, x))), token_axes()),
            mesh=mesh, in_specs=(specs, rows), out_specs=PartitionSpec(),
        )(layer, x)  # fmt: skip
        return total

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(layer, x).compile()
    run = partial(compiled, layer, x)
    jax.block_until_ready(run())

    def seconds() -> float:
        start = time.process_time()
        jax.block_until_ready(run())
        return time.process_time() - start

    return seconds


if __name__ == "__main__":
    raise SystemExit(main())
