"""The head's cross entropy as `Case`s: padded vocabularies, ignored targets, and chunks of every size.

B batch, T time, D model width, V vocabulary rows, padded.
"""

from functools import cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from shmap_tp.layers.embedding import OutputProjection, VocabParallelHead
from shmap_tp.model.loss import LinearCrossEntropy
from shmap_tp.parallel.collectives import all_reduce
from shmap_tp.parallel.mesh import DP
from shmap_tp.parallel.tensor_parallel import TensorParallel
from tests.helpers import reference
from tests.helpers.sharded_harness import ALL_REDUCE, BATCH_SHARDED, SEQUENCE, TIME_SHARDED, Case

B, T, D, V = 8, 8, 24, 64
TARGETS_SPEC = P(DP, None)
COUNTED = 11.0
Z_LOSS = 0.3


def random_targets(vocabulary: int, ignored: float) -> np.ndarray:
    """targets[B T], a fraction `ignored` of them below zero."""
    rng = np.random.default_rng(4)
    return np.where(rng.random((B, T)) < ignored, -rng.integers(1, 100, (B, T)), rng.integers(0, vocabulary, (B, T)))


@cache
def dense_loss(vocabulary: int) -> Any:
    def dense(p: dict, h_BTD: Any, targets_BT: Any) -> tuple[Any, Any]:
        logits = 4 * h_BTD @ p["weight"].T + reference.bias(p)
        nll, logz = reference.cross_entropy(logits, targets_BT, vocabulary)
        loss = nll.sum() / COUNTED
        return loss + Z_LOSS * (logz**2).sum() / COUNTED, lax.stop_gradient(loss)

    return dense


def loss(vocabulary: int, ignored: float, chunk: int, tp: TensorParallel = ALL_REDUCE, *, bias: bool = False) -> Case:
    """`LinearCrossEntropy` of h after `tp.enter`, summed over dp."""
    layer = LinearCrossEntropy(vocabulary, Z_LOSS, chunk)
    targets = random_targets(vocabulary, ignored).astype(np.int32)
    return Case(
        partial(VocabParallelHead, vocabulary, V, D, std=1.0, bias=bias),
        lambda head, h, targets: all_reduce(
            layer(4 * tp.enter(h), OutputProjection(head.weight, head.bias), targets, jnp.array(COUNTED)), DP
        ),
        dense_loss(vocabulary),
        (((B, T, D), TIME_SHARDED if tp == SEQUENCE else BATCH_SHARDED), (targets, TARGETS_SPEC)),
        (P(), P()),
        tp,
    )


CHUNK_SIZES = {"one chunk": 64, "chunks of 32": 32, "chunks of 3": 3}
"""For 8 to 64 positions on a device: one chunk; equal chunks where there are 64 positions; a padded last chunk."""
ALL_COLUMNS_REAL, ONLY_PADDING = "all columns are real", "padded to 64 from 3"
PADDED = "padded to 64 from 50, a third of the targets ignored"
LOSS_WITH_BIAS, LOSS_IN_SEQUENCE = "with a bias, chunks of 3", "sequence, chunks of 3"
LOSSES = {
    f"{name}, {chunks}": loss(vocabulary, ignored, size)
    for name, vocabulary, ignored in [(ALL_COLUMNS_REAL, V, 0.0), (ONLY_PADDING, 3, 0.0), (PADDED, 50, 0.3)]
    for chunks, size in CHUNK_SIZES.items()
}
LOSSES |= {
    "every target ignored": loss(50, 1.0, 3),
    LOSS_IN_SEQUENCE: loss(50, 0.3, 3, SEQUENCE),
    LOSS_WITH_BIAS: loss(50, 0.3, 3, bias=True),
}
