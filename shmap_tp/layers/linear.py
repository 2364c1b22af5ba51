"""Linear layers whose matrix product is shared by the devices of mp.

Shoeybi et al. 2019, "Megatron-LM", section 3, https://arxiv.org/abs/1909.08053

B batch, T time, D features in, F features out, H heads, K head dim.  F/mp: dim F sharded over mp.  {+mp}: a partial
sum, not yet reduced.

    column-parallel   x[B T D]     @ w[F/mp D]'  ->  y[B T F/mp]     + b[F/mp]
    row-parallel      x[B T D/mp]  @ w[D/mp F]   ->  y[B T F] {+mp}  reduced, then + b[F]

Neither communicates: a tensor-parallel mode calls them together with its collectives (`parallel/tensor_parallel.py`).
T is all of time there, or a chunk of it.  A call is the product alone; `add_bias` is called by the mode, which knows
when the sum over mp is complete (`parallel/linear_protocol.py`).  Biases start at zero.

The dim that mp shards is stored first, and FSDP shards it further if it can.  Of an MLP it is the longer dim, so a
piece of a weight gradient that is reduced in a ring (`parallel/fsdp_overlap.py`) reads only the smaller operand in
full.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from shmap_tp.parallel.mesh import MP
from shmap_tp.parallel.partitioning import param


class ColumnParallelLinear(eqx.Module):
    """y = x @ w' + b, each device computing its own columns of y; with `head_dim`, as heads of so many columns.

    The weight is reshaped to heads and not the result, so that a compiler can write the result head by head, as
    attention reads it (docs/performance-notes.md).

    Shapes         x[B T D], varying over mp -> y[B T F/mp] or y[B T H/mp K], in x's dtype; w and b are cast to it.
    Communication  none.
    """

    weight: Float[Array, "F D"] = param(MP, None, outputs=(0,))
    bias: Float[Array, " F"] | None = param(MP)
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
        self.head_dim = head_dim

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T *F"]:
        if self.head_dim is None:
            return matmul(x_BTD, self.weight.T)
        weight_HKD = self.weight.astype(x_BTD.dtype).reshape(-1, self.head_dim, x_BTD.shape[2])
        return jnp.einsum("btd,hkd->bthk", x_BTD, weight_HKD)

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

    def __init__(self, features_in: int, features_out: int, *, std: float, key: PRNGKeyArray, bias: bool = False):
        self.weight = std * jax.random.normal(key, (features_in, features_out))
        self.bias = jnp.zeros(features_out) if bias else None

    def __call__(self, x: Float[Array, "B T *D"]) -> Float[Array, "B T F"]:
        if x.ndim == 3:
            return matmul(x, self.weight)
        weight_HKF = self.weight.astype(x.dtype).reshape(*x.shape[2:], self.weight.shape[1])
        return jnp.einsum("bthk,hkf->btf", x, weight_HKF)

    def add_bias(self, y_BTF: Float[Array, "B _ F"]) -> Float[Array, "B _ F"]:
        """y is reduced: T/mp positions of it, or all."""
        return y_BTF if self.bias is None else y_BTF + self.bias.astype(y_BTF.dtype)[None, None]


def matmul(x_BTD: Float[Array, "B T D"], weight_DF: Float[Array, "D F"]) -> Float[Array, "B T F"]:
    """x @ w in x's dtype, as one product of two matrices.

    Batch and time are flattened because XLA for CPU copies a three-dimensional operand, transposed, for the weight's
    gradient (docs/performance-notes.md).
    """
    batch, time, width = x_BTD.shape
    y = x_BTD.reshape(batch * time, width) @ weight_DF.astype(x_BTD.dtype)
    return y.reshape(batch, time, weight_DF.shape[1])
