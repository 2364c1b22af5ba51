"""The key/value cache: what attention keeps of the tokens that were seen, so that a new token costs one position.

L layers, B sequences, N key/value heads, S slots, T new tokens, H query heads, K head dim.  B/dp, N/mp, H/mp: sharded
over that axis.  Where mp exceeds the key/value heads of the model, every device has the one head that its query heads
share, and N counts these copies.

The sequences of a batch have their last tokens in the same slot: a shorter prompt is padded on its left.  The position
of slot s in sequence b is s - start[b]; padding, the slots before start[b], is attended to by padding alone.  So every
sequence writes to the same slots, whatever its length.

A layer with a window of W tokens has W slots at most: token number p of all that were written is in slot p % S, so a
new one takes the place of the oldest, which it does not see.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from shmap_tp.config.choices import PositionKind
from shmap_tp.config.schema import ModelConfig
from shmap_tp.layers.attention import AnyAttention, Chunked
from shmap_tp.layers.causal_attention import Keys, Pattern, Queries, attend
from shmap_tp.layers.flash_attention import BLOCKS
from shmap_tp.model.transformer import layer_options, scan_layers
from shmap_tp.parallel.mesh import MP

QUERY_CHUNK = 256
"""Queries whose scores exist at a time while a prompt is read without a kernel."""


class EmptyCache(eqx.Module):
    """A cache without tokens, which reads prompts: the model's attention computes them, with the padding before each
    as a document of its own."""

    start_B: Int[Array, " B"]
    """The first slot of each sequence."""
    slots_L: tuple[int, ...] = eqx.field(static=True)
    """The slots of each layer of the cache that it becomes (`layer_slots`)."""
    dtype: DTypeLike = eqx.field(static=True)
    unrolled: bool = eqx.field(static=True)
    """Whether that cache has an array for each layer; else all layers have as many slots."""

    def positions(self, time: int) -> Int[Array, "B T"]:
        """The positions of the tokens in the first `time` slots; 0 for padding."""
        return _positions(self.start_B, jnp.arange(time))

    def run_layers(
        self, layers: Sequence[Callable[..., tuple]], x_BTD: Float[Array, "B T D"], blocks: Any
    ) -> tuple[Array, "KeyValueCache"]:
        """(x after all `blocks`, the cache of its tokens); each of the period's `layers(x, block, cache)` returns
        (x, NewTokens)."""

        def body(layer: Any, x_BTD: Array, block: Any) -> tuple[Array, NewTokens]:
            return layer(x_BTD, block, _PromptLayer(self.start_B, self.dtype))

        y_BTD, stacked = scan_layers([partial(body, layer) for layer in layers], x_BTD, blocks)
        time = stacked.keys.shape[3]

        parts = [tuple(x_LBNTK) if self.unrolled else (x_LBNTK,) for x_LBNTK in stacked]
        keys, values = (tuple(map(_in_slots, part, self.slots_L[: len(part)])) for part in parts)
        return y_BTD, KeyValueCache(keys, values, self.start_B, jnp.asarray(time, jnp.int32))


class KeyValueCache(NamedTuple):
    """Keys and values of all layers.  The new tokens of a call are written at slot `filled`, which advances."""

    keys: tuple[Float[Array, "*L B N S K"], ...]
    """An array [B N S K] for each layer, or one of all layers; rotated, where the position encoding rotates them."""
    values: tuple[Float[Array, "*L B N S K"], ...]
    start_B: Int[Array, " B"]
    """The first slot of each sequence."""
    filled: Int[Array, ""]
    """Number of slots that are written."""

    def positions(self, time: int) -> Int[Array, "B T"]:
        """The positions of the tokens in the next `time` slots; 0 for padding."""
        return _positions(self.start_B, self.filled + jnp.arange(time))

    def run_layers(
        self, layers: Sequence[Callable[..., tuple]], x_BTD: Float[Array, "B T D"], blocks: Any
    ) -> tuple[Array, "KeyValueCache"]:
        """(x after all `blocks`, the cache with the new tokens); each of the period's `layers(x, block, cache)` returns
        (x, cache).

        With an array for each layer, the layers are unrolled, and `blocks` may be a tuple with the block of each layer:
        a scan would copy weights and cache of each layer out of stacked arrays, which on a TPU takes as long as the
        step itself, but compiles faster (docs/performance-notes.md).
        """
        stacked = self.keys[0].ndim == 5
        x_BTD, keys, values = (self._scan if stacked else self._unrolled)(layers, x_BTD, blocks)
        return x_BTD, KeyValueCache(keys, values, self.start_B, self.filled + x_BTD.shape[1])

    def _unrolled(self, layers: Sequence[Callable[..., tuple]], x_BTD: Array, blocks: Any) -> tuple:
        caches = []
        for number, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            is_stacked = not isinstance(blocks, tuple)
            block = jax.tree.map(lambda x, number=number: x[number], blocks) if is_stacked else blocks[number]
            before = LayerCache(keys, values, self.start_B, self.filled, None)
            x_BTD, after = layers[number % len(layers)](x_BTD, block, before)
            caches.append(after)
        return x_BTD, tuple(cache.keys for cache in caches), tuple(cache.values for cache in caches)

    def _scan(self, layers: Sequence[Callable[..., tuple]], x_BTD: Array, blocks: Any) -> tuple:
        """The cache is carried whole and updated in place: as an input and output of the scan it would be copied."""

        def body(layer: Any, carry: tuple[Array, Array, Array], each: tuple[Any, Array]) -> tuple[tuple, None]:
            (x_BTD, keys, values), (block, index) = carry, each
            x_BTD, cache = layer(x_BTD, block, LayerCache(keys, values, self.start_B, self.filled, index))
            return (x_BTD, cache.keys, cache.values), None

        (keys,), (values,) = self.keys, self.values
        bodies = [partial(body, layer) for layer in layers]
        (y_BTD, keys, values), _ = scan_layers(bodies, (x_BTD, keys, values), (blocks, jnp.arange(keys.shape[0])))
        return y_BTD, (keys,), (values,)


class LayerCache(eqx.Module):
    """The cache as the attention of one layer sees it."""

    keys: Float[Array, "*L B N S K"]
    values: Float[Array, "*L B N S K"]
    start_B: Int[Array, " B"]
    filled: Int[Array, ""]
    layer: Int[Array, ""] | None
    """Which layer of keys and values this is, where they are of all layers."""

    def attend(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BTNK: Float[Array, "B T N K"],
        v_BTNK: Float[Array, "B T N K"],
        pattern: Pattern,
        attention: AnyAttention,
    ) -> tuple[Float[Array, "B T H K"], "LayerCache"]:
        """(attention of T new tokens to all tokens so far, the cache with their keys and values).  T is small: the
        scores [B H T S] exist at once, and the kernel of `attention` is not used.  T is 1 where there is a window."""
        slots, slot = self.keys.shape[-2], self.filled
        number_S = jnp.arange(slots)  # of the token in each slot
        if pattern.window is not None and slots <= pattern.window:
            assert q_BTHK.shape[1] == 1, "the oldest token is overwritten, which the first of several would see"
            slot = self.filled % slots
            number_S = self.filled - (self.filled - number_S) % slots  # below 0 before the slot is written
            pattern = replace(pattern, window=None)
        keys, values = self._write(self.keys, k_BTNK, slot), self._write(self.values, v_BTNK, slot)
        queries = Queries(q_BTHK, _segments(self.start_B, self.filled + jnp.arange(q_BTHK.shape[1])))
        k_BNSK, v_BNSK = self._of_layer(keys), self._of_layer(values)
        mixed_BTHK = attend(queries, Keys(k_BNSK, v_BNSK, _segments(self.start_B, number_S)), pattern, self.filled)
        return mixed_BTHK, LayerCache(keys, values, self.start_B, self.filled, self.layer)

    def _of_layer(self, cache: Float[Array, "*L B N S K"]) -> Float[Array, "B N S K"]:
        return cache if self.layer is None else lax.dynamic_index_in_dim(cache, self.layer, keepdims=False)

    def _write(self, cache: Float[Array, "*L B N S K"], new_BTNK: Array, slot: Int[Array, ""]) -> Array:
        new = new_BTNK.transpose(0, 2, 1, 3).astype(cache.dtype)
        first = (0, 0, slot, 0)
        if self.layer is None:
            return lax.dynamic_update_slice(cache, new, first)
        return lax.dynamic_update_slice(cache, new[None], (self.layer, *first))


class NewTokens(NamedTuple):
    """Keys and values of one layer for the tokens of the prompts."""

    keys: Float[Array, "B N T K"]
    values: Float[Array, "B N T K"]


class _PromptLayer(eqx.Module):
    """`EmptyCache` as the attention of one layer sees it."""

    start_B: Int[Array, " B"]
    dtype: DTypeLike = eqx.field(static=True)

    def attend(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BTNK: Float[Array, "B T N K"],
        v_BTNK: Float[Array, "B T N K"],
        pattern: Pattern,
        attention: AnyAttention,
    ) -> tuple[Float[Array, "B T H K"], NewTokens]:
        """(attention of the prompt's tokens to one another, their keys and values)."""
        time = q_BTHK.shape[1]
        new = NewTokens(*(x.transpose(0, 2, 1, 3).astype(self.dtype) for x in (k_BTNK, v_BTNK)))
        beyond = -time % BLOCKS[-1]
        if isinstance(attention, Chunked) or "segments" not in attention.patterns:
            attention, beyond = Chunked(QUERY_CHUNK), 0
        segments_BT = _segments(self.start_B, jnp.arange(time + beyond))
        if pattern.window is not None and pattern.window >= time:
            pattern = replace(pattern, window=None)
        qkv = [jnp.pad(x, [(0, 0), (0, beyond), (0, 0), (0, 0)]) for x in (q_BTHK, k_BTNK, v_BTNK)]
        mixed_BTHK, _ = attention(*qkv, replace(pattern, segments_BT=segments_BT))
        return mixed_BTHK[:, :time], new


def _in_slots(x: Float[Array, "*L B N T K"], slots: int) -> Float[Array, "*L B N S K"]:
    """The tokens in their slots: all of them and free slots, or the last ones."""
    time = x.shape[-2]
    if time <= slots:
        return jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, slots - time), (0, 0)])
    return jnp.roll(x[..., time - slots :, :], time % slots, axis=-2)


