"""Position encodings.  One is chosen for the whole model and passed to every block; a layer may have another.

B batch, T time, D model width, H heads on this device, K head dim, R how many elements of a head are rotated, the first
ones, P = R/2 pairs of them.

                 add_to_input (x[B T D])    rotate (q, k [B T H K])        slopes ([H/mp] or None)
    Alibi        x                          q, k                           slope of each head
    Rotary       x                          rotated by position            None
    Learned      x + w[positions]           q, k                           None
    NoPositions  x                          q, k                           None

`positions` [B T] are those of the tokens in their sequences; None stands for 0, 1 ... T - 1.  No communication:
every device knows all positions, a head's slope is that of its number in the whole model, and which positions of the
residual stream a device holds is known to the tensor-parallel mode.

The rotary encoding turns pair i of a head by position * rate_i; rates and pairs are plain numbers, known before
anything is traced.
"""

import math
from dataclasses import dataclass
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from shmap_tp.config.choices import PositionKind, RotaryPairing, RotaryScaling
from shmap_tp.config.schema import ModelConfig
from shmap_tp.parallel.mesh import MP
from shmap_tp.parallel.partitioning import ParameterKind, param
from shmap_tp.parallel.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class Llama3Scaling:
    """Slower rotation for contexts longer than a model was trained with.  Dubey et al. 2024, Llama 3, section 3.4.3;
    the formula is that of the code released with Llama 3.1.

    A rate that makes n = original_context * rate / 2 pi rotations in the original context is divided by `factor` where
    n < low, stays where n > high, and is interpolated linearly in n between the two.
    """

    factor: float
    low: float
    high: float
    original_context: int
    amplitude = 1.0

    def scaled(self, rates: Float[np.ndarray, " pairs"]) -> Float[np.ndarray, " pairs"]:
        rotations = self.original_context * rates / (2 * math.pi)
        kept = np.clip((rotations - self.low) / (self.high - self.low), 0, 1)
        return kept * rates + (1 - kept) * rates / self.factor


@dataclass(frozen=True)
class LinearScaling:
    """Every rate divided by `factor`: positions are interpolated.  Chen et al. 2023, https://arxiv.org/abs/2306.15595"""

    factor: float
    amplitude = 1.0

    def scaled(self, rates: Float[np.ndarray, " pairs"]) -> Float[np.ndarray, " pairs"]:
        return rates / self.factor


@dataclass(frozen=True)
class YarnScaling:
    """Low rates divided by `factor`, high ones kept, and what is rotated times an amplitude, by default
    0.1 log(factor) + 1.  Peng et al. 2023, YaRN, sections 3.2 and 3.4, https://arxiv.org/abs/2309.00071

    The rate of the pair i(n) = R log(original_context / 2 pi n) / (2 log base) makes n rotations in the original
    context.  Rates stay up to pair i(fast), rounded down, and are divided from pair i(slow) on, rounded up; between the
    two they are interpolated linearly in the number of the pair, as in the code released with the paper.  Where not
    `rounded`, i(fast) and i(slow) stay fractions.
    """

    factor: float
    slow: float
    fast: float
    original_context: int
    base: float
    rounded: bool = True
    other_amplitude: float | None = None

    @property
    def amplitude(self) -> float:
        return yarn_amplitude(self.factor) if self.other_amplitude is None else self.other_amplitude

    def scaled(self, rates: Float[np.ndarray, " pairs"]) -> Float[np.ndarray, " pairs"]:
        pairs = len(rates)
        fast, slow = (
            pairs * math.log(self.original_context / (2 * math.pi * n)) / math.log(self.base)
            for n in (self.fast, self.slow)
        )
        fast, slow = (math.floor(fast), math.ceil(slow)) if self.rounded else (fast, slow)
        first, last = max(fast, 0), min(slow, 2 * pairs - 1)
        divided = np.clip((np.arange(pairs) - first) / (last - first if last != first else 1e-3), 0, 1)
        return (1 - divided) * rates + divided * rates / self.factor


def yarn_amplitude(factor: float, scale: float = 1.0) -> float:
    """What YaRN multiplies q and k by: their scores by its square, the inverse of a temperature.  `scale` is another
    than that of the paper, as DeepSeek's models have."""
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


