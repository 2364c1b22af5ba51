"""Products of groups of rows, each group with a matrix of its own: what experts compute.

R rows, sorted by group, E groups, D features in, F features out.

    x[R D], w[E D F], sizes[E]  ->  y[R F]:  the first sizes[0] rows times w[0], the next sizes[1] times w[1], ...

The sizes are values of the run, and their sum may be less than R; what `y` and the gradient of `x` have in the rows
beyond it is not specified.  Which of the three products a model uses is decided once, by its devices.

    ragged_dot    the plain version, XLA's own
    in_kernels    TPU v4 and later: jax.experimental.pallas.ops.tpu.megablox, of the JAX authors.  For the gradient of w
                  XLA multiplies all rows for every matrix there
    in_blocks     CPUs, where XLA multiplies all rows by all matrices in the forward pass, too

The gradients of the last two are defined by hand: no kernel and no loop whose length is a value has one in JAX.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jaxtyping import Array, Float, Int

from shmap_tp.hardware.devices import Device, generation
from shmap_tp.parallel.collectives import without_vma_check

GroupedMatmul = Callable[[Array, Array, Array], Array]
"""(x[R D], w[E D F], sizes[E]) -> y[R F], in x's dtype, which is also w's; all three vary over the same mesh axes.
Communication: none."""

BLOCKS = (512, 128)
"""Rows that a CPU multiplies at a time: as many of the first size as a group has, then of the last one."""


ROW_TILES = (1024, 512, 256, 128)
"""Rows of a tile of a TPU's kernel: the first of which a group has four on average."""
CONTRACTED_TILE, FEATURE_BYTES = 512, 2048
"""Features of a tile of the dim that is summed over, and bytes of a row of it in the other dims.  With 1024 rows these
are what the vector memory of a TPU v4 holds."""
WHOLE_BYTES, WHOLE_ROWS = 4096, 256
"""A dim of up to so many bytes is summed over in one tile, with tiles of so many rows at most.  The matrix of a group
then stays in vector memory from its first tile of rows to its last, and is read once."""


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


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def in_kernels(
    x_RD: Float[Array, "R D"], w_EDF: Float[Array, "E D F"], sizes_E: Int[Array, " E"], interpret: bool = False
) -> Float[Array, "R F"]:
    """Tiles of rows, each times the matrix of every group that it has rows of.  `interpret` runs the kernels on any
    device instead of compiling them: for tests."""
    itemsize = x_RD.dtype.itemsize
    tiles = contracted_tile(x_RD.shape[1], itemsize), output_tile(w_EDF.shape[2], itemsize)
    return _in_tiles(gmm, x_RD, w_EDF, sizes_E, tiles, interpret)


def _kernels_forward(
    x_RD: Array, w_EDF: Array, sizes_E: Array, interpret: bool
) -> tuple[Array, tuple[Array, Array, Array]]:
    return in_kernels(x_RD, w_EDF, sizes_E, interpret), (x_RD, w_EDF, sizes_E)


def _kernels_backward(interpret: bool, saved: tuple[Array, Array, Array], dy_RF: Array) -> tuple[Array, Array, None]:
    x_RD, w_EDF, sizes_E = saved
    _, d, f = w_EDF.shape
    itemsize = dy_RF.dtype.itemsize
    tiles = contracted_tile(f, itemsize), output_tile(d, itemsize)
    dx_RD = _in_tiles(partial(gmm, transpose_rhs=True), dy_RF, w_EDF, sizes_E, tiles, interpret)
    dw_EDF = _in_tiles(_transposed_gmm, x_RD, dy_RF, sizes_E, [output_tile(n, itemsize) for n in (d, f)], interpret)
    return dx_RD, dw_EDF, None


in_kernels.defvjp(_kernels_forward, _kernels_backward)


def select_grouped_matmul(device: Device) -> GroupedMatmul:
    """The one for devices like `device`."""
    if device.device_kind == "cpu":
        return in_blocks
    made = generation(device.device_kind)
    return in_kernels if made is not None and made.has_kernels else ragged_dot


def _transposed_gmm(
    x_RD: Array, dy_RF: Array, sizes_E: Array, *, tiling: tuple[int, int, int], **options: Any
) -> Array:
    """dw[E D F].  The rows are the dim that is summed over, and the kernel transposes its argument back."""
    rows, *features = tiling
    return tgmm(x_RD.T, dy_RF, sizes_E, tiling=(min(rows, CONTRACTED_TILE), *features), **options)


