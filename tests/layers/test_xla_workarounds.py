"""Sums over a few arrays are made by adding them, and come to the same."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shmap_tp.layers.flash_attention import Splash
from shmap_tp.layers.xla_workarounds import MOST, sum_by_additions
from tests.layers.test_flash_attention import equations


def shapes_of(primitive: str, jaxpr: Any) -> list[tuple[int, ...]]:
    """Of what each of them makes."""
    return [one.outvars[0].aval.shape for one in equations(jaxpr) if one.primitive.name == primitive]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_it_is_the_sum(axis, dtype):
    """Of numbers whose sum no order rounds; made by additions, each of one of the arrays, widened by itself."""
    x = jnp.arange(2 * 3 * 4, dtype=dtype).reshape(2, 3, 4)
    summed = jax.jit(lambda x: 2 * x.sum(axis))
    found, expected = sum_by_additions(summed)(x), summed(x)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
    jaxpr = jax.make_jaxpr(sum_by_additions(summed))(x).jaxpr
    assert not shapes_of("reduce_sum", jaxpr)
    assert len(shapes_of("add", jaxpr)) == x.shape[axis] - 1
    assert {one.outvars[0].aval.dtype for one in equations(jaxpr) if one.primitive.name == "slice"} == {x.dtype}


@pytest.mark.parametrize("terms", [1, 2, MOST])
def test_it_adds_up_to_so_many(terms):
    x = jnp.arange(float(terms * 2)).reshape(terms, 2)
    np.testing.assert_array_equal(sum_by_additions(lambda x: x.sum(0))(x), x.sum(0))
    assert not shapes_of("reduce_sum", jax.make_jaxpr(sum_by_additions(lambda x: x.sum(0)))(x).jaxpr)


def in_a_loop(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 2, lambda _, total: total + x[:2].sum(0), jnp.zeros(x.shape[1:]))


@pytest.mark.parametrize(
    "summed", [lambda x: x.sum(0), lambda x: x.sum((1, 2)), lambda x: x[:0].sum(0), in_a_loop],
    ids=["many", "two dims", "nothing", "in a loop"],
)  # fmt: skip
def test_others_stay(summed):
    x = jnp.arange((MOST + 1) * 6.0).reshape(MOST + 1, 2, 3)
    assert len(shapes_of("reduce_sum", jax.make_jaxpr(sum_by_additions(summed))(x).jaxpr)) == 1
    np.testing.assert_array_equal(sum_by_additions(summed)(x), summed(x))


def test_trees_go_in_and_out():
    found = sum_by_additions(lambda x, tree: {"sum": x.sum(0), "rest": (tree["a"], None)})(jnp.ones((2, 3)), {"a": 1.0})
    np.testing.assert_array_equal(found["sum"], [2.0, 2.0, 2.0])
    assert found["rest"] == (1.0, None)


def test_the_parts_of_dq_are_added():
    """Splash attention's backward pass over 1024 positions: of two blocks of keys each has made a dq."""
    q, k = jnp.ones((2, 1, 1024, 128), jnp.bfloat16), jnp.ones((2, 1024, 128), jnp.bfloat16)

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return jax.vjp(lambda *qkv: Splash(interpret=True)(*qkv, None)[0], q, k, v)[1](q)

    of_model = [x.reshape(1, 2, 1024, 128).transpose(0, 2, 1, 3) for x in (q, k, k)]
    on_one = jax.shard_map(gradients, mesh=jax.make_mesh((1,), ("dp",)), in_specs=jax.P(), out_specs=jax.P())
    jaxpr = jax.make_jaxpr(on_one)(*of_model).jaxpr
    assert (2, 1, 1024, 128) not in shapes_of("reduce_sum", jaxpr)
    assert (2, 1, 1024, 128) in shapes_of("add", jaxpr)
