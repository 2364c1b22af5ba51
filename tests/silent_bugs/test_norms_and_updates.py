"""Norms, initial values and updates that depended on the mesh in other frameworks, or differed between replicas, each
written as the mistake would be made here.  docs/silent-bugs.md names the published threads, test by test."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shmap_tp.training.optimizer
from shmap_tp.layers.linear import Linear
from shmap_tp.parallel.fsdp import Zero1
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.parallel.partitioning import partition_specs
from shmap_tp.parallel.whole_matrices import UpdateSharding, on_whole_matrices
from shmap_tp.training.optimizer import global_norm, orthogonalized
from tests.helpers.assertions import RELATIVE, assert_close, assert_same_bits
from tests.helpers.model_fixtures import mesh, random_like, shapes_of
from tests.helpers.mutations import refused_by_type, trace_step, wrong

IN, OUT = 40, 24
SHAPES = shapes_of(partial(Linear.row, IN, OUT, std=1.0, bias=True))
SPECS = partition_specs(SHAPES, {MP: 4})
"""The weight is sharded over mp, the bias replicated."""
PARAMS = random_like(SHAPES, "float64")


def over_mp(call: Any, out_specs: Any, *arguments: Any) -> Any:
    """call(*arguments), trees shaped like PARAMS, under shard_map over four devices of mp."""
    with jax.enable_x64(True):
        run = jax.shard_map(call, mesh=mesh((1, 4)), in_specs=(SPECS,) * len(arguments), out_specs=out_specs)
        return jax.jit(run)(*arguments)


def compare_norm() -> None:
    """Asserts that the global norm is that of all values, each counted once."""
    expected = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(PARAMS)))
    assert_close(over_mp(global_norm, P(), PARAMS), expected, RELATIVE["float64"])


def test_a_norm_counts_replicated_parameters_once_for_each_replica(monkeypatch):
    compare_norm()
    everywhere = lambda totals: sum(lax.psum(total, MP) for total in totals.values())  # noqa: E731
    monkeypatch.setattr(shmap_tp.training.optimizer, "_total", everywhere)
    with wrong:
        compare_norm()


def test_a_norm_counts_sharded_parameters_on_one_device_alone(monkeypatch):
    monkeypatch.setattr(shmap_tp.training.optimizer, "_total", lambda totals: sum(totals.values()))
    with refused_by_type:
        compare_norm()


def test_the_spread_of_initial_weights_is_that_of_a_shard():
    """Each device draws its own rows, with the spread that their number gives: here twice that of all rows."""

    def draw(rows: int, key: jax.Array) -> Linear:
        return Linear.row(rows, OUT, std=rows**-0.5, bias=True, key=key)

    def init(key: jax.Array) -> Linear:
        own = draw(IN // lax.axis_size(MP), jax.random.fold_in(key, lax.axis_index(MP)))
        return eqx.tree_at(lambda layer: layer.bias, own, jnp.zeros(OUT))

    key = jax.random.key(0)
    found = jax.jit(jax.shard_map(init, mesh=mesh((1, 4)), in_specs=P(), out_specs=SPECS))(key)
    assert 1.8 < np.std(found.weight) / np.std(draw(IN, key).weight) < 2.2
    with pytest.raises(AssertionError, match=r"not bitwise equal: \['weight'\]"):
        assert_same_bits(found, draw(IN, key))


def test_replicas_start_from_other_values():
    """Each device draws the replicated bias with a key of its own."""

    def init(key: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(key, lax.axis_index(MP)), (OUT,))

    with refused_by_type:
        jax.shard_map(init, mesh=mesh((1, 4)), in_specs=P(), out_specs=SPECS.bias)(jax.random.key(0))


def test_a_replica_keeps_what_other_ranks_updated(monkeypatch):
    """ZeRO-1: each rank writes its own shard of the update into its copy, and nothing brings it the others."""

    def only_its_own(self: Zero1, w: jax.Array) -> jax.Array:
        return jnp.concatenate([w] * lax.axis_size(self.axes), self.dim % w.ndim)

    monkeypatch.setattr(Zero1, "all_gather_updated", only_its_own)
    with refused_by_type:
        trace_step("mesh.zero=zero1")


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "by shard"])
def test_muon_orthogonalises_the_shards_of_a_matrix(whole):
    def orthogonalised(x_NRC: jax.Array) -> jax.Array:
        return jax.vmap(lambda x: orthogonalized(x, steps=5))(x_NRC)

    def by_matrix(tree: Any) -> Any:
        return eqx.tree_at(lambda tree: tree.weight, tree, orthogonalised(tree.weight[None])[0])

    def update(gradients: Any) -> Any:
        if whole:
            layout = UpdateSharding(SPECS, (DP, MP), jnp.float64)
            return on_whole_matrices(orthogonalised).update(gradients, (), layout=layout)[0]
        return by_matrix(gradients)

    found = over_mp(update, SPECS, PARAMS)
    with jax.enable_x64(True):
        expected = by_matrix(PARAMS)
    with nullcontext() if whole else wrong:
        assert_close(found, expected, RELATIVE["float64"])
