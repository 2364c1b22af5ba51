"""The rotary encoding's pairs of elements and their rates: plain numbers, known before anything is traced.

K head dim, R how many of its elements are rotated, the first ones.  Pair i of R/2 turns by position * rate_i.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from shmap_tp.config.schema import ModelConfig, RotaryPairing, RotaryScaling


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

    def scaled(self, rates: Float[np.ndarray, " pairs"]) -> Float[np.ndarray, " pairs"]:
        rotations = self.original_context * rates / (2 * math.pi)
        kept = np.clip((rotations - self.low) / (self.high - self.low), 0, 1)
        return kept * rates + (1 - kept) * rates / self.factor


@dataclass(frozen=True)
class Rotation:
    """The rates base^(-2i/R), scaled or not, and the pairs that they rotate.  Su et al. 2021, section 3.2.2,
    https://arxiv.org/abs/2104.09864"""

    base: float
    rotated: int | None = None
    """R; None: all of the head."""
    neighbouring: bool = False
    """Pairs (2i, 2i + 1), as in the paper and GPT-J; else (i, i + R/2), as in GPT-NeoX and Llama."""
    scaling: Llama3Scaling | None = None

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


def make_rotation(config: ModelConfig) -> Rotation:
    """The rotation that the `rotary_` keys of the model name."""
    scaling = None
    if config.rotary_scaling == RotaryScaling.llama3:
        scaling = Llama3Scaling(
            config.rotary_scaling_factor,
            config.rotary_low_frequency_factor,
            config.rotary_high_frequency_factor,
            config.rotary_original_context,
        )
    neighbouring = config.rotary_pairing == RotaryPairing.neighbouring
    return Rotation(config.rotary_base, config.rotary_dim, neighbouring, scaling)
