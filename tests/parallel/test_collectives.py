"""`shard` and `unshard` are inverses of each other, and agree with the sharding that a PartitionSpec has in JAX."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shmap_tp.parallel.collectives import shard, unshard, varying_axes
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.parallel.partitioning import spec_axes
from tests.helpers.model_fixtures import mesh

X = np.arange(16 * 8 * 3, dtype=np.float32).reshape(16, 8, 3)
SPECS = [
    P(),
    P(DP),
    P(None, MP),
    P(DP, MP),
    P(MP, DP),
    P((MP, DP), None),
    P((DP, MP), None),
    P(None, (MP, DP)),
]
every_spec = pytest.mark.parametrize("spec", SPECS, ids=str)


def axes_of(spec: P) -> frozenset[str]:
    return frozenset(axis for entry in spec for axis in spec_axes(entry))


@every_spec
def test_unshard_of_shards_is_the_full_array_on_every_device(spec):
    def local(x):
        full = unshard(x, spec)
        assert full.shape == X.shape and not varying_axes(full)
        return full

    run = jax.shard_map(local, mesh=mesh((2, 4)), in_specs=spec, out_specs=P())
    np.testing.assert_array_equal(jax.jit(run)(X), X)


@every_spec
def test_shard_of_a_replicated_array_is_the_shard_that_its_partition_spec_says(spec):
    def local(x):
        part = shard(x, spec)
        assert varying_axes(part) == axes_of(spec)
        return part

    run = jax.shard_map(local, mesh=mesh((2, 4)), in_specs=P(), out_specs=spec)
    np.testing.assert_array_equal(jax.jit(run)(X), X)


@every_spec
def test_shard_of_unshard_returns_the_same_shards(spec):
    run = jax.shard_map(lambda x: shard(unshard(x, spec), spec), mesh=mesh((2, 4)), in_specs=spec, out_specs=spec)
    np.testing.assert_array_equal(jax.jit(run)(X), X)


def test_shards_along_two_axes_of_one_dim_differ_with_the_order_of_the_axes():
    """Otherwise the tests above could not detect that `shard` and `unshard` take the axes in the wrong order."""

    def shards(spec: P) -> np.ndarray:
        run = jax.shard_map(lambda x: shard(x, spec), mesh=mesh((2, 4)), in_specs=P(), out_specs=P((DP, MP)))
        return np.asarray(jax.jit(run)(X))

    np.testing.assert_array_equal(shards(P((DP, MP))), X)
    assert not np.array_equal(shards(P((MP, DP))), X)
