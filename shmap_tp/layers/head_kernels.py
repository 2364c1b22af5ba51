"""Kernels between the matmuls of attention and splash attention on TPUs: norm and rotation of heads, and their order.

B batch, T time, H heads, K head dim, a multiple of 128, F = H K; all of one device.

    matmul of q or k  -->  x[B T F]  --`normed_heads`-->  [B H T K]
    matmul of v       -->  x[B T F]  --`heads_first`-->   [B H T K]
    splash attention  -->  x[B H T K]  --`heads_last`-->  [B T F]  -->  matmul of out

Matmuls are fast where their features are one dim; splash attention reads head by head.  With [B H T K] XLA for TPU uses
half of a multiplier of 256 x 256 where heads have 128 elements, and computes the gradient of the norm anew in every
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


class NormAndRotation(NamedTuple):
    """What `normed_heads` computes, but for the factor of the norm."""

    epsilon: float
    rotation: Rotation
    interpret: bool = False

    def suits(self, head_dim: int) -> bool:
        """Whether the kernels compute it for heads of this dim: whole rows of memory, rotated in halves."""
        halves = not self.rotation.neighbouring and self.rotation.size(head_dim) == head_dim
        return halves and head_dim % LANES == 0

    def constants(self, time: int, factor_K: Array) -> tuple[Array, Array, Array]:
        """cos[T K]; sin[T K], for the first element of a pair negative; the factor [1 K].  In float32."""
        cos, sin = self.rotation.tables(time, len(factor_K))
        sin[:, : len(factor_K) // 2] *= -1
        return jnp.asarray(cos, jnp.float32), jnp.asarray(sin, jnp.float32), factor_K.astype(jnp.float32)[None]


def normed_heads(how: NormAndRotation, x_BTF: Float[Array, "B T F"], factor_K: Float[Array, " K"]) -> Array:
    """y[B T H K] = x / sqrt(mean(x^2) + epsilon) * factor, rotated by position; computed in float32, in x's dtype.
    Communication: none; backward that of the cast of a factor that does not vary."""
    axes = sorted(varying_axes(x_BTF) | varying_axes(factor_K))
    return _normed(how, *mark_varying((x_BTF, factor_K), tuple(axes))).transpose(0, 2, 1, 3)


def heads_first(interpret: bool, head_dim: int, x_BTF: Float[Array, "B T F"]) -> Float[Array, "B T H K"]:
    """x as [B T H K], stored as [B H T K].  Communication: none."""
    return _to_heads(interpret, head_dim, x_BTF).transpose(0, 2, 1, 3)


def heads_last(interpret: bool, x_BTHK: Float[Array, "B T H K"]) -> Float[Array, "B T F"]:
    """x, stored as [B H T K], with H and K in one dim F.  Communication: none."""
    return _to_features(interpret, x_BTHK.shape[3], x_BTHK.transpose(0, 2, 1, 3))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normed(how: NormAndRotation, x_BTF: Array, factor_K: Array) -> Array:
    def kernel(x: Any, cos: Any, sin: Any, factor: Any, y: Any) -> None:
        for head, columns in _heads(y):
            n = x[0, :, columns].astype(jnp.float32)
            n = n * lax.rsqrt(jnp.mean(n * n, axis=1, keepdims=True) + how.epsilon) * factor[...]
            y[0, head] = (n * cos[...] + _other(n) * sin[...]).astype(y.dtype)

    arrays = x_BTF, *how.constants(x_BTF.shape[1], factor_K)
    return _call(kernel, how.interpret, len(factor_K), arrays, "fttw", "h")[0]


def _normed_backward(how: NormAndRotation, saved: tuple[Array, Array], dy_BHTK: Array) -> tuple[Array, Array]:
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

    arrays = x_BTF, dy_BHTK, *how.constants(x_BTF.shape[1], factor_K)
    dx_BTF, d_factor_B1K = _call(kernel, how.interpret, len(factor_K), arrays, "fhttw", "fs")
    return dx_BTF, jnp.sum(d_factor_B1K, axis=(0, 1)).astype(factor_K.dtype)


_normed.defvjp(lambda how, x, factor: (_normed(how, x, factor), (x, factor)), _normed_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _to_features(interpret: bool, head_dim: int, x_BHTK: Array) -> Array:
    def kernel(x: Any, y: Any) -> None:
        for head, columns in _heads(x):
            y[0, :, columns] = x[0, head]

    return _call(kernel, interpret, head_dim, (x_BHTK,), "h", "f")[0]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _to_heads(interpret: bool, head_dim: int, x_BTF: Array) -> Array:
    def kernel(x: Any, y: Any) -> None:
        for head, columns in _heads(y):
            y[0, head] = x[0, :, columns]

    return _call(kernel, interpret, head_dim, (x_BTF,), "f", "h")[0]


_to_features.defvjp(lambda *of: (_to_features(*of), None), lambda how, dim, _, dy: (_to_heads(how, dim, dy),))
_to_heads.defvjp(lambda *of: (_to_heads(*of), None), lambda how, dim, _, dy: (_to_features(how, dim, dy),))


def _call(
    kernel: Callable[..., None], interpret: bool, head_dim: int, arrays: Sequence[Array], ins: str, outs: str
) -> Sequence[Array]:
    """The kernel on tiles of positions and heads.

    A letter says what an array is, and which block of it a tile has: f [B T F], h [B H T K], t a table [T K], w [1 K],
    and s a sum for each sequence [B 1 K] in float32, which the kernel sets to zero in the first tile of a sequence.
    """
    x = arrays[0]
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
        interpret=interpret,
    )
    return without_vma_check(run, *arrays)


def _heads(x: Any) -> list[tuple[int, slice]]:
    """(number, columns) of each head of a tile, of which x has the heads in a dim of their own."""
    _, heads, _, head_dim = x.shape
    return [(head, slice(head * head_dim, (head + 1) * head_dim)) for head in range(heads)]


def _other(n: Float[Array, "T K"]) -> Float[Array, "T K"]:
    """The other element of each pair."""
    return pltpu.roll(n, n.shape[1] // 2, 1)
