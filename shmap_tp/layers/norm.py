"""Normalisation of the residual stream.  Scale only, no bias; the scale is replicated.

B batch, T time, D model width.

    x[B T D]  ->  y[B T D]      computed in float32 (or wider), returned in x's dtype; no communication

Positions are normalised one by one.  Where x is replicated over mp, every device computes the same y, and the scale's
gradient is complete.  Where a device holds T/mp positions, the gradient is a partial sum over mp: the scale was marked
as varying before (`TensorParallel.mark_varying`), so that it is reduced once per step and not once per layer.

The means are named for rematerialisation policies: saving one value per position spares reading the whole position.
"""

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from shmap_tp.config.activation_names import NORM_STATISTICS
from shmap_tp.config.schema import Norm
from shmap_tp.parallel.partitioning import param


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


NORMS = {Norm.layernorm: LayerNorm, Norm.rmsnorm: RMSNorm}
"""The normalisations that `model.norm` names."""


def _mean(x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T 1"]:
    return checkpoint_name(jnp.mean(x_BTD, axis=-1), NORM_STATISTICS)[..., None]
