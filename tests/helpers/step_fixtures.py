"""A short run on the small model of `model_fixtures`: its configuration, its batches, and a distance of loss curves."""

import numpy as np

from shmap_tp.config.schema import Config
from tests.helpers.model_fixtures import config

STEPS = 50


def step_config(shape: tuple[int, int], *overrides: str) -> Config:
    """Two microbatches, clipping that takes effect in the first steps, warm-up and decay within 50 steps."""
    return config(
        f"mesh.dp={shape[0]}", f"mesh.mp={shape[1]}", "train.batch=16", "train.microbatches=2", "train.z_loss=1e-4",
        "optimizer.learning_rate=1e-2", "optimizer.warmup_steps=5", "optimizer.decay_steps=50", *overrides,
    )  # fmt: skip


def learnable_batch(step: int, shape: tuple[int, ...]) -> np.ndarray:
    """Token ids [A, B, T + 1]: with probability 0.8, each is three times the one before, which 50 steps can learn."""
    rng = np.random.default_rng(step)
    ids = np.zeros(shape, np.int32)
    ids[..., 0] = rng.integers(0, 50, shape[:-1])
    for t in range(1, shape[-1]):
        ids[..., t] = np.where(rng.random(shape[:-1]) < 0.2, rng.integers(0, 50, shape[:-1]), 3 * ids[..., t - 1] % 50)
    return ids


def largest_difference(losses: np.ndarray, expected: np.ndarray) -> float:
    """max|losses - expected| / expected."""
    return float(np.max(np.abs(losses - expected) / expected))
