"""Products of groups of rows, each group with a matrix of its own: what experts compute.

R rows, sorted by group, E groups, D features in, F features out.

    x[R D], w[E D F], sizes[E]  ->  y[R F]:  the first sizes[0] rows times w[0], the next sizes[1] times w[1], ...

Each takes several w for one x, as experts have for gate and up, so that the sum of its gradients is part of a product.

The sizes are values of the run, and their sum may be less than R; what `y` and the gradient of `x` have in the rows
beyond it is not specified.  Which of the three products a model uses is decided once, by its devices.

    ragged_dot    the plain version, XLA's own
    in_kernels    TPU v4 and later, where XLA multiplies all rows for every matrix for the gradient of w.  The kernel of
                  that gradient is of jax.experimental.pallas.ops.tpu.megablox, of the JAX authors
    in_blocks     CPUs, where XLA multiplies all rows by all matrices in the forward pass, too

The gradients of the last two are defined by hand: no kernel and no loop whose length is a value has one in JAX.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata, tgmm
from jaxtyping import Array, Float, Int

from shmap_tp.hardware.devices import Device, generation
from shmap_tp.parallel.collectives import without_vma_check

Matrices = tuple[Float[Array, "E D F"], ...]
Products = tuple[Float[Array, "R F"], ...]
Arrays = tuple[Array, ...]
GroupedMatmul = Callable[[Array, Matrices, Array], Products]
"""(x[R D], matrices w[E D F], sizes[E]) -> y[R F] of each w, in x's dtype, which is also w's; all vary over the same
mesh axes.  The gradients of x from several w are added before they are rounded, with `ragged_dot` after it.
Communication: none."""

BLOCKS = (1024, 256, 128)
"""Rows that a CPU multiplies at a time: as many of the first size as a group has, then of the next ones."""


ROW_TILES = (1024, 512, 256, 128)
"""Rows of a tile of a TPU's kernel: the first of which a group has four on average."""
CONTRACTED_TILE, FEATURE_BYTES = 512, 2048
"""Features of a tile of the dim that is summed over, and bytes of a row of it in the other dims.  With 1024 rows these
are what the vector memory of a TPU v4 holds."""
WHOLE_BYTES, WHOLE_ROWS = 4096, 256
"""A dim of up to so many bytes is summed over in one tile, with tiles of so many rows at most.  The matrix of a group
then stays in vector memory from its first tile of rows to its last, and is read once."""


def ragged_dot(x_RD: Float[Array, "R D"], ws_EDF: Matrices, sizes_E: Int[Array, " E"]) -> Products:
    """XLA's own; its FLOPs can be counted.  JAX adds the gradients of x, which are rounded to its dtype before."""
    return tuple(lax.ragged_dot(x_RD, w_EDF, sizes_E) for w_EDF in ws_EDF)


@jax.custom_vjp
def in_blocks(x_RD: Float[Array, "R D"], ws_EDF: Matrices, sizes_E: Int[Array, " E"]) -> Products:
    """One group after the other, a block of rows at a time: as many matmuls as the rows of each group need."""
    return tuple(_multiply((x_RD,), (w_EDF,), sizes_E, contracted=1) for w_EDF in ws_EDF)


def _backward(saved: tuple[Array, Arrays, Array], dys_RF: Arrays) -> tuple[Array, Arrays, None]:
    x_RD, ws_EDF, sizes_E = saved
    dws_EDF = tuple(_weight_gradient(x_RD, dy_RF, sizes_E) for dy_RF in dys_RF)
    return _multiply(dys_RF, ws_EDF, sizes_E, contracted=2), dws_EDF, None


