"""The model: embedding, a scan over stacked blocks, the final norm.  The loss projects its output to logits
(`loss.py`).

B batch, T time, D model width, V vocabulary rows, L layers.  V/mp: dim V sharded over mp.

    ids[B T]  --embedding, reduced over mp-->  x  --scale, + learned positions-->  x  --L blocks-->  x
              --norm, enter-->  h[B T D]

x is the residual stream, [B T D] or [B T/mp D] as the tensor-parallel mode says.  Around each part, and not inside it,
its FSDP weights are gathered (`fsdp.gather`).

Layers may differ as `model.layer_pattern` says.  P layers of a period:

    pattern [local, local, global], 7 layers:   (local, local, global), (local, local, global), local

Parameters are stacked over layers as without a pattern.  An iteration of the scan computes the layers of one period one
after the other, so each layer's attention is chosen when the program is traced, and the program is as long as a period,
whatever the number of layers.  The layers beyond the last whole period follow the scan.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from shmap_tp.config.choices import LayerKind, Remat, SavedActivation
from shmap_tp.config.schema import ModelConfig
from shmap_tp.config.values import padded_vocabulary
from shmap_tp.errors import UserError
from shmap_tp.layers.attention import AnyAttention
from shmap_tp.layers.causal_attention import Pattern
from shmap_tp.layers.context import Cache, Context, Extras, positions_within
from shmap_tp.layers.embedding import OutputProjection, VocabParallelEmbedding, VocabParallelHead
from shmap_tp.layers.grouped_matmul import GroupedMatmul, ragged_dot
from shmap_tp.layers.norm import LayerNorm, RMSNorm, make_norm
from shmap_tp.layers.positions import Alibi, Learned, NoPositions, Rotary, make_position_encoding, make_rotation
from shmap_tp.layers.xla_workarounds import isolate_gradient, join_gradients
from shmap_tp.model.adapters import with_adapters
from shmap_tp.model.blocks import BLOCKS, MakeMlp, checkpointed, save_at_block_end
from shmap_tp.parallel.fsdp import gather, has_gathered, reduces_gradient
from shmap_tp.parallel.partitioning import stacked
from shmap_tp.parallel.tensor_parallel import TensorParallel

Body = Callable[[Any, Any], tuple[Any, Any]]
"""(carry, a layer) -> (carry, output), as lax.scan takes it."""


@dataclass(frozen=True)
class LayerOptions:
    """In what a layer may differ from the others."""

    pattern: Pattern
    """What its attention computes, without arrays."""
    encoding: Rotary | NoPositions | None = None
    """None: the encoding of the model."""

    def within(self, context: Context) -> Context:
        """The context of this layer."""
        return replace(context, pattern=self.pattern, encoding=self.encoding or context.encoding)


def layer_options(config: ModelConfig) -> tuple[LayerOptions, ...]:
    """The options of each layer of a period: layer i has element i % P."""
    rotary = None
    if config.rotary_local_base is not None:
        rotary = Rotary(replace(make_rotation(config), base=config.rotary_local_base, scaling=None))
    scale = None if config.attention_scale_dim is None else config.attention_scale_dim**-0.5
    everywhere = Pattern(softcap=config.attention_softcap, scale=scale)
    of_kind = {
        LayerKind["local"]: LayerOptions(replace(everywhere, window=config.window), rotary),
        LayerKind["global"]: LayerOptions(everywhere),
        LayerKind["nope"]: LayerOptions(everywhere, NoPositions()),
    }
    return tuple(of_kind[kind] for kind in config.layer_pattern or [LayerKind.local])


def scan_layers(
    bodies: Sequence[Body], carry: Any, layers: Any, *, outside: Sequence[Body] | None = None
) -> tuple[Any, Any]:
    """lax.scan over the first dim of every array of `layers`; layer i is computed by bodies[i % P], or in no loop by
    outside[i % P] (None: also by bodies).  A loop of one iteration is none: XLA unrolls it.

    As many outputs as layers, stacked.
    """
    period, outside = len(bodies), outside or bodies
    whole, rest = divmod(len(jax.tree.leaves(layers)[0]), period)
    bodies = bodies if whole > 1 else outside
    if period == 1:
        return lax.scan(bodies[0], carry, layers)

    def unrolled(bodies: Sequence[Body], carry: Any, layers: Any) -> tuple[Any, Any]:
        outputs = []
        for i, body in enumerate(bodies):
            carry, output = body(carry, jax.tree.map(lambda x, i=i: x[i], layers))
            outputs.append(output)
        return carry, jax.tree.map(lambda *each: jnp.stack(each), *outputs)

    # slice_in_dim has strides: the gradient of x[a:b], which has none, JAX cannot add to a Ref (`loss_and_gradients`).
    def periods(x: jax.Array) -> jax.Array:
        return lax.slice_in_dim(x, 0, whole * period).reshape(whole, period, *x.shape[1:])

    carry, outputs = lax.scan(partial(unrolled, bodies), carry, jax.tree.map(periods, layers))
    outputs = jax.tree.map(lambda x: x.reshape(whole * period, *x.shape[2:]), outputs)
    if not rest:
        return carry, outputs
    beyond = jax.tree.map(lambda x: lax.slice_in_dim(x, whole * period, whole * period + rest), layers)
    carry, last = unrolled(outside[:rest], carry, beyond)
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), outputs, last)


MakeBlock = Callable[..., Any]
"""(config, attend, *, key, mlp) -> a block, as the classes of model/blocks.py."""


@dataclass(frozen=True)
class Execution:
    """How a model is computed on a mesh; the same for all of its parts."""

    tp: TensorParallel
    dtype: DTypeLike
    """The dtype of activations and matrix products."""
    placements: Any
    """A tree like the model: how each parameter is placed over dp (`fsdp.py`)."""
    grouped_matmul: GroupedMatmul = ragged_dot
    """How experts multiply their tokens."""
    eight_bit: Any = None
    """What a step rounds to eight bits (`parallel/eight_bit.py`), a tree like the model; None: nothing."""


@runtime_checkable
class ModelCache(Protocol):
    """Keys and values of all layers (`inference/cache.py`)."""

    def run_layers(
        self,
        layers: Sequence[Callable[[Array, Any, Cache], tuple[Array, Any]]],
        x_BTD: Float[Array, "B T D"],
        blocks: Any,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """(x after all `blocks`, the cache with the new tokens); `layers` are the layers of a period, and each of them,
        `layer(x, block, its cache)`, returns (x, cache)."""
        ...


class Carried(eqx.Module):
    """What the tokens carry beside their ids: fields of `Context`, with the cache of all layers."""

    positions: Int[Array, "B T"] | None = None
    """None: from the segments, where the encoding needs them."""
    segments: Int[Array, "B row"] | None = None
    is_token: Bool[Array, "B T"] | None = None
    cache: ModelCache | None = None


NOTHING_CARRIED = Carried()
"""Rows of one document each, at positions 0 to T - 1."""


class Transformer(eqx.Module):
    """ids[B T] -> h[B T D], which `output_projection`'s weight projects to logits.

    Communication  the embedding's output is reduced and the head's input enters, as `tp` does that; the blocks' own.

    `checkpointed` of `blocks.py` lists what each `remat` policy saves.  None saves what `enter` gathered over mp: it
    would take mp times the memory of what it was gathered from, and is gathered again in the backward pass.
    """

    embedding: VocabParallelEmbedding
    positions: Alibi | Rotary | Learned
    blocks: eqx.Module = stacked()
    norm: LayerNorm | RMSNorm
    head: VocabParallelHead | None
    embedding_scale: float = eqx.field(static=True)
    logit_softcap: float | None = eqx.field(static=True)
    period: tuple[LayerOptions, ...] = eqx.field(static=True)
    remat: Remat = eqx.field(static=True)
    offload: tuple[SavedActivation, ...] = eqx.field(static=True)
    row_major: bool = eqx.field(static=True)

    def __init__(
        self,
        config: ModelConfig,
        attend: AnyAttention,
        *,
        key: PRNGKeyArray,
        block: MakeBlock | None = None,
        mlp: MakeMlp | None = None,
    ):
        """`block` and `mlp` replace those that the configuration names."""
        key_embedding, key_positions, key_blocks, key_head = jax.random.split(key, 4)
        table = (config.vocabulary, padded_vocabulary(config), config.width)
        self.embedding = VocabParallelEmbedding(*table, std=config.init_std, key=key_embedding)
        self.positions = make_position_encoding(config, key_positions)
        make = block or BLOCKS[config.block]
        keys = jax.random.split(key_blocks, config.layers)

        def one_block(key: PRNGKeyArray) -> Any:
            made = make(config, attend, key=key, mlp=mlp)
            return with_adapters(made, config.adapter, key=key) if config.adapter.rank else made

        self.blocks = eqx.filter_vmap(one_block)(keys)
        self.norm = make_norm(config)
        head = partial(VocabParallelHead, *table, std=config.init_std, key=key_head, bias=config.head_bias)
        self.head = None if config.tie_embeddings else head()
        self.embedding_scale, self.logit_softcap = config.embedding_scale, config.logit_softcap
        self.period = layer_options(config)
        self.remat, self.offload, self.row_major = config.remat, tuple(config.offload), config.row_major

    def __call__(
        self, ids_BT: Int[Array, "B T"], execution: Execution, carried: Carried = NOTHING_CARRIED
    ) -> tuple[Float[Array, "B T D"], Extras]:
        """(h, the sum of the blocks' auxiliary losses, their statistics and, where one was carried, the cache with the
        new tokens).

        With a cache h is what a call without it gives for the last T of all tokens so far; the residual stream must be
        replicated over mp (`AllReduce`).
        """
        tp, dtype, placements = execution.tp, execution.dtype, execution.placements
        positions = carried.positions
        if positions is None and carried.segments is not None and self.positions.is_absolute:
            positions = positions_within(carried.segments)
        with jax.named_scope("embedding"):
            encoding = gather(placements.positions, self.positions, dtype)
            table = self.embedding if carried.cache is not None else isolate_gradient(self.embedding)
            embedding = gather(placements.embedding, table, dtype)
            x_BTD = self._scaled(tp.reduce(embedding(ids_BT, dtype)))
            x_BTD = encoding.add_to_input(x_BTD, tp, positions)
        context = Context(
            tp, encoding, positions, carried.segments, carried.is_token, grouped_matmul=execution.grouped_matmul,
            row_major=self.row_major and carried.cache is None,
        )  # fmt: skip
        with jax.named_scope("blocks"):
            if carried.cache is None:
                x_BTD, extras = self._scan_blocks(x_BTD, context, execution)
            else:
                x_BTD, extras = self._scan_with_cache(x_BTD, context, execution, carried.cache)
        with jax.named_scope("head"):
            return tp.enter(self.norm(x_BTD)), extras

    def output_projection(
        self, h_BTD: Float[Array, "B T D"], execution: Execution
    ) -> tuple[Float[Array, "B T D"], OutputProjection]:
        """(h, w[V/mp D] and b[V/mp]) of logits = h @ w' + b: the head's, or the embedding's w where the two are
        tied.  h is the one given; its gradient and that of w become available together (`join_gradients`)."""
        placements, dtype = execution.placements, execution.dtype
        placement, table = (placements.embedding, self.embedding) if self.head is None else (placements.head, self.head)
        h_BTD, table = join_gradients(h_BTD, table) if reduces_gradient(placement) else (h_BTD, isolate_gradient(table))
        gathered = gather(placement, table, dtype)
        bias = None if self.head is None else gathered.bias
        return h_BTD, OutputProjection(gathered.weight, bias, self.logit_softcap)

    def _scaled(self, x_BTD: Float[Array, "B _ D"]) -> Float[Array, "B _ D"]:
        """The embedding, multiplied by embedding_scale in its own dtype."""
        return x_BTD if self.embedding_scale == 1 else x_BTD * jnp.asarray(self.embedding_scale, x_BTD.dtype)

    def _scan_with_cache(
        self, x_BTD: Float[Array, "B T D"], context: Context, execution: Execution, cache: ModelCache
    ) -> tuple[Float[Array, "B T D"], Extras]:
        """All blocks, one after the other, each with its part of the cache."""

        def layer(options: LayerOptions, x_BTD: Array, block: Any, cache: Cache) -> tuple[Array, Any]:
            gathered = gather(execution.placements.blocks, block, execution.dtype)
            x_BTD, extras = gathered(x_BTD, replace(options.within(context), cache=cache))
            if extras.cache is None:
                raise UserError(
                    f"{type(block).__name__} cannot generate: its extras have no cache although its context has one; "
                    f"return the extras of its attention, as the blocks of shmap_tp/model/blocks.py do"
                )
            return x_BTD, extras.cache

        x_BTD, cache = cache.run_layers([partial(layer, options) for options in self.period], x_BTD, self.blocks)
        return x_BTD, Extras(cache=cache)

    def _scan_blocks(
        self, x_BTD: Float[Array, "B _ D"], context: Context, execution: Execution
    ) -> tuple[Float[Array, "B _ D"], Extras]:
        """All blocks, one after the other."""
        placements = execution.placements.blocks

        def layer(options: LayerOptions, x_BTD: Array, block: Any) -> tuple[Array, Any]:
            x_BTD, extras = gather(placements, block, execution.dtype)(x_BTD, options.within(context))
            return save_at_block_end(x_BTD, extras.residuals), (extras.auxiliary_loss, extras.statistics)

        period = outside = [partial(layer, options) for options in self.period]
        if self.remat != Remat.none or has_gathered(placements):
            period, outside = (
                [checkpointed(each, self.remat, self.offload, in_loop=in_loop) for each in period]
                for in_loop in (True, False)
            )
        x_BTD, (losses, statistics) = scan_layers(period, x_BTD, self.blocks, outside=outside)
        return x_BTD, Extras(None if losses is None else jnp.sum(losses), statistics=statistics)
