"""What attention's backward pass reads, kept where it is handed over at the end of the block, not where it was made.

    mixed, handed = attend(q, k, v)         early in a block; handed = q, k, v, three dims each
    y = put_off(y, handed)                  at its end: y

For the sake of the host's memory (`model.offload`, `remat`).  XLA for TPU (libtpu 0.0.42) starts all writes of a block
together, at the beginning of the next one, in an order of its own, and they share a wire.  The next block makes its q,
k and v first, over those that still stand in the queue behind all else, and waits.  A copy made at the end of a block
is made over only at the end of the next: its write has a whole block of time.  Seconds a step of 16B on a v5e-256 (two
microbatches, remat up, the host keeping q, k, v and up), predicted, before its rings lay as they do: 9.42; put off, but
the same arrays instead of copies, 11.49.  The copies take about 2 % of it, and the memory of one block's q, k and v.

It needs two rules of gradients that belong together.  `put_off`'s returns, in the place of the gradients of what it was
handed, the copies themselves; they come to `attend`'s, which reads them.  So whatever is handed has to go to `put_off`,
once and nowhere else.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

QUERY_KEY_VALUE = "query_key_value"
"""Names what the heads are made of, so that a remat policy can keep it."""

DeferredResiduals = tuple[Float[Array, "..."], ...]
"""q, k, v of this device, in the dtype and the order that its kernel takes them in, three dims each; or nothing."""


def save_at_block_end(
    y_BTD: Float[Array, "B T D"], handed: DeferredResiduals, *, copied: bool = True
) -> Float[Array, "B T D"]:
    """y.  Its backward pass finds `handed`, under the name QUERY_KEY_VALUE: copies, made when y is there, or where they
    are not `copied`, which is for what stays on the device, the same arrays.  Wire: nothing."""
    return _put_off(copied, y_BTD, handed) if handed else y_BTD


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _put_off(copied: bool, y: Array, handed: DeferredResiduals) -> Array:
    return y


def _forward(copied: bool, y: Array, handed: DeferredResiduals) -> tuple[Array, DeferredResiduals]:
    kept = [_copied_after(y, x) for x in handed] if copied else handed
    return y, tuple(checkpoint_name(x, QUERY_KEY_VALUE) for x in kept)


def _backward(copied: bool, kept: DeferredResiduals, dy: Array) -> tuple[Array, DeferredResiduals]:
    """k and v are copied once dy is there: what they were read into is free, then, for what the block before reads.
    That the compiler does so early nothing here forces; it does (16B: 9.77 s a step without these copies, 9.42 with).
    """
    q, *rest = kept
    return dy, (q, *([_copied_after(dy, x) for x in rest] if copied else rest))


_put_off.defvjp(_forward, _backward)


def _copied_after(y: Array, x: Array) -> Array:
    """x, copied once y is there: chosen by what is true, which the compiler does not see through."""
    y, x, true = lax.optimization_barrier((y, x, jnp.array(True)))
    return jnp.where(true, x, 0)
