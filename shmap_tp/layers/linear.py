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
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey
from jaxtyping import Array, Float, PRNGKeyArray

from shmap_tp.layers.products import heads_product, matmul, outputs_first, product_with_adapter
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
        product = outputs_first if self.head_dim is None else partial(heads_product, self.head_dim)
        if self.adapter is None:
            return product(x_BTD, self.weight)
        a_Dr, b_Fr = self.adapter.scale * mark_varying(self.adapter.a.weight, MP), self.adapter.b.weight
        return product_with_adapter(product, 1, x_BTD, self.weight, a_Dr, b_Fr)

    def add_bias(self, y: Float[Array, "B T *F"]) -> Float[Array, "B T *F"]:
        return y if self.bias is None else y + self.of_features(self.bias.astype(y.dtype), y)

    def of_features(self, v: Float[Array, " F"], y: Float[Array, "B T *F"]) -> Float[Array, "1 1 *F"]:
        return v.reshape(1, 1, *y.shape[2:])


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
            return product_with_adapter(matmul, 0, x, self.weight, a_Dr, b_rF)
        weight_HKF = self.weight.astype(x.dtype).reshape(*x.shape[2:], self.weight.shape[1])
        return adapted(jnp.einsum("bthk,hkf->btf", x, weight_HKF), self.adapter, x)

    def add_bias(self, y_BTF: Float[Array, "B _ F"]) -> Float[Array, "B _ F"]:
        """y is reduced: T/mp positions of it, or all."""
        return y_BTF if self.bias is None else y_BTF + self.of_features(self.bias.astype(y_BTF.dtype), y_BTF)

    def of_features(self, v: Float[Array, " F"], y: Float[Array, "B _ F"]) -> Float[Array, "1 1 F"]:
        return v[None, None]


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
