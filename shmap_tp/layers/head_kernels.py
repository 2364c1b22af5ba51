"""Kernels between the matmuls of attention and splash attention on TPUs: norm and rotation of heads, and their order.

B batch, T time, H heads, K head dim, a multiple of 128, F = H K; all of one device.

    matmul of q, k or v  -->  x[B T F]    --`heads_first`: norm and rotation of q and k-->  [B H T K]
    splash attention     -->  x[B H T K]  --`heads_last`-->  [B T F]  -->  matmul of out

Matmuls are fast where their features are one dim; splash attention reads head by head.  With [B H T K] XLA for TPU uses
half of an MXU of 256 x 256 where heads have 128 elements, and computes the gradient of the norm anew in every
tile of two matmuls (docs/performance-notes.md).  The plain versions are the norm, `rotate_pairs` and a transpose.  The
gradients are defined by hand, as those of all kernels here.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from shmap_tp.layers.positions import Rotation
from shmap_tp.layers.xla_workarounds import LANES
from shmap_tp.parallel.collectives import mark_varying, varying_axes, without_vma_check

TILE_BYTES = 2048
"""Bytes of a position in a tile: of bfloat16 eight heads of 128."""
POSITIONS = (512, 256, 128)
"""Positions of a tile: the first that divides T.  Splash attention needs that one does."""


class Heads(NamedTuple):
    """What the kernels compute for each head beside the transposition, but for the factor of a norm."""

    head_dim: int
    rotation: Rotation | None = None
    scale: float = 1.0
    """What heads that are rotated or normalised are multiplied by."""
    epsilon: float | None = None
    """The epsilon of the RMSNorm before the rotation; None: there is no norm."""
    interpret: bool = False

    @property
    def is_suited(self) -> bool:
        """Whether the kernels compute it: whole rows of memory, rotated in halves."""
        halves = not self.rotation.neighbouring and self.rotation.size(self.head_dim) == self.head_dim
        return halves and self.head_dim % LANES == 0

    def tables(self, time: int) -> tuple[Array, ...]:
        """cos[T K]; sin[T K], for the first element of a pair negative.  In float32; nothing without a rotation."""
        if self.rotation is None:
            return ()
        cos, sin = self.rotation.tables(time, self.head_dim)
        sin[:, : self.head_dim // 2] *= -1
        return jnp.asarray(cos, jnp.float32), jnp.asarray(sin, jnp.float32)


def heads_first(
    how: Heads, x_BTF: Float[Array, "B T F"], factor_K: Float[Array, " K"] | None = None
) -> Float[Array, "B T H K"]:
    """x, or with a factor x / sqrt(mean(x^2) + epsilon) * factor, rotated by position, times the scale, as [B T H K],
    which is stored as [B H T K]; computed in float32, in x's dtype.

    Communication: none; backward that of the cast of a factor that does not vary."""
    if factor_K is None:
        return _to_heads(how, x_BTF).transpose(0, 2, 1, 3)
    axes = sorted(varying_axes(x_BTF) | varying_axes(factor_K))
    return _normed(how, *mark_varying((x_BTF, factor_K * how.scale), tuple(axes))).transpose(0, 2, 1, 3)


def heads_last(how: Heads, x_BTHK: Float[Array, "B T H K"]) -> Float[Array, "B T F"]:
    """x, stored as [B H T K], with H and K in one dim F; nothing else is computed.  Communication: none."""
    return _to_features(how._replace(rotation=None), x_BTHK.transpose(0, 2, 1, 3))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normed(how: Heads, x_BTF: Array, factor_K: Array) -> Array:
    def kernel(x: Any, cos: Any, sin: Any, factor: Any, y: Any) -> None:
        for head, columns in _heads(y):
            n = x[0, :, columns].astype(jnp.float32)
            n = n * lax.rsqrt(jnp.mean(n * n, axis=1, keepdims=True) + how.epsilon) * factor[...]
            y[0, head] = (n * cos[...] + _other(n) * sin[...]).astype(y.dtype)

    arrays = x_BTF, *how.tables(x_BTF.shape[1]), _row(factor_K)
    return _call(kernel, how, arrays, "fttw", "h")[0]


def _normed_backward(how: Heads, saved: tuple[Array, Array], dy_BHTK: Array) -> tuple[Array, Array]:
    x_BTF, factor_K = saved

    def kernel(x: Any, dy: Any, cos: Any, sin: Any, factor: Any, dx: Any, d_factor: Any) -> None:
        @pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))
        def _() -> None:
            d_factor[...] = jnp.zeros_like(d_factor)

        for head, columns in _heads(dy):
            n, dn = x[0, :, columns].astype(jnp.float32), dy[0, head].astype(jnp.float32)
            root = lax.rsqrt(jnp.mean(n * n, axis=1, keepdims=True) + how.epsilon)
            n, dn = n * root, dn * cos[...] - _other(dn) * sin[...]
            d_factor[0] += jnp.sum(dn * n, axis=0, keepdims=True)
            dn = dn * factor[...]
            dx[0, :, columns] = (root * (dn - n * jnp.mean(dn * n, axis=1, keepdims=True))).astype(dx.dtype)

    arrays = x_BTF, dy_BHTK, *how.tables(x_BTF.shape[1]), _row(factor_K)
    dx_BTF, d_factor_B1K = _call(kernel, how, arrays, "fhttw", "fs")
    return dx_BTF, jnp.sum(d_factor_B1K, axis=(0, 1)).astype(factor_K.dtype)


_normed.defvjp(lambda how, x, factor: (_normed(how, x, factor), (x, factor)), _normed_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _to_heads(how: Heads, x_BTF: Array) -> Array:
    def kernel(x: Any, *tables_and_y: Any) -> None:
        *tables, y = tables_and_y
        for head, columns in _heads(y):
            y[0, head] = _rotated(how, 1, x[0, :, columns], tables)

    arrays = x_BTF, *how.tables(x_BTF.shape[1])
    return _call(kernel, how, arrays, "ftt"[: len(arrays)], "h")[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _to_features(how: Heads, x_BHTK: Array) -> Array:
    """The transpose of `_to_heads`, which rotates the other way."""

    def kernel(x: Any, *tables_and_y: Any) -> None:
        *tables, y = tables_and_y
        for head, columns in _heads(x):
            y[0, :, columns] = _rotated(how, -1, x[0, head], tables)

    arrays = x_BHTK, *how.tables(x_BHTK.shape[2])
    return _call(kernel, how, arrays, "htt"[: len(arrays)], "f")[0]


_to_heads.defvjp(lambda how, x: (_to_heads(how, x), None), lambda how, _, dy: (_to_features(how, dy),))
_to_features.defvjp(lambda how, x: (_to_features(how, x), None), lambda how, _, dy: (_to_heads(how, dy),))


def _call(kernel: Callable[..., None], how: Heads, arrays: Sequence[Array], ins: str, outs: str) -> Sequence[Array]:
    """The kernel on tiles of positions and heads.

    A letter says what an array is, and which block of it a tile has: f [B T F], h [B H T K], t a table [T K], w [1 K],
    and s a sum for each sequence [B 1 K] in float32, which the kernel sets to zero in the first tile of a sequence.
    """
    x, head_dim = arrays[0], how.head_dim
    batch, time = x.shape[0], x.shape[1 if ins[0] == "f" else 2]
    heads = x.size // (batch * time * head_dim)
    rows = next(size for size in POSITIONS if time % size == 0)
    most = max(1, TILE_BYTES // (head_dim * x.dtype.itemsize))
    group = next(size for size in range(min(most, heads), 0, -1) if heads % size == 0)
    blocks = {
        "f": pl.BlockSpec((1, rows, group * head_dim), lambda b, t, h: (b, t, h)),
        "h": pl.BlockSpec((1, group, rows, head_dim), lambda b, t, h: (b, h, t, 0)),
        "t": pl.BlockSpec((rows, head_dim), lambda b, t, h: (t, 0)),
        "w": pl.BlockSpec((1, head_dim), lambda b, t, h: (0, 0)),
        "s": pl.BlockSpec((1, 1, head_dim), lambda b, t, h: (b, 0, 0)),
    }
    results = {
        "f": jax.ShapeDtypeStruct((batch, time, heads * head_dim), x.dtype),
        "h": jax.ShapeDtypeStruct((batch, heads, time, head_dim), x.dtype),
        "s": jax.ShapeDtypeStruct((batch, 1, head_dim), jnp.float32),
    }
    size = sum(x.size * x.dtype.itemsize for x in (*arrays, *[results[kind] for kind in outs]))
    run = pl.pallas_call(
        kernel,
        grid=(batch, time // rows, heads // group),
        in_specs=[blocks[kind] for kind in ins],
        out_specs=[blocks[kind] for kind in outs],
        out_shape=[results[kind] for kind in outs],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=size),
        interpret=how.interpret,
    )
    return without_vma_check(run, *arrays)


def _heads(x: Any) -> list[tuple[int, slice]]:
    """(number, columns) of each head of a tile, of which x has the heads in a dim of their own."""
    _, heads, _, head_dim = x.shape
    return [(head, slice(head * head_dim, (head + 1) * head_dim)) for head in range(heads)]


def _rotated(how: Heads, sign: int, x: Float[Array, "T K"], tables: Sequence[Any]) -> Float[Array, "T K"]:
    """One head, rotated by sign times the angles, times the scale; without tables x."""
    if not tables:
        return x
    (cos, sin), n = tables, x.astype(jnp.float32) * how.scale
    return (n * cos[...] + sign * (_other(n) * sin[...])).astype(x.dtype)


def _row(factor_K: Float[Array, " K"]) -> Float[Array, "1 K"]:
    return factor_K.astype(jnp.float32)[None]


def _other(n: Float[Array, "T K"]) -> Float[Array, "T K"]:
    """The other element of each pair."""
    return pltpu.roll(n, n.shape[1] // 2, 1)
