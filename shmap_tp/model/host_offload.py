"""Host offload of q, k and v: saving what attention's backward pass reads at the end of the block, not where it is
computed.

    mixed, residuals = attend(q, k, v)          early in a block; residuals = q, k, v, three dims each
    y = save_at_block_end(y, residuals)         at its end: y

The plain version is `checkpoint_name` on q, k and v where they are computed, which `Attention` uses without offload.
XLA for TPU starts all writes to the host of one block together, at the beginning of the next block, which then waits
before it overwrites q, k and v (docs/performance-notes.md).  A copy made at the end of a block is not overwritten
before the end of the next one, so its write has the time of a whole block.

Two custom gradients belong together.  The backward pass of `save_at_block_end` returns, in the place of gradients of
the residuals, the saved copies themselves; they reach the backward pass of `attend`, which reads them.  So residuals
must be passed to `save_at_block_end`, once, and used nowhere else.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from shmap_tp.config.activation_names import QUERY_KEY_VALUE
from shmap_tp.layers.context import DeferredResiduals


def save_at_block_end(
    y_BTD: Float[Array, "B T D"], residuals: DeferredResiduals, *, copy: bool = True
) -> Float[Array, "B T D"]:
    """y.  Its backward pass saves `residuals` under the name QUERY_KEY_VALUE: as copies made when y is available, or
    without `copy`, for residuals that stay on the device, as they are.  Communication: none."""
    return _save(copy, y_BTD, residuals) if residuals else y_BTD


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _save(copy: bool, y: Array, residuals: DeferredResiduals) -> Array:
    return y


def _forward(copy: bool, y: Array, residuals: DeferredResiduals) -> tuple[Array, DeferredResiduals]:
    saved = [_copy_after(y, x) for x in residuals] if copy else residuals
    return y, tuple(checkpoint_name(x, QUERY_KEY_VALUE) for x in saved)


def _backward(copy: bool, saved: DeferredResiduals, dy: Array) -> tuple[Array, DeferredResiduals]:
    """k and v are copied when dy is available, which frees the buffers they were read into for the block before."""
    q, *rest = saved
    return dy, (q, *([_copy_after(dy, x) for x in rest] if copy else rest))


_save.defvjp(_forward, _backward)


def _copy_after(y: Array, x: Array) -> Array:
    """A copy of x, made when y is available: selected by a condition whose value is hidden from the compiler."""
    y, x, true = lax.optimization_barrier((y, x, jnp.array(True)))
    return jnp.where(true, x, 0)
