"""The matrix products of linear layers on one device: plain, with heads as the result, and with an adapter.

B batch, T time, D features in, F features out, H heads, K head dim, r rank of an adapter.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def matmul(x_BTD: Float[Array, "B T D"], weight_DF: Float[Array, "D F"]) -> Float[Array, "B T F"]:
    """x @ w in x's dtype, as one product of two matrices.

    Batch and time are flattened because XLA for CPU copies a three-dimensional operand, transposed, for the weight's
    gradient (docs/performance-notes.md).
    """
    batch, time, width = x_BTD.shape
    y = x_BTD.reshape(batch * time, width) @ weight_DF.astype(x_BTD.dtype)
    return y.reshape(batch, time, weight_DF.shape[1])


def outputs_first(x_BTD: Float[Array, "B T D"], weight_FD: Float[Array, "F D"]) -> Float[Array, "B T F"]:
    """x @ w', as `matmul`."""
    return matmul(x_BTD, weight_FD.T)


def heads_product(head_dim: int, x_BTD: Float[Array, "B T D"], weight_FD: Float[Array, "F D"]) -> Array:
    """x @ w' as heads [B T H K]."""
    weight_HKD = weight_FD.astype(x_BTD.dtype).reshape(-1, head_dim, x_BTD.shape[2])
    return jnp.einsum("btd,hkd->bthk", x_BTD, weight_HKD)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def product_with_adapter(
    product: Callable[[Array, Array], Array],
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


def _forward(product: Any, inputs: int, x: Array, w: Array, a: Array, b: Array) -> tuple[Array, tuple]:
    u, is_wide = matmul(x, a), w.shape[1 - inputs] >= w.shape[inputs]
    y = product(_joined(x, u, -1), _joined(w, b, inputs)) if is_wide else product(x, w) + product(u, b)
    return y, (x, u, w, a, b)


def _backward(product: Any, inputs: int, saved: tuple, dy: Array) -> tuple:
    x, u, w, a, b = saved

    def transpose(function: Callable[[Array], Array], at: Array, dy: Array) -> Array:
        return jax.linear_transpose(function, at)(dy)[0]

    du = transpose(lambda u: product(u, b), u, dy)
    db = transpose(lambda b: product(u, b), b, dy)
    da = transpose(lambda a: matmul(x, a), a, du)
    if product is matmul and w.shape[0] > w.shape[1]:
        dx = matmul(_joined(dy, du, -1), _joined(w, a, 1).T)
    else:
        dx = transpose(lambda x: product(x, w), x, dy) + transpose(lambda x: matmul(x, a), x, du)
    return dx, jnp.zeros_like(w), da, db


product_with_adapter.defvjp(_forward, _backward)


def _joined(first: Array, second: Array, axis: int) -> Array:
    return jnp.concatenate([first, second.astype(first.dtype)], axis)
