"""What tokens carry: the context that reaches every block and its attention beside the residual stream, what a block
returns beside it, and the batch of a step.

A microbatches, B batch, T time, H query heads, N key/value heads, K head dim.

Something else that tokens carry is a field of `Context`; something else that a block has to hand on is one of `Extras`.
A block that needs neither ignores the one and returns `Extras()`.

In the tokens of a batch the sign says whether a token counts as a target:

    id >= 0     an input, and a target that counts
    -1 - id     the same input, but no target that counts: the token of a prompt, for example
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Int32

from shmap_tp.config.schema import ModelConfig
from shmap_tp.errors import UserError
from shmap_tp.layers.causal_attention import PLAIN, Pattern
from shmap_tp.layers.grouped_matmul import GroupedMatmul, ragged_dot
from shmap_tp.layers.positions import PositionEncoding
from shmap_tp.layers.xla_workarounds import row_major
from shmap_tp.parallel.context_parallel import own_chunks
from shmap_tp.parallel.mesh import Role, axes_of, batch_axes
from shmap_tp.parallel.tensor_parallel import TensorParallel

DeferredResiduals = tuple[Float[Array, "..."], ...]
"""q, k and v of this device in the dtype and layout of a kernel, three dims each, which the caller must pass to
`save_at_block_end`; or nothing."""


@runtime_checkable
class Cache(Protocol):
    """Keys and values of earlier tokens, which generation keeps for each layer (`inference/cache.py`)."""

    def attend(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BTNK: Float[Array, "B T N K"],
        v_BTNK: Float[Array, "B T N K"],
        pattern: Pattern,
        attention: Any,
    ) -> tuple[Float[Array, "B T H K"], Any]:
        """(attention of T new tokens to all tokens so far, the cache with them); q and k are rotated, and the pattern
        has no segments.  `attention` is how the model computes it without a cache, which prompts are read with."""
        ...


@dataclass(frozen=True)
class Context:
    """The same for all blocks, except that each has its own cache, and what `model.layer_pattern` says."""

    tp: TensorParallel
    encoding: PositionEncoding
    positions: Int[Array, "B T"] | None = None
    """The position of each token in its sequence; None: 0 to T - 1 in every row."""
    segments: Int[Array, "B row"] | None = None
    """The document of each token: a token attends to earlier tokens of its own document.  Segments cover whole rows,
    in order, also where the rest is split along time.  None: every row is one document."""
    is_token: Bool[Array, "B T"] | None = None
    """Whether each slot has a token, or is free space of its row, which experts leave out.  None: every slot has."""
    cache: Cache | None = None
    """Only in generation."""
    pattern: Pattern = PLAIN
    """What the attention of this layer computes; it adds slopes and segments itself."""
    grouped_matmul: GroupedMatmul = ragged_dot
    """How experts multiply their tokens."""
    row_major: bool = False
    """`model.row_major`; not in generation."""

    def stored(self, x: Array) -> Array:
        """x, an activation that a policy may save, in the layout in which it is to be saved."""
        return row_major(x) if self.row_major else x


@runtime_checkable
class Statistics(Protocol):
    """A pytree of arrays without gradients, which the step sums over devices and microbatches."""

    def metrics(self, tokens: int | Int[Array, ""]) -> dict[str, Float[Array, ""]]:
        """Metrics by name, made of the sums over a step of so many tokens; the arrays are stacked over layers."""
        ...


class Extras(eqx.Module):
    """What the caller of a block takes care of."""

    auxiliary_loss: Float[Array, ""] | None = None
    """A loss of this block, summed over the tokens for which this device computed it: all of its own, or T/mp positions
    of them where the mode of tensor parallelism shards time.  The objective adds the sum over blocks and devices,
    divided by the number of tokens of the step."""
    cache: Any = None
    """The cache with the new tokens, where the context had one: of this block, or where a model returns its extras, of
    all blocks."""
    residuals: DeferredResiduals = ()
    """What host offload saves at the end of the block."""
    statistics: Statistics | None = None
    """What metrics are made of; each device has a share of the sum over all.  Where a model returns its extras, stacked
    over blocks."""


# The batch of a step

Tokens = np.ndarray | Array | Sequence[Sequence[int]]
"""Token ids [batch, time]."""
Counted = np.ndarray | Array | Sequence[Sequence[bool]]
"""For each token of [batch, time], whether it counts as a target.  Either way it is an input: with False for the tokens
of a prompt, the model reads the prompt and learns only what follows it."""
Segments = np.ndarray | Array | Sequence[Sequence[int]]
"""For each token of [batch, time], the number of its document in the row."""
IGNORE = -1
"""Pads the end of a row: not counted, and as an input id 0, which nothing counted depends on."""


class Batch(NamedTuple):
    """What a model is trained on, a microbatch or several of them in a leading dim A."""

    inputs: Int[Array, "*A B T"]
    targets: Int[Array, "*A B T"]
    """Targets below zero do not count."""
    positions: Int[Array, "*A B T"] | None
    """None, where every device has whole rows: 0 to T - 1, or from the segments, where the encoding needs them."""
    segments: Int[Array, "*A B T"] | None = None
    """Segments cover whole rows, also where the rest is split along time.  None: each row is one document."""
    is_token: Bool[Array, "*A B T"] | None = None
    """Whether a slot has a token, or is free space of its row (`has_token`).  None: every slot has one."""
    sources: Int[Array, "*A B T"] | None = None
    """The number of the source of each row; None where losses are not wanted by source."""


def next_token_batch(
    tokens_ABT: Int[Array, "*A B T"],
    axes: Iterable[str],
    segments_ABT: Int[Array, "*A B T"] | None = None,
    end_of_text: int | None = None,
    sources_AB1: Int[Array, "*A B 1"] | None = None,
    *,
    free_space: bool = False,
) -> Batch:
    """tokens[A B T+1] -> the batch whose target at each position is the next token, on a mesh with these axes; with
    `free_space` it says which slots have a token.

    With segments[A B T+1], or with `end_of_text` those of `document_segments`, a target of another document than its
    input does not count: nothing that the model may see says what the next document is.
    The batch is made before anything is split along time (`of_this_device`), so that each position has its own target
    and position wherever it goes.
    """
    inputs, targets = input_ids(tokens_ABT[..., :-1]), tokens_ABT[..., 1:]
    if segments_ABT is None and end_of_text is not None:
        segments_ABT = document_segments(tokens_ABT, end_of_text)
    if segments_ABT is not None:
        same = segments_ABT[..., 1:] == segments_ABT[..., :-1]
        targets, segments_ABT = jnp.where(same | (targets < 0), targets, ~targets), segments_ABT[..., :-1]
    is_token = has_token(tokens_ABT, targets, segments_ABT) if free_space else None
    sources = None if sources_AB1 is None else jnp.broadcast_to(sources_AB1, inputs.shape)
    return Batch(inputs, targets, positions_of(inputs, axes, segments_ABT), segments_ABT, is_token, sources)


def has_token(
    tokens_ABT: Int[Array, "*A B row"], targets_ABT: Int[Array, "*A B T"], segments_ABT: Int[Array, "*A B T"] | None
) -> Bool[Array, "*A B T"]:
    """Whether each input of tokens[A B T+1] is a token of a document: not of the padding that ends a row, nor of a
    document without a target that counts, as those are that fill a packed row.  The segments ascend in each row."""
    last, counts = tokens_ABT.ndim - 1, targets_ABT >= 0
    is_padding = lax.cummin((tokens_ABT == IGNORE).astype(jnp.int32), last, reverse=True)[..., :-1] > 0
    segments_ABT = jnp.zeros_like(targets_ABT) if segments_ABT is None else segments_ABT
    before = lax.cummax(jnp.where(counts, segments_ABT, -1), last)
    after = lax.cummin(jnp.where(counts, segments_ABT, jnp.iinfo(jnp.int32).max), last, reverse=True)
    return ~is_padding & ((segments_ABT == before) | (segments_ABT == after))


def of_this_device(batch: Batch) -> Batch:
    """The positions of whole rows that this device computes, inside shard_map.  Communication: none."""
    return own_chunks(batch._replace(segments=None))._replace(segments=batch.segments)


def document_segments(tokens_ABT: Int[Array, "*A B T"], end_of_text: int) -> Int[Array, "*A B T"]:
    """The number of the document of each token in its row; `end_of_text` ends one, and belongs to it."""
    ends = (input_ids(tokens_ABT) == end_of_text).astype(jnp.int32)
    return jnp.cumsum(ends, axis=-1) - ends


def positions_within(segments_BT: Int[Array, "*B T"]) -> Int[Array, "*B T"]:
    """The position of each token in its segment, whose tokens stand together."""
    place = jnp.broadcast_to(jnp.arange(segments_BT.shape[-1]), segments_BT.shape)
    begins = jnp.diff(segments_BT, axis=-1, prepend=segments_BT[..., :1]) != 0
    return place - lax.cummax(jnp.where(begins, place, 0), axis=place.ndim - 1)


def positions_of(
    ids_ABT: Int[Array, "*A B T"], axes: Iterable[str], segments_ABT: Int[Array, "*A B T"] | None
) -> Int[Array, "*A B T"] | None:
    """The position of each token, in its segment where there are several, if the mesh has an axis that shards time;
    else None."""
    if not axes_of(Role.time, axes):
        return None
    if segments_ABT is not None:
        return positions_within(segments_ABT)
    return jnp.broadcast_to(jnp.arange(ids_ABT.shape[-1]), ids_ABT.shape)


def tokens_spec(axes: Iterable[str]) -> P:
    """The PartitionSpec of whole rows: of tokens[A B T+1] and the fields of a batch, on a mesh with these axes."""
    return P(None, batch_axes(axes), None)


def input_ids(tokens_BT: Int[Array, "*A B T"]) -> Int[Array, "*A B T"]:
    """The ids of a batch's tokens, of both signs."""
    return jnp.where(tokens_BT < 0, ~tokens_BT, tokens_BT)


