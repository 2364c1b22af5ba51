"""Position encodings.  One is chosen for the whole model and passed to every block; a layer may have another.

B batch, T time, D model width, H heads on this device, K head dim.

                 add_to_input (x[B T D])    rotate (q, k [B T H K])        slopes ([H/mp] or None)
    Alibi        x                          q, k                           slope of each head
    Rotary       x                          rotated by position            None
    Learned      x + w[positions]           q, k                           None
    NoPositions  x                          q, k                           None

`positions` [B T] are those of the tokens in their sequences; None stands for 0, 1 ... T - 1.  No communication:
every device knows all positions, a head's slope is that of its number in the whole model, and which positions of the
residual stream a device holds is known to the tensor-parallel mode.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from shmap_tp.config.schema import ModelConfig, PositionKind
from shmap_tp.layers.rotation import Rotation, make_rotation, rotate_pairs, rotate_pairs_at
from shmap_tp.parallel.mesh import MP
from shmap_tp.parallel.partitioning import ParameterKind, param
from shmap_tp.parallel.tensor_parallel import TensorParallel


class PositionEncoding(eqx.Module):
    """What a model asks of its position encoding; what an encoding does not define changes nothing."""

    is_absolute = False
    """Whether it depends on the positions themselves.  One that depends on distances alone is the same in a document
    of a row, whether or not its positions begin at 0."""

    def add_to_input(
        self, x_BTD: Float[Array, "B _ D"], tp: TensorParallel, positions: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B _ D"]:
        """x of the residual stream before the first block."""
        return x_BTD

    def rotate(
        self, x_BTHK: Float[Array, "B T H K"], positions: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T H K"]:
        """Queries or keys."""
        return x_BTHK

    def slopes(self) -> Float[Array, " H"] | None:
        """The slope of each head of this device: attention adds slope * (s - t) to the score of query t and key s."""
        return None


class Alibi(PositionEncoding):
    """A penalty on distance, steeper in some heads.  Press et al. 2022, section 3, https://arxiv.org/abs/2108.12409

    Attention adds slope * (s - t) to the score of query t and key s, counted by their places in its inputs: `positions`
    must be consecutive.
    """

    heads: int = eqx.field(static=True)

    def slopes(self) -> Float[Array, " H"]:
        local = self.heads // lax.axis_size(MP)
        return lax.dynamic_slice_in_dim(jnp.asarray(alibi_slopes(self.heads)), lax.axis_index(MP) * local, local)


def alibi_slopes(heads: int) -> Float[np.ndarray, " H"]:
    """2^(-8 h / H) for h = 1 .. H; between powers of two, those of the lower, then every other of the higher."""

    def geometric(n: int) -> list[float]:
        return [2.0 ** (-8 * h / n) for h in range(1, n + 1)]

    below = 2 ** math.floor(math.log2(heads))
    return np.array(geometric(below) + geometric(2 * below)[0::2][: heads - below])


class Rotary(PositionEncoding):
    """Pairs of elements of a head, rotated by position * a rate of their own.  Su et al. 2021,
    https://arxiv.org/abs/2104.09864

    `rotation` says which elements form a pair, and their rates.
    """

    rotation: Rotation = eqx.field(static=True)

    def rotate(
        self, x_BTHK: Float[Array, "B T H K"], positions: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T H K"]:
        if positions is None:
            return rotate_pairs(self.rotation, 1, x_BTHK)
        return rotate_pairs_at(self.rotation, positions, x_BTHK)


class Learned(PositionEncoding):
    """A vector per position, added to the embedding; replicated.  Radford et al. 2018, GPT, section 3.1"""

    weight: Float[Array, "T D"] = param(None, None, kind=ParameterKind.embedding)
    is_absolute = True

    def __init__(self, context: int, width: int, *, std: float, key: PRNGKeyArray):
        self.weight = std * jax.random.normal(key, (context, width))

    def add_to_input(
        self, x_BTD: Float[Array, "B _ D"], tp: TensorParallel, positions: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B _ D"]:
        weight_BTD = self.weight[None] if positions is None else self.weight[positions]
        return x_BTD + tp.local_positions(weight_BTD, x_BTD.shape[1]).astype(x_BTD.dtype)


class NoPositions(PositionEncoding):
    """None: a causal layer of a model whose other layers have one.  Kazemnejad et al. 2023, NoPE,
    https://arxiv.org/abs/2305.19466"""


def make_position_encoding(config: ModelConfig, key: PRNGKeyArray) -> Alibi | Rotary | Learned:
    """The encoding that `model.positions` names."""
    match config.positions:
        case PositionKind.alibi:
            return Alibi(config.heads)
        case PositionKind.rotary:
            return Rotary(make_rotation(config))
        case PositionKind.learned:
            return Learned(config.context, config.width, std=config.init_std, key=key)
