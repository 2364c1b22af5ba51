"""Cross entropy over a vocabulary that is cut along mp; the logits are never gathered.

Shoeybi et al. 2019, "Megatron-LM", section 3, https://arxiv.org/abs/1909.08053

B batch, T time, V vocabulary rows, padded.  V/mp: dim V cut along mp.

    logits[B T V/mp]  --max, pmax-->  m[B T]  --sum of exp, psum-->  z[B T]
                      --the target's own logit, psum-->  t[B T]      ->  m + log z - t  [B T], whole on every device
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from shmap_tp.mesh import MP

IGNORE = -1
"""Targets below zero are not counted; this is the one to write."""


@jax.named_scope("cross_entropy")
def vocab_parallel_cross_entropy(
    logits_BTV: Float[Array, "B T V"], targets_BT: Int[Array, "B T"], vocabulary: int
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(-log p(target), log z) at each position, in float32 (or wider); both 0 where the target is ignored.

    `vocabulary` counts the real ids: columns beyond it are padding and have no probability.
    Wire    forward three all-reduces of B T values over mp (one max, two sums); backward none.
    """
    wide = jnp.promote_types(logits_BTV.dtype, jnp.float32)
    columns = logits_BTV.shape[-1]
    first = lax.axis_index(MP) * columns
    logits_BTV = logits_BTV.astype(wide)
    if columns * lax.axis_size(MP) > vocabulary:
        real_V = first + jnp.arange(columns) < vocabulary
        logits_BTV = jnp.where(real_V[None, None], logits_BTV, jnp.finfo(wide).min)
    max_BT = lax.pmax(lax.stop_gradient(jnp.max(logits_BTV, axis=-1)), MP)
    logz_BT = max_BT + jnp.log(lax.psum(jnp.sum(jnp.exp(logits_BTV - max_BT[..., None]), axis=-1), MP))
    column_BT = targets_BT - first
    mine_BT = (column_BT >= 0) & (column_BT < columns)
    own_BT = jnp.take_along_axis(logits_BTV, jnp.where(mine_BT, column_BT, 0)[..., None], axis=-1)[..., 0]
    target_BT = lax.psum(jnp.where(mine_BT, own_BT, 0.0), MP)
    counted_BT = targets_BT >= 0
    return jnp.where(counted_BT, logz_BT - target_BT, 0.0), jnp.where(counted_BT, logz_BT, 0.0)
