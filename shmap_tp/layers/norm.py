"""Normalisation of the residual stream.  Scale only, no bias; the scale is whole on every device.

B batch, T time, D model width.

    x[B T D]  ->  y[B T D]      computed in float32 (or wider), returned in x's dtype; no wire

Positions are normalised one by one.  Where x is whole on every device of mp, every device computes the same y, and the
scale's gradient is complete over mp.  Where a device has T/mp of them, it is {+mp}: the scale was made to vary over mp
before (`collectives.SequenceParallel.at_home`), or JAX would sum its gradient here, layer by layer.

What was averaged has a name, so that a remat policy can keep it: one number of a position, where to find it again reads
the whole position.
"""

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from shmap_tp.parallel.partitioning import param

NORM_STATISTICS = "statistics"
"""Names the means that a norm divides by, or takes away."""


class LayerNorm(eqx.Module):
    """y = (x - mean(x)) / sqrt(var(x) + 1e-5) * scale.  Ba et al. 2016, https://arxiv.org/abs/1607.06450"""

    scale: Float[Array, " D"] = param(None)

    def __init__(self, width: int):
        self.scale = jnp.ones(width)

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x = x_BTD.astype(self.scale.dtype)
        x = x - _mean(x)
        y = x * lax.rsqrt(_mean(x * x) + 1e-5) * self.scale[None, None]
        return y.astype(x_BTD.dtype)


class RMSNorm(eqx.Module):
    """y = x / sqrt(mean(x^2) + 1e-6) * scale.  Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467"""

    scale: Float[Array, " D"] = param(None)

    def __init__(self, width: int):
        self.scale = jnp.ones(width)

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x = x_BTD.astype(self.scale.dtype)
        y = x * lax.rsqrt(_mean(x * x) + 1e-6) * self.scale[None, None]
        return y.astype(x_BTD.dtype)


def _mean(x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T 1"]:
    return checkpoint_name(jnp.mean(x_BTD, axis=-1), NORM_STATISTICS)[..., None]