def _positions(start_B: Int[Array, " B"], slot_T: Int[Array, " T"]) -> Int[Array, "B T"]:
    return jnp.maximum(slot_T[None] - start_B[:, None], 0)


def _segments(start_B: Int[Array, " B"], slot_S: Int[Array, " S"]) -> Int[Array, "B S"]:
    """1 for slots of a sequence, 0 for those before it: what is padding is attended to by padding alone."""
    return (slot_S[None] >= start_B[:, None]).astype(jnp.int32)


def cache_specs(batch: tuple[str, ...], unrolled: int) -> KeyValueCache:
    """PartitionSpecs of the fields; `batch` are the axes whose ranks hold different sequences, and `unrolled` is the
    number of layers with arrays of their own, 0 where they are stacked."""
    each = P(batch, MP, None, None)
    heads = (each,) * unrolled or (P(None, *each),)
    return KeyValueCache(heads, heads, P(batch), P())


def layer_slots(model: ModelConfig, slots: int) -> tuple[int, ...]:
    """Slots of each layer of a cache for `slots` tokens: no more than its window has.  (With ALiBi every layer has all
    slots, since the position of a key is its slot.)"""
    if model.positions == PositionKind.alibi:
        return (slots,) * model.layers
    of_period = [min(slots, options.pattern.window or slots) for options in layer_options(model)]
    return tuple(of_period[layer % len(of_period)] for layer in range(model.layers))


def cache_bytes(model: ModelConfig, dp: int, mp: int, batch: int, slots: int, dtype: DTypeLike) -> int:
    """Bytes of keys and values on one device: 2 B/dp N/mp K values for each slot of each layer."""
    heads = max(model.kv_heads // mp, 1)
    return 2 * sum(layer_slots(model, slots)) * (batch // dp) * heads * model.head_dim * jnp.dtype(dtype).itemsize
