"""Rounding to eight bits with one scale for the elements along a dim, and a kernel that does so in one call.

B batch, T time, F features; of one device.

    x[B T F]  ~  values[B T F] * scale, [B T 1] of each token, or [1 1 F] of each feature

XLA for TPU reads x once for the scales and once more to round it, and transposes what is rounded by feature in another
pass.  The kernel reads a tile of whole rows, or of whole columns, which it reads twice where they are too long, and can
write columns with T as the last dim of memory: v5e and v5p sum over tokens faster so (docs/performance-notes.md).  The
plain version is `rounded`.

A value is rounded to the nearest number of the format, or stochastically to one of the two around it, each with a
probability that makes the mean the value.  The random number of an element is a hash of two, one of its token and one
of its feature, so that it is the same wherever the element is computed.  Gupta et al. 2015, "Deep Learning with Limited
Numerical Precision", section 3, https://arxiv.org/abs/1502.02551
"""

from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped, UInt32

from shmap_tp.parallel.collectives import without_vma_check

TILE = 2**20
"""Elements of a tile, up to twice as many where the rows are long."""
ROWS, COLUMNS = (256, 128, 64, 32), 128
"""Rows of a tile, the first number that fits; columns of a tile."""
BLOCK = (512, 2048)
"""Most rows and columns of a tile where whole columns are too long for one."""
PART = 1024
"""Elements of a row, or of a column in a tile of 128 columns, that are converted to 32 bits at a time; in a wider tile
fewer."""


class Noise(NamedTuple):
    """The random numbers by which x[B T F] is rounded stochastically: one of each token and one of each feature."""

    tokens: UInt32[Array, "B T 1"]
    features: UInt32[Array, "1 1 F"]


def rounded(
    x: Float[Array, "..."],
    dims: tuple[int, ...],
    dtype: DTypeLike,
    axes: tuple[str, ...] = (),
    noise: Noise | None = None,
) -> tuple[Shaped[Array, "..."], Float[Array, "..."]]:
    """(values, scale), x ~ values x scale: one scale for all elements along `dims`, whose size in it is 1, so that the
    largest becomes the largest number of `dtype`, unless the scale would be below the least normal one.  What is all 0
    stays so; what is not finite has such a scale.  Values are rounded to the nearest number, with
    `noise` stochastically.

    Communication  one maximum over `axes`, those which shard `dims` under shard_map.
    """
    largest = jnp.max(jnp.abs(x), axis=dims, keepdims=True)
    scale = scale_of(lax.pmax(largest, axes) if axes else largest, dtype)
    return divided(x, scale, dtype, noise).astype(dtype), scale


def scale_of(largest: Array, dtype: DTypeLike) -> Array:
    """The scale of elements of which this is the largest."""
    largest = largest.astype(jnp.promote_types(largest.dtype, jnp.float32))
    scale = jnp.where(largest == 0, 1, largest) / _most(dtype)
    return jnp.maximum(scale, jnp.finfo(scale.dtype).tiny)  # else flushed to 0, so that finite / 0 is NaN in float8


def divided(x: Array, scale: Array, dtype: DTypeLike, noise: Noise | None = None) -> Array:
    """x / scale in 32 bits, rounded to numbers of `dtype`; float8 without `noise` is left to the conversion."""
    scaled, is_integer = x.astype(scale.dtype) / scale, jnp.issubdtype(dtype, jnp.integer)
    if noise is None:
        return jnp.round(scaled) if is_integer else scaled
    spacing = jnp.ones_like(scaled) if is_integer else _spacing(scaled, dtype)
    between_0_and_1 = (mixed(noise.tokens ^ noise.features) >> 16).astype(jnp.int32).astype(scaled.dtype) * 2.0**-16
    most = _most(dtype)  # above which x / scale may be where a device divides less exactly
    return jnp.clip(jnp.floor(scaled / spacing + between_0_and_1) * spacing, -most, most)


def mixed(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A hash of each number, different for different ones.  lowbias32 of Wellons 2018,
    https://nullprogram.com/blog/2018/07/31"""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _spacing(x: Array, dtype: DTypeLike) -> Array:
    """The distance between the two numbers of a floating-point format around x."""
    info = jnp.finfo(dtype)
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    power = lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)
    return jnp.maximum(power * 2.0**-info.nmant, float(info.smallest_subnormal))


def _most(dtype: DTypeLike) -> float:
    return float((jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).max)


def suits(xs: tuple[Array, ...], by_feature: bool) -> bool:
    """Whether the kernel rounds all x."""
    if any(x.ndim != 3 for x in xs):
        return False
    tokens, features = xs[0].shape[0] * xs[0].shape[1], sum(x.shape[2] for x in xs)
    is_whole = tokens % COLUMNS == 0 and all(x.shape[2] % COLUMNS == 0 for x in xs)
    return is_whole and (by_feature or features * ROWS[-1] <= 2 * TILE)


