"""Kernels that bring heads from matmuls to splash attention and back equal the operations that they stand for.

B batch, T time, H heads, K head dim, F = H K.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shmap_tp.layers.head_kernels import NormAndRotation, heads_first, heads_last, normed_heads
from shmap_tp.layers.positions import Rotation, YarnScaling, rotate_pairs
from shmap_tp.parallel.mesh import DP, MP
from tests.helpers.assertions import RELATIVE, assert_close
from tests.helpers.model_fixtures import mesh

B, T = 4, 384
HOW = NormAndRotation(1e-5, Rotation(10_000.0, scaling=YarnScaling(8.0, 1.0, 4.0, 32, 10.0)), interpret=True)


def in_kernels(x_BTF, factor_K, v_BTF):
    q, v = normed_heads(HOW, x_BTF, factor_K), heads_first(True, len(factor_K), v_BTF)
    return heads_last(True, q), heads_last(True, v)


def plain(x_BTF, factor_K, v_BTF):
    x = x_BTF.reshape(*x_BTF.shape[:2], -1, len(factor_K))
    n = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + HOW.epsilon) * factor_K[None, None, None]
    return rotate_pairs(HOW.rotation, 1, n).reshape(x_BTF.shape), v_BTF


def outputs_and_gradients(function, arrays, cotangents):
    def local(arrays, cotangents):
        outputs, pull = jax.vjp(function, *arrays)
        return outputs, pull(cotangents)

    rows, factor = P(DP, None, MP), P()
    specs, both = (rows, factor, rows), (rows, rows)
    run = jax.shard_map(local, mesh=mesh((2, 2)), in_specs=(specs, both), out_specs=(both, specs))
    return jax.jit(run)(arrays, cotangents)


@pytest.mark.parametrize(("heads", "head_dim"), [(12, 128), (2, 256)])
def test_heads_in_kernels_are_those_of_norm_and_rotation(heads, head_dim):
    """Outputs and gradients, also of a factor that all devices share; on each device three tiles of positions, and of
    heads of 128 two.  In bfloat16 each result is rounded once."""
    rng = np.random.default_rng(0)
    x, v, *cotangents = (rng.normal(size=(B, T, heads * head_dim)).astype(np.float32) for _ in range(4))
    factor = (1 + rng.normal(size=head_dim) / 4).astype(np.float32)
    found = outputs_and_gradients(in_kernels, (x, factor, v), cotangents := tuple(cotangents))
    assert_close(found, outputs_and_gradients(plain, (x, factor, v), cotangents), RELATIVE["float32"])
    x, v, *cotangents = (jnp.asarray(y, jnp.bfloat16) for y in (x, v, *cotangents))
    found = outputs_and_gradients(in_kernels, (x, factor, v), cotangents := tuple(cotangents))
    exact = outputs_and_gradients(
        plain, (x.astype(np.float32), factor, v), (cotangents[0].astype(np.float32), cotangents[1])
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert np.all(np.abs(one.astype(np.float32) - other) <= 2.0**-8 * np.abs(other) + 1e-5)


def test_kernels_compute_heads_that_are_rotated_in_halves_and_fill_rows_of_memory():
    assert HOW.suits(128) and HOW.suits(256) and not HOW.suits(64)
    for rotation in (Rotation(1.0, 64), Rotation(1.0, neighbouring=True)):
        assert not HOW._replace(rotation=rotation).suits(128)
