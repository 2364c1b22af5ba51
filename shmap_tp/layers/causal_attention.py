"""Causal attention in XLA's own operations, a chunk of queries at a time.  No communication.

B batch, T time (queries), S time (keys), H query heads, N key/value heads, K head dim, G = H / N; all of this device.

`Pattern` describes what attention computes, for this implementation and for the kernels of flash_attention.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

MAX_KEY_LENGTHS = 4
"""Groups of chunks in `causal_attention`: different numbers of keys that its queries are computed with."""


@dataclass(frozen=True)
class Pattern:
    """What attention computes beside softmax(q k' / sqrt(K), s <= t) v.  A kernel refuses what it cannot do."""

    slopes_H: Float[Array, " H"] | None = None
    """slope * (s - t) is added to the score of query t and key s (ALiBi)."""
    segments_BT: Int[Array, "B T"] | None = None
    """A query attends to the keys of its own segment alone."""

    @property
    def used(self) -> frozenset[str]:
        """The names of the fields that are not None, without their dims."""
        return frozenset(each.name.split("_")[0] for each in fields(self) if getattr(self, each.name) is not None)


class Queries(NamedTuple):
    """What attention knows of its queries."""

    q_BTHK: Float[Array, "B T H K"]
    segments_BT: Int[Array, "B T"] | None


class Keys(NamedTuple):
    """What attention knows of its keys."""

    k_BSNK: Float[Array, "B S N K"]
    v_BSNK: Float[Array, "B S N K"]
    segments_BS: Int[Array, "B S"] | None

    def upto(self, end: int) -> "Keys":
        """Those of the positions below `end`."""
        return jax.tree.map(lambda x: x[:, :end], self)

    def by_head(self) -> "Keys":
        """With k and v as [B N S K], which `attend` takes."""
        return self._replace(k_BSNK=self.k_BSNK.transpose(0, 2, 1, 3), v_BSNK=self.v_BSNK.transpose(0, 2, 1, 3))


def causal_attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BTNK: Float[Array, "B T N K"],
    v_BTNK: Float[Array, "B T N K"],
    pattern: Pattern,
    chunk: int,
) -> Float[Array, "B T H K"]:
    """Attention of every query to the keys up to its own time, `chunk` queries at a time.

    Scores and softmax are float32 (or wider).  Consecutive chunks form at most MAX_KEY_LENGTHS groups of equal size; a
    group computes all its queries with the keys up to its end, in a loop where it has several chunks.  With g groups
    the work is (1 + 1 / g) / 2 of all pairs of queries and keys.

    Memory  linear in T: the scores [B, H, chunk, T] of one chunk, or of each group where a group is one chunk.  The
            backward pass recomputes them, and saves only q, k and v.
    """
    time = q_BTHK.shape[1]
    queries, keys = Queries(q_BTHK, pattern.segments_BT), Keys(k_BTNK, v_BTNK, pattern.segments_BT)
    if time <= chunk:
        return attend(queries, keys.by_head(), pattern.slopes_H, 0)
    per_group = -(-time // chunk // MAX_KEY_LENGTHS) * chunk
    ends = [min(start + per_group, time) for start in range(0, time, per_group)]
    groups = zip(_split(queries, ends[:-1]), ends, strict=True)
    return jnp.concatenate([_attend_group(group, keys, pattern.slopes_H, end, chunk) for group, end in groups], axis=1)


def _attend_group(queries: Queries, keys: Keys, slopes_H: Array | None, end: int, chunk: int) -> Array:
    """Attention of the queries of the positions up to `end`, a chunk at a time."""

    @jax.checkpoint
    def attend_chunk(queries: Queries, keys: Keys, first: Int[Array, ""] | int) -> Array:
        # keys are sliced here, so that they are saved whole, once, and not as a prefix for each group
        return attend(queries, keys.upto(end).by_head(), slopes_H, first)

    time = queries.q_BTHK.shape[1]
    start, (whole, rest) = end - time, divmod(time, chunk)
    if time <= chunk:
        return attend_chunk(queries, keys, start)
    in_loop, *last = _split(queries, [whole * chunk])
    firsts = start + chunk * jnp.arange(whole)
    mixed_BTHK = map_chunks(lambda queries, first: attend_chunk(queries, keys, first), in_loop, firsts)
    return jnp.concatenate([mixed_BTHK, attend_chunk(*last, keys, end - rest)], axis=1) if rest else mixed_BTHK


def map_chunks(
    attend_chunk: Callable[[Queries, Int[Array, ""]], Array], queries: Queries, firsts: Int[Array, " chunks"]
) -> Float[Array, "B T H K"]:
    """`attend_chunk(queries of a chunk, its element of firsts)` for as many chunks as `firsts` has, one by one."""

    def chunked(x_BT: Array) -> Array:
        batch, time, *rest = x_BT.shape
        return jnp.moveaxis(x_BT.reshape(batch, len(firsts), time // len(firsts), *rest), 1, 0)

    mixed_CBTHK = lax.map(lambda each: attend_chunk(*each), (jax.tree.map(chunked, queries), firsts))
    return jnp.moveaxis(mixed_CBTHK, 0, 1).reshape(queries.q_BTHK.shape)


def _split(queries: Queries, at: list[int]) -> list[Queries]:
    q, segments = queries
    parts = jnp.split(q, at, axis=1)
    return list(map(Queries, parts, [None] * len(parts) if segments is None else jnp.split(segments, at, axis=1)))


@jax.named_scope("attend")
def attend(
    queries: Queries, keys: Keys, slopes_H: Float[Array, " H"] | None, first: Int[Array, ""] | int
) -> Float[Array, "B T H K"]:
    """Exact softmax attention of T queries, from position `first` on, to the keys of positions 0 to S - 1, by head.

    Each pair of batch and key/value head is one batch entry of the matrix products; its G query heads are more rows.
    """
    q_BTHK, (k_BNSK, v_BNSK) = queries.q_BTHK, keys[:2]
    (batch, time, heads, head_dim), groups = q_BTHK.shape, k_BNSK.shape[1]
    shared, wide = heads // groups, jnp.promote_types(q_BTHK.dtype, jnp.float32)
    q = q_BTHK.reshape(batch, time, groups, shared, head_dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(batch, groups, shared * time, head_dim)
    scores = jnp.einsum("bnrk,bnsk->bnrs", q, k_BNSK, preferred_element_type=wide) * head_dim**-0.5
    bias_NRS = _bias(slopes_H, shared, _positions(first, time), k_BNSK.shape[2], wide)
    weights = jax.nn.softmax(_within_segments(scores + bias_NRS[None], queries, keys), axis=-1)
    mixed = jnp.einsum("bnrs,bnsk->bnrk", weights.astype(v_BNSK.dtype), v_BNSK)
    mixed = mixed.reshape(batch, groups, shared, time, head_dim)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, time, heads, head_dim)


def _within_segments(scores_BNRS: Float[Array, "B N R S"], queries: Queries, keys: Keys) -> Float[Array, "B N R S"]:
    """The scores, nearly -inf for keys of other segments."""
    if queries.segments_BT is None:
        return scores_BNRS
    same_BTS = queries.segments_BT[:, :, None] == keys.segments_BS[:, None]
    same_BRS = jnp.tile(same_BTS, (1, scores_BNRS.shape[2] // same_BTS.shape[1], 1))
    return jnp.where(same_BRS[:, None], scores_BNRS, jnp.finfo(scores_BNRS.dtype).min)


def _positions(first: Int[Array, ""] | int, time: int) -> Int[Array, " T"]:
    return jnp.arange(first, first + time) if isinstance(first, int) else first + jnp.arange(time)


def _bias(
    slopes_H: Float[Array, " H"] | None, shared: int, query_T: Int[Array, " T"], keys: int, dtype: DTypeLike
) -> Float[Array, "N R S"]:
    """What is added to the scores [N or 1, G x T, S]: the head's slope x (s - t), and nearly -inf for later keys."""
    past_TS = jnp.arange(keys)[None, :] - query_T[:, None]
    slopes_H = jnp.zeros(shared, dtype) if slopes_H is None else slopes_H.astype(dtype)
    bias_HTS = slopes_H[:, None, None] * past_TS.astype(dtype)[None]
    bias_HTS = jnp.where((past_TS <= 0)[None], bias_HTS, jnp.finfo(dtype).min)
    return bias_HTS.reshape(-1, shared * query_T.shape[0], keys)
