"""The linear layer, whose matrix product is shared by the devices of mp as its kind says.

Shoeybi et al. 2019, "Megatron-LM", section 3, https://arxiv.org/abs/1909.08053

B batch, T time, D features in, F features out, H heads, N key/value heads, K head dim, r rank of an adapter.  F/mp: dim
F sharded over mp.  {+mp}: a partial sum, not yet reduced.

    column       x[B T D]     @ w[F/mp D]'   ->  y[B T F/mp]      + b[F/mp]
    row          x[B T D/mp]  @ w[D/mp F]    ->  y[B T F] {+mp}   reduced, then + b[F]
    heads        x[B T D]     @ w[D N/mp K]  ->  y[B T N/mp K]    + b[N/mp K]
    replicated   x[B T D]     @ w[D F]       ->  y[B T F]         x differs between devices; a factor of an adapter

No kind communicates: a tensor-parallel mode calls layers together with its collectives (`parallel/tensor_parallel.py`).
T is all of time there, or a chunk of it.  A call is the product alone.  The mode adds the bias, because of where that
must happen: a row-parallel bias once, after the reduction; before it the bias would count mp times.

A weight is an array, or multiplies in a way of its own: a `Ring` is an FSDP weight whose gradient is reduced in a ring,
an `Int8` scales the product, and an `EightBit` rounds both operands.  Which one a layer has is decided by
`fsdp.gather`, by the dtype of the model, and by `train.matmul_precision`.

The dim that mp shards is stored first, and FSDP shards it further if it can.  In an MLP that is the longer dim, so a
piece of a weight gradient that is reduced in a ring (`parallel/weights.py`) reads only the smaller operand in full.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num, PRNGKeyArray

from shmap_tp.layers.xla_workarounds import row_major
from shmap_tp.parallel.collectives import mark_varying
from shmap_tp.parallel.eight_bit import EightBit, sum_over_tokens
from shmap_tp.parallel.fsdp import Weight
from shmap_tp.parallel.mesh import MP
from shmap_tp.parallel.partitioning import Declaration, ParameterKind, declare, param_of
from shmap_tp.parallel.weights import Int8, Ring


class Kind(Enum):
    """What mp shards in a linear layer."""

    column = auto()
    """mp shards the outputs; the weight is stored as [outputs, inputs]."""
    row = auto()
    """mp shards the inputs, which may be heads."""
    heads = auto()
    """mp shards the outputs, whole key/value heads.  Where mp exceeds their number, every device holds all of them."""
    replicated = auto()
    """mp shards nothing."""


declare_weight = partial(declare, by_linear=True)
DECLARED: dict[Kind, tuple[Declaration, Declaration]] = {
    Kind.column: (declare_weight(MP, None, outputs=(0,)), declare(MP)),
    Kind.row: (declare_weight(MP, None), declare(None)),
    Kind.heads: (
        declare_weight(None, MP, None, outputs=(1, 2), replicate_if_fewer=True),
        declare(MP, None, kind=ParameterKind.vector, replicate_if_fewer=True),
    ),
    Kind.replicated: (declare_weight(None, None), declare(None)),
}
"""The declarations of the weight and of the bias."""


class Linear(eqx.Module):
    """y = x @ w + b, each device computing its part; with an adapter, y = x @ w + scale (x @ a) @ b'.

    Outputs may be heads: the weight is then reshaped to heads and not the result, so that a compiler can write the
    result head by head, as attention reads it (docs/performance-notes.md), unless the layer `is_flat`.

    Shapes         those above, in x's dtype, to which the weight and the bias are cast.  x varies over mp.
    Communication  none forward.  Backward, of a weight and a bias that mp does not shard and whose use differs between
                   its devices (`replicated`; `heads` where mp > N), one all-reduce of their gradients over mp, unless
                   the tensor-parallel mode marked them as varying before: then they are reduced once per step.
    """

    weight: Weight = param_of(lambda layer: DECLARED[layer.kind][0])
    """An array is float32 in training."""
    bias: Float[Array, "..."] | None = param_of(lambda layer: DECLARED[layer.kind][1])
    """Initially zero."""
    adapter: "Adapter | None"
    kind: Kind = eqx.field(static=True)
    outputs: tuple[int, ...] = eqx.field(static=True)
    """(F,) or (heads, K), of all devices together."""
    scope: str | None = eqx.field(static=True, default=None)
    """A name that its operations carry in profiles and in the planner: that of the sublayer, where the block has none
    around them."""
    is_flat: bool = eqx.field(static=True, default=False)
    """Whether heads are computed as one dim of features, and then reshaped."""

    @staticmethod
    def column(
        features_in: int,
        features_out: int,
        *,
        std: float,
        key: PRNGKeyArray,
        bias: bool = False,
        head_dim: int | None = None,
    ) -> "Linear":
        """A column-parallel layer; with `head_dim` its outputs are heads of so many features."""
        weight = std * jax.random.normal(key, (features_out, features_in))
        outputs = (features_out,) if head_dim is None else (features_out // head_dim, head_dim)
        return Linear(weight, jnp.zeros(features_out) if bias else None, None, Kind.column, outputs)

    @staticmethod
    def row(features_in: int, features_out: int, *, std: float, key: PRNGKeyArray, bias: bool = False) -> "Linear":
        """A row-parallel layer."""
        weight = std * jax.random.normal(key, (features_in, features_out))
        return Linear(weight, jnp.zeros(features_out) if bias else None, None, Kind.row, (features_out,))

    @staticmethod
    def heads(
        features_in: int, heads: int, head_dim: int, *, std: float, key: PRNGKeyArray, bias: bool = False
    ) -> "Linear":
        """A layer for k or v: each device computes the heads that its query heads attend to."""
        weight = std * jax.random.normal(key, (features_in, heads, head_dim))
        return Linear(weight, jnp.zeros((heads, head_dim)) if bias else None, None, Kind.heads, (heads, head_dim))

    @property
    def is_linear(self) -> bool:
        """Whether a call is linear in all parameters together."""
        return self.adapter is None and not isinstance(self.weight, EightBit)

    def __call__(self, x: Float[Array, "B T *D"]) -> Float[Array, "B T *F"]:
        with self._named():
            product = LinearProduct(self.kind, self.outputs, self.is_flat)
            weight = self.of_this_device(self.weight)
            if self.adapter is None:
                return self._heads_of(_multiply(product, x, weight))
            if isinstance(weight, Int8 | EightBit) or x.ndim > 3 or self.kind == Kind.heads:
                return self._heads_of(_multiply(product, x, weight)) + self.adapter(x)
            a, b = self.adapter.a, self.adapter.b
            factors = self.adapter.scale * a.of_this_device(a.weight), b.of_this_device(b.weight)
            return self._heads_of(product_with_adapter(product, int(self.kind == Kind.column), x, weight, *factors))

    def _heads_of(self, y: Float[Array, "B T *F"]) -> Float[Array, "B T *outputs"]:
        return y.reshape(*y.shape[:2], -1, self.outputs[1]) if self.is_flat else y

    def add_bias(self, y: Float[Array, "B _ *F"]) -> Float[Array, "B _ *F"]:
        """y + b, or y where there is none.  Communication: none."""
        if self.bias is None:
            return y
        with self._named():
            return y + self.of_this_device(self.bias).astype(y.dtype).reshape(1, 1, *y.shape[2:])

    def of_this_device(self, w: Any) -> Any:
        """The weight or bias that this device's part of the product needs.  Where mp > N, every device holds N heads
        and needs the one that all its query heads share."""
        if self.kind == Kind.replicated:
            return mark_varying(w, MP)
        if self.kind != Kind.heads or lax.axis_size(MP) <= self.outputs[0]:
            return w
        shared = lax.axis_index(MP) * self.outputs[0] // lax.axis_size(MP)
        return jax.tree.map(lambda w: lax.dynamic_slice_in_dim(mark_varying(w, MP), shared, 1, axis=-2), w)

    def _named(self) -> Any:
        return nullcontext() if self.scope is None else jax.named_scope(self.scope)


class Adapter(eqx.Module):
    """scale (x @ a) @ b, which a layer with frozen weights adds to its product.  Hu et al. 2021, "LoRA", section 4.1,
    https://arxiv.org/abs/2106.09685

    The factors are sharded as the weight is, and so share the communication of the layer's own product:

        column-parallel   x[B T D]     @ a[D r]     @ b[r F/mp]  ->  [B T F/mp]       x has entered already
        row-parallel      x[B T D/mp]  @ a[D/mp r]  @ b[r F]     ->  [B T F] {+mp}    reduced with the layer's product

    Where it is part of the matmul with the weight (`product_with_adapter`), it is not called.

    Communication  none of activations.  Backward: one all-reduce over mp of the gradient of the factor that mp does not
                   shard.
    """

    a: Linear
    b: Linear
    scale: float = eqx.field(static=True)

    def __call__(self, x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        with jax.named_scope("adapter"):
            return self.b(self.scale * self.a(x))


def with_adapter(layer: Linear, rank: int, scale: float, *, key: PRNGKeyArray) -> Linear:
    """`layer` with an adapter of this rank, whose factor on the side that mp shards is of the layer's own kind.

    Initially a is uniform within +-1 / sqrt(features in), as in PEFT (He et al. 2015, with a slope of sqrt(5)), and b
    is zero: the layer's product is what it was.
    """
    declared, shape = DECLARED[layer.kind][0], layer.weight.shape
    (inputs,) = (dim % len(shape) for dim in declared.inputs)
    features_in, features_out = shape[inputs], layer.weight.size // shape[inputs]
    a = jax.random.uniform(key, (features_in, rank), minval=-1.0, maxval=1.0) * features_in**-0.5

    def replicated(weight: Array) -> Linear:
        return Linear(weight, None, None, Kind.replicated, weight.shape[1:])

    if layer.kind == Kind.row:
        factors = Linear(a, None, None, Kind.row, (rank,)), replicated(jnp.zeros((rank, features_out)))
    else:
        b = jnp.zeros([rank if dim == inputs else size for dim, size in enumerate(shape)])
        factors = replicated(a), replace(layer, weight=b, bias=None)
    return replace(layer, adapter=Adapter(*factors, scale))


# The products on one device

Product = Callable[[Array, Array], Array]
"""(x, w) -> x @ w, linear in both."""


def _multiply(product: Product, x: Array, weight: Weight) -> Array:
    return weight.multiply(product, x) if isinstance(weight, Ring | Int8 | EightBit) else product(x, weight)


@dataclass(frozen=True)
class LinearProduct:
    """x @ w in x's dtype, or accumulated in the dtype `into` and given so, as `Linear` with these fields stores w."""

    kind: Kind
    outputs: tuple[int, ...]
    is_flat: bool = False
    """Whether heads are one dim of features in what it gives and in its gradient."""

    def __call__(
        self, x: Num[Array, "B T *D"], w: Num[Array, "..."], into: DTypeLike | None = None
    ) -> Num[Array, "B T *F"]:
        einsum = partial(jnp.einsum, preferred_element_type=into)
        if self.kind == Kind.column and len(self.outputs) == 1:
            return matmul(x, w.T, into)
        if self.is_flat:
            w_DF = w.T if self.kind == Kind.column else row_major(w.reshape(len(w), -1))
            return matmul(x, w_DF, into)
        if self.kind == Kind.column:
            return einsum("btd,hkd->bthk", x, w.astype(x.dtype).reshape(-1, self.outputs[1], x.shape[2]))
        if self.kind == Kind.heads:
            return einsum("btd,dhk->bthk", x, w.astype(x.dtype))
        if x.ndim > 3:
            return einsum("bthk,hkf->btf", x, w.astype(x.dtype).reshape(*x.shape[2:], w.shape[1]))
        return matmul(x, w, into)

    def transposed(
        self, dy: Num[Array, "B T *F"], w: Num[Array, "..."], inputs: tuple[int, ...], into: DTypeLike | None = None
    ) -> Num[Array, "B T *D"]:
        """dy @ w', of shape [B T *inputs]: the product of the layer whose outputs are the inputs of this one."""
        if self.kind == Kind.heads and self.is_flat:
            return matmul(dy, row_major(w.reshape(len(w), -1)).T, into)
        if self.kind == Kind.heads:
            return jnp.einsum("bthk,dhk->btd", dy, w, preferred_element_type=into)
        mirrored = Kind.row if self.kind == Kind.column else Kind.column
        return LinearProduct(mirrored, inputs)(dy, w, into)

    def weight_gradient(self, x: Any, dy: Any) -> Array:
        """x' @ dy (`sum_over_tokens`), with the dims of w in their order, but heads as a dim of their own."""
        return sum_over_tokens(*(dy, x) if self.kind == Kind.column else (x, dy))


