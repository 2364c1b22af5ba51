"""Where a token stands: three ways of telling the model.  One is chosen for the whole model and handed to every block.

B batch, T time, D model width, H heads on this device, K head dim.

              at_input (x[B T D])    on_heads (q, k [B T H K])    slopes ([H/mp] or None)
    ALiBi     x                      q, k                         slope of each head, added as slope * (s - t)
    rotary    x                      rotated by position          None
    learned   x + w[:T]              q, k                         None

No wire: positions are the same on every device, except that a head's slope goes by its number in the whole model, and
that x may be a part of time, T/mp, which the wire in use knows.
"""

import math
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from shmap_tp.parallel.mesh import MP
from shmap_tp.parallel.modes import TensorParallel
from shmap_tp.parallel.partitioning import param


class Alibi(eqx.Module):
    """A penalty on distance, steeper in some heads.  Press et al. 2022, section 3, https://arxiv.org/abs/2108.12409"""

    heads: int = eqx.field(static=True)

    def at_input(self, x_BTD: Float[Array, "B T D"], wire: TensorParallel) -> Float[Array, "B T D"]:
        return x_BTD

    def on_heads(self, x_BTHK: Float[Array, "B T H K"]) -> Float[Array, "B T H K"]:
        return x_BTHK

    def slopes(self) -> Float[Array, " H"]:
        local = self.heads // lax.axis_size(MP)
        return lax.dynamic_slice_in_dim(jnp.asarray(alibi_slopes(self.heads)), lax.axis_index(MP) * local, local)


def alibi_slopes(heads: int) -> Float[np.ndarray, " H"]:
    """2^(-8 h / H) for h = 1 .. H; between powers of two, those of the lower, then every other of the higher."""

    def geometric(n: int) -> list[float]:
        return [2.0 ** (-8 * h / n) for h in range(1, n + 1)]

    below = 2 ** math.floor(math.log2(heads))
    return np.array(geometric(below) + geometric(2 * below)[0::2][: heads - below])


class Rotary(eqx.Module):
    """Pairs (k, k + K/2) of a head turned by position * base^(-2k/K).  Su et al. 2021, https://arxiv.org/abs/2104.09864

    The halves are paired as in GPT-NeoX, not neighbours as in the paper: a fixed permutation of the head dim.
    """

    base: float = eqx.field(static=True)

    def at_input(self, x_BTD: Float[Array, "B T D"], wire: TensorParallel) -> Float[Array, "B T D"]:
        return x_BTD

    def on_heads(self, x_BTHK: Float[Array, "B T H K"]) -> Float[Array, "B T H K"]:
        return _turn(self.base, 1, x_BTHK)

    def slopes(self) -> None:
        return None


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _turn(base: float, way: int, x_BTHK: Float[Array, "B T H K"]) -> Float[Array, "B T H K"]:
    """x * cos + (x @ swap) * sin, in float32 or wider, `way` 1 or -1; the gradient is turned the other way.

    swap[K K], zeros but for one 1 or -1 in a column, brings the other of the pair, with its sign, exactly.  Half a head
    fills half a row of a TPU's vector unit: in halves, put together again, this took 4 % more of a 6B model's step on a
    v4-32 and on a v5e-16 (predicted).
    """
    time, half = x_BTHK.shape[1], x_BTHK.shape[3] // 2
    wide = jnp.promote_types(x_BTHK.dtype, jnp.float32)
    angle = np.arange(time)[:, None] * base ** (-np.arange(half) / half)
    cos, sin = (jnp.asarray(np.tile(f(angle), 2)[None, :, None, :], wide) for f in (np.cos, np.sin))
    swap = jnp.asarray(np.roll(np.diag(np.repeat([-1, 1], half)), half, axis=0) * way, x_BTHK.dtype)
    other = jnp.matmul(x_BTHK, swap, precision=lax.Precision.HIGHEST, preferred_element_type=wide)
    return (x_BTHK.astype(wide) * cos + other * sin).astype(x_BTHK.dtype)


_turn.defvjp(lambda base, way, x: (_turn(base, way, x), None), lambda base, way, _, dy: (_turn(base, -way, dy),))


class Learned(eqx.Module):
    """A vector per position, added to the embedding; whole on every device.  Radford et al. 2018, GPT, section 3.1"""

    weight: Float[Array, "T D"] = param(None, None)

    def __init__(self, context: int, width: int, *, std: float, key: PRNGKeyArray):
        self.weight = std * jax.random.normal(key, (context, width))

    def at_input(self, x_BTD: Float[Array, "B T D"], wire: TensorParallel) -> Float[Array, "B T D"]:
        return x_BTD + wire.beside(self.weight, x_BTD.shape[1]).astype(x_BTD.dtype)[None]

    def on_heads(self, x_BTHK: Float[Array, "B T H K"]) -> Float[Array, "B T H K"]:
        return x_BTHK

    def slopes(self) -> None:
        return None


AnyPositions = Alibi | Rotary | Learned
