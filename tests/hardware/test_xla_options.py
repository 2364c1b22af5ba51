"""Effect of the compiler options in modules compiled by libtpu: weights are all-gathered for a matmul over all devices
of a slice, and their gradient is reduce-scattered."""

import re
from collections import Counter
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shmap_tp.hardware.devices import GENERATIONS
from shmap_tp.hardware.xla_options import ASYNC_FULL_ALL_GATHER, COMPILER_OPTIONS
from shmap_tp.parallel.mesh import DP
from shmap_tp.plan.tpu import Slice, topology_devices

pytest.importorskip("libtpu")

WIDTH = 2048


def collectives(version: str, sides: tuple[int, ...], options: Mapping[str, str]) -> Counter[str]:
    """Count the collectives in the gradient of two consecutive matmuls; `sparsecore` marks those on the SparseCores."""
    devices = topology_devices(Slice(version, sides, 1))
    mesh = Mesh(devices, (DP,))

    @jax.shard_map(mesh=mesh, in_specs=(P(DP), P(None, DP)), out_specs=P(None, DP))
    def gradient(x: jax.Array, weights: jax.Array) -> jax.Array:
        def loss(weights: jax.Array) -> jax.Array:
            y = x
            for weight in weights:
                y = jnp.tanh(y @ jax.lax.all_gather(weight, DP, tiled=True))
            return (y.astype(jnp.float32) ** 2).sum()

        return jax.grad(loss)(weights)

    shapes = [((512 * len(devices), WIDTH), P(DP)), ((2, WIDTH, WIDTH), P(None, DP))]
    given = [jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for size, spec in shapes]
    text = jax.jit(gradient).lower(*given).compile(compiler_options=dict(options)).as_text()
    found = re.findall(r" ((?:all-gather|all-reduce|reduce-scatter)(?:-start)?)\((?=.*replica_groups)(.*)", text)
    return Counter(("sparsecore " if "DEVICE_TYPE_SPARSECORE" in rest else "") + kind for kind, rest in found)


@pytest.mark.parametrize("version, sides", [("v5p", (4, 4, 4)), ("v6e", (4, 4))])
def test_all_gathers_and_reduce_scatters_execute_on_the_sparse_cores(version, sides):
    kind = GENERATIONS[version].kind
    assert collectives(version, sides, COMPILER_OPTIONS[kind]) == {
        "sparsecore all-gather": 2, "sparsecore reduce-scatter": 2,
    }  # fmt: skip
    assert not any("sparsecore" in name for name in collectives(version, sides, {}))


def test_all_gathers_over_a_whole_torus_are_asynchronous_on_v4():
    options = COMPILER_OPTIONS["TPU v4"]
    assert "all-gather-start" in collectives("v4", (4, 4, 4), options)
    without = {name: value for name, value in options.items() if name not in ASYNC_FULL_ALL_GATHER}
    assert collectives("v4", (4, 4, 4), without) == {"all-reduce": 2}