def matmul(
    x_BTD: Num[Array, "B T D"], weight_DF: Num[Array, "D F"], into: DTypeLike | None = None
) -> Num[Array, "B T F"]:
    """x @ w in x's dtype, or accumulated in the dtype `into`, as one product of two matrices.

    Batch and time are flattened because XLA for CPU copies a three-dimensional operand, transposed, for the weight's
    gradient (docs/performance-notes.md).
    """
    batch, time, width = x_BTD.shape
    y = jnp.matmul(x_BTD.reshape(batch * time, width), weight_DF.astype(x_BTD.dtype), preferred_element_type=into)
    return y.reshape(batch, time, weight_DF.shape[1])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def product_with_adapter(
    product: Product,
    inputs: int,
    x_BTD: Float[Array, "B T D"],
    w: Float[Array, "..."],
    a_Dr: Float[Array, "D r"],
    b: Float[Array, "..."],
) -> Float[Array, "B T *F"]:
    """x @ w + (x @ a) @ b, where `product` multiplies with w and with b, whose dim `inputs` is that of x and of x @ a.
    w is frozen: its gradient is not computed, and given as zero.

    The result and the gradient of x are [B T F] and [B T D].  To add a product of low rank to the wider of them would
    take about as long as to compute it, so it is that of one matmul instead:

        F >= D   y   =  [x  x a]    @ [w]         F < D   dx  =  [dy  dy b'] @ [w  a]'
                                      [b]

    The plain version is the formula above and its gradient by JAX.

    Communication  none.
    """
    return _forward(product, inputs, x_BTD, w, a_Dr, b)[0]


