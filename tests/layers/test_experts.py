"""A layer of experts equals a loop over its experts, whatever the load, on every mesh and in every mode.

`assert_close` compares the largest error of every array: of the output, and of the gradients of x, the router and each
expert.
"""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shmap_tp.layers.context import Context
from shmap_tp.layers.grouped_matmul import (
    GroupedMatmul,
    contracted_tile,
    in_blocks,
    in_kernels,
    output_tile,
    ragged_dot,
    row_tile,
)
from shmap_tp.layers.positions import Alibi
from shmap_tp.parallel.collectives import all_reduce
from shmap_tp.parallel.eight_bit import FORMATS, EightBit, rounded
from shmap_tp.parallel.partitioning import partition_specs
from tests.helpers.expert_cases import LOADS, experts_case, moved
from tests.helpers.model_fixtures import mesh
from tests.helpers.sharded_harness import ALL_REDUCE, compare

PLACES = [
    # load, mode, (dp, mp), ep of the ranks of dp, precision
    ("two of eight", "all_reduce", (2, 4), 1, "float64"),
    ("two of eight", "all_reduce", (4, 2), 2, "float64"),
    ("two of eight", "sequence", (4, 2), 4, "float32"),
    ("one expert takes all", "all_reduce", (8, 1), 8, "float32"),
    ("two experts take all", "sequence", (1, 8), 1, "float32"),
    ("all experts, geglu", "all_reduce", (4, 2), 2, "float32"),
    ("three of sixteen by biased sigmoid, shared", "collective_matmul", (4, 2), 2, "float64"),
    ("two of eight, biases, clamped", "sequence", (4, 2), 2, "float64"),
    ("two of eight, not normalised", "collective_matmul", (1, 8), 1, "float32"),
]
"""Every load; experts whose features are cut and experts to which tokens are sent, in every mode and both at once."""


@pytest.mark.parametrize(("load", "mode", "shape", "ep", "precision"), PLACES, ids=str)
def test_experts_equal_a_loop_over_them(load, mode, shape, ep, precision):
    compare(experts_case(load, mode), shape, precision, ep=ep)


def test_a_capacity_that_the_load_does_not_exceed_changes_nothing():
    case = experts_case("two of eight", "all_reduce", settings="expert_capacity=8.0")
    compare(case, (8, 1), "float32", ep=8)


def test_what_a_capacity_drops_is_counted():
    """All 8 tokens of each rank choose one expert, and only one of them can be sent to its rank."""
    case = experts_case("one expert takes all", "all_reduce", settings="expert_capacity=1.0")
    layer, (x,) = case.arrays("float32")
    on = mesh((8, 1), ep=8)

    def count(layer, x):
        _, _, found = layer(moved(x, *LOADS["one expert takes all"][1]), Context(ALL_REDUCE, Alibi(8)))
        return all_reduce(found, on.axis_names)

    specs = partition_specs(layer, dict(on.shape)), P(("dp", "ep"))
    counted = jax.device_get(jax.jit(jax.shard_map(count, mesh=on, in_specs=specs, out_specs=P()))(layer, x))
    assert counted.dropped == 8 * 7 and sorted(counted.load_E) == [0] * 7 + [64]
    found = jax.tree.map(lambda total: total[None], counted).metrics(64)
    assert found["expert_load"] == 8 and found["experts_dropped"] == pytest.approx(7 / 8)
    assert 0 <= found["router_entropy"] < np.log(8)


interpreted = GroupedMatmul(
    *(partial(function, interpret=True) for function in (in_kernels.multiply, in_kernels.gradient))
)


SIZES = [(0, 300, 1, 64), (65, 0, 0, 520), (0, 0, 0, 0), (0, 0, 1, 0), (0, 600, 0, 0), (150, 150, 150, 150)]
"""Empty groups, one row, and rows of no group; for `in_blocks` blocks of both sizes, for kernels tiles of several
groups."""


PRODUCTS = [
    (in_blocks, (5, 3), "float64"),
    (ragged_dot, (5, 3), "float64"),
    (interpreted, (5, 3), "float32"),
    (interpreted, (5, 3), "bfloat16"),
    (interpreted, (1100, 600), "float32"),
]
"""No tile of a kernel divides 1100 or 600 features, of the forward pass or the backward pass."""