@dataclass(frozen=True)
class Rotation:
    """The rates base^(-2i/R), scaled or not, and the pairs that they rotate.  Su et al. 2021, section 3.2.2,
    https://arxiv.org/abs/2104.09864"""

    base: float
    rotated: int | None = None
    """R; None: all of the head."""
    neighbouring: bool = False
    """Pairs (2i, 2i + 1), as in the paper and GPT-J; else (i, i + R/2), as in GPT-NeoX and Llama."""
    scaling: Llama3Scaling | LinearScaling | YarnScaling | None = None

    @property
    def amplitude(self) -> float:
        """What the rotated elements are multiplied by."""
        return 1.0 if self.scaling is None else self.scaling.amplitude

    def size(self, head_dim: int) -> int:
        """R of a head."""
        return head_dim if self.rotated is None else self.rotated

    def rates(self, head_dim: int) -> Float[np.ndarray, " pairs"]:
        """Radians per position of each pair."""
        half = self.size(head_dim) // 2
        rates = self.base ** (-np.arange(half) / half)
        return rates if self.scaling is None else self.scaling.scaled(rates)

    def pairs(self, head_dim: int) -> tuple[Int[np.ndarray, " pairs"], Int[np.ndarray, " pairs"]]:
        """(the first, the second element) of each pair."""
        size = self.size(head_dim)
        if self.neighbouring:
            return np.arange(0, size, 2), np.arange(1, size, 2)
        return np.arange(size // 2), np.arange(size // 2, size)

    def tables(self, time: int, head_dim: int) -> tuple[Float[np.ndarray, "T K"], Float[np.ndarray, "T K"]]:
        """The cosine and the sine of the angle of each element at each position, times the amplitude.  Elements that
        are not rotated have an angle of 0."""
        angle, size = np.zeros((time, head_dim)), np.ones(head_dim)
        for elements in self.pairs(head_dim):
            angle[:, elements] = np.arange(time)[:, None] * self.rates(head_dim)
            size[elements] = self.amplitude
        return size * np.cos(angle), size * np.sin(angle)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def rotate_pairs(rotation: Rotation, sign: int, x_BTHK: Float[Array, "B T H K"]) -> Float[Array, "B T H K"]:
    """Rotate each pair of the head at position t by sign * t * its rate, in float32 or wider, times the amplitude.

    The plain version is `rotate_pairs_at`.  Here the other element of each pair comes from a matmul with a signed
    permutation, exactly, because half a head fills half a row of a TPU's vector unit; and the gradient, a rotation the
    other way, is stated, because JAX's own transpose of that matmul would round.
    """
    time, head_dim = x_BTHK.shape[1], x_BTHK.shape[3]
    wide = jnp.promote_types(x_BTHK.dtype, jnp.float32)
    (first, second), swap = rotation.pairs(head_dim), np.zeros((head_dim, head_dim), int)
    swap[second, first], swap[first, second] = -sign, sign
    cos, sin = (jnp.asarray(table[None, :, None, :], wide) for table in rotation.tables(time, head_dim))
    swap = jnp.asarray(swap, x_BTHK.dtype)
    other = jnp.matmul(x_BTHK, swap, precision=lax.Precision.HIGHEST, preferred_element_type=wide)
    return (x_BTHK.astype(wide) * cos + other * sin).astype(x_BTHK.dtype)


rotate_pairs.defvjp(
    lambda rotation, sign, x: (rotate_pairs(rotation, sign, x), None),
    lambda rotation, sign, _, dy: (rotate_pairs(rotation, -sign, dy),),
)


def rotate_pairs_at(
    rotation: Rotation, positions_BT: Int[Array, "B T"], x_BTHK: Float[Array, "B T H K"]
) -> Float[Array, "B T H K"]:
    """The same at the positions given, by its definition: a pair a, b becomes a cos - b sin, b cos + a sin."""
    head_dim = x_BTHK.shape[3]
    wide = jnp.promote_types(x_BTHK.dtype, jnp.float32)
    angle_BTHP = _angles(rotation.rates(head_dim), positions_BT, wide)[:, :, None]
    x, rest = jnp.split(x_BTHK.astype(wide), [rotation.size(head_dim)], axis=-1)
    a, b = (x[..., ::2], x[..., 1::2]) if rotation.neighbouring else jnp.split(x, 2, axis=-1)
    cos, sin = (rotation.amplitude * f(angle_BTHP) for f in (jnp.cos, jnp.sin))
    turned = [a * cos - b * sin, b * cos + a * sin]
    y = jnp.stack(turned, axis=-1).reshape(x.shape) if rotation.neighbouring else jnp.concatenate(turned, axis=-1)
    return jnp.concatenate([y, rest], axis=-1).astype(x_BTHK.dtype)


NEAR = 1024
"""`_angles` takes positions as multiples of it and remainders."""


def _angles(rates: Float[np.ndarray, " P"], positions_BT: Int[Array, "B T"], wide: DTypeLike) -> Float[Array, "B T P"]:
    """position * rate, in float32 less whole turns.

    The plain version is the product, whose rounded rate is wrong by 0.008 radians at position 131,072 in float32.  Here
    turns are integers of 1/2^32, whose sums and products lose whole turns and nothing else: at most 2e-6 radians are
    lost up to position 2^20, by the rounding of the two factors.
    """
    if jnp.dtype(wide).itemsize > 4:
        return positions_BT.astype(wide)[..., None] * jnp.asarray(rates, wide)[None, None]
    turns = np.stack([rates, NEAR * rates]) / (2 * np.pi)
    near_P, far_P = jnp.asarray(np.round((turns % 1) * 2.0**32).astype(np.uint64).astype(np.uint32))
    position_BTP = positions_BT.astype(jnp.uint32)[..., None]
    phase_BTP = position_BTP % NEAR * near_P[None, None] + position_BTP // NEAR * far_P[None, None]
    return lax.bitcast_convert_type(phase_BTP, jnp.int32).astype(wide) * (2 * np.pi / 2**32)


def make_rotation(config: ModelConfig) -> Rotation:
    """The rotation that the `rotary_` keys of the model name."""
    neighbouring = config.rotary_pairing == RotaryPairing.neighbouring
    return Rotation(config.rotary_base, config.rotary_dim, neighbouring, _scaling(config))


def _scaling(config: ModelConfig) -> Llama3Scaling | LinearScaling | YarnScaling | None:
    frequencies = (
        config.rotary_low_frequency_factor,
        config.rotary_high_frequency_factor,
        config.rotary_original_context,
    )
    match config.rotary_scaling:
        case RotaryScaling.none:
            return None
        case RotaryScaling.llama3:
            return Llama3Scaling(config.rotary_scaling_factor, *frequencies)
        case RotaryScaling.linear:
            return LinearScaling(config.rotary_scaling_factor)
        case RotaryScaling.yarn | RotaryScaling.yarn_unrounded:
            rounded = config.rotary_scaling == RotaryScaling.yarn
            of_base = config.rotary_base, rounded, config.rotary_amplitude
            return YarnScaling(config.rotary_scaling_factor, *frequencies, *of_base)


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
    """2^(-8 h / H) for h = 1 .. H.  Where H is no power of two, the slopes of the power below it, then every other
    slope of the power above it."""

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
