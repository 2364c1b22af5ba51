"""Products of groups of rows, each group with a matrix of its own: what experts compute.

R rows, sorted by group, E groups, D features in, F features out.

    x[R D], w[E D F], sizes[E]  ->  y[R F]:  the first sizes[0] rows times w[0], the next sizes[1] times w[1], ...

Each takes several w for one x, as experts have for gate and up, so that the sum of its gradients is part of a product.

The sizes are values of the run, and their sum may be less than R; what `y` and the gradient of `x` have in the rows
beyond it is not specified.  Which of the three products a model uses is decided once, by its devices.

    ragged_dot    the plain version, XLA's own; its FLOPs can be counted
    in_kernels    TPU v4 and later, where XLA multiplies all rows for every matrix for the gradient of w.  The kernel of
                  that gradient is of jax.experimental.pallas.ops.tpu.megablox, of the JAX authors
    in_blocks     CPUs, where XLA multiplies all rows by all matrices in the forward pass, too

The gradients are defined by hand: no kernel and no loop whose length is a value has one in JAX.

Where w is an `EightBit` (`parallel/eight_bit.py`), the products of rows are in eight bits, with one scale for each
matrix.  That is a factor of each row of its group, and so part of dy before dy is rounded:

    step       w[E D F]  ~  q_w * s_w[E]
    forward    x[R D]  ~  q_x * s_x[R],                y = (q_x @ q_w) * s_x * s_w
    backward   dy[R F] * s_w  ~  q_g * s_g[R],         dx = (q_g @ q_w') * s_g; one s_g for the dy of gate and of up

The gradient of w is computed from x and dy as they are: the kernel of megablox takes no integers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata, tgmm
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from shmap_tp.hardware.devices import Device, generation
from shmap_tp.parallel.collectives import without_vma_check
from shmap_tp.parallel.eight_bit import EightBit

Matrices = tuple[Float[Array, "E D F"] | EightBit, ...]
Products = tuple[Float[Array, "R F"], ...]
Arrays = tuple[Array, ...]

BLOCKS = (1024, 256, 128)
"""Rows that a CPU multiplies at a time: as many of the first size as a group has, then of the next ones."""


ROW_TILES = (1024, 512, 256, 128)
"""Rows of a tile of a TPU's kernel: the first of which a group has four on average."""
CONTRACTED_TILE, FEATURE_BYTES = 512, 2048
"""Features of a tile of the dim that is summed over, of eight bits twice as many, and bytes of a row of it in the other
dims.  With 1024 rows these are what the vector memory of a TPU v4 holds."""
WHOLE_BYTES, WHOLE_ROWS = 4096, 256
"""A dim of up to so many bytes is summed over in one tile, with tiles of so many rows at most.  The matrix of a group
then stays in vector memory from its first tile of rows to its last, and is read once."""


