"""The head's cross entropy is log_softmax of h @ w' over the real ids, wherever the rows of w lie and in whatever
chunks; so are its gradients, at three products, and no logits exist of more than a chunk.

B batch, T time, D model width, V vocabulary rows, padded.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shmap_tp.layers.embedding import VocabParallelHead, score
from shmap_tp.model.loss import LinearCrossEntropy
from shmap_tp.parallel.collectives import all_reduce
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.parallel.tensor_parallel import TensorParallel
from shmap_tp.plan.communication.from_jaxpr import bodies
from shmap_tp.training.step import build_step_functions
from tests.helpers import reference
from tests.helpers.model_fixtures import config, every_mesh, every_precision, mesh
from tests.helpers.sharded_harness import ALL_REDUCE, ROWS, SEQUENCE, TIMES, Case, compare

B, T, D, V = 8, 8, 24, 64
TARGETS = P(DP, None)
COUNTED = 11.0
Z_LOSS = 0.3


def targets(vocabulary: int, ignored: float) -> np.ndarray:
    rng = np.random.default_rng(4)
    return np.where(rng.random((B, T)) < ignored, -rng.integers(1, 100, (B, T)), rng.integers(0, vocabulary, (B, T)))


def dense(p: dict, h_BTD: Any, targets_BT: Any, vocabulary: int) -> tuple[Any, Any]:
    nll, logz = reference.cross_entropy(4 * h_BTD @ p["weight"].T, targets_BT, vocabulary)
    loss = nll.sum() / COUNTED
    return loss + Z_LOSS * (logz**2).sum() / COUNTED, lax.stop_gradient(loss)


def loss(vocabulary: int, ignored: float, chunk: int, wire: TensorParallel = ALL_REDUCE) -> Case:
    """Against a random cotangent of the objective."""
    how = LinearCrossEntropy(vocabulary, Z_LOSS, chunk)
    return Case(
        partial(VocabParallelHead, vocabulary, V, D, std=1.0),
        lambda head, h, targets: all_reduce(how(4 * wire.enter(h), head.weight, targets, jnp.array(COUNTED)), DP),
        lambda p, h, targets: dense(p, h, targets, vocabulary),
        (
            ((B, T, D), TIMES if wire == SEQUENCE else ROWS),
            (targets(vocabulary, ignored).astype(np.int32), TARGETS),
        ),
        (P(), P()),
        wire,
    )


CHUNKS = {"whole": 64, "halves": 32, "chunks of 3": 3}
"""Of 8 to 64 positions on a device: one chunk, equal ones where they are 64, and a last one that is filled up."""
LOSSES = {
    f"{what}, {chunks}": loss(vocabulary, ignored, size)
    for what, vocabulary, ignored in [
        ("all columns are real", V, 0.0),
        ("padded to 64 from 3, seven devices of eight hold padding only", 3, 0.0),
        ("padded to 64 from 50, a third of the targets ignored", 50, 0.3),
    ]
    for chunks, size in CHUNKS.items()
}
LOSSES |= {
    "every target ignored": loss(50, 1.0, 3),
    "sequence, padded to 64 from 50, a third of the targets ignored, chunks of 3": loss(50, 0.3, 3, SEQUENCE),
}


@every_precision
@every_mesh
@pytest.mark.parametrize("case", LOSSES)
def test_the_loss_is_its_dense_reference(case, shape, precision):
    compare(LOSSES[case], shape, precision)


def losses(
    h: np.ndarray, w: np.ndarray, targets: np.ndarray, how: LinearCrossEntropy, shape: tuple[int, int] = (2, 4)
) -> dict[str, np.ndarray]:
    """The sums, and the gradients of the first of them."""

    def local(h: Any, w: Any, targets: Any) -> dict[str, Any]:
        counted = jnp.ones((), jnp.float32)
        objective, pull, loss = jax.vjp(lambda h, w: how(h, w, targets, counted), h, w, has_aux=True)
        dh, dw = pull(jnp.ones_like(objective))
        alone = how(h, w, targets, counted)
        return {"sums": all_reduce((objective, loss), DP), "alone": all_reduce(alone, DP), "dh": dh, "dw": dw}

    outs = {"sums": (P(), P()), "alone": (P(), P()), "dh": ROWS, "dw": P(MP, None)}
    run = jax.shard_map(local, mesh=mesh(shape), in_specs=(ROWS, P(MP, None), TARGETS), out_specs=outs)
    return jax.device_get(jax.jit(run)(h, w, targets))


def arrays(rows: int = V, spread: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """h[B T D], w[rows D]."""
    rng = np.random.default_rng(5)
    return tuple(rng.normal(scale=spread, size=shape).astype(np.float32) for shape in ((B, T, D), (rows, D)))


def test_padding_does_not_change_the_loss():
    """Not in a single bit, whatever the padded rows hold; and they have no gradient."""
    (h, w), ids = arrays(48), targets(48, 0.1).astype(np.int32)
    padding = np.random.default_rng(6).normal(scale=1e6, size=(48, D)).astype(np.float32)
    how = LinearCrossEntropy(48, Z_LOSS, 5)
    real, padded = losses(h, w, ids, how, (8, 1)), losses(h, np.concatenate([w, padding]), ids, how, (8, 1))
    np.testing.assert_array_equal(real["sums"], padded["sums"])
    np.testing.assert_array_equal(padded["dw"][48:], 0)


def test_large_logits_neither_overflow_nor_vanish():
    (h, w), ids = arrays(spread=100), targets(V, 0.0).astype(np.int32)
    with jax.enable_x64(True):
        nll, logz = reference.cross_entropy(h.astype(np.float64) @ w.astype(np.float64).T, ids, V)
        expected = nll.sum() + 1e-3 * (logz**2).sum(), nll.sum()
    found = losses(h, w, ids, LinearCrossEntropy(V, 1e-3, 5))
    np.testing.assert_allclose(found["sums"], expected, rtol=1e-6)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


def test_without_gradients_the_loss_is_the_same():
    (h, w), ids = arrays(), targets(V, 0.1).astype(np.int32)
    found = losses(h, w, ids, LinearCrossEntropy(V, Z_LOSS, 5))
    np.testing.assert_allclose(found["alone"], found["sums"], rtol=1e-6)


@pytest.fixture
def in_bfloat16() -> tuple[Any, np.ndarray, np.ndarray]:
    (h, w), ids = arrays(spread=0.5), targets(V, 0.0).astype(np.int32)
    return jnp.asarray(h, jnp.bfloat16), np.array(jnp.asarray(w, jnp.bfloat16), np.float32), ids


def test_bfloat16_is_scored_in_float32(in_bfloat16):
    """No logit is rounded to bfloat16: the losses are those of the same h in float32.  As it is written, too, since XLA
    on CPU leaves out such a rounding."""
    h, w, ids = in_bfloat16
    (product,) = [e for e, _ in equations(jax.make_jaxpr(score)(h[0], w).jaxpr) if e.primitive.name == "dot_general"]
    dtypes = [var.aval.dtype for var in (*product.invars, *product.outvars)]
    assert dtypes == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    how = LinearCrossEntropy(V, Z_LOSS, 5)
    found, wanted = losses(h, w, ids, how), losses(np.asarray(h, np.float32), w, ids, how)
    assert (found["dh"].dtype, found["dw"].dtype) == (jnp.bfloat16, np.float32)
    np.testing.assert_allclose(found["sums"], wanted["sums"], rtol=1e-6)
    np.testing.assert_allclose(found["dw"], wanted["dw"], atol=1e-2 * np.abs(wanted["dw"]).max())


def test_the_gradient_of_the_weight_is_added_up_in_float32(in_bfloat16):
    """Of 32 positions, each by itself: as if in one product."""
    h, w, ids = in_bfloat16
    each, whole = (losses(h, w, ids, LinearCrossEntropy(V, Z_LOSS, chunk))["dw"] for chunk in (1, 64))
    np.testing.assert_allclose(each, whole, atol=1e-6 * np.abs(whole).max())


# What a program does


def equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Every equation, and how often it runs."""
    for equation in jaxpr.eqns:
        yield equation, times
        inner = equation.params["length"] if equation.primitive.name == "scan" else 1
        for body in bodies(equation.params):
            yield from equations(body, times * inner)


