"""Linear layers whose matrix product is shared by the devices of mp.

Shoeybi et al. 2019, "Megatron-LM", section 3, https://arxiv.org/abs/1909.08053

B batch, T time, D features in, F features out, H heads, K head dim.  F/mp: dim F sharded over mp.  {+mp}: a partial
sum, not yet reduced.

    column-parallel   x[B T D]     @ w[F/mp D]'  ->  y[B T F/mp]     + b[F/mp]
    row-parallel      x[B T D/mp]  @ w[D/mp F]   ->  y[B T F] {+mp}  reduced, then + b[F]

Neither communicates: a tensor-parallel mode calls them together with its collectives (`parallel/tensor_parallel.py`).
T is all of time there, or a chunk of it.  A call is the product alone; `add_bias` is called by the mode, which knows
when the sum over mp is complete (`parallel/linear_protocol.py`).  Biases start at zero.

Each may have an `Adapter`, a product of low rank that is added to its own (`with_adapter`).

The dim that mp shards is stored first, and FSDP shards it further if it can.  Of an MLP it is the longer dim, so a
piece of a weight gradient that is reduced in a ring (`parallel/fsdp_overlap.py`) reads only the smaller operand in
full.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey
from jaxtyping import Array, Float, PRNGKeyArray

from shmap_tp.parallel.collectives import mark_varying
from shmap_tp.parallel.linear_protocol import Adapter
from shmap_tp.parallel.mesh import MP
from shmap_tp.parallel.partitioning import declaration, param


class ColumnParallelLinear(eqx.Module):
    """y = x @ w' + b, each device computing its own columns of y; with `head_dim`, as heads of so many columns.

    The weight is reshaped to heads and not the result, so that a compiler can write the result head by head, as
    attention reads it (docs/performance-notes.md).

    Shapes         x[B T D], varying over mp -> y[B T F/mp] or y[B T H/mp K], in x's dtype; w and b are cast to it.
    Communication  none.
    """

    weight: Float[Array, "F D"] = param(MP, None, outputs=(0,))
    bias: Float[Array, " F"] | None = param(MP)
    adapter: Adapter | None
    head_dim: int | None = eqx.field(static=True)

    def __init__(
        self,
        features_in: int,
        features_out: int,
        *,
        std: float,
        key: PRNGKeyArray,
        bias: bool = False,
        head_dim: int | None = None,
    ):
        self.weight = std * jax.random.normal(key, (features_out, features_in))
        self.bias = jnp.zeros(features_out) if bias else None
        self.adapter = None
        self.head_dim = head_dim

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T *F"]:
        product = matmul if self.head_dim is None else partial(_heads_product, self.head_dim)
        if self.adapter is None:
            return product(x_BTD, self.weight.T)
        a_Dr, b_Fr = self.adapter.scale * mark_varying(self.adapter.a.weight, MP), self.adapter.b.weight
        return product_with_adapter(product, x_BTD, self.weight.T, a_Dr, b_Fr.T)

    def add_bias(self, y: Float[Array, "B T *F"]) -> Float[Array, "B T *F"]:
        return y if self.bias is None else y + self.bias.astype(y.dtype).reshape(1, 1, *y.shape[2:])


class RowParallelLinear(eqx.Module):
    """y = x @ w + b, each device multiplying its own rows of w; b is replicated, and added to the reduced y.

    The rows may be heads, D = H K: the counterpart of `head_dim` of ColumnParallelLinear.

    Shapes         x[B T D/mp] or x[B T H/mp K] -> y[B T F] {+mp}, in x's dtype; w and b are cast to it.
    Communication  none; y is reduced once, together with other partial sums.
    """

    weight: Float[Array, "D F"] = param(MP, None)
    bias: Float[Array, " F"] | None = param(None)
    adapter: Adapter | None

    def __init__(self, features_in: int, features_out: int, *, std: float, key: PRNGKeyArray, bias: bool = False):
        self.weight = std * jax.random.normal(key, (features_in, features_out))
        self.bias = jnp.zeros(features_out) if bias else None
        self.adapter = None

    def __call__(self, x: Float[Array, "B T *D"]) -> Float[Array, "B T F"]:
        if x.ndim == 3 and self.adapter is None:
            return matmul(x, self.weight)
        if x.ndim == 3:
            a_Dr, b_rF = self.adapter.scale * self.adapter.a.weight, mark_varying(self.adapter.b.weight, MP)
            return product_with_adapter(matmul, x, self.weight, a_Dr, b_rF)
        weight_HKF = self.weight.astype(x.dtype).reshape(*x.shape[2:], self.weight.shape[1])
        return adapted(jnp.einsum("bthk,hkf->btf", x, weight_HKF), self.adapter, x)

    def add_bias(self, y_BTF: Float[Array, "B _ F"]) -> Float[Array, "B _ F"]:
        """y is reduced: T/mp positions of it, or all."""
        return y_BTF if self.bias is None else y_BTF + self.bias.astype(y_BTF.dtype)[None, None]


class ReplicatedLinear(eqx.Module):
    """y = x @ w, for an x that differs between the devices of mp, all of which hold w: a factor of an adapter.

    Shapes         x[B T D], varying over mp -> y[B T F], in x's dtype.
    Communication  backward: one all-reduce of dw (D F values) over mp, unless the tensor-parallel mode marked w as
                   varying before: then it is reduced once per step.
    """

    weight: Float[Array, "D F"] = param(None, None)

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
        return matmul(x_BTD, mark_varying(self.weight, MP))


def adapted(y: Float[Array, "B T *F"], adapter: Adapter | None, x: Float[Array, "B T *D"]) -> Float[Array, "B T *F"]:
    """y = x @ w, and what the adapter of w adds to it."""
    return y if adapter is None else y + adapter(x)


def _heads_product(head_dim: int, x_BTD: Float[Array, "B T D"], w_DF: Float[Array, "D F"]) -> Array:
    """x @ w as heads [B T H K]."""
    weight_HKD = w_DF.T.astype(x_BTD.dtype).reshape(-1, head_dim, x_BTD.shape[2])
    return jnp.einsum("btd,hkd->bthk", x_BTD, weight_HKD)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def product_with_adapter(
    product: Callable[[Array, Array], Array],
    x_BTD: Float[Array, "B T D"],
    w_DF: Float[Array, "D F"],
    a_Dr: Float[Array, "D r"],
    b_rF: Float[Array, "r F"],
) -> Float[Array, "B T *F"]:
    """x @ w + (x @ a) @ b, with `product` as the matrix product that writes the result.  w is frozen: its gradient
    is not computed, and given as zero.

    The result and the gradient of x are [B T F] and [B T D].  To add a product of low rank to the wider of them would
    take about as long as to compute it, so it is that of one matmul instead:

        F >= D   y   =  [x  x a]    @ [w]         F < D   dx  =  [dy  dy b'] @ [w  a]'
                                      [b]

    Communication  none.
    """
    return _forward(product, x_BTD, w_DF, a_Dr, b_rF)[0]


def _forward(product: Any, x: Array, w: Array, a: Array, b: Array) -> tuple[Array, tuple]:
    u, is_wide = matmul(x, a), w.shape[1] >= w.shape[0]
    y = product(_joined(x, u, -1), _joined(w, b, 0)) if is_wide else product(x, w) + product(u, b)
    return y, (x, u, w, a, b)


def _backward(product: Any, saved: tuple, dy: Array) -> tuple:
    x, u, w, a, b = saved

    def transpose(function: Callable[[Array], Array], at: Array, dy: Array) -> Array:
        return jax.linear_transpose(function, at)(dy)[0]

    du = transpose(lambda u: product(u, b), u, dy)
    db = transpose(lambda b: product(u, b), b, dy)
    da = transpose(lambda a: matmul(x, a), a, du)
    if w.shape[0] > w.shape[1] and dy.ndim == 3:
        dx = matmul(_joined(dy, du, -1), _joined(w, a, 1).T)
    else:
        dx = transpose(lambda x: product(x, w), x, dy) + transpose(lambda x: matmul(x, a), x, du)
    return dx, jnp.zeros_like(w), da, db


product_with_adapter.defvjp(_forward, _backward)


def _joined(first: Array, second: Array, axis: int) -> Array:
    return jnp.concatenate([first, second.astype(first.dtype)], axis)


def with_adapter(layer: Any, rank: int, scale: float, *, key: PRNGKeyArray) -> Any:
    """`layer`, a linear layer, with an adapter of this rank.  The factor on the side that mp shards is a layer of the
    same class.

    Initially a is uniform within +-1 / sqrt(features in), as in PEFT (He et al. 2015, with a slope of sqrt(5)), and b
    is zero: the layer's product is what it was.
    """
    declared = declaration(layer, (GetAttrKey("weight"),))
    shape = dict(enumerate(layer.weight.shape, -layer.weight.ndim))
    features_in = math.prod(shape[dim] for dim in declared.inputs)
    features_out = math.prod(shape[dim] for dim in declared.outputs)
    a = jax.random.uniform(key, (features_in, rank), minval=-1.0, maxval=1.0) * features_in**-0.5

    def alike(weight: Array) -> Any:
        return eqx.tree_at(lambda layer: (layer.weight, layer.bias), layer, (weight, None), is_leaf=lambda x: x is None)

    if any(declared.axes[dim] for dim in declared.inputs):
        adapter = Adapter(alike(a), ReplicatedLinear(jnp.zeros((rank, features_out))), scale)
    else:
        sizes = [rank if dim in declared.inputs else size for dim, size in shape.items()]
        adapter = Adapter(ReplicatedLinear(a), alike(jnp.zeros(sizes)), scale)
    return eqx.tree_at(lambda layer: layer.adapter, layer, adapter, is_leaf=lambda x: x is None)


def matmul(x_BTD: Float[Array, "B T D"], weight_DF: Float[Array, "D F"]) -> Float[Array, "B T F"]:
    """x @ w in x's dtype, as one product of two matrices.

    Batch and time are flattened because XLA for CPU copies a three-dimensional operand, transposed, for the weight's
    gradient (docs/performance-notes.md).
    """
    batch, time, width = x_BTD.shape
    y = x_BTD.reshape(batch * time, width) @ weight_DF.astype(x_BTD.dtype)
    return y.reshape(batch, time, weight_DF.shape[1])
