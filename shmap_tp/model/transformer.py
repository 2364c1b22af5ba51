"""The model: embedding, a scan over stacked blocks, the final norm; what comes of it the loss scores (`loss`).

B batch, T time, D model width, V vocabulary rows, L layers.  V/mp: dim V cut along mp.  {+mp}: a sum over mp still
owed.

A block goes into the parallel region after a norm, through the columns of its layers, and out of it before the residual
sum, through their rows:

    parallel     x + out_of(attention(into(norm(x))) + mlp(into(norm(x))))            one region, one `into`
    sequential   x + out_of(attention(into(norm(x)))), then the same with the MLP     two

What the residual stream is between regions, and what travels, says the wire that is handed down (`collectives`).
Forward and backward, a region costs

    AllReduce          x[B T D]       out_of: an all-reduce                           into: an all-reduce
    SequenceParallel   x[B T/mp D]    into: an all-gather, out_of: a reduce-scatter   the same, the other way around
    Ring               x[B T/mp D]    each: mp - 1 ppermutes of a part                the same

where an all-reduce is as much as the two others together, and so are 2 (mp - 1) ppermutes.
"""

from typing import Any

import equinox as eqx
import jax
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from shmap_tp.config.schema import ModelConfig, Positions, Remat, SavedActivation, padded_vocabulary
from shmap_tp.layers.attention import AnyAttention
from shmap_tp.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from shmap_tp.layers.norm import LayerNorm, RMSNorm
from shmap_tp.layers.positions import Alibi, AnyPositions, Learned, Rotary
from shmap_tp.model.blocks import BLOCKS, NORMS, ParallelBlock, SequentialBlock
from shmap_tp.model.offloaded_scan import Closing, Layers, through
from shmap_tp.model.remat import checkpointed
from shmap_tp.parallel.fsdp import are_gathered, is_ring_reduced, use, without_ring
from shmap_tp.parallel.modes import TensorParallel
from shmap_tp.parallel.partitioning import stacked


