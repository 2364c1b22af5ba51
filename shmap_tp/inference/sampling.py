"""The next token from logits whose vocabulary is sharded over mp; no device ever has a whole row of logits.

Choosing the largest of logits / temperature + Gumbel noise samples from the softmax (Maddison et al. 2014, "A*
Sampling", section 2), so sampling is a maximum over devices, as greedy decoding is.  The noise is a function of (seed,
request, sample, position, token id): the same token is drawn on every mesh, in every batch, and beside any other
request, up to the rounding of the logits.

B sequences, V vocabulary rows, padded.  V/mp: dim V sharded over mp.
"""

from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt

from shmap_tp.parallel.collectives import mark_varying
from shmap_tp.parallel.mesh import MP, token_axes

NO_TOKEN = 2**31 - 1
"""The id that is drawn where the largest logit is infinite or NaN."""


class Sampling(eqx.Module):
    """How the next token is chosen.  Its values are arrays: another value needs no compilation."""

    temperature: Float[Array | np.ndarray, ""]
    """0 is greedy: the most likely token."""
    top_k: Int[Array | np.ndarray, ""]
    """Only the k most likely tokens are candidates; 0 is all.  Fan et al. 2018, https://arxiv.org/abs/1805.04833"""
    top_p: Float[Array | np.ndarray, ""]
    """Only the most likely tokens that together have this probability are candidates; 1 is all.  Holtzman et al. 2020,
    https://arxiv.org/abs/1904.09751"""
    repetition_penalty: Float[Array | np.ndarray, ""]
    """Logits of tokens that were seen are divided by it if positive, else multiplied; 1 is none.  Keskar et al. 2019,
    section 4.1, https://arxiv.org/abs/1909.05858"""
    exempt: Int[Array | np.ndarray, " _"]
    """Ids to which the penalty does not apply: those that end an answer, which prompts of several turns have seen."""
    seed: Int[Array | np.ndarray, ""]
    vocabulary: Int[Array | np.ndarray, ""]
    """Ids from it on are never chosen."""


@dataclass(frozen=True)
class Filters:
    """Which parts of sampling a program contains; the others cost nothing."""

    noise: bool
    candidates: bool
    penalty: bool


class Sequences(NamedTuple):
    """What the choice of a token depends on beside the logits."""

    request_B: Int[Array, " B"]
    """Number of the request that each sequence belongs to."""
    sample_B: Int[Array, " B"]
    """Number of the sequence among those that continue the same prompt."""
    position_B: Int[Array, " B"]
    """Position of the token to choose in its sequence."""
    seen_BV: Bool[Array, "B V"] | None
    """Which of this device's tokens occur in the sequence; None without a repetition penalty."""

    def saw(self, ids_BT: Int[Array, "B T"]) -> "Sequences":
        """With these tokens marked as seen; negative ids are padding."""
        if self.seen_BV is None:
            return self
        rows = self.seen_BV.shape[1]
        row_BT = ids_BT - lax.axis_index(MP) * rows
        row_BT = jnp.where((row_BT >= 0) & (row_BT < rows), row_BT, rows)  # beyond the last row: dropped
        seen_BV = jax.vmap(lambda seen_V, row_T: seen_V.at[row_T].set(True, mode="drop"))(self.seen_BV, row_BT)
        return self._replace(seen_BV=seen_BV)


def next_token(
    logits_BV: Float[Array, "B V"], sequences: Sequences, sampling: Sampling, filters: Filters, vocabulary: int
) -> Int[Array, " B"]:
    """The token that follows each sequence, replicated over mp; NO_TOKEN where the logits are not finite.

    Communication  over mp: two all-gathers of one value per sequence; with top-k and top-p 66 all-reduces of one value.
    """
    id_V = lax.axis_index(MP) * logits_BV.shape[1] + jnp.arange(logits_BV.shape[1])
    logits_BV = jnp.where((id_V < jnp.minimum(sampling.vocabulary, vocabulary))[None], logits_BV, -jnp.inf)
    if filters.penalty:
        penalty = sampling.repetition_penalty
        penalised_BV = jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
        is_exempt_V = jnp.any(id_V[:, None] == sampling.exempt[None], axis=-1)
        logits_BV = jnp.where(sequences.seen_BV & ~is_exempt_V[None], penalised_BV, logits_BV)
    if filters.noise:
        logits_BV = logits_BV / sampling.temperature
        if filters.candidates:
            is_kept_BV = _candidates(logits_BV, sampling) | jnp.isnan(logits_BV)
            logits_BV = jnp.where(is_kept_BV, logits_BV, -jnp.inf)
        logits_BV = logits_BV + _noise(sequences, sampling.seed, id_V).astype(logits_BV.dtype)
    return argmax(logits_BV, id_V)


