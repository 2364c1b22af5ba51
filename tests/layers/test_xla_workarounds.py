"""Each function equals the plain version that it replaces, and does what it exists for."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shmap_tp.layers.causal_attention import Pattern
from shmap_tp.layers.flash_attention import Splash
from shmap_tp.layers.linear import Kind, LinearProduct
from shmap_tp.layers.xla_workarounds import MAX_ADDITIONS, exact_gelu, recompute_from, row_major, sum_by_additions
from tests.helpers.jaxprs import equations_named


def result_shapes(primitive: str, jaxpr: Any) -> list[tuple[int, ...]]:
    """The shapes of the results of all equations of this primitive."""
    return [one.outvars[0].aval.shape for one in equations_named(jaxpr, primitive)]


@pytest.mark.parametrize(
    ("shape", "axis", "dtype"),
    [
        ((2, 3, 4), 0, "bfloat16"),
        ((2, 3, 4), -1, "bfloat16"),
        ((1, 2), 0, "float32"),
        ((MAX_ADDITIONS, 2), 0, "float32"),
    ],
)
def test_a_short_sum_is_computed_by_additions(shape, axis, dtype):
    """The sum of the numbers is exact in any order.  Each slice is converted to float32 as it is added."""
    x = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    function = sum_by_additions(jax.jit(lambda x: 2 * x.sum(axis)))
    found = jax.jit(function)(x)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, 2 * x.astype("float32").sum(axis))
    jaxpr = jax.make_jaxpr(function)(x).jaxpr
    assert not result_shapes("reduce_sum", jaxpr)
    assert len(result_shapes("add", jaxpr)) == x.shape[axis] - 1
    assert {one.outvars[0].aval.dtype for one in equations_named(jaxpr, "slice")} == {x.dtype}


def sum_in_a_loop(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 2, lambda _, total: total + x[:2].sum(0), jnp.zeros(x.shape[1:]))


@pytest.mark.parametrize(
    "function", [lambda x: x.sum(0), lambda x: x.sum((1, 2)), lambda x: x[:0].sum(0), sum_in_a_loop],
    ids=["more terms", "two dims", "no terms", "in a loop"],
)  # fmt: skip
def test_other_sums_are_not_rewritten(function):
    x = np.arange((MAX_ADDITIONS + 1) * 6, dtype="float32").reshape(MAX_ADDITIONS + 1, 2, 3)
    assert len(result_shapes("reduce_sum", jax.make_jaxpr(sum_by_additions(function))(x).jaxpr)) == 1
    np.testing.assert_array_equal(jax.jit(sum_by_additions(function))(x), jax.jit(function)(x))


def test_arguments_and_results_may_be_pytrees():
    function = sum_by_additions(lambda x, tree: {"sum": x.sum(0), "rest": (tree["a"], None)})
    found = jax.jit(function)(np.ones((2, 3), "float32"), {"a": 1.0})
    np.testing.assert_array_equal(found["sum"], [2.0, 2.0, 2.0])
    assert found["rest"] == (1.0, None)


def test_splash_attention_adds_the_partial_dq_of_its_blocks():
    """In the backward pass over 1024 positions, where each of two blocks of keys returns a partial dq."""

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return jax.vjp(lambda *qkv: Splash(interpret=True)(*qkv, Pattern())[0], q, k, v)[1](q)

    qkv = 3 * [jax.ShapeDtypeStruct((1, 1024, 2, 128), jnp.bfloat16)]
    one_device = jax.shard_map(gradients, mesh=jax.make_mesh((1,), ("dp",)), in_specs=jax.P(), out_specs=jax.P())
    jaxpr = jax.make_jaxpr(one_device)(*qkv).jaxpr
    assert (2, 1, 1024, 128) not in result_shapes("reduce_sum", jaxpr)
    assert (2, 1, 1024, 128) in result_shapes("add", jaxpr)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-6), ("bfloat16", 2**-7)])
def test_exact_gelu_has_the_value_and_the_derivative_of_the_plain_version(dtype, tolerance):
    """The derivative of the bfloat16 version is compared with that of the float32 version."""
    x, gelu = np.linspace(-6, 6, 1001).astype(dtype), partial(jax.nn.gelu, approximate=False)
    derivative = jax.jit(jax.vmap(jax.grad(exact_gelu)))(x)
    np.testing.assert_array_equal(jax.jit(exact_gelu)(x), jax.jit(gelu)(x))
    plain = jax.jit(jax.vmap(jax.grad(gelu)))(x.astype("float32"))
    assert derivative.dtype == x.dtype
    np.testing.assert_allclose(derivative.astype("float32"), plain, atol=tolerance)


@pytest.mark.parametrize("platform, is_recomputed", [("cpu", False), ("tpu", True), ("cuda", True)])
def test_only_cpus_compute_nothing_again(platform, is_recomputed):
    """XLA does not see through an optimization barrier, so what depends on one is computed again."""
    tree = {"a": np.arange(4, dtype="float32"), "b": np.arange(3).astype("bfloat16")}
    text = jax.jit(recompute_from).trace(tree).lower(lowering_platforms=(platform,)).as_text()
    assert ("optimization_barrier" in text) == is_recomputed
    jax.tree.map(np.testing.assert_array_equal, jax.jit(recompute_from)(tree), tree)


@pytest.mark.parametrize(
    ("platform", "width", "constraints"), [("tpu", 256, 2), ("tpu", 64, 0), ("cuda", 256, 0), ("cpu", 256, 0)]
)
def test_tpus_store_values_and_gradients_whose_rows_fill_their_memory_in_row_major_order(platform, width, constraints):
    x = np.arange(2 * 3 * width, dtype="float32").reshape(2, 3, width) % 100
    gradient = jax.jit(jax.value_and_grad(lambda x: jnp.sum(jnp.square(row_major(x)))))
    value, dx = gradient(x)
    assert value == np.sum(np.square(x, dtype="float64"))
    np.testing.assert_array_equal(dx, 2 * x)
    np.testing.assert_array_equal(jax.jit(jax.vmap(row_major))(x), x)
    text = gradient.trace(x).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("custom_call @LayoutConstraint") == constraints


def test_flat_heads_have_products_of_matrices_and_a_gradient_in_row_major_order():
    """Else XLA for TPU computes the gradient of the weight head by head, and copies it."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 64, 256), (256, 3, 128), (2, 64, 384))]
    product = LinearProduct(Kind.heads, (3, 128), is_flat=True)
    jaxpr = jax.make_jaxpr(lambda x, w, dy: jax.vjp(product, x, w)[1](dy))(*shapes).jaxpr
    assert result_shapes("row_major", jaxpr) == [(256, 384), (256, 384)]
    assert sorted(result_shapes("dot_general", jaxpr)) == [(128, 256), (128, 384), (384, 256)]
