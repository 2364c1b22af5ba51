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

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from shmap_tp.config.activation_names import QUERY_KEY_VALUE
from shmap_tp.layers.context import DeferredResiduals


def save_at_block_end(y_BTD: Float[Array, "B T D"], residuals: DeferredResiduals) -> Float[Array, "B T D"]:
    """y.  Its backward pass saves `residuals` under the name QUERY_KEY_VALUE, as copies made when y is available.
    Communication: none."""
    return _save(y_BTD, residuals) if residuals else y_BTD


@jax.custom_vjp
def _save(y: Array, residuals: DeferredResiduals) -> Array:
    return y


def _forward(y: Array, residuals: DeferredResiduals) -> tuple[Array, DeferredResiduals]:
    return y, tuple(checkpoint_name(_copy_after(y, x), QUERY_KEY_VALUE) for x in residuals)


def _backward(saved: DeferredResiduals, dy: Array) -> tuple[Array, DeferredResiduals]:
    """k and v are copied when dy is available, which frees the buffers they were read into for the block before."""
    q, *rest = saved
    return dy, (q, *(_copy_after(dy, x) for x in rest))


_save.defvjp(_forward, _backward)


def _copy_after(y: Array, x: Array) -> Array:
    """A copy of x, made when y is available: selected by a condition whose value is hidden from the compiler."""
    y, x, true = lax.optimization_barrier((y, x, jnp.array(True)))
    return jnp.where(true, x, 0)