def heads(chunk: int, *more: str) -> dict[str, tuple[int, int]]:
    """Of each program: (products with V/mp = 16 rows of the head, in all microbatches; most values of an array that
    has a dim of 16).  28 positions on a device; two microbatches."""
    conf = config(
        "mesh.dp=2", "mesh.mp=4", "train.batch=16", "train.microbatches=2", f"train.loss_chunk={chunk}", *more
    )
    made = build_step_functions(conf, mesh((2, 4)), jnp.bfloat16)
    programs = {
        "step": jax.make_jaxpr(made.step)(made.shapes, made.tokens),
        "evaluate": jax.make_jaxpr(made.evaluate)(made.shapes.params, made.tokens),
    }
    found = {}
    for name, program in programs.items():
        products, largest = 0, 0
        for equation, times in equations(program.jaxpr):
            shapes = [var.aval.shape for var in (*equation.invars, *equation.outvars) if hasattr(var.aval, "shape")]
            products += times * (equation.primitive.name == "dot_general" and any(16 in shape for shape in shapes))
            beside = [shape for shape in shapes if 16 in shape and conf.model.width not in shape]
            largest = max([largest, *(int(np.prod(shape)) for shape in beside)])
        found[name] = products, largest
    return found


@pytest.mark.parametrize("more", ["remat=none", "remat=all_matmuls", "remat=full", "tie_embeddings=true"])
@pytest.mark.parametrize(("chunk", "chunks"), [(64, 1), (14, 2), (9, 4)])
def test_three_products_and_a_chunk_of_logits(more, chunk, chunks):
    """Whatever the blocks recompute.  Logits of all 28 positions exist only where they are one chunk."""
    found = heads(chunk, f"model.{more}")
    assert found == {"step": (2 * 3 * chunks, 28 // chunks * 16), "evaluate": (2 * chunks, 28 // chunks * 16)}
