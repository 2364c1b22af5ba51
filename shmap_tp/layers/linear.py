"""Linear layers that share one matrix product between the devices of the mp axis.

Shoeybi et al. 2019, "Megatron-LM", section 3, https://arxiv.org/abs/1909.08053

B batch, T time, D features in, F features out.  F/mp: dim F cut along mp.  {+mp}: a sum over mp still owed.

    column   x[B T D]     @ w[F/mp D]'  ->  y[B T F/mp]
    row      x[B T D/mp]  @ w[D/mp F]   ->  y[B T F] {+mp}

Both keep the dim that mp cuts first, and where dp shares a weight, it cuts that dim further, if it divides it.  Of an
MLP it is the longer one, so that a piece of a gradient that goes home in a ring (`shared`) reads but the smaller
operand whole.

Neither talks.  Whoever composes them hands the columns to a wire's `into` and the rows to its `out_of`, once for all
the products of a region: that is where the two all-reduces of a Megatron layer stand, or whatever stands for them
(`collectives`).  T is all of time there, or a part of it.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from shmap_tp.parallel.fsdp_overlap import Weight, product
from shmap_tp.parallel.mesh import MP
from shmap_tp.parallel.partitioning import param


class ColumnParallelLinear(eqx.Module):
    """y = x @ w', each device computing its own columns of y.  No bias.

    Shapes  x[B T D], varying over mp (entered) -> y[B T F/mp], in x's dtype; w is cast to it.
    Wire    none here; x was entered for all the columns that it meets.
    """

    weight: Float[Array, "F D"] = param(MP, None)

    def __init__(self, features_in: int, features_out: int, *, std: float, key: PRNGKeyArray):
        self.weight = std * jax.random.normal(key, (features_out, features_in))

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
        return product(lambda x_BTD, weight_FD: matmul(x_BTD, weight_FD.T), x_BTD, self.weight, outputs_first=True)


class ColumnParallelHeads(ColumnParallelLinear):
    """y = x @ w', its columns F = H K as heads.

    It is the weight that is reshaped and not the result, so that a compiler is free to write the result head by head,
    as attention reads it: on TPU the other way costs copies of q, k and v, forward and backward, a sixth of the layer's
    time with two heads of 256 on a device (predicted, v5e).

    Shapes  x[B T D], varying over mp (entered) -> y[B T H/mp K], in x's dtype; w is cast to it.
    Wire    none here.
    """

    head_dim: int = eqx.field(static=True)

    def __init__(self, features_in: int, heads: int, head_dim: int, *, std: float, key: PRNGKeyArray):
        super().__init__(features_in, heads * head_dim, std=std, key=key)
        self.head_dim = head_dim

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T H K"]:
        def multiply(x_BTD: Float[Array, "B T D"], weight_FD: Float[Array, "F D"]) -> Float[Array, "B T H K"]:
            weight_HKD = weight_FD.astype(x_BTD.dtype).reshape(-1, self.head_dim, x_BTD.shape[2])
            return jnp.einsum("btd,hkd->bthk", x_BTD, weight_HKD)

        return product(multiply, x_BTD, self.weight, outputs_first=True)


class RowParallelLinear(eqx.Module):
    """y = x @ w, each device adding up its own rows of w.  No bias.

    Shapes  x[B T D/mp] -> y[B T F] {+mp}, in x's dtype; w is cast to it.
    Wire    none here; y is left once, with whatever else is owed beside it.
    """

    weight: Float[Array, "D F"] = param(MP, None)

    def __init__(self, features_in: int, features_out: int, *, std: float, key: PRNGKeyArray):
        self.weight = std * jax.random.normal(key, (features_in, features_out))

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
        return product(matmul, x_BTD, self.weight, outputs_first=False)


class RowParallelHeads(RowParallelLinear):
    """y = x @ w, its F = H K rows met by heads: the other way of `ColumnParallelHeads`.

    Shapes  x[B T H/mp K] -> y[B T D] {+mp}, in x's dtype; w is cast to it.
    Wire    none here.
    """

    def __call__(self, x_BTHK: Float[Array, "B T H K"]) -> Float[Array, "B T D"]:
        def multiply(x_BTHK: Float[Array, "B T H K"], weight_FD: Float[Array, "F D"]) -> Float[Array, "B T D"]:
            weight_HKD = weight_FD.astype(x_BTHK.dtype).reshape(*x_BTHK.shape[2:], weight_FD.shape[1])
            return jnp.einsum("bthk,hkd->btd", x_BTHK, weight_HKD)

        return product(multiply, x_BTHK, self.weight, outputs_first=False)


def matmul(x_BTD: Float[Array, "B T D"], weight_DF: Float[Array, "D F"]) -> Float[Array, "B T F"]:
    """x @ w in x's dtype, as one product of two matrices.

    The rows are flattened because XLA on CPU copies a three-dimensional operand transposed for the weight's gradient,
    and computes an activation again, element by element, inside that copy: a third of an MLP's time.
    """
    batch, time, width = x_BTD.shape
    y = x_BTD.reshape(batch * time, width) @ weight_DF.astype(x_BTD.dtype)
    return y.reshape(batch, time, weight_DF.shape[1])


def into_heads(x_BTD: Float[Array, "B T D"], weight_DHK: Weight) -> Float[Array, "B T H K"]:
    """x @ w in x's dtype, a head for each [D K] of w."""

    def multiply(x_BTD: Float[Array, "B T D"], weight_DHK: Float[Array, "D H K"]) -> Float[Array, "B T H K"]:
        return jnp.einsum("btd,dhk->bthk", x_BTD, weight_DHK.astype(x_BTD.dtype))

    return product(multiply, x_BTD, weight_DHK, outputs_first=False)