in_blocks.defvjp(lambda *given: (in_blocks(*given), given), _backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def in_kernels(
    x_RD: Float[Array, "R D"], ws_EDF: Matrices, sizes_E: Int[Array, " E"], interpret: bool = False
) -> Products:
    """Tiles of rows, each times the matrix of every group that it has rows of.  `interpret` runs the kernels on any
    device instead of compiling them: for tests."""
    return tuple(_multiply_in_tiles((x_RD,), (w_EDF,), sizes_E, False, interpret) for w_EDF in ws_EDF)


def _kernels_backward(
    interpret: bool, saved: tuple[Array, Arrays, Array], dys_RF: Arrays
) -> tuple[Array, Arrays, None]:
    x_RD, ws_EDF, sizes_E = saved
    dx_RD = _multiply_in_tiles(dys_RF, ws_EDF, sizes_E, True, interpret)
    return dx_RD, tuple(_gradient_in_tiles(x_RD, dy_RF, sizes_E, interpret) for dy_RF in dys_RF), None


in_kernels.defvjp(lambda *given: (in_kernels(*given), given[:3]), _kernels_backward)


def select_grouped_matmul(device: Device) -> GroupedMatmul:
    """The one for devices like `device`."""
    if device.device_kind == "cpu":
        return in_blocks
    made = generation(device.device_kind)
    return in_kernels if made is not None and made.has_kernels else ragged_dot


def _multiply_in_tiles(xs: Arrays, ws: Arrays, sizes_E: Array, transposed: bool, interpret: bool) -> Array:
    """The sum of the products of each x[R K] and its w[E K N], or `transposed` w[E N K], in one kernel: no product is
    rounded, written and read again to be added."""
    (rows, k), itemsize, of_n = xs[0].shape, xs[0].dtype.itemsize, 1 if transposed else 2
    experts, n = len(ws[0]), ws[0].shape[of_n]
    by_k, by_n = contracted_tile(k, itemsize, len(xs)), output_tile(n, itemsize)
    by_rows = row_tile(rows, experts, by_k == k)
    steps, columns, tiled_rows = pl.cdiv(k, by_k), pl.cdiv(n, by_n), rows + -rows % by_rows
    kernel = partial(_multiply_tiles, len(xs), k, 3 - of_n)

    def run(sizes_E: Array, *operands: Array) -> Array:
        metadata, visits = make_group_metadata(
            group_sizes=sizes_E, m=tiled_rows, tm=by_rows, start_group=jnp.int32(0), num_nonzero_groups=experts,
            visit_empty_groups=False,
        )  # fmt: skip
        x_block = pl.BlockSpec((by_rows, by_k), lambda j, i, step, of: (of[2][i], step))
        w_block = pl.BlockSpec((None, by_k, by_n), lambda j, i, step, of: (of[1][i], step, j))
        if transposed:
            w_block = pl.BlockSpec((None, by_n, by_k), lambda j, i, step, of: (of[1][i], j, step))
        values = rows * n + len(xs) * k * (rows * columns + n * len(metadata[1]))
        call = pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((rows, n), xs[0].dtype),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                in_specs=[x_block] * len(xs) + [w_block] * len(xs),
                out_specs=pl.BlockSpec((by_rows, by_n), lambda j, i, step, of: (of[2][i], j)),
                grid=(columns, visits, steps),
                scratch_shapes=[pltpu.VMEM((by_rows, by_n), jnp.float32)],
            ),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
            cost_estimate=pl.CostEstimate(
                flops=2 * tiled_rows * k * n * len(xs), bytes_accessed=values * itemsize, transcendentals=0
            ),
            interpret=interpret,
        )
        return call(metadata, *operands)

    with jax.numpy_dtype_promotion("standard"), jax.named_scope("gmm"):  # the code of megablox needs it
        return without_vma_check(run, sizes_E, *xs, *ws)