def _forward(product: Product, inputs: int, x: Array, w: Array, a: Array, b: Array) -> tuple[Array, tuple]:
    u, is_wide = matmul(x, a), w.shape[1 - inputs] >= w.shape[inputs]
    y = product(_joined(x, u, -1), _joined(w, b, inputs)) if is_wide else product(x, w) + product(u, b)
    return y, (x, u, w, a, b)


def _backward(product: Product, inputs: int, saved: tuple, dy: Array) -> tuple:
    x, u, w, a, b = saved

    def transpose(function: Callable[[Array], Array], at: Array, dy: Array) -> Array:
        return jax.linear_transpose(function, at)(dy)[0]

    du = transpose(lambda u: product(u, b), u, dy)
    db = transpose(lambda b: product(u, b), b, dy)
    da = transpose(lambda a: matmul(x, a), a, du)
    if inputs == 0 and w.shape[0] > w.shape[1]:
        dx = matmul(_joined(dy, du, -1), _joined(w, a, 1).T)
    else:
        dx = transpose(lambda x: product(x, w), x, dy) + transpose(lambda x: matmul(x, a), x, du)
    return dx, jnp.zeros_like(w), da, db


product_with_adapter.defvjp(_forward, _backward)


def _joined(first: Array, second: Array, axis: int) -> Array:
    return jnp.concatenate([first, second.astype(first.dtype)], axis)