def rounded_in_a_kernel(
    interpret: bool,
    xs: tuple[Float[Array, "B T _"], ...],
    factors: tuple[Array | None, ...],
    by_feature: bool,
    transposes: bool,
    dtype: DTypeLike,
    noise: Noise | None = None,
) -> tuple[tuple[Shaped[Array, "B T _"], ...], Float[Array, "..."]]:
    """`rounded` of each x * its factor, in its dtype, and a factor for each token or each feature: a scale for each
    feature of one x, or one for each token of all.  `transposes`: what has a scale for each feature is stored with T as
    the last dim.  `noise`: of one x.

    Communication: none.  Not to be differentiated."""
    shape, xs_NF, tiled = xs[0].shape, [x.reshape(-1, x.shape[2]) for x in xs], int(by_feature)
    tokens, features = len(xs_NF[0]), sum(x.shape[1] for x in xs_NF)
    size, order = _tile(tokens, features, by_feature), -1 if by_feature and transposes else 1
    blocks, tiles = tokens // size[0] if by_feature else 1, (tokens, features)[tiled] // size[tiled]
    passes = 1 if blocks == 1 else 2

    def along(shape: tuple[int, int], order: int = 1, is_written: bool = False) -> pl.BlockSpec:
        """Tiles of an array of this shape.  What is written stays at the first block until the last pass."""
        tile = tuple(map(min, shape, size))

        def place(i: Array, this_pass: Array, block: Array) -> tuple:
            at = [block * this_pass if is_written else block, i] if tiled else [i, 0]
            return tuple(n if whole > part else 0 for n, whole, part in zip(at, shape, tile, strict=True))[::order]

        return pl.BlockSpec(tile[::order], place)

    taken = [jnp.ones((1, 1)) if factor is None else factor.reshape(-1, factor.shape[-1]) for factor in factors]
    random = [] if noise is None else [noise.tokens.reshape(tokens, 1), noise.features.reshape(1, features)]
    given, stored = (1, features) if by_feature else (tokens, 1), [x.shape[::order] for x in xs_NF]
    size_of_all = sum(x.size * (x.itemsize * passes + 1) for x in xs_NF)
    of_tokens = COLUMNS * tokens * (1 if blocks == 1 else passes * tiles)  # of [tokens 1] whole tiles
    size_of_all += 4 * (features + of_tokens) * (2 * len(xs) - 1 + len(random) // 2)
    run = pl.pallas_call(
        partial(_round_tile, len(xs), 1 - by_feature, blocks, order, dtype),
        grid=(tiles, passes, blocks),
        in_specs=[along(x.shape) for x in (*xs_NF, *taken, *random)],
        out_specs=[*(along(x.shape, order, is_written=True) for x in xs_NF), along(given)],
        out_shape=[*(jax.ShapeDtypeStruct(shape, dtype) for shape in stored), jax.ShapeDtypeStruct(given, jnp.float32)],
        scratch_shapes=[pltpu.VMEM(tuple(map(min, x.shape, size)), x.dtype) for x in xs_NF],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=size_of_all),
        interpret=interpret,
    )
    *values, scale = without_vma_check(run, *xs_NF, *taken, *random)
    values = tuple((found.T if order < 0 else found).reshape(x.shape) for found, x in zip(values, xs, strict=True))
    return values, scale.reshape((1, 1, -1) if by_feature else (*shape[:2], 1))


def _tile(tokens: int, features: int, by_feature: bool) -> tuple[int, int]:
    """Rows and columns of a tile."""
    if not by_feature:
        return next((n for n in ROWS if n * features <= TILE and tokens % n == 0), ROWS[-1]), features
    if tokens * COLUMNS <= TILE:
        return tokens, COLUMNS
    rows, columns = (
        next(n for n in range(most, 0, -COLUMNS) if of % n == 0)
        for most, of in zip(BLOCK, (tokens, features), strict=True)
    )
    return rows, columns


def _round_tile(count: int, axis: int, blocks: int, order: int, dtype: DTypeLike, *refs: Any) -> None:
    """One tile of each of so many x, in parts along `axis`, the dim along which all elements share a scale.  With more
    than one of `blocks` along it the first pass finds the scale."""
    (xs, factors), (*random, scale) = (refs[:count], refs[count : 2 * count]), refs[2 * count : -count]
    products, values, random = refs[-count:], random[-count:], random[:-count]

    def parts(x: Any) -> list[tuple]:
        length, at_once = x.shape[axis], PART // COLUMNS if axis else max(1, PART // x.shape[1])
        part = COLUMNS * next(n for n in range(at_once, 0, -1) if length % (n * COLUMNS) == 0)
        each = [pl.ds(start, part) for start in range(0, length, part)]
        return [(slice(None), one) if axis else (one, slice(None)) for one in each]

    places, maxima = [(i, at) for i, x in enumerate(xs) for at in parts(x)], []
    for i, at in places:
        factor = factors[i][at if factors[i].shape[axis] > 1 else ...]
        products[i][at] = (xs[i][at].astype(jnp.float32) * factor).astype(xs[i].dtype)
        maxima.append(jnp.max(jnp.abs(products[i][at]), axis=axis, keepdims=True))
    largest = reduce(jnp.maximum, maxima).astype(jnp.float32)

    def store() -> None:
        for i, at in places:
            of_part = Noise(random[0][at[0], :], random[1][:, at[1]]) if random else None
            found = divided(products[i][at], scale[...], dtype, of_part).astype(dtype)
            values[i][at[::order]] = found.T if order < 0 else found

    if blocks == 1:
        scale[...] = scale_of(largest, dtype)
        return store()
    block = pl.program_id(2)

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        of_all = jnp.where(block == 0, largest, jnp.maximum(scale[...], largest))
        scale[...] = jnp.where(block == blocks - 1, scale_of(of_all, dtype), of_all)

    pl.when(pl.program_id(1) == 1)(store)