class Transformer(eqx.Module):
    """What the next token at every position is scored by, with the weight of `scored_by`.

    Wire    the embedding leaves, the blocks go in and out, the head enters; each x[B T D].  With Ring the blocks do so
            around the ring, embedding and head as with SequenceParallel: no product of theirs stands there.

    What a policy keeps says `remat`.  What is entered is entered again by the backward pass: with AllReduce that moves
    nothing, with the others it is the all-gather or its ring, for each region once more; kept, it would take mp times
    the memory of what it was gathered from.
    What a region left with is owed again only with `full` in a sequential block: the attention's, which the second norm
    reads.
    With `remat: none` JAX keeps all that the gradients read, what was gathered over mp included.
    """

    embedding: VocabParallelEmbedding
    positions: AnyPositions
    blocks: ParallelBlock | SequentialBlock = stacked()
    norm: LayerNorm | RMSNorm
    head: VocabParallelHead | None
    remat: Remat = eqx.field(static=True)
    offload: tuple[SavedActivation, ...] = eqx.field(static=True)

    def __init__(self, config: ModelConfig, attend: AnyAttention, *, key: PRNGKeyArray):
        key_embedding, key_positions, key_blocks, key_head = jax.random.split(key, 4)
        table = (config.vocabulary, padded_vocabulary(config), config.width)
        self.embedding = VocabParallelEmbedding(*table, std=config.init_std, key=key_embedding)
        self.positions = _positions(config, key_positions)
        block = BLOCKS[config.block]
        keys = jax.random.split(key_blocks, config.layers)
        self.blocks = eqx.filter_vmap(lambda key: block(config, attend, key=key))(keys)
        self.norm = NORMS[config.norm](config.width)
        self.head = None if config.tie_embeddings else VocabParallelHead(*table, std=config.init_std, key=key_head)
        self.remat, self.offload = config.remat, tuple(config.offload)

    def scored_by(
        self, h_BTD: Float[Array, "B T D"], dtype: DTypeLike, placements: Any
    ) -> tuple[Float[Array, "B T D"], Float[Array, "V D"]]:
        """(h, w[V/mp D]) of logits = h @ w': the head's own, or the embedding's where the two are tied."""
        owner, table = (placements.embedding, self.embedding) if self.head is None else (placements.head, self.head)
        h_BTD, table = _back_together(h_BTD, table) if are_gathered(owner) else (h_BTD, _apart(table))
        return h_BTD, use(owner, table, dtype).weight

    def __call__(
        self, ids_BT: Int[Array, "B T"], dtype: DTypeLike, wire: TensorParallel, placements: Any
    ) -> Float[Array, "B T D"]:
        """ids[B T] -> h[B T D] that the head is to score, entered; computed in `dtype`.  `owners` is a tree like this
        one (`zero`)."""
        with jax.named_scope("embedding"):
            positions = use(placements.positions, self.positions, dtype)
            embedding = use(placements.embedding, _apart(self.embedding), dtype)
            x_BTD = positions.at_input(wire.leave(embedding(ids_BT, dtype)), wire)

        def layer(x_BTD: Array, block: ParallelBlock | SequentialBlock) -> tuple[Array, None]:
            return use(placements.blocks, block, dtype)(x_BTD, positions, wire), None

        def last(x_BTD: Array, block: ParallelBlock | SequentialBlock) -> tuple[Array, None]:
            return use(without_ring(placements.blocks), block, dtype)(x_BTD, positions, wire, copied=False), None

        kept = layer
        if self.remat != Remat.none or are_gathered(placements.blocks):
            kept = checkpointed(layer, self.remat, self.offload)
        down = _down(placements.blocks)
        with jax.named_scope("blocks"):
            if self.offload and is_ring_reduced(down) and len(jax.tree.leaves(self.blocks)[0]) > 1:
                layers = Layers(
                    kept, checkpointed(last, self.remat, ()), Closing(_down, lambda w: down.whole(w, dtype))
                )
                x_BTD = through(layers, x_BTD, self.blocks)
            else:
                x_BTD, _ = lax.scan(kept, x_BTD, self.blocks)
        with jax.named_scope("head"):
            return wire.enter(self.norm(x_BTD))


def _down(block: Any) -> Any:
    """The last weight of a block, or what stands in its place: the first that its backward pass reads."""
    return block.mlp.down.weight


@jax.custom_vjp
def _back_together(h_BTD: Float[Array, "B T D"], table: Any) -> tuple[Float[Array, "B T D"], Any]:
    """Both as they are.  This custom gradient stands for no collective's; it says only when: dh goes on to the blocks
    when the gradient of the table is home, where dp shares it.  Left free, XLA sends that home last, and holds all of
    it, in float32, through the backward pass of all blocks (6B on v4-32: 24.6 GiB instead of 25.4)."""
    return h_BTD, table


_back_together.defvjp(lambda h_BTD, table: ((h_BTD, table), None), lambda _, back: lax.optimization_barrier(back))


def _apart(module: Any) -> Any:
    """`module`, its gradient apart from the total that it is added to: XLA for TPU fails on an all-reduce that a loop
    adds up directly (libtpu 0.0.42, RET_CHECK in while_loop_all_reduce_code_motion).  The dim around the barrier is for
    jax 0.12, which adds no barrier's gradient to a total."""

    def apart(w: Array) -> Array:
        return lax.squeeze(lax.optimization_barrier(lax.expand_dims(w, (0,))), (0,))

    return jax.tree.map(apart, module)


def _positions(config: ModelConfig, key: PRNGKeyArray) -> AnyPositions:
    match config.positions:
        case Positions.alibi:
            return Alibi(config.heads)
        case Positions.rotary:
            return Rotary(10_000.0)
        case Positions.learned:
            return Learned(config.context, config.width, std=config.init_std, key=key)