def uncounted(tokens: Int[np.ndarray, "B T"], where: Bool[np.ndarray, "B T"]) -> Int[np.ndarray, "B T"]:
    """`tokens`, those selected by `where` marked as targets that do not count: id becomes -1 - id."""
    return np.where(where, ~tokens, tokens)


def rectangular(tokens: Tokens | Segments, name: str = "tokens") -> np.ndarray:
    """`tokens`, called `name` in messages, on the host.  Raises UserError if they are lists of different lengths."""
    try:
        return np.asarray(tokens)
    except ValueError:
        raise UserError(f"{name} must be integers [batch, time], but their rows have different lengths") from None


def checked_tokens(tokens: Tokens, model: ModelConfig, *, longest: int, least: int) -> Int32[np.ndarray, "B T"]:
    """`tokens` on the host.  Raises UserError unless they are `least` to vocabulary - 1, and no row is too long."""
    tokens, vocabulary = rectangular(tokens), model.vocabulary
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer) or 0 in tokens.shape:
        raise UserError(f"tokens must be integers [batch, time], not {tokens.dtype}{list(tokens.shape)}")
    if tokens.shape[1] > longest:
        raise UserError(
            f"tokens have {tokens.shape[1]} positions, and with model.context={model.context} there are at most "
            f"{longest}; cut them into shorter sequences"
        )
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < least or highest >= vocabulary:
        wrong = lowest if lowest < least else highest
        raise UserError(f"token id {wrong} is not in {least} to {vocabulary - 1} (model.vocabulary={vocabulary})")
    return tokens.astype(np.int32)


