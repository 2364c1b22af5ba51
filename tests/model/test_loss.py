"""The head's cross entropy equals log_softmax of h @ w' over the real ids, for every sharding of w and any chunk size.

So do its gradients, which take three matrix products; and logits of more than one chunk never exist.

B batch, T time, D model width, V vocabulary rows, padded.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shmap_tp.layers.embedding import OutputProjection, score
from shmap_tp.model.loss import LinearCrossEntropy
from shmap_tp.parallel.collectives import all_reduce
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.training.step import build_step_functions
from tests.helpers import loss_cases as cases
from tests.helpers.jaxprs import equations_named, repeated_equations
from tests.helpers.loss_cases import PADDED, Z_LOSS, B, D, T, V
from tests.helpers.model_fixtures import config, mesh, mesh_of
from tests.helpers.sharded_harness import BATCH_SHARDED, compare

PLACES = {
    **dict.fromkeys(["every target ignored", cases.LOSS_IN_SEQUENCE, cases.LOSS_WITH_BIAS], ((2, 4), "float64")),
    f"{PADDED}, chunks of 3": ((2, 4), "float64"),
    f"{PADDED}, chunks of 32": ((1, 8), "float32"),
    f"{cases.ONLY_PADDING}, one chunk": ((1, 8), "float64"),
    f"{cases.ONLY_PADDING}, chunks of 3": ((1, 8), "float32"),
    f"{cases.ALL_COLUMNS_REAL}, one chunk": ((4, 2), "float32"),
    f"{cases.ALL_COLUMNS_REAL}, chunks of 32": ((1, 1), "float64"),
    f"{cases.ALL_COLUMNS_REAL}, chunks of 3": ((8, 1), "float32"),
}
"""On (1, 8) one device holds only padding, or seven do."""


@pytest.mark.parametrize("case", PLACES)
def test_loss_equals_its_dense_reference(case):
    compare(cases.LOSSES[case], *PLACES[case])


@cache
def sums_and_gradients(loss: LinearCrossEntropy, shape: tuple[int, int] = (2, 4)) -> Any:
    """(h, w, targets) -> the sums with and without gradients, and the gradients of the objective."""

    def local(h: Any, w: Any, targets: Any) -> dict[str, Any]:
        counted = jnp.ones((), jnp.float32)
        objective, pull, nll = jax.vjp(lambda h, w: loss(h, OutputProjection(w), targets, counted), h, w, has_aux=True)
        dh, dw = pull(jnp.ones_like(objective))
        evaluated = loss(h, OutputProjection(w), targets, counted)
        return {"sums": all_reduce((objective, nll), DP), "evaluated": all_reduce(evaluated, DP), "dh": dh, "dw": dw}

    outs = {"sums": (P(), P()), "evaluated": (P(), P()), "dh": BATCH_SHARDED, "dw": P(MP, None)}
    in_specs = (BATCH_SHARDED, P(MP, None), cases.TARGETS_SPEC)
    return jax.jit(jax.shard_map(local, mesh=mesh(shape), in_specs=in_specs, out_specs=outs))


def arrays(rows: int = V, spread: float = 1.0, ignored: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """h[B T D], w[rows D], targets[B T]."""
    rng = np.random.default_rng(5)
    h, w = (rng.normal(scale=spread, size=shape).astype(np.float32) for shape in ((B, T, D), (rows, D)))
    return h, w, cases.random_targets(rows, ignored).astype(np.int32)


def test_padding_changes_no_bit_of_the_loss():
    """Whatever values the padded rows hold; and their gradient is zero."""
    h, w, ids = arrays(48, ignored=0.1)
    padding = np.random.default_rng(6).normal(scale=1e6, size=(48, D)).astype(np.float32)
    run = sums_and_gradients(LinearCrossEntropy(48, Z_LOSS, 5), (8, 1))
    real, padded = run(h, w, ids), run(h, np.concatenate([w, padding]), ids)
    np.testing.assert_array_equal(real["sums"], padded["sums"])
    np.testing.assert_array_equal(padded["dw"][48:], 0)


IN_CHUNKS_OF_5 = LinearCrossEntropy(V, Z_LOSS, 5)


def test_large_logits_neither_overflow_nor_underflow():
    h, w, ids = arrays(spread=100)
    logits = h.astype(np.float64) @ w.astype(np.float64).T
    largest = logits.max(-1)
    logz = largest + np.log(np.exp(logits - largest[..., None]).sum(-1))
    nll = logz - np.take_along_axis(logits, ids[..., None], -1)[..., 0]
    found = sums_and_gradients(IN_CHUNKS_OF_5)(h, w, ids)
    np.testing.assert_allclose(found["sums"], (nll.sum() + Z_LOSS * (logz**2).sum(), nll.sum()), rtol=1e-6)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


def test_loss_is_the_same_without_gradients():
    found = sums_and_gradients(IN_CHUNKS_OF_5)(*arrays(ignored=0.1))
    np.testing.assert_allclose(found["evaluated"], found["sums"], rtol=1e-6)


@pytest.fixture
def bfloat16_arrays() -> tuple[Any, np.ndarray, np.ndarray]:
    """(h in bfloat16, w in float32 with bfloat16 values, targets)."""
    h, w, ids = arrays(spread=0.5)
    return jnp.asarray(h, jnp.bfloat16), np.array(jnp.asarray(w, jnp.bfloat16), np.float32), ids


def test_logits_of_bfloat16_inputs_are_float32(bfloat16_arrays):
    """No logit is rounded to bfloat16: the losses equal those of the same h in float32.  The dtypes of the program are
    checked, too, because XLA for CPU would leave out such a rounding."""
    h, w, ids = bfloat16_arrays
    (product,) = equations_named(jax.make_jaxpr(score)(h[0], OutputProjection(jnp.asarray(w))).jaxpr, "dot_general")
    dtypes = [var.aval.dtype for var in (*product.invars, *product.outvars)]
    assert dtypes == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    found, wanted = (sums_and_gradients(IN_CHUNKS_OF_5)(each, w, ids) for each in (h, np.asarray(h, np.float32)))
    assert (found["dh"].dtype, found["dw"].dtype) == (jnp.bfloat16, np.float32)
    np.testing.assert_allclose(found["sums"], wanted["sums"], rtol=1e-6)
    np.testing.assert_allclose(found["dw"], wanted["dw"], atol=1e-2 * np.abs(wanted["dw"]).max())


def test_weight_gradient_is_accumulated_in_float32(bfloat16_arrays):
    """Over 32 chunks of one position it equals that of a single product."""
    runs = (sums_and_gradients(LinearCrossEntropy(V, Z_LOSS, n)) for n in (1, 64))
    chunked, single = (np.asarray(run(*bfloat16_arrays)["dw"]) for run in runs)
    np.testing.assert_allclose(chunked, single, atol=1e-6 * np.abs(single).max())


# The traced programs


def head_products_and_largest_logits(chunk: int, *overrides: str) -> dict[str, tuple[int, int]]:
    """For each program: (products with V/mp = 16 rows of the head, over all microbatches; size of the largest array
    with a dim of 16, weights excepted).  A device has 28 positions in each of two microbatches."""
    conf = config(
        "mesh.dp=2", "mesh.mp=4", "train.batch=16", "train.microbatches=2", f"train.loss_chunk={chunk}", *overrides
    )
    made = build_step_functions(conf, mesh_of(conf), jnp.bfloat16)
    programs = {
        "step": jax.make_jaxpr(made.step)(made.shapes, made.tokens),
        "evaluate": jax.make_jaxpr(made.evaluate)(made.shapes.params, made.tokens),
    }
    found = {}
    for name, program in programs.items():
        products, largest = 0, 0
        for equation, times in repeated_equations(program.jaxpr):
            shapes = [var.aval.shape for var in (*equation.invars, *equation.outvars) if hasattr(var.aval, "shape")]
            products += times * (equation.primitive.name == "dot_general" and any(16 in shape for shape in shapes))
            logits = [shape for shape in shapes if 16 in shape and conf.model.width not in shape]
            largest = max([largest, *(int(np.prod(shape)) for shape in logits)])
        found[name] = products, largest
    return found


@pytest.mark.parametrize(
    ("override", "chunk", "chunks"),
    [("remat=none", 64, 1), ("remat=all_matmuls", 14, 2), ("remat=full", 9, 4), ("tie_embeddings=true", 9, 4)],
)
def test_loss_takes_three_products_and_holds_the_logits_of_one_chunk(override, chunk, chunks):
    """Whatever the blocks recompute.  Logits of all 28 positions exist only where they form one chunk."""
    found = head_products_and_largest_logits(chunk, f"model.{override}")
    assert found == {"step": (2 * 3 * chunks, 28 // chunks * 16), "evaluate": (2 * chunks, 28 // chunks * 16)}
