"""The interface of the linear layers that a tensor-parallel mode multiplies with, two wrappers around such layers, and
what a layer may have beside its weight: a low-rank adapter.

A layer is called for its matrix product alone, which is linear in the input and in the weight; its bias is added apart,
by the mode, because of where that must happen:

    column-parallel   x @ w, + b[F/mp]          on each device, after the product
    row-parallel      x @ w, reduced, + b[D]    once, after the reduction: every device holds b, and added before it b
                                                would count mp times
"""

from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
from jaxtyping import Array, Float

from shmap_tp.parallel.collectives import mark_varying
from shmap_tp.parallel.mesh import MP


@runtime_checkable
class Linear(Protocol):
    """A column- or row-parallel layer, a pytree of its weight and bias."""

    def __call__(self, x: Array) -> Any:
        """x[B any ...] -> x @ w, linear in both.  Communication: none."""
        ...

    def add_bias(self, y: Any) -> Any:
        """y + b, or y where the layer has no bias.  Communication: none."""
        ...


class InScope(eqx.Module):
    """A layer whose operations carry the name of the sublayer that it belongs to, in profiles and in the planner."""

    name: str = eqx.field(static=True)
    layer: Linear

    def __call__(self, x: Array) -> Array:
        with jax.named_scope(self.name):
            return self.layer(x)

    def add_bias(self, y: Array) -> Array:
        with jax.named_scope(self.name):
            return self.layer.add_bias(y)


class Adapter(eqx.Module):
    """scale (x @ a) @ b, which a layer with frozen weights adds to its product.  Hu et al. 2021, "LoRA", section 4.1,
    https://arxiv.org/abs/2106.09685

    The two factors are layers.  They are sharded as the weight is, and so share the communication of the layer's own
    product:

        column-parallel   x[B T D]     @ a[D r]     @ b[r F/mp]  ->  [B T F/mp]       x has entered already
        row-parallel      x[B T D/mp]  @ a[D/mp r]  @ b[r F]     ->  [B T F] {+mp}    reduced with the layer's product

    Where it is part of the matmul with the weight (`layers/products.py`), it is not called.

    Communication  none of activations.  Backward: one all-reduce over mp of the gradient of the factor that mp does not
                   shard (`ReplicatedLinear`).
    """

    a: Any
    b: Any
    scale: float = eqx.field(static=True)

    def __call__(self, x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        with jax.named_scope("adapter"):
            return self.b(self.scale * self.a(x))


class AfterNorm(eqx.Module):
    """The column-parallel layers of a sublayer, behind the scale and bias of its norm: n -> layer(n * scale + bias).

    Several of them share one `enter` of the normalised n, which has no scale yet.  What they return is a tuple, one
    product for each layer.  They are not linear.

    Communication  backward: where the residual stream is replicated over mp, one all-reduce over mp of the gradient of
                   each parameter of the norm, because every device has that of its own columns alone; else it stays a
                   partial sum, which is reduced once per step.
    """

    norm: Any
    layers: tuple[Linear, ...]

    def __call__(self, n_BTD: Float[Array, "B _ D"]) -> tuple[Array, ...]:
        h_BTD = mark_varying(self.norm, MP).affine(n_BTD)
        return tuple(layer(h_BTD) for layer in self.layers)

    def add_bias(self, products: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(layer.add_bias(y) for layer, y in zip(self.layers, products, strict=True))
