"""Normalisation of the residual stream, and of the heads of q and k.  Scale and bias are replicated.

B batch, T time, D model width; for a head D is the head dim, and there is a dim of heads before it.

    x[B T D]  ->  y[B T D]      computed in float32 (or wider), returned in x's dtype; no communication, but for
                                JointRMSNorm

Positions are normalised one by one.  Where x is replicated over mp, every device computes the same y, and the scale's
gradient is complete.  Where a device holds T/mp positions, the gradient is a partial sum over mp: the scale was marked
as varying before (`TensorParallel.time_axes`), so that it is reduced once per step and not once per layer.

`normalize` and `affine` are the two halves of a call, for blocks in which several norms read the same x.

The means are named for rematerialisation policies: saving one value per position spares reading the whole position.
"""

from functools import partial

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from shmap_tp.config.activation_names import NORM_STATISTICS
from shmap_tp.config.choices import Norm
from shmap_tp.config.schema import ModelConfig
from shmap_tp.parallel.collective_matmul import Product
from shmap_tp.parallel.collectives import all_reduce, mark_varying
from shmap_tp.parallel.mesh import MP
from shmap_tp.parallel.partitioning import ParameterKind, param


class LayerNorm(eqx.Module):
    """y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias.  Ba et al. 2016, https://arxiv.org/abs/1607.06450"""

    scale: Float[Array, " D"] = param(None)
    bias: Float[Array, " D"] | None = param(None)
    epsilon: float = eqx.field(static=True)

    def __init__(self, width: int, epsilon: float = 1e-5, *, bias: bool = False):
        self.scale = jnp.ones(width)
        self.bias = jnp.zeros(width) if bias else None
        self.epsilon = epsilon

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self._scaled(self._normalized(x_BTD)).astype(x_BTD.dtype)

    def normalize(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """(x - mean(x)) / sqrt(var(x) + epsilon)."""
        return self._normalized(x_BTD).astype(x_BTD.dtype)

    def affine(self, n_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """n * scale + bias."""
        return self._scaled(n_BTD.astype(self.scale.dtype)).astype(n_BTD.dtype)

    def _normalized(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x = x_BTD.astype(self.scale.dtype)
        x = x - _mean(x)
        return x * lax.rsqrt(_mean(x * x) + self.epsilon)

    def _scaled(self, n_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        y = n_BTD * self.scale[None, None]
        return y if self.bias is None else y + self.bias[None, None]


class RMSNorm(eqx.Module):
    """y = x / sqrt(mean(x^2) + epsilon) * scale.  Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467

    With `unit_offset` the factor is 1 + scale, and the initial scale 0: Gemma, https://arxiv.org/abs/2403.08295
    """

    scale: Float[Array, " D"] = param(None)
    epsilon: float = eqx.field(static=True)
    unit_offset: bool = eqx.field(static=True)

    def __init__(self, width: int, epsilon: float = 1e-6, *, unit_offset: bool = False):
        self.scale = jnp.zeros(width) if unit_offset else jnp.ones(width)
        self.epsilon, self.unit_offset = epsilon, unit_offset

    def __call__(self, x: Float[Array, "B T *heads D"]) -> Float[Array, "B T *heads D"]:
        return self._scaled(self._normalized(x)).astype(x.dtype)

    def normalize(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """x / sqrt(mean(x^2) + epsilon)."""
        return self._normalized(x_BTD).astype(x_BTD.dtype)

    def affine(self, n_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """n * scale."""
        return self._scaled(n_BTD.astype(self.scale.dtype)).astype(n_BTD.dtype)

    def _normalized(self, x: Float[Array, "B T *heads D"]) -> Float[Array, "B T *heads D"]:
        x = x.astype(self.scale.dtype)
        return x * lax.rsqrt(_mean(x * x) + self.epsilon)

    @property
    def factor(self) -> Float[Array, " D"]:
        """What x / sqrt(...) is multiplied by."""
        return 1 + self.scale if self.unit_offset else self.scale

    def _scaled(self, n: Float[Array, "B T *heads D"]) -> Float[Array, "B T *heads D"]:
        return n * self.factor[(None,) * (n.ndim - 1)]


class AfterNorm(eqx.Module):
    """The column-parallel layers of a sublayer, behind the scale and bias of its norm: n -> layer(n * scale + bias).

    Several of them share one `enter` of the normalised n, which has no scale yet.  What they return is a tuple, one
    product for each layer.

    Communication  backward: where the residual stream is replicated over mp, one all-reduce over mp of the gradient of
                   each parameter of the norm, because every device has that of its own columns alone; else it stays a
                   partial sum, which is reduced once per step.
    """

    norm: LayerNorm | RMSNorm
    layers: tuple[Product, ...]
    is_linear = False

    def __call__(self, n_BTD: Float[Array, "B _ D"]) -> tuple[Array, ...]:
        h_BTD = mark_varying(self.norm, MP).affine(n_BTD)
        return tuple(layer(h_BTD) for layer in self.layers)

    def add_bias(self, products: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(layer.add_bias(y) for layer, y in zip(self.layers, products, strict=True))


class JointRMSNorm(eqx.Module):
    """RMSNorm of all heads of q, or of k, together: the mean is over heads and elements, and each has its own scale.
    Team OLMo 2024, OLMo 2, section 3.2, https://arxiv.org/abs/2501.00656

    Shapes         x[B T N/mp K] -> y[B T N/mp K]; where mp > N, the scale is replicated, and x is the one head
                   [B T 1 K] that mp / N devices share: the mean over devices counts every head alike.
    Communication  one all-reduce over mp of the mean [B T] of this device's heads; backward one of its gradient, and
                   where mp > N one of the scale's, unless the tensor-parallel mode marked it as varying before.
    """

    scale: Float[Array, "N K"] = param(MP, None, kind=ParameterKind.vector, replicate_if_fewer=True)
    epsilon: float = eqx.field(static=True)

    def __init__(self, heads: int, head_dim: int, epsilon: float = 1e-6):
        self.scale = jnp.ones((heads, head_dim))
        self.epsilon = epsilon

    def __call__(self, x_BTNK: Float[Array, "B T N K"]) -> Float[Array, "B T N K"]:
        scale_NK, devices = self.scale, lax.axis_size(MP)
        if (heads := scale_NK.shape[0]) != x_BTNK.shape[2]:
            scale_NK = lax.dynamic_slice_in_dim(scale_NK, lax.axis_index(MP) * heads // devices, 1)
        x = x_BTNK.astype(scale_NK.dtype)
        mean_BT = all_reduce(mark_varying(jnp.mean(x * x, axis=(2, 3)), MP), MP) / devices
        root_BT = lax.rsqrt(checkpoint_name(mean_BT, NORM_STATISTICS) + self.epsilon)
        return (x * root_BT[..., None, None] * scale_NK[None, None]).astype(x_BTNK.dtype)


NORMS = {
    Norm.layernorm: LayerNorm,
    Norm.rmsnorm: RMSNorm,
    Norm.rmsnorm_unit_offset: partial(RMSNorm, unit_offset=True),
}
"""The normalisations that `model.norm` names."""


def make_norm(config: ModelConfig) -> LayerNorm | RMSNorm:
    """The norm of the residual stream that `model.norm`, `norm_epsilon` and `norm_bias` name."""
    bias = {"bias": True} if config.norm_bias else {}
    return NORMS[config.norm](config.width, **_epsilon(config), **bias)


def make_head_norm(config: ModelConfig, heads: int) -> RMSNorm | JointRMSNorm:
    """The norm of the heads of q, or of k."""
    if config.qk_norm_across_heads:
        return JointRMSNorm(heads, config.head_dim, **_epsilon(config))
    unit_offset = config.norm == Norm.rmsnorm_unit_offset
    return RMSNorm(config.head_dim, **_epsilon(config), unit_offset=unit_offset)


def _epsilon(config: ModelConfig) -> dict[str, float]:
    return {} if config.norm_epsilon is None else {"epsilon": config.norm_epsilon}


def _mean(x: Float[Array, "B T *heads D"]) -> Float[Array, "B T *heads 1"]:
    return checkpoint_name(jnp.mean(x, axis=-1), NORM_STATISTICS)[..., None]
