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
    """A query attends to the keys of its own segment alone.  Segments are given for all positions of a row of keys."""
    window: int | None = None
    """A query attends to the last `window` positions, its own included: t - window < s <= t."""
    softcap: float | None = None
    """Scores become softcap tanh(score / softcap), before anything is added or masked."""
    scale: float | None = None
    """In place of 1 / sqrt(K)."""
    sinks_H: Float[Array, " H"] | None = None
    """exp(sink) is added to the denominator of the softmax of its head, as if of one key more, whose value is 0."""
    earlier: int | None = None
    """The queries have the positions of the last keys, behind so many others; there are segments then.  None: they have
    the positions of all keys, or are this device's part of a row (`context_parallel.py`)."""

    @property
    def used(self) -> frozenset[str]:
        """The names of the fields that are not None, without their dims."""
        return frozenset(each.name.split("_")[0] for each in fields(self) if getattr(self, each.name) is not None)


PLAIN = Pattern()
"""Attention to all earlier positions."""


class Queries(NamedTuple):
    """What attention knows of its queries."""

    q_BTHK: Float[Array, "B T H K"]
    segments_BT: Int[Array, "B T"] | None

    def halves(self) -> list["Queries"]:
        """The queries of the first and of the second half of the positions."""
        return _split(self, [self.q_BTHK.shape[1] // 2])


class Keys(NamedTuple):
    """What attention knows of its keys."""

    k_BSNK: Float[Array, "B S N K"]
    v_BSNK: Float[Array, "B S N K"]
    segments_BS: Int[Array, "B S"] | None

    def between(self, start: int, end: int) -> "Keys":
        """The keys of the positions from `start` on and below `end`."""
        return jax.tree.map(lambda x: x[:, start:end], self)

    def within(
        self, window: int | None, first: Int[Array, ""] | int, queries: int
    ) -> tuple[Int[Array, ""] | int, "Keys"]:
        """(first position of the keys, the keys) that so many queries from position `first` on see, with a window."""
        there = self.k_BSNK.shape[1]
        seen = there if window is None else min(there, queries + window - 1)
        if seen == there:
            return 0, self
        oldest = jnp.clip(first + 1 - window, 0, there - seen)
        return oldest, jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, oldest, seen, 1), self)

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
    the work is (1 + 1 / g) / 2 of all pairs of queries and keys; with a window at most T x (2 window + chunk).

    Memory  linear in T: the scores [B, H, chunk, T] of one chunk, or of each group where a group is one chunk.  The
            backward pass recomputes them, and saves only q, k and v.
    """
    time, window = q_BTHK.shape[1], pattern.window
    queries, keys = Queries(q_BTHK, pattern.segments_BT), Keys(k_BTNK, v_BTNK, pattern.segments_BT)
    if window is not None:
        chunk = min(chunk, window)
        if 2 * (block := -(-window // chunk) * chunk) < time:
            return _attend_blocks(queries, keys, pattern, block, chunk)
    if time <= chunk:
        return attend(queries, keys.by_head(), pattern, 0)
    return _attend_groups(queries, keys, pattern, chunk)


def _attend_blocks(queries: Queries, keys: Keys, pattern: Pattern, block: int, chunk: int) -> Array:
    """Attention within a window of at most `block` positions.  Every block of queries is a row of the batch, with the
    keys of its own block and of the one before it."""
    batch, time, heads, head_dim = queries.q_BTHK.shape
    blocks = -(-time // block)
    if queries.segments_BT is None:
        segments_BT = jnp.zeros((batch, time), jnp.int32)
        queries, keys = queries._replace(segments_BT=segments_BT), keys._replace(segments_BS=segments_BT)

    def folded(x_BT: Array, before: int, filling: int = 0) -> Array:
        beyond = [(0, 0), (before * block, blocks * block - time), *[(0, 0)] * (x_BT.ndim - 2)]
        padded = jnp.pad(x_BT, beyond, constant_values=filling)
        return padded.reshape(batch, before + blocks, block, *x_BT.shape[2:])

    def with_previous(x_BS: Array, filling: int = 0) -> Array:
        x_BCS = folded(x_BS, 1, filling)
        return jnp.concatenate([x_BCS[:, :-1], x_BCS[:, 1:]], axis=2).reshape(
            batch * blocks, 2 * block, *x_BS.shape[2:]
        )

    @jax.checkpoint
    def attend_all(queries: Queries, keys: Keys) -> Array:
        rows = jax.tree.map(lambda x: folded(x, 0).reshape(batch * blocks, block, *x.shape[2:]), queries)
        before_the_first = -1  # a segment that no query has
        k, v, segments = keys
        keys = Keys(with_previous(k), with_previous(v), with_previous(segments, before_the_first))
        return _attend_groups(rows, keys, pattern, chunk)

    mixed_BTHK = attend_all(queries, keys).reshape(batch, blocks * block, heads, head_dim)
    return mixed_BTHK[:, :time]


def _attend_groups(queries: Queries, keys: Keys, pattern: Pattern, chunk: int) -> Array:
    """Attention of the queries, which have the last positions of the keys."""
    time, before = queries.q_BTHK.shape[1], keys.k_BSNK.shape[1] - queries.q_BTHK.shape[1]
    per_group = -(-time // chunk // MAX_KEY_LENGTHS) * chunk
    ends = [min(start + per_group, time) for start in range(0, time, per_group)]
    groups = zip(_split(queries, ends[:-1]), ends, strict=True)
    mixed = [_attend_group(group, keys, pattern, before + end, chunk) for group, end in groups]
    return jnp.concatenate(mixed, axis=1)


def attend_from(
    queries: Queries, keys: Keys, pattern: Pattern, first: Int[Array, ""] | int, chunk: int
) -> Float[Array, "B T H K"]:
    """Attention of T queries, from position `first` on, to the keys of positions 0 to S - 1, `chunk` queries at a time.

    All S keys take part in the work, those that the mask excludes, too; with a window at most window + chunk of them.
    """
    return _attend_chunks(queries, keys, pattern, None, first, chunk)


def _attend_group(queries: Queries, keys: Keys, pattern: Pattern, end: int, chunk: int) -> Array:
    """Attention of the queries of the positions up to `end`, a chunk at a time."""
    start = end - queries.q_BTHK.shape[1]
    oldest = 0 if pattern.window is None else max(0, start - pattern.window + 1)
    return _attend_chunks(queries, keys, pattern, (oldest, end), start, chunk)


def _attend_chunks(
    queries: Queries,
    keys: Keys,
    pattern: Pattern,
    span: tuple[int, int] | None,
    start: Int[Array, ""] | int,
    chunk: int,
) -> Array:
    """Attention of the queries from position `start` on to the keys between the two positions of `span`; without one,
    to all of them, with a window to those that a chunk can see."""
    time = queries.q_BTHK.shape[1]
    whole, rest = divmod(time, chunk)

    @jax.checkpoint
    def attend_chunk(queries: Queries, keys: Keys, first: Int[Array, ""] | int) -> Array:
        # keys are sliced here, so that they are saved whole, once, and not as a part for each group
        if span is None:
            oldest, seen = keys.within(pattern.window, first, queries.q_BTHK.shape[1])
        else:
            oldest, seen = span[0], keys.between(*span)
        return attend(queries, seen.by_head(), pattern, first - oldest)

    if time <= chunk:
        return attend_chunk(queries, keys, start)
    in_loop, *last = _split(queries, [whole * chunk])
    firsts = start + chunk * jnp.arange(whole)
    mixed_BTHK = map_chunks(lambda queries, first: attend_chunk(queries, keys, first), in_loop, firsts)
    if not rest:
        return mixed_BTHK
    return jnp.concatenate([mixed_BTHK, attend_chunk(*last, keys, start + whole * chunk)], axis=1)


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
def attend(queries: Queries, keys: Keys, pattern: Pattern, first: Int[Array, ""] | int) -> Float[Array, "B T H K"]:
    """Exact softmax attention of T queries, from position `first` on, to the keys of positions 0 to S - 1, by head.

    Each pair of batch and key/value head is one batch entry of the matrix products; its G query heads are more rows.
    The segments are those of `queries` and `keys`.
    """
    q_BTHK, (k_BNSK, v_BNSK) = queries.q_BTHK, keys[:2]
    (batch, time, heads, head_dim), groups = q_BTHK.shape, k_BNSK.shape[1]
    shared, wide = heads // groups, jnp.promote_types(q_BTHK.dtype, jnp.float32)
    q = q_BTHK.reshape(batch, time, groups, shared, head_dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(batch, groups, shared * time, head_dim)
    scale = head_dim**-0.5 if pattern.scale is None else pattern.scale
    scores = jnp.einsum("bnrk,bnsk->bnrs", q, k_BNSK, preferred_element_type=wide) * scale
    if pattern.softcap is not None:
        scores = pattern.softcap * jnp.tanh(scores / pattern.softcap)
    bias_NRS = _bias(pattern, shared, _positions(first, time), k_BNSK.shape[2], wide)
    weights = _softmax(_within_segments(scores + bias_NRS[None], queries, keys), pattern.sinks_H)
    mixed = jnp.einsum("bnrs,bnsk->bnrk", weights.astype(v_BNSK.dtype), v_BNSK)
    mixed = mixed.reshape(batch, groups, shared, time, head_dim)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, time, heads, head_dim)


def _softmax(scores_BNRS: Float[Array, "B N R S"], sinks_H: Float[Array, " H"] | None) -> Float[Array, "B N R S"]:
    """exp(score) / (sum over S of exp(score) + exp(sink of the head)).  Xiao et al. 2023, "Efficient Streaming Language
    Models with Attention Sinks", section 3.3, https://arxiv.org/abs/2309.17453"""
    if sinks_H is None:
        return jax.nn.softmax(scores_BNRS, axis=-1)
    _, groups, rows, _ = scores_BNRS.shape
    sinks_NR = jnp.repeat(sinks_H.astype(scores_BNRS.dtype), groups * rows // len(sinks_H)).reshape(groups, rows)
    log_sums_BNR = jnp.logaddexp(jax.nn.logsumexp(scores_BNRS, axis=-1), sinks_NR[None])
    return jnp.exp(scores_BNRS - log_sums_BNR[..., None])


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
    pattern: Pattern, shared: int, query_T: Int[Array, " T"], keys: int, dtype: DTypeLike
) -> Float[Array, "N R S"]:
    """What is added to the scores [N or 1, G x T, S]: the head's slope x (s - t), and nearly -inf for later keys and
    for those before the window."""
    past_TS = jnp.arange(keys)[None, :] - query_T[:, None]
    slopes_H = jnp.zeros(shared, dtype) if pattern.slopes_H is None else pattern.slopes_H.astype(dtype)
    bias_HTS = slopes_H[:, None, None] * past_TS.astype(dtype)[None]
    seen_TS = past_TS <= 0 if pattern.window is None else (past_TS <= 0) & (past_TS > -pattern.window)
    bias_HTS = jnp.where(seen_TS[None], bias_HTS, jnp.finfo(dtype).min)
    return bias_HTS.reshape(-1, shared * query_T.shape[0], keys)
