"""Kernels that bring heads from matmuls to splash attention and back equal the operations that they stand for.

B batch, T time, H heads, K head dim, F = H K.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shmap_tp.layers.head_kernels import Heads, heads_first, heads_last
from shmap_tp.layers.positions import Rotation, YarnScaling, rotate_pairs
from shmap_tp.parallel.mesh import DP, MP
from tests.helpers.assertions import RELATIVE, assert_close
from tests.helpers.model_fixtures import mesh

B, T = 4, 384
ROTATION = Rotation(10_000.0, scaling=YarnScaling(8.0, 1.0, 4.0, 32, 10.0))


def heads_of(dim):
    return Heads(dim, ROTATION, scale=0.3, epsilon=1e-5, interpret=True)


def in_kernels(x_BTF, factor_K, k_BTF, v_BTF):
    how = heads_of(len(factor_K))
    q, k = heads_first(how, x_BTF, factor_K), heads_first(how, k_BTF)
    v = heads_first(how._replace(rotation=None), v_BTF)
    return tuple(heads_last(how, x) for x in (q, k, v))


def plain(x_BTF, factor_K, k_BTF, v_BTF):
    x, k = (x.reshape(*x.shape[:2], -1, len(factor_K)) for x in (x_BTF, k_BTF))
    how = heads_of(len(factor_K))
    n = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + how.epsilon) * factor_K[None, None, None]
    return *(how.scale * rotate_pairs(ROTATION, 1, x).reshape(x_BTF.shape) for x in (n, k)), v_BTF


def outputs_and_gradients(function, arrays, cotangents):
    def local(arrays, cotangents):
        outputs, pull = jax.vjp(function, *arrays)
        return outputs, pull(cotangents)

    rows, factor = P(DP, None, MP), P()
    specs, outputs = (rows, factor, rows, rows), (rows, rows, rows)
    run = jax.shard_map(local, mesh=mesh((2, 2)), in_specs=(specs, outputs), out_specs=(outputs, specs))
    return jax.jit(run)(arrays, cotangents)


@pytest.mark.parametrize(("heads", "head_dim"), [(12, 128), (2, 256)])
def test_heads_in_kernels_are_those_of_norm_and_rotation(heads, head_dim):
    """Outputs and gradients, of heads normalised, by a factor that all devices share, and rotated; rotated alone; and
    neither.  On each device three tiles of positions, and of heads of 128 two.  In bfloat16 each result is rounded
    once."""
    rng = np.random.default_rng(0)
    x, k, v, *cotangents = (rng.normal(size=(B, T, heads * head_dim)).astype(np.float32) for _ in range(6))
    factor = (1 + rng.normal(size=head_dim) / 4).astype(np.float32)
    found = outputs_and_gradients(in_kernels, (x, factor, k, v), cotangents := tuple(cotangents))
    assert_close(found, outputs_and_gradients(plain, (x, factor, k, v), cotangents), RELATIVE["float32"])
    x, k, v, *cotangents = (jnp.asarray(y, jnp.bfloat16) for y in (x, k, v, *cotangents))
    found = outputs_and_gradients(in_kernels, (x, factor, k, v), cotangents := tuple(cotangents))
    exact = outputs_and_gradients(plain, *jax.tree.map(lambda x: x.astype(np.float32), ((x, factor, k, v), cotangents)))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert np.all(np.abs(one.astype(np.float32) - other) <= 2.0**-8 * np.abs(other) + 1e-5)


def test_kernels_compute_heads_that_are_rotated_in_halves_and_fill_rows_of_memory():
    assert heads_of(128).is_suited and heads_of(256).is_suited and not heads_of(64).is_suited
    for rotation in (Rotation(1.0, 64), Rotation(1.0, neighbouring=True)):
        assert not heads_of(128)._replace(rotation=rotation).is_suited
