"""Products of groups of rows, each group with a matrix of its own: what experts compute.

R rows, sorted by group, E groups, D features in, F features out.

    x[R D], w[E D F], sizes[E]  ->  y[R F]:  the first sizes[0] rows times w[0], the next sizes[1] times w[1], ...

The sizes are values of the run, and their sum may be less than R; what `y` and the gradient of `x` have in the rows
beyond it is not specified.  Which of the two products a model uses is decided once, by its devices.  `ragged_dot` is
the plain version, a kernel on TPUs.  On CPUs XLA multiplies all rows by all matrices for it; `in_blocks` does not, and
its gradient is defined by hand because JAX differentiates no loop whose length is a value.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from shmap_tp.hardware.devices import Device

GroupedMatmul = Callable[[Array, Array, Array], Array]
"""(x[R D], w[E D F], sizes[E]) -> y[R F], in x's dtype, which is also w's; all three vary over the same mesh axes.
Communication: none."""

BLOCKS = (256, 64)
"""Rows that a CPU multiplies at a time: as many of the first size as a group has, then of the last one."""


def ragged_dot(
    x_RD: Float[Array, "R D"], w_EDF: Float[Array, "E D F"], sizes_E: Int[Array, " E"]
) -> Float[Array, "R F"]:
    """XLA's own; its FLOPs can be counted."""
    return lax.ragged_dot(x_RD, w_EDF, sizes_E)


@jax.custom_vjp
def in_blocks(
    x_RD: Float[Array, "R D"], w_EDF: Float[Array, "E D F"], sizes_E: Int[Array, " E"]
) -> Float[Array, "R F"]:
    """One group after the other, a block of rows at a time: as many matmuls as the rows of each group need."""
    return _multiply(x_RD, w_EDF, sizes_E, contracted=1)


def _forward(x_RD: Array, w_EDF: Array, sizes_E: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _multiply(x_RD, w_EDF, sizes_E, contracted=1), (x_RD, w_EDF, sizes_E)


def _backward(saved: tuple[Array, Array, Array], dy_RF: Array) -> tuple[Array, Array, None]:
    x_RD, w_EDF, sizes_E = saved
    return _multiply(dy_RF, w_EDF, sizes_E, contracted=2), _weight_gradient(x_RD, dy_RF, w_EDF, sizes_E), None


in_blocks.defvjp(_forward, _backward)


def select_grouped_matmul(device: Device) -> GroupedMatmul:
    """The one for devices like `device`."""
    return in_blocks if device.device_kind == "cpu" else ragged_dot


def _multiply(x_RD: Array, w: Array, sizes_E: Array, *, contracted: int) -> Array:
    """Each group of rows, contracted with this dim of its matrix.  The last block of a group reaches into the next one,
    whose own result is written later."""
    rows, padded = x_RD.shape[0], _pad(x_RD)
    starts = jnp.cumsum(sizes_E) - sizes_E

    def one_group(group: Array, y: Array) -> Array:
        matrix = lax.dynamic_index_in_dim(w, group, keepdims=False)

        def one_block(at: Array, size: int, y: Array) -> Array:
            block = lax.dynamic_slice_in_dim(padded, starts[group] + at, size)
            product = lax.dot_general(block, matrix, (((1,), (contracted - 1,)), ((), ())))
            return lax.dynamic_update_slice_in_dim(y, product, starts[group] + at, 0)

        return _for_each_block(sizes_E[group], one_block, y)

    y = jnp.zeros_like(padded, shape=(len(padded), w.shape[3 - contracted]))
    return lax.fori_loop(0, w.shape[0], one_group, y)[:rows]


def _weight_gradient(x_RD: Array, dy_RF: Array, w_EDF: Array, sizes_E: Array) -> Array:
    """For each group the product of its rows of x and of dy."""
    x_padded, dy_padded = _pad(x_RD), _pad(dy_RF)
    starts = jnp.cumsum(sizes_E) - sizes_E

    def one_group(group: Array, dw_EDF: Array) -> Array:
        def one_block(at: Array, size: int, dw_DF: Array) -> Array:
            x, dy = (lax.dynamic_slice_in_dim(a, starts[group] + at, size) for a in (x_padded, dy_padded))
            is_inside = (at + jnp.arange(size) < sizes_E[group])[:, None]
            return dw_DF + lax.dot_general(jnp.where(is_inside, x, 0), dy, (((0,), (0,)), ((), ())))

        dw_DF = _for_each_block(sizes_E[group], one_block, jnp.zeros_like(w_EDF[0]))
        return lax.dynamic_update_index_in_dim(dw_EDF, dw_DF, group, 0)

    return lax.fori_loop(0, w_EDF.shape[0], one_group, jnp.zeros_like(w_EDF))


def _for_each_block(rows: Array, one_block: Callable[[Array, int, Array], Array], carry: Array) -> Array:
    """carry = one_block(first row, size, carry) for the blocks of a group of so many rows; the last may be longer."""
    done = jnp.zeros_like(rows)
    for size in BLOCKS:
        count = (rows - done + (size - 1 if size == BLOCKS[-1] else 0)) // size
        first = done

        def step(i: Array, carry: Array, first: Array = first, size: int = size) -> Array:
            return one_block(first + i * size, size, carry)

        carry = lax.fori_loop(0, count, step, carry)
        done = done + count * size
    return carry


_pad = partial(jnp.pad, pad_width=((0, BLOCKS[0]), (0, 0)))