def argmax(x_BV: Float[Array, "B V"], id_V: Int[Array, " V"]) -> Int[Array, " B"]:
    """The id of the largest value over all devices of mp; the lowest such id.  NO_TOKEN if that value is infinite, or
    one of them is NaN."""
    place_B = jnp.argmax(x_BV, axis=-1)
    found = jnp.max(x_BV, axis=-1), id_V[place_B]
    value_RB, id_RB = (lax.all_gather(part, MP, to="invarying") for part in found)
    is_largest = (value_RB == jnp.max(value_RB, axis=0)[None]) & jnp.isfinite(value_RB)
    return jnp.min(jnp.where(is_largest, id_RB, NO_TOKEN), axis=0)


def _noise(sequences: Sequences, seed: Int[Array, ""], id_V: Int[Array, " V"]) -> Float[Array, "B V"]:
    """Gumbel noise, each value from a key of its own: a device makes only that of its own ids."""

    def of_sequence(*numbers: Int[Array, ""]) -> Float[Array, " V"]:
        key: PRNGKeyArray = reduce(jax.random.fold_in, numbers, jax.random.key(seed))
        return jax.vmap(lambda token: jax.random.gumbel(jax.random.fold_in(key, token), (), jnp.float32))(id_V)

    return jax.vmap(of_sequence)(sequences.request_B, sequences.sample_B, sequences.position_B)


def _candidates(logits_BV: Float[Array, "B V"], sampling: Sampling) -> Bool[Array, "B V"]:
    """The tokens of top-k and, by their renormalised probabilities, of top-p.  Equally likely tokens stay together."""
    every_B = jnp.full(logits_BV.shape[0], jnp.inf, logits_BV.dtype)
    count_B = jnp.where(sampling.top_k > 0, sampling.top_k.astype(logits_BV.dtype), every_B)
    kept_BV = _largest(logits_BV, jnp.ones_like(logits_BV), count_B)
    max_B = lax.pmax(jnp.max(logits_BV, axis=-1), MP)
    weights_BV = jnp.where(kept_BV, jnp.exp(logits_BV - max_B[:, None]), 0)
    total_B = lax.psum(jnp.sum(weights_BV, axis=-1), MP)
    least = jnp.finfo(total_B.dtype).tiny  # a top_p that rounds to 0 leaves the most likely token
    needed_B = jnp.maximum(sampling.top_p.astype(total_B.dtype) * total_B, least)
    needed_B = jnp.where(sampling.top_p < 1, needed_B, every_B)
    return kept_BV & _largest(logits_BV, weights_BV, needed_B)


def _largest(
    x_BV: Float[Array, "B V"], weights_BV: Float[Array, "B V"], needed_B: Float[Array, " B"]
) -> Bool[Array, "B V"]:
    """The fewest largest values of each row whose weights sum to `needed`, and those equal to the least of them; all
    values if their weights do not reach it.

    Their least value is found by bisection over the 32 bits of float32, which are ordered as the numbers are once those
    of negative numbers are flipped.  Communication: 32 all-reduces of one value per row over mp.  (To sort the row, it
    would have to be gathered.)
    """
    bits_BV = lax.bitcast_convert_type(x_BV.astype(jnp.float32), jnp.uint32)
    order_BV = jnp.where(bits_BV >> 31 == 1, ~bits_BV, bits_BV | jnp.uint32(1 << 31))

    def step(least_B: UInt[Array, " B"], bit: UInt[Array, ""]) -> tuple[UInt[Array, " B"], None]:
        trial_B = least_B + jnp.left_shift(jnp.uint32(1), bit)
        reached = jnp.sum(jnp.where(order_BV >= trial_B[:, None], weights_BV, 0), axis=-1)
        return jnp.where(lax.psum(reached, MP) >= needed_B, trial_B, least_B), None

    lowest_B = mark_varying(jnp.zeros(x_BV.shape[0], jnp.uint32), token_axes())
    least_B, _ = lax.scan(step, lowest_B, jnp.arange(31, -1, -1, dtype=jnp.uint32))
    return order_BV >= least_B[:, None]
