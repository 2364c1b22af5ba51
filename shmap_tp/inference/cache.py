"""The key/value cache: what attention keeps of the tokens that were seen, so that a new token costs one position.

L layers, B sequences, N key/value heads, S slots, T new tokens, H query heads, K head dim.  B/dp, N/mp, H/mp: sharded
over that axis.  Where mp exceeds the key/value heads of the model, every device has the one head that its query heads
share, and N counts these copies.

The sequences of a batch have their last tokens in the same slot: a shorter prompt is padded on its left.  The position
of slot s in sequence b is s - start[b]; slots before start[b] are never attended to.  So every sequence writes to the
same slots, whatever its length.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from shmap_tp.config.schema import ModelConfig
from shmap_tp.layers.positions import PositionEncoding
from shmap_tp.parallel.collectives import mark_varying
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.parallel.tensor_parallel import TensorParallel

QUERY_CHUNK = 256
"""Queries whose scores exist at a time while a prompt is read."""


class KeyValueCache(NamedTuple):
    """Keys and values of all layers.  The new tokens of a call are written at slot `filled`, which advances."""

    keys: Float[Array, "L B N S K"]
    """Rotated, where the position encoding rotates them."""
    values: Float[Array, "L B N S K"]
    start_B: Int[Array, " B"]
    """The first slot of each sequence."""
    filled: Int[Array, ""]
    """Number of slots that are written."""

    def add_to_input(
        self, encoding: PositionEncoding, x_BTD: Float[Array, "B T D"], tp: TensorParallel
    ) -> Float[Array, "B T D"]:
        """x of T new tokens, with what the encoding adds at their positions."""
        add = jax.vmap(lambda x_TD, position_T: encoding.add_to_input(x_TD[None], tp, position_T)[0])
        return add(x_BTD, _positions(self.start_B, self.filled, x_BTD.shape[1]))

    def scan(self, layer: Any, x_BTD: Float[Array, "B T D"], blocks: Any) -> tuple[Array, "KeyValueCache"]:
        """(x after all `blocks`, the cache with the new tokens); `layer(x, block, cache)` returns (x, cache).

        The cache is carried whole and updated in place: as an input and output of the scan it would be copied.
        """

        def body(carry: tuple[Array, Array, Array], each: tuple[Any, Array]) -> tuple[tuple, None]:
            (x_BTD, keys, values), (block, index) = carry, each
            x_BTD, cache = layer(x_BTD, block, LayerCache(keys, values, self.start_B, self.filled, index))
            return (x_BTD, cache.keys, cache.values), None

        each = (blocks, jnp.arange(self.keys.shape[0]))
        (y_BTD, keys, values), _ = lax.scan(body, (x_BTD, self.keys, self.values), each)
        return y_BTD, KeyValueCache(keys, values, self.start_B, self.filled + x_BTD.shape[1])


class LayerCache(eqx.Module):
    """The cache as the attention of one layer sees it."""

    keys: Float[Array, "L B N S K"]
    values: Float[Array, "L B N S K"]
    start_B: Int[Array, " B"]
    filled: Int[Array, ""]
    layer: Int[Array, ""]

    def attend(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BTNK: Float[Array, "B T N K"],
        v_BTNK: Float[Array, "B T N K"],
        encoding: PositionEncoding,
    ) -> tuple[Float[Array, "B T H K"], "LayerCache"]:
        """(attention of T new tokens to all tokens so far, the cache with their keys and values)."""
        position_BT = _positions(self.start_B, self.filled, q_BTHK.shape[1])
        rotate = jax.vmap(lambda x_THK, position_T: encoding.rotate(x_THK[None], position_T)[0])
        keys = self._write(self.keys, rotate(k_BTNK, position_BT))
        values = self._write(self.values, v_BTNK)
        k_BNSK, v_BNSK = (lax.dynamic_index_in_dim(x, self.layer, keepdims=False) for x in (keys, values))
        mixed_BTHK = _attend_in_chunks(
            rotate(q_BTHK, position_BT), k_BNSK, v_BNSK, self.start_B, self.filled, encoding.slopes()
        )
        return mixed_BTHK, LayerCache(keys, values, self.start_B, self.filled, self.layer)

    def _write(self, cache: Float[Array, "L B N S K"], new_BTNK: Float[Array, "B T N K"]) -> Array:
        new = new_BTNK.transpose(0, 2, 1, 3)[None].astype(cache.dtype)
        return lax.dynamic_update_slice(cache, new, (self.layer, 0, 0, self.filled, 0))


def cache_specs() -> KeyValueCache:
    """PartitionSpecs of the fields."""
    heads = P(None, DP, MP, None, None)
    return KeyValueCache(heads, heads, P(DP), P())


def empty_cache(model: ModelConfig, start_B: Int[Array, " B"], slots: int, dtype: DTypeLike) -> KeyValueCache:
    """A cache without tokens, of this device's shapes, inside shard_map."""
    heads = max(model.kv_heads // lax.axis_size(MP), 1)
    zeros = jnp.zeros((model.layers, start_B.shape[0], heads, slots, model.head_dim), dtype)
    zeros = mark_varying(mark_varying(zeros, DP), MP)
    return KeyValueCache(zeros, zeros, start_B, jnp.zeros((), jnp.int32))


def cache_bytes(model: ModelConfig, dp: int, mp: int, batch: int, slots: int, dtype: DTypeLike) -> int:
    """Bytes of keys and values on one device: 2 L B/dp N/mp S K values."""
    heads = max(model.kv_heads // mp, 1)
    return 2 * model.layers * (batch // dp) * heads * slots * model.head_dim * jnp.dtype(dtype).itemsize


def _positions(start_B: Int[Array, " B"], filled: Int[Array, ""], time: int) -> Int[Array, "B T"]:
    """Positions of the tokens in the next `time` slots; 0 for padding."""
    return jnp.maximum(filled + jnp.arange(time)[None] - start_B[:, None], 0)


def _attend_in_chunks(
    q_BTHK: Float[Array, "B T H K"], k_BNSK: Array, v_BNSK: Array, start_B: Array, filled: Array, slopes_H: Array | None
) -> Float[Array, "B T H K"]:
    """`_attend`, QUERY_CHUNK queries at a time: the scores of all queries of a long prompt would not fit."""
    batch, time, heads, head_dim = q_BTHK.shape
    if time <= QUERY_CHUNK:
        return _attend(q_BTHK, k_BNSK, v_BNSK, start_B, filled, slopes_H)
    chunks = -(-time // QUERY_CHUNK)
    q = jnp.pad(q_BTHK, [(0, 0), (0, chunks * QUERY_CHUNK - time), (0, 0), (0, 0)])
    q_CBTHK = jnp.moveaxis(q.reshape(batch, chunks, QUERY_CHUNK, heads, head_dim), 1, 0)
    firsts = filled + QUERY_CHUNK * jnp.arange(chunks)
    mixed = lax.map(lambda each: _attend(each[0], k_BNSK, v_BNSK, start_B, each[1], slopes_H), (q_CBTHK, firsts))
    return jnp.moveaxis(mixed, 0, 1).reshape(q.shape)[:, :time]


@jax.named_scope("attend")
def _attend(
    q_BTHK: Float[Array, "B T H K"],
    k_BNSK: Float[Array, "B N S K"],
    v_BNSK: Float[Array, "B N S K"],
    start_B: Int[Array, " B"],
    first: Int[Array, ""],
    slopes_H: Float[Array, " H"] | None,
) -> Float[Array, "B T H K"]:
    """Exact softmax attention of the T queries from slot `first` on, in float32 (or wider).

    Each pair of sequence and key/value head is one batch entry of the matrix products; its G query heads are more rows.
    """
    (batch, time, heads, head_dim), (_, groups, slots, _) = q_BTHK.shape, k_BNSK.shape
    shared, wide = heads // groups, jnp.promote_types(q_BTHK.dtype, jnp.float32)
    q = q_BTHK.reshape(batch, time, groups, shared, head_dim).transpose(0, 2, 3, 1, 4)
    scores = jnp.einsum("bngtk,bnsk->bngts", q, k_BNSK, preferred_element_type=wide) * head_dim**-0.5
    past_TS = jnp.arange(slots)[None] - (first + jnp.arange(time))[:, None]
    if slopes_H is not None:
        slopes = slopes_H.astype(wide).reshape(1, groups, shared, 1, 1)
        scores = scores + slopes * past_TS.astype(wide)[None, None, None]
    scores = jnp.where(_attended(past_TS, start_B)[:, None, None], scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BNSK.dtype)
    mixed = jnp.einsum("bngts,bnsk->bngtk", weights, v_BNSK)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, time, heads, head_dim)


def _attended(past_TS: Int[Array, "T S"], start_B: Int[Array, " B"]) -> Bool[Array, "B T S"]:
    """Which slots each query attends to: those of its own sequence up to its own."""
    slot_S = jnp.arange(past_TS.shape[1])
    return (past_TS <= 0)[None] & (slot_S[None, None] >= start_B[:, None, None])
