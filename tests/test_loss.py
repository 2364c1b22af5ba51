"""The vocab-parallel cross entropy is log_softmax over the real ids, wherever the columns of the logits lie.

B batch, T time, V vocabulary rows, padded.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import PartitionSpec as P
from sharded import COLUMNS, Case, compare
from small import every_mesh, every_precision, mesh

from shmap_tp.layers.norm import LayerNorm
from shmap_tp.loss import vocab_parallel_cross_entropy
from shmap_tp.mesh import DP

B, T, V = 8, 5, 64
ROWS = P(DP, None)


def targets(vocabulary: int, ignored: float) -> np.ndarray:
    rng = np.random.default_rng(4)
    return np.where(rng.random((B, T)) < ignored, -rng.integers(1, 100, (B, T)), rng.integers(0, vocabulary, (B, T)))


def loss(vocabulary: int, ignored: float) -> Case:
    """Both outputs against random cotangents, so z-loss or any other use of log z has its gradient, too."""
    return Case(
        lambda key: LayerNorm(2),  # the loss has no parameters; these stay untouched
        lambda _, logits, targets: vocab_parallel_cross_entropy(4 * logits, targets, vocabulary),
        lambda _, logits, targets: reference.cross_entropy(4 * logits, targets, vocabulary),
        (((B, T, V), COLUMNS), (targets(vocabulary, ignored).astype(np.int32), ROWS)),
        (ROWS, ROWS),
    )


LOSSES = {
    "all columns are real": loss(V, 0.0),
    "padded to 64 from 3, seven devices of eight hold padding only": loss(3, 0.0),
    "padded to 64 from 50, a third of the targets ignored": loss(50, 0.3),
    "every target ignored": loss(50, 1.0),
}


@every_precision
@every_mesh
@pytest.mark.parametrize("case", LOSSES)
def test_the_loss_is_its_dense_reference(case, shape, precision):
    compare(LOSSES[case], shape, precision)


def both(logits: np.ndarray, targets: np.ndarray, vocabulary: int, shape: tuple[int, int] = (2, 4)):
    run = jax.shard_map(
        lambda logits, targets: vocab_parallel_cross_entropy(logits, targets, vocabulary),
        mesh=mesh(shape), in_specs=(COLUMNS, ROWS), out_specs=(ROWS, ROWS),
    )  # fmt: skip
    return jax.device_get(jax.jit(run)(logits, targets))


def test_padding_does_not_change_the_loss():
    """Not in a single bit, whatever the padded columns hold."""
    rng = np.random.default_rng(5)
    real = rng.normal(size=(B, T, 48)).astype(np.float32)
    padding = rng.normal(scale=1e6, size=(B, T, 48)).astype(np.float32)
    ids = targets(48, 0.1).astype(np.int32)
    nll, logz = both(real, ids, 48, (8, 1))
    nll_padded, logz_padded = both(np.concatenate([real, padding], axis=-1), ids, 48, (8, 1))
    np.testing.assert_array_equal(nll, nll_padded)
    np.testing.assert_array_equal(logz, logz_padded)


def test_large_logits_neither_overflow_nor_vanish():
    rng = np.random.default_rng(6)
    logits = rng.normal(scale=1e4, size=(B, T, V)).astype(np.float32)
    ids = targets(V, 0.0).astype(np.int32)
    with jax.enable_x64(True):
        expected = jax.device_get(reference.cross_entropy(logits.astype(np.float64), ids, V))
    for found, wanted in zip(both(logits, ids, V), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6 * np.abs(logits).max())


def test_bfloat16_logits_are_scored_in_float32():
    rng = np.random.default_rng(7)
    logits = jnp.asarray(rng.normal(size=(B, T, V)), jnp.bfloat16)
    ids = targets(V, 0.0).astype(np.int32)
    found, wanted = both(np.asarray(logits), ids, V), both(np.asarray(logits, np.float32), ids, V)
    assert found[0].dtype == np.float32
    np.testing.assert_array_equal(found, wanted)