def _multiply_tiles(products: int, features: int, contracted: int, metadata: Any, *refs: Any) -> None:
    """One tile of rows of each x and one of each matrix, of which this dim of [E D F] is summed over."""
    (starts, groups, tiles), (*operands, y, total) = metadata, refs
    visit, step = pl.program_id(1), pl.program_id(2)

    def tile(operand: Any, dim: int) -> Array:
        """What is beyond the last feature is zero."""
        size = operand.shape[dim]
        feature = step * size + lax.broadcasted_iota(jnp.int32, operand.shape, dim)
        return jnp.where(feature < features, operand[...], 0) if features % size else operand[...]

    @pl.when(step == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    for x, w in zip(operands[:products], operands[products:], strict=True):  # one by one: their sum would need memory
        dims = (((1,), (contracted - 1,)), ((), ()))
        total[...] += lax.dot_general(tile(x, 1), tile(w, contracted - 1), dims, preferred_element_type=jnp.float32)

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        row = tiles[visit] * y.shape[0] + lax.broadcasted_iota(jnp.int32, y.shape, 0)
        is_later = row >= starts[groups[visit]]  # than earlier groups; rows of later groups are written after this
        y[...] = jnp.where(is_later, total[...], y[...].astype(jnp.float32)).astype(y.dtype)


def _gradient_in_tiles(x_RD: Array, dy_RF: Array, sizes_E: Array, interpret: bool) -> Array:
    """dw[E D F]: the rows are the dim that is summed over.  The kernel transposes its argument back."""
    rows = row_tile(len(x_RD), len(sizes_E))
    tiles = min(rows, CONTRACTED_TILE), *(output_tile(a.shape[1], a.dtype.itemsize) for a in (x_RD, dy_RF))
    x_RD, dy_RF = (jnp.pad(a, ((0, -len(a) % rows), (0, 0))) for a in (x_RD, dy_RF))
    kernel = partial(tgmm, preferred_element_type=x_RD.dtype, tiling=tiles, interpret=interpret)
    with jax.numpy_dtype_promotion("standard"):
        return without_vma_check(kernel, x_RD.T, dy_RF, sizes_E)


def row_tile(rows: int, experts: int, is_whole: bool = False) -> int:
    """Rows of a tile: a tile that two groups share is computed twice, so that a group should fill several.  `is_whole`:
    all features are summed over in one tile."""
    sizes = (size for size in ROW_TILES if rows >= 4 * experts * size and (size <= WHOLE_ROWS or not is_whole))
    return next(sizes, ROW_TILES[-1])


def contracted_tile(features: int, itemsize: int, products: int = 1) -> int:
    """Features of a tile of the dim that is summed over, where so many products are: all of few, else as
    `feature_tile`."""
    is_whole = features * itemsize * products <= WHOLE_BYTES
    return features if is_whole else feature_tile(features, CONTRACTED_TILE // products)


def output_tile(features: int, itemsize: int) -> int:
    """Features of a tile of a dim that is not summed over."""
    return feature_tile(features, FEATURE_BYTES // itemsize)


def feature_tile(features: int, most: int) -> int:
    """Features of a tile: all, or that number up to `most` with which the tiles exceed the matrix least."""
    sizes = range(most, most // 2 - 1, -128)
    return features if features <= most else min(sizes, key=lambda size: -features % size)


def _multiply(xs: Arrays, ws: Arrays, sizes_E: Array, *, contracted: int) -> Array:
    """The sum over xs of each group of rows, contracted with this dim of its matrix."""
    rows, starts = len(xs[0]), jnp.cumsum(sizes_E) - sizes_E

    def one_group(group: Array, y: Array) -> Array:
        matrices = [lax.dynamic_index_in_dim(w, group, keepdims=False) for w in ws]

        def one_block(first: Array, is_inside: Array | None, size: int, y: Array) -> Array:
            blocks = zip((lax.dynamic_slice_in_dim(x, first, size) for x in xs), matrices, strict=True)
            product = sum(lax.dot_general(x, w, (((1,), (contracted - 1,)), ((), ()))) for x, w in blocks)
            if is_inside is not None:
                product = jnp.where(is_inside, product, lax.dynamic_slice_in_dim(y, first, size))
            return lax.dynamic_update_slice_in_dim(y, product, first, 0)

        return _for_each_block(starts[group], sizes_E[group], rows, one_block, y)

    y = _any(ws[0], (rows, ws[0].shape[3 - contracted]))
    return lax.fori_loop(0, len(sizes_E), one_group, y)


def _weight_gradient(x_RD: Array, dy_RF: Array, sizes_E: Array) -> Array:
    """For each group the product of its rows of x and of dy."""
    starts = jnp.cumsum(sizes_E) - sizes_E
    zeros_DF = jnp.zeros_like(x_RD, shape=(x_RD.shape[1], dy_RF.shape[1]))

    def one_group(group: Array, dw_EDF: Array) -> Array:
        def one_block(first: Array, is_inside: Array | None, size: int, dw_DF: Array) -> Array:
            x, dy = (lax.dynamic_slice_in_dim(a, first, size) for a in (x_RD, dy_RF))
            if is_inside is not None:
                x, dy = jnp.where(is_inside, x, 0), jnp.where(is_inside, dy, 0)
            return dw_DF + lax.dot_general(x, dy, (((0,), (0,)), ((), ())))

        dw_DF = _for_each_block(starts[group], sizes_E[group], len(x_RD), one_block, zeros_DF)
        return lax.dynamic_update_index_in_dim(dw_EDF, dw_DF, group, 0)

    return lax.fori_loop(0, len(sizes_E), one_group, _any(dy_RF, (len(sizes_E), *zeros_DF.shape)))


def _any(x: Array, shape: tuple[int, ...]) -> Array:
    """An array to be filled.  XLA makes arrays of zeros once for all loops, and copies them for each."""
    return jnp.broadcast_to(x[(0,) * x.ndim], shape)


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
