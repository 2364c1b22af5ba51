"""AdamW by optax, and the one thing optax cannot know: the norm of a gradient that lies on many devices.

Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float

from shmap_tp.config.schema import OptimizerConfig
from shmap_tp.parallel.collectives import varying_axes
from shmap_tp.parallel.partitioning import matrices


def learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Linear from 0 to the peak over the warm-up, a cosine down to the final rate at decay_steps, then constant."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.decay_steps,
        end_value=config.final_learning_rate,
    )


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW whose decay spares what is not a matrix.  Clipping is not in it: see `clip_by_global_norm`."""
    return optax.chain(
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon),
        optax.add_decayed_weights(config.weight_decay, mask=matrices),
        optax.scale_by_learning_rate(learning_rate_schedule(config)),
    )


def global_norm(tree: Any) -> Float[Array, ""]:
    """sqrt of the sum of squares of every value in `tree`, each counted once wherever it lies.

    A leaf's type says over which axes its values differ between devices: its squares are summed over just those.
    (Plain `optax.global_norm` inside shard_map would be the norm of one device's shards.)
    Wire    one all-reduce of a scalar per set of axes.
    """
    squares: dict[frozenset[str], Array] = {}
    for leaf in jax.tree.leaves(tree):
        axes = varying_axes(leaf)
        squares[axes] = squares.get(axes, 0.0) + jnp.sum(jnp.square(leaf))
    return jnp.sqrt(sum(lax.psum(total, tuple(sorted(axes))) if axes else total for axes, total in squares.items()))


def clip_by_global_norm(gradients: Any, limit: float) -> tuple[Any, Float[Array, ""]]:
    """(gradients scaled so that their global norm is at most `limit`, the norm they came with)."""
    norm = global_norm(gradients)
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
    return jax.tree.map(lambda g: g * scale, gradients), norm
