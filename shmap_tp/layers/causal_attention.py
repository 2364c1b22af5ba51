"""Causal attention in XLA's own operations, a chunk of queries at a time.  No communication.

B batch, T time (queries), S time (keys), H query heads, N key/value heads, K head dim, G = H / N; all of this device.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

MAX_KEY_LENGTHS = 4
"""Groups of chunks in `causal_attention`: different numbers of keys that its queries are computed with."""


def causal_attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BTNK: Float[Array, "B T N K"],
    v_BTNK: Float[Array, "B T N K"],
    slopes_H: Float[Array, " H"] | None,
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
    if time <= chunk:
        return _attend(q_BTHK, k_BTNK, v_BTNK, slopes_H, 0)
    per_group = -(-time // chunk // MAX_KEY_LENGTHS) * chunk
    ends = [min(start + per_group, time) for start in range(0, time, per_group)]
    q_groups = jnp.split(q_BTHK, ends[:-1], axis=1)
    return jnp.concatenate(
        [_attend_group(q, k_BTNK, v_BTNK, slopes_H, end, chunk) for q, end in zip(q_groups, ends, strict=True)], axis=1
    )


def _attend_group(
    q_BTHK: Array, k_BTNK: Array, v_BTNK: Array, slopes_H: Array | None, end: int, chunk: int
) -> Float[Array, "B T H K"]:
    """Attention of the queries of the positions up to `end`, a chunk at a time."""

    @jax.checkpoint
    def attend(q: Array, k: Array, v: Array, first: Int[Array, ""] | int) -> Array:
        # k and v are sliced here, so that they are saved whole, once, and not as a prefix for each group
        return _attend(q, k[:, :end], v[:, :end], slopes_H, first)

    batch, time, heads, head_dim = q_BTHK.shape
    start, (whole, rest) = end - time, divmod(time, chunk)
    if time <= chunk:
        return attend(q_BTHK, k_BTNK, v_BTNK, start)
    q_loop, q_rest = jnp.split(q_BTHK, [whole * chunk], axis=1)
    q_CBTHK = jnp.moveaxis(q_loop.reshape(batch, whole, chunk, heads, head_dim), 1, 0)
    firsts = start + chunk * jnp.arange(whole)
    mixed_CBTHK = lax.map(lambda each: attend(each[0], k_BTNK, v_BTNK, each[1]), (q_CBTHK, firsts))
    mixed_BTHK = jnp.moveaxis(mixed_CBTHK, 0, 1).reshape(q_loop.shape)
    if not rest:
        return mixed_BTHK
    return jnp.concatenate([mixed_BTHK, attend(q_rest, k_BTNK, v_BTNK, end - rest)], axis=1)


@jax.named_scope("attend")
def _attend(
    q_BTHK: Float[Array, "B T H K"],
    k_BSNK: Float[Array, "B S N K"],
    v_BSNK: Float[Array, "B S N K"],
    slopes_H: Float[Array, " H"] | None,
    first: Int[Array, ""] | int,
) -> Float[Array, "B T H K"]:
    """Exact softmax attention of T queries, from position `first` on, to the keys of positions 0 to S - 1.

    Each pair of batch and key/value head is one batch entry of the matrix products; its G query heads are more rows.
    """
    (batch, time, heads, head_dim), (_, keys, groups, _) = q_BTHK.shape, k_BSNK.shape
    shared, wide = heads // groups, jnp.promote_types(q_BTHK.dtype, jnp.float32)
    q = q_BTHK.reshape(batch, time, groups, shared, head_dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(batch, groups, shared * time, head_dim)
    k, v = k_BSNK.transpose(0, 2, 1, 3), v_BSNK.transpose(0, 2, 1, 3)
    scores = jnp.einsum("bnrk,bnsk->bnrs", q, k, preferred_element_type=wide) * head_dim**-0.5
    weights = jax.nn.softmax(scores + _bias(slopes_H, shared, _positions(first, time), keys, wide)[None], axis=-1)
    mixed = jnp.einsum("bnrs,bnsk->bnrk", weights.astype(v.dtype), v)
    mixed = mixed.reshape(batch, groups, shared, time, head_dim)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, time, heads, head_dim)


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
