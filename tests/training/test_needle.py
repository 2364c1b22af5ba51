"""A small model finds an exact answer anywhere in a row that several devices share.

T time.  A row is filled with noise, and among it stand pairs, each a token that is a key and its value; it ends with a
key, and its target is the value of that key's pair.  Only this target counts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shmap_tp.layers import attention
from shmap_tp.model.tokens import uncounted
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.training.model_functions import build_model_functions
from shmap_tp.training.step import build_step_functions
from tests.helpers.step_fixtures import step_config

CONTEXT, KEYS, VALUES = 64, 2, 4
PAIRS, QUERIES, NOISE = VALUES, VALUES + KEYS * VALUES, VALUES + KEYS * VALUES + KEYS
"""The first id of the pairs, of the keys that are asked for, and of the noise; values are the first."""
BATCH, STEPS = 64, 200
DEPTHS = (0, 9, 17, 31, 32, 47, 55, 62)
"""In every chunk of a row over four ranks, and at its two ends."""


def rows(rng: np.random.Generator, depths: np.ndarray) -> np.ndarray:
    """tokens[B, T+1], the pair that is asked for at the position `depths`[B], one of every other key elsewhere."""
    count, each = len(depths), np.arange(len(depths))
    tokens = rng.integers(NOISE, 32, (count, CONTEXT + 1))
    key, values = rng.integers(KEYS, size=count), rng.integers(VALUES, size=(count, KEYS))
    other = (depths + rng.integers(1, CONTEXT - 1, count)) % (CONTEXT - 1)
    tokens[each, other] = PAIRS + (1 - key) * VALUES + values[each, 1 - key]
    tokens[each, depths] = PAIRS + key * VALUES + values[each, key]
    tokens[:, -2], tokens[:, -1] = QUERIES + key, values[each, key]
    return tokens.astype(np.int32)


def trained_and_asked(shape: tuple[int, int, int], steps: int = STEPS) -> dict[int, float]:
    """By depth, the share of rows whose answer is exactly the value, after training on a (dp, cp, mp) mesh."""
    dp, cp, mp = shape
    conf = step_config(
        (dp, mp), f"mesh.cp={cp}", f"model.context={CONTEXT}", f"train.batch={BATCH}", "train.microbatches=1",
        "model.positions=rotary", "optimizer.learning_rate=0.01", "optimizer.warmup_steps=5",
        f"optimizer.decay_steps={steps}", "optimizer.weight_decay=0", "model.vocabulary=32",
    )  # fmt: skip
    mesh = make_mesh(conf.mesh, jax.devices()[: conf.mesh.devices])
    made, functions = build_step_functions(conf, mesh, jnp.float32), build_model_functions(conf, mesh, jnp.float32)
    rng, state, is_last = np.random.default_rng(0), made.init(), np.arange(CONTEXT + 1) == CONTEXT
    for _ in range(steps):
        tokens = rows(rng, rng.integers(CONTEXT - 1, size=BATCH))
        marked = uncounted(tokens, np.broadcast_to(~is_last, tokens.shape))
        state, metrics = made.step(state, jax.device_put(marked[None], made.tokens.sharding))
        jax.block_until_ready(metrics)
    found = {}
    for depth in DEPTHS:
        tokens = rows(rng, np.full(BATCH, depth))
        logits = functions.logits(state.params, jnp.asarray(tokens[:, :-1]))
        found[depth] = float(np.mean(np.asarray(logits[:, -1, :32].argmax(-1)) == tokens[:, -1]))
    return found


@pytest.mark.slow
def test_an_exact_answer_is_found_at_every_depth_of_a_shared_row():
    assert trained_and_asked((1, 4, 2)) == dict.fromkeys(DEPTHS, 1.0)


@pytest.mark.slow
def test_without_the_keys_of_the_other_ranks_only_those_of_its_own_chunks_are_found(monkeypatch):
    """The last query is rank 0's, of the chunks 0 and 7."""
    monkeypatch.setattr(attention, "whole_rows", lambda tree: jax.tree.map(lambda x: jnp.tile(x, (1, 4, 1, 1)), tree))
    found = trained_and_asked((1, 4, 1))
    assert all(found[depth] < 0.8 for depth in DEPTHS if CONTEXT // 8 <= depth < CONTEXT * 7 // 8), found
