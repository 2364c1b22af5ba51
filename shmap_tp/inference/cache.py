"""The key/value cache: what attention keeps of the tokens that were seen, so that a new token costs one position.

L layers, B sequences, N key/value heads, S slots, T new tokens, H query heads, K head dim.  B/dp, N/mp, H/mp: sharded
over that axis.  Where mp exceeds the key/value heads of the model, every device has the one head that its query heads
share, and N counts these copies.

The sequences of a batch have their last tokens in the same slot: a shorter prompt is padded on its left.  The position
of slot s in sequence b is s - start[b]; padding, the slots before start[b], is attended to by padding alone.  So every
sequence writes to the same slots, whatever its length.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from shmap_tp.config.schema import ModelConfig
from shmap_tp.layers.causal_attention import Keys, Pattern, Queries, attend, map_chunks
from shmap_tp.model.layer_pattern import scan_layers
from shmap_tp.parallel.collectives import mark_varying
from shmap_tp.parallel.mesh import MP, token_axes

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

    def positions(self, time: int) -> Int[Array, "B T"]:
        """The positions of the tokens in the next `time` slots; 0 for padding."""
        return jnp.maximum(self.filled + jnp.arange(time)[None] - self.start_B[:, None], 0)

    def scan(
        self, layers: Sequence[Callable[..., tuple]], x_BTD: Float[Array, "B T D"], blocks: Any
    ) -> tuple[Array, "KeyValueCache"]:
        """(x after all `blocks`, the cache with the new tokens); each of the period's `layers(x, block, cache)` returns
        (x, cache).

        The cache is carried whole and updated in place: as an input and output of the scan it would be copied.
        """

        def body(layer: Any, carry: tuple[Array, Array, Array], each: tuple[Any, Array]) -> tuple[tuple, None]:
            (x_BTD, keys, values), (block, index) = carry, each
            x_BTD, cache = layer(x_BTD, block, LayerCache(keys, values, self.start_B, self.filled, index))
            return (x_BTD, cache.keys, cache.values), None

        each = (blocks, jnp.arange(self.keys.shape[0]))
        bodies = [partial(body, layer) for layer in layers]
        (y_BTD, keys, values), _ = scan_layers(bodies, (x_BTD, self.keys, self.values), each)
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
        pattern: Pattern,
    ) -> tuple[Float[Array, "B T H K"], "LayerCache"]:
        """(attention of T new tokens to all tokens so far, the cache with their keys and values)."""
        keys, values = self._write(self.keys, k_BTNK), self._write(self.values, v_BTNK)
        k_BNSK, v_BNSK = (lax.dynamic_index_in_dim(x, self.layer, keepdims=False) for x in (keys, values))
        queries = Queries(q_BTHK, self._segments(self.filled + jnp.arange(q_BTHK.shape[1])))
        written = Keys(k_BNSK, v_BNSK, self._segments(jnp.arange(k_BNSK.shape[2])))
        mixed_BTHK = _attend_in_chunks(queries, written, pattern, self.filled)
        return mixed_BTHK, LayerCache(keys, values, self.start_B, self.filled, self.layer)

    def _segments(self, slot_S: Int[Array, " S"]) -> Int[Array, "B S"]:
        """1 for slots of a sequence, 0 for those before it: what is padding is attended to by padding alone."""
        return (slot_S[None] >= self.start_B[:, None]).astype(jnp.int32)

    def _write(self, cache: Float[Array, "L B N S K"], new_BTNK: Float[Array, "B T N K"]) -> Array:
        new = new_BTNK.transpose(0, 2, 1, 3)[None].astype(cache.dtype)
        return lax.dynamic_update_slice(cache, new, (self.layer, 0, 0, self.filled, 0))


def cache_specs(batch: tuple[str, ...]) -> KeyValueCache:
    """PartitionSpecs of the fields; `batch` are the axes whose ranks hold different sequences."""
    heads = P(None, batch, MP, None, None)
    return KeyValueCache(heads, heads, P(batch), P())


def empty_cache(model: ModelConfig, start_B: Int[Array, " B"], slots: int, dtype: DTypeLike) -> KeyValueCache:
    """A cache without tokens, of this device's shapes, inside shard_map."""
    heads = max(model.kv_heads // lax.axis_size(MP), 1)
    zeros = jnp.zeros((model.layers, start_B.shape[0], heads, slots, model.head_dim), dtype)
    zeros = mark_varying(zeros, (*token_axes(), MP))
    return KeyValueCache(zeros, zeros, start_B, jnp.zeros((), jnp.int32))


def cache_bytes(model: ModelConfig, dp: int, mp: int, batch: int, slots: int, dtype: DTypeLike) -> int:
    """Bytes of keys and values on one device: 2 L B/dp N/mp S K values."""
    heads = max(model.kv_heads // mp, 1)
    return 2 * model.layers * (batch // dp) * heads * slots * model.head_dim * jnp.dtype(dtype).itemsize


def _attend_in_chunks(
    queries: Queries, keys: Keys, pattern: Pattern, filled: Int[Array, ""]
) -> Float[Array, "B T H K"]:
    """`attend` of the queries from slot `filled` on, QUERY_CHUNK at a time: the scores of all queries of a long prompt
    would not fit."""
    time = queries.q_BTHK.shape[1]
    if time <= QUERY_CHUNK:
        return attend(queries, keys, pattern, filled)
    chunks = -(-time // QUERY_CHUNK)

    def padded(x_BT: Array) -> Array:
        return jnp.pad(x_BT, [(0, 0), (0, chunks * QUERY_CHUNK - time), *[(0, 0)] * (x_BT.ndim - 2)])

    firsts = filled + QUERY_CHUNK * jnp.arange(chunks)
    mixed = map_chunks(lambda q, first: attend(q, keys, pattern, first), jax.tree.map(padded, queries), firsts)
    return mixed[:, :time]