def checked_segments(segments: Segments, tokens: Int[np.ndarray, "B T"]) -> Int32[np.ndarray, "B T"]:
    """`segments` on the host, numbered 0, 1, 2, ... in each row, as the documents of files are.

    Raises UserError unless they are integers, one for each token, and the tokens of each document stand together."""
    segments = rectangular(segments, "segments")
    if segments.shape != tokens.shape or not np.issubdtype(segments.dtype, np.integer):
        raise UserError(
            f"segments must be integers {list(tokens.shape)}, one for each token, not "
            f"{segments.dtype}{list(segments.shape)}"
        )
    begins = segments != np.roll(segments, 1, axis=1)
    begins[:, 0] = True
    for row, numbers in enumerate(segments):
        if len(set(numbers[begins[row]].tolist())) != begins[row].sum():
            raise UserError(
                f"segments[{row}] returns to a number that it left: the tokens of a document must stand together; "
                f"number the documents of a row 0, 1, 2, ..."
            )
    return np.cumsum(begins, axis=1, dtype=np.int32) - 1


def with_free_space(
    segments: Int32[np.ndarray, "B T"] | None, marked: Int32[np.ndarray, "B T"], model: ModelConfig
) -> Int32[np.ndarray, "B T"] | None:
    """`segments`.  Where there are none, a program does not know of padding, which experts are to leave out: then the
    segments of rows that are one document each.  `marked` are tokens of `batch_tokens`."""
    is_padded = bool(model.experts) and bool((marked[:, -1] == IGNORE).any())
    return np.zeros_like(marked) if segments is None and is_padded else segments


def batch_tokens(tokens: Tokens, counted: Counted | None, model: ModelConfig) -> Int32[np.ndarray, "B T"]:
    """Sequences of at most T + 1 tokens as they stand in a batch: those that are not `counted` below zero.

    Raises UserError as `checked_tokens` does, if an id follows a -1, or if `counted` is not a bool for each token.
    """
    tokens = checked_tokens(tokens, model, longest=model.context + 1, least=IGNORE)
    padding = tokens == IGNORE
    if (inside := padding[:, :-1] & ~padding[:, 1:]).any():
        row, column = np.argwhere(inside)[0]
        raise UserError(
            f"tokens[{row}, {column}] is -1, but an id follows, and -1 only pads the end of a row;\n"
            f"to leave a target out of the loss, give its id, and counted=... with False there"
        )
    if counted is None:
        return tokens
    counted = np.asarray(counted)
    if counted.shape != tokens.shape or counted.dtype != bool:
        raise UserError(
            f"counted must be bool{list(tokens.shape)}, one for each token, not {counted.dtype}{list(counted.shape)}"
        )
    return uncounted(tokens, ~counted & ~padding)