@dataclass(frozen=True)
class GroupedMatmul:
    """(x[R D], matrices w[E D F], sizes[E]) -> y[R F] of each w, in x's dtype, which is also that of an array w; all
    vary over the same mesh axes.  The gradients of x from several w are added before they are rounded.

    Communication: none."""

    multiply: Callable[[Arrays, Arrays, Array, bool, Array | None, DTypeLike], Array]
    """(xs, ws, sizes, transposed, scale[R 1] or None: 1, dtype) -> the sum of the products of each x[R K] and its
    w[E K N], or `transposed` w[E N K], accumulated in `sums_of` x's dtype, times the scale, in `dtype`.  Not
    differentiated."""
    gradient: Callable[[Array, Array, Array], Array]
    """(x[R D], dy[R F], sizes) -> dw[E D F] in x's dtype.  Not differentiated."""

    def __call__(self, x_RD: Float[Array, "R D"], ws_EDF: Matrices, sizes_E: Int[Array, " E"]) -> Products:
        held = tuple(replace(w, weight=None) if isinstance(w, EightBit) else w for w in ws_EDF)
        weights = tuple(w.weight if isinstance(w, EightBit) else w for w in ws_EDF)
        return _products(self, x_RD, held, jax.tree.map(lambda w: w.astype(x_RD.dtype), weights), sizes_E)

    def sum_of_products(self, xs: Arrays, ws: Matrices, sizes_E: Array, transposed: bool) -> Array:
        """The sum of the products of each x and its w, in x's dtype.  Not differentiated."""
        if not isinstance(ws[0], EightBit):
            return self.multiply(xs, ws, sizes_E, transposed, None, xs[0].dtype)
        factors = tuple(_of_rows(w.scale, sizes_E, len(xs[0])) for w in ws)
        values, scale_R1 = ws[0].to.round_rows(xs, factors)
        return self.multiply(values, tuple(w.values for w in ws), sizes_E, transposed, scale_R1, xs[0].dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(matmul: GroupedMatmul, x_RD: Array, ws: Matrices, weights: tuple, sizes_E: Array) -> Products:
    """Values are those of x and `ws`; `weights`, the arrays or None for what is frozen, have the gradients.  The plain
    version of arrays is `lax.ragged_dot` of each, with JAX's gradients; a product in eight bits has none, since
    rounding has none."""
    return tuple(matmul.sum_of_products((x_RD,), (w,), sizes_E, False) for w in ws)


def _forward(matmul: GroupedMatmul, x_RD: Array, ws: Matrices, weights: tuple, sizes_E: Array) -> tuple:
    trained = tuple(None if weight is None else () for weight in weights)
    return _products(matmul, x_RD, ws, weights, sizes_E), (x_RD, ws, trained, sizes_E)


def _backward(matmul: GroupedMatmul, saved: tuple, dys_RF: Arrays) -> tuple:
    x_RD, ws, trained, sizes_E = saved
    pairs = zip(trained, dys_RF, strict=True)
    dws = tuple(None if one is None else matmul.gradient(x_RD, dy, sizes_E) for one, dy in pairs)
    return matmul.sum_of_products(dys_RF, ws, sizes_E, True), None, dws, None


_products.defvjp(_forward, _backward)


def sums_of(dtype: DTypeLike) -> Any:
    """The dtype that products of this one are accumulated in."""
    return jnp.int32 if dtype == jnp.int8 else jnp.float64 if dtype == jnp.float64 else jnp.float32


def _of_rows(scale_E11: Array, sizes_E: Array, rows: int) -> Float[Array, "R 1"]:
    """The scale of the matrix of each row; 0 for rows of no group."""
    ends_E, row_R1 = jnp.cumsum(sizes_E)[None], jnp.arange(rows)[:, None]
    is_of_RE = (row_R1 >= ends_E - sizes_E[None]) & (row_R1 < ends_E)
    return jnp.sum(jnp.where(is_of_RE, scale_E11.reshape(1, -1), 0), axis=1, keepdims=True)


def _scaled(total: Array, scale_R1: Array | None) -> Array:
    return total if scale_R1 is None else total.astype(scale_R1.dtype) * scale_R1


def _multiply_ragged(
    xs: Arrays, ws: Arrays, sizes_E: Array, transposed: bool, scale_R1: Array | None, dtype: DTypeLike
) -> Array:
    dims = lax.RaggedDotDimensionNumbers((((1,), (1 + transposed,)), ((), ())), [0], [0])
    product = partial(lax.ragged_dot_general, preferred_element_type=sums_of(xs[0].dtype))
    return _scaled(sum(product(x, w, sizes_E, dims) for x, w in zip(xs, ws, strict=True)), scale_R1).astype(dtype)


def _gradient_ragged(x_RD: Array, dy_RF: Array, sizes_E: Array) -> Array:
    dims = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return lax.ragged_dot_general(x_RD, dy_RF, sizes_E, dims)


def _multiply_in_tiles(
    xs: Arrays,
    ws: Arrays,
    sizes_E: Array,
    transposed: bool,
    scale_R1: Array | None,
    dtype: DTypeLike,
    interpret: bool = False,
) -> Array:
    """The sum of the products of each x[R K] and its w[E K N], or `transposed` w[E N K], in one kernel: no product is
    rounded, written and read again to be added."""
    (rows, k), itemsize, of_n = xs[0].shape, xs[0].dtype.itemsize, 1 if transposed else 2
    experts, n, out_bytes = len(ws[0]), ws[0].shape[of_n], jnp.dtype(dtype).itemsize
    by_k, by_n = contracted_tile(k, itemsize, len(xs)), output_tile(n, out_bytes)
    by_rows = row_tile(rows, experts, by_k == k)
    steps, columns, tiled_rows = pl.cdiv(k, by_k), pl.cdiv(n, by_n), rows + -rows % by_rows
    kernel, scales = partial(_multiply_tiles, len(xs), k, 3 - of_n), () if scale_R1 is None else (scale_R1,)

    def run(sizes_E: Array, *operands: Array) -> Array:
        metadata, visits = make_group_metadata(
            group_sizes=sizes_E, m=tiled_rows, tm=by_rows, start_group=jnp.int32(0), num_nonzero_groups=experts,
            visit_empty_groups=False,
        )  # fmt: skip
        x_block = pl.BlockSpec((by_rows, by_k), lambda j, i, step, of: (of[2][i], step))
        w_block = pl.BlockSpec((None, by_k, by_n), lambda j, i, step, of: (of[1][i], step, j))
        if transposed:
            w_block = pl.BlockSpec((None, by_n, by_k), lambda j, i, step, of: (of[1][i], j, step))
        scale_block = pl.BlockSpec((by_rows, 1), lambda j, i, step, of: (of[2][i], 0))
        read = len(xs) * k * (rows * columns + n * len(metadata[1])) * itemsize + len(scales) * rows * columns * 512
        call = pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((rows, n), dtype),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                in_specs=[x_block] * len(xs) + [w_block] * len(xs) + [scale_block] * len(scales),
                out_specs=pl.BlockSpec((by_rows, by_n), lambda j, i, step, of: (of[2][i], j)),
                grid=(columns, visits, steps),
                scratch_shapes=[pltpu.VMEM((by_rows, by_n), sums_of(xs[0].dtype))],
            ),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
            cost_estimate=pl.CostEstimate(
                flops=2 * tiled_rows * k * n * len(xs), bytes_accessed=rows * n * out_bytes + read, transcendentals=0
            ),
            interpret=interpret,
        )
        return call(metadata, *operands)

    with jax.numpy_dtype_promotion("standard"), jax.named_scope("gmm"):  # the code of megablox needs it
        return without_vma_check(run, sizes_E, *xs, *ws, *scales)


