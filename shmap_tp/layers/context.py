"""What reaches every block and its attention beside the residual stream, and what a block returns beside it.

B batch, T time, H query heads, N key/value heads, K head dim.

Something else that tokens carry is a field of `Context`; something else that a block has to hand on is one of `Extras`.
A block that needs neither ignores the one and returns `Extras()`.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
from jaxtyping import Array, Bool, Float, Int

from shmap_tp.layers.causal_attention import PLAIN, Pattern
from shmap_tp.layers.grouped_matmul import GroupedMatmul, ragged_dot
from shmap_tp.layers.positions import PositionEncoding
from shmap_tp.layers.xla_workarounds import row_major
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
    """The same for all blocks, but for the cache, of which each has its own, and what `model.layer_pattern` says."""

    tp: TensorParallel
    encoding: PositionEncoding
    positions: Int[Array, "B T"] | None = None
    """The position of each token in its sequence; None: 0 to T - 1 in every row."""
    segments: Int[Array, "B row"] | None = None
    """The document of each token: a token attends to earlier ones of its own.  Segments are those of whole rows, in
    order, also where the rest is split along time.  None: every row is one document."""
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
        """By name, of the sums over a step of so many tokens; the arrays are stacked over layers."""
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