@pytest.mark.parametrize(("multiply", "features", "precision"), PRODUCTS)
def test_grouped_products_and_their_gradients_are_those_of_a_loop_over_groups(multiply, features, precision):
    """Two matrices for each group.  bfloat16 is rounded once: to 8 bits, of which half the last may be wrong."""
    off = {"float64": {"rtol": 0, "atol": 1e-12}, "float32": {"rtol": 0, "atol": 1e-6}}
    close = partial(np.allclose, **off.get(precision, {"rtol": 2**-8, "atol": 1e-6}))
    rng, (d, f) = np.random.default_rng(0), features
    sizes_of = (600, d), (2, 4, d, f), (2, 600, f)
    scales = 1.0, (d + f) ** -0.5 / 4, 600**-0.5 / 4  # results of about 1/4
    given = [(rng.normal(size=size) * by).astype(precision) for size, by in zip(sizes_of, scales, strict=True)]
    x, ws, dys = (a.astype(np.float64) for a in given)

    @jax.jit
    def run(x, ws, dys, sizes):
        ys, pull = jax.vjp(lambda x, ws: multiply(x, ws, sizes), x, ws)
        return ys, *pull(dys)

    for sizes in SIZES:
        with jax.enable_x64(precision == "float64"), jax.set_mesh(mesh((1, 1))):
            found = jax.device_get(run(given[0], *map(tuple, given[1:]), np.array(sizes, np.int32)))
        ys, dx, dws = jax.tree.map(lambda a: a.astype(np.float64), found)
        for e, end in enumerate(np.cumsum(sizes)):
            group = slice(end - sizes[e], end)
            assert close(dx[group], np.einsum("wrf,wdf->rd", dys[:, group], ws[:, e]))
            for y, dw, w, dy in zip(ys, dws, ws, dys, strict=True):
                assert close(y[group], x[group] @ w[e])
                assert close(dw[e], x[group].T @ dy[group])


@pytest.mark.parametrize("precision", list(FORMATS))
def test_grouped_products_in_eight_bits_are_the_same_of_all_three(precision):
    """Forward and for the gradient of rows, from two matrices.  No tile of a kernel divides 1100 features."""
    rng, to, sizes = np.random.default_rng(0), FORMATS[precision], jnp.array([65, 0, 1, 520], jnp.int32)
    x, dys, weights = (rng.normal(size=n).astype("float32") for n in ((600, 1100), (2, 600, 260), (2, 4, 1100, 260)))
    rounded_weights = [rounded(jnp.asarray(w), (-2, -1), to.values) for w in weights]

    def run(multiply, x, weights, dys):
        def products(x, weights):
            held = zip(rounded_weights, weights, strict=True)
            return multiply(x, tuple(EightBit(*found, w, to, (-2, -1)) for found, w in held), sizes)

        ys, pull = jax.vjp(products, x, weights)
        return *ys, pull(dys)[0]

    with jax.set_mesh(mesh((1, 1))):
        tries = (
            jax.jit(partial(run, each))(x, tuple(weights), tuple(dys)) for each in (in_blocks, ragged_dot, interpreted)
        )
        plain, *others = jax.device_get(list(tries))
    close = partial(np.testing.assert_allclose, rtol=0, atol=1e-6 * 1100**0.5)
    for other in others:
        jax.tree.map(lambda a, b: close(a[:586], b[:586]), plain, other)
    exact = x[:65] @ weights[0, 0]
    assert 0.003 < np.linalg.norm(plain[0][:65] - exact) / np.linalg.norm(exact) < 0.1


def test_tiles_cover_a_matrix_with_little_to_spare():
    assert [output_tile(size, 2) for size in (176, 1024, 1408, 5632, 14336)] == [176, 1024, 768, 512, 1024]
    assert [contracted_tile(size, 2) for size in (768, 2048, 2176, 4096)] == [768, 2048, 384, 512]
    assert [contracted_tile(size, 2, 2) for size in (768, 1024, 1408, 14336)] == [768, 1024, 128, 256]
    assert [contracted_tile(size, 1) for size in (4096, 14336)] == [4096, 1024]
    assert [output_tile(size, 4) for size in (176, 1024, 1408)] == [176, 512, 512]
    assert [contracted_tile(size, 4) for size in (768, 1024, 2048)] == [768, 1024, 512]
    assert [row_tile(8 * rows, 8) for rows in (100, 1024, 2048, 6000)] == [128, 256, 512, 1024]
    assert [row_tile(8 * rows, 8, True) for rows in (100, 1024, 6000)] == [128, 256, 256]


def test_equal_scores_choose_the_experts_of_lower_numbers():
    """As jax.lax.top_k has it, on every mesh."""
    layer = experts_case("two of eight", "all_reduce").arrays("float32")[0].router
    scores = np.zeros((3, 8), np.float32)
    scores[1, [2, 5, 6]] = 1.0
    router = eqx.tree_at(lambda router: router.weight, layer, jnp.eye(8))
    choose = jax.shard_map(lambda x: router(x).experts_NC, mesh=mesh((1, 2)), in_specs=P(), out_specs=P("mp"))
    assert jax.jit(choose)(scores)[:3].tolist() == [[0, 1], [2, 5], [0, 1]]


@pytest.mark.parametrize("multiply", [ragged_dot, interpreted])
def test_the_other_grouped_products_give_the_same(multiply):
    compare(experts_case("two of eight", "all_reduce", multiply), (2, 4), "float32")