def _multiply_tiles(products: int, features: int, contracted: int, metadata: Any, *refs: Any) -> None:
    """One tile of rows of each x and one of each matrix, of which this dim of [E D F] is summed over."""
    (starts, groups, tiles), (*operands, y, total) = metadata, refs
    xs, ws, scales = operands[:products], operands[products : 2 * products], operands[2 * products :]
    visit, step = pl.program_id(1), pl.program_id(2)

    def tile(operand: Any, dim: int) -> Array:
        """What is beyond the last feature is zero."""
        size = operand.shape[dim]
        feature = step * size + lax.broadcasted_iota(jnp.int32, operand.shape, dim)
        return jnp.where(feature < features, operand[...], 0) if features % size else operand[...]

    @pl.when(step == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    for x, w in zip(xs, ws, strict=True):  # one by one: their sum would need memory
        dims = (((1,), (contracted - 1,)), ((), ()))
        total[...] += lax.dot_general(tile(x, 1), tile(w, contracted - 1), dims, preferred_element_type=total.dtype)

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        row = tiles[visit] * y.shape[0] + lax.broadcasted_iota(jnp.int32, y.shape, 0)
        is_later = row >= starts[groups[visit]]  # than earlier groups; rows of later groups are written after this
        found = _scaled(total[...], scales[0][...] if scales else None).astype(jnp.float32)
        y[...] = jnp.where(is_later, found, y[...].astype(jnp.float32)).astype(y.dtype)


def _gradient_in_tiles(x_RD: Array, dy_RF: Array, sizes_E: Array, interpret: bool = False) -> Array:
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
    return features if is_whole else feature_tile(features, CONTRACTED_TILE * (1 + (itemsize == 1)) // products)


def output_tile(features: int, itemsize: int) -> int:
    """Features of a tile of a dim that is not summed over."""
    return feature_tile(features, FEATURE_BYTES // itemsize)


def feature_tile(features: int, most: int) -> int:
    """Features of a tile: all, or that number up to `most` with which the tiles exceed the matrix least."""
    sizes = range(most, most // 2 - 1, -128)
    return features if features <= most else min(sizes, key=lambda size: -features % size)


def _multiply_in_blocks(
    xs: Arrays, ws: Arrays, sizes_E: Array, transposed: bool, scale_R1: Array | None, dtype: DTypeLike
) -> Array:
    """One group after the other, a block of rows at a time: as many matmuls as the rows of each group need."""
    rows, starts, contracted = len(xs[0]), jnp.cumsum(sizes_E) - sizes_E, 1 + transposed
    dims, wide = (((1,), (contracted - 1,)), ((), ())), sums_of(xs[0].dtype)

    def one_group(group: Array, y: Array) -> Array:
        matrices = [lax.dynamic_index_in_dim(w, group, keepdims=False) for w in ws]

        def one_block(first: Array, is_inside: Array | None, size: int, y: Array) -> Array:
            blocks = zip((lax.dynamic_slice_in_dim(x, first, size) for x in xs), matrices, strict=True)
            product = sum(lax.dot_general(x, w, dims, preferred_element_type=wide) for x, w in blocks)
            scale = None if scale_R1 is None else lax.dynamic_slice_in_dim(scale_R1, first, size)
            product = _scaled(product, scale).astype(dtype)
            if is_inside is not None:
                product = jnp.where(is_inside, product, lax.dynamic_slice_in_dim(y, first, size))
            return lax.dynamic_update_slice_in_dim(y, product, first, 0)

        return _for_each_block(starts[group], sizes_E[group], rows, one_block, y)

    y = _any(ws[0], (rows, ws[0].shape[3 - contracted])).astype(dtype)
    return lax.fori_loop(0, len(sizes_E), one_group, y)


def _gradient_in_blocks(x_RD: Array, dy_RF: Array, sizes_E: Array) -> Array:
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


ragged_dot = GroupedMatmul(_multiply_ragged, _gradient_ragged)
in_kernels = GroupedMatmul(_multiply_in_tiles, _gradient_in_tiles)
in_blocks = GroupedMatmul(_multiply_in_blocks, _gradient_in_blocks)


def select_grouped_matmul(device: Device) -> GroupedMatmul:
    """The one for devices like `device`."""
    if device.device_kind == "cpu":
        return in_blocks
    made = generation(device.device_kind)
    return in_kernels if made is not None and made.has_kernels else ragged_dot