def _in_tiles(
    kernel: Callable[..., Array], x: Array, other: Array, sizes_E: Array, features: Sequence[int], interpret: bool
) -> Array:
    """kernel(x[R ..], other, sizes) in x's dtype; `other` is a matrix for each group, or has rows, too.  `features`:
    sizes of the tiles in the two other dims."""
    rows = row_tile(len(x), len(sizes_E), other.ndim == 3 and features[0] == x.shape[1])
    kernel = partial(kernel, preferred_element_type=x.dtype, tiling=(rows, *features), interpret=interpret)
    padded = [jnp.pad(a, ((0, -len(a) % rows), (0, 0))) if a.ndim == 2 else a for a in (x, other)]
    with jax.numpy_dtype_promotion("standard"):  # the code of the kernels needs it
        result = without_vma_check(kernel, *padded, sizes_E)
    return result[: len(x)] if result.ndim == 2 else result


def row_tile(rows: int, experts: int, is_whole: bool = False) -> int:
    """Rows of a tile: a tile that two groups share is computed twice, so that a group should fill several.  `is_whole`:
    all features are summed over in one tile."""
    sizes = (size for size in ROW_TILES if rows >= 4 * experts * size and (size <= WHOLE_ROWS or not is_whole))
    return next(sizes, ROW_TILES[-1])


def contracted_tile(features: int, itemsize: int) -> int:
    """Features of a tile of the dim that is summed over: all of few, else as `feature_tile`."""
    return features if features * itemsize <= WHOLE_BYTES else feature_tile(features, CONTRACTED_TILE)


def output_tile(features: int, itemsize: int) -> int:
    """Features of a tile of a dim that is not summed over."""
    return feature_tile(features, FEATURE_BYTES // itemsize)


def feature_tile(features: int, most: int) -> int:
    """Features of a tile: all, or that number up to `most` with which the tiles exceed the matrix least."""
    sizes = range(most, most // 2 - 1, -128)
    return features if features <= most else min(sizes, key=lambda size: -features % size)


def _multiply(x_RD: Array, w: Array, sizes_E: Array, *, contracted: int) -> Array:
    """Each group of rows, contracted with this dim of its matrix."""
    starts = jnp.cumsum(sizes_E) - sizes_E

    def one_group(group: Array, y: Array) -> Array:
        matrix = lax.dynamic_index_in_dim(w, group, keepdims=False)

        def one_block(first: Array, is_inside: Array | None, size: int, y: Array) -> Array:
            block = lax.dynamic_slice_in_dim(x_RD, first, size)
            product = lax.dot_general(block, matrix, (((1,), (contracted - 1,)), ((), ())))
            if is_inside is not None:
                product = jnp.where(is_inside, product, lax.dynamic_slice_in_dim(y, first, size))
            return lax.dynamic_update_slice_in_dim(y, product, first, 0)

        return _for_each_block(starts[group], sizes_E[group], len(x_RD), one_block, y)

    y = jnp.zeros_like(x_RD, shape=(len(x_RD), w.shape[3 - contracted]))
    return lax.fori_loop(0, w.shape[0], one_group, y)


def _weight_gradient(x_RD: Array, dy_RF: Array, w_EDF: Array, sizes_E: Array) -> Array:
    """For each group the product of its rows of x and of dy."""
    starts = jnp.cumsum(sizes_E) - sizes_E

    def one_group(group: Array, dw_EDF: Array) -> Array:
        def one_block(first: Array, is_inside: Array | None, size: int, dw_DF: Array) -> Array:
            x, dy = (lax.dynamic_slice_in_dim(a, first, size) for a in (x_RD, dy_RF))
            if is_inside is not None:
                x, dy = jnp.where(is_inside, x, 0), jnp.where(is_inside, dy, 0)
            return dw_DF + lax.dot_general(x, dy, (((0,), (0,)), ((), ())))

        dw_DF = _for_each_block(starts[group], sizes_E[group], len(x_RD), one_block, jnp.zeros_like(w_EDF[0]))
        return lax.dynamic_update_index_in_dim(dw_EDF, dw_DF, group, 0)

    return lax.fori_loop(0, w_EDF.shape[0], one_group, jnp.zeros_like(w_EDF))


def _for_each_block(
    start: Array, size: Array, rows: int, one_block: Callable[[Array, Array | None, int, Array], Array], carry: Array
) -> Array:
    """carry = one_block(first row, which of its rows are the group's, or None: all, rows of the block, carry) for the
    blocks of a group that has `size` of all `rows`, the first of them `start`.  The last block may reach into another
    group, and begins earlier where there are no rows after it."""
    done = jnp.zeros_like(size)
    for block in sorted({min(block, rows) for block in BLOCKS}, reverse=True):
        is_last = block == min(BLOCKS[-1], rows)
        count, begin = (size - done + (block - 1 if is_last else 0)) // block, start + done

        def step(i: Array, carry: Array, begin: Array = begin, block: int = block, is_last: bool = is_last) -> Array:
            first = begin + i * block
            if not is_last:
                return one_block(first, None, block, carry)
            row = jnp.minimum(first, rows - block) + jnp.arange(block)
            return one_block(row[0], ((row >= first) & (row < start + size))[:, None], block, carry)

        carry = lax.fori_loop(0, count, step, carry)
        done = done + count * block
    return carry
