"""The compiled functions of generation: prefill reads the prompts, decode appends tokens.

B sequences, P slots of the padded prompts, C new tokens of a call, V vocabulary rows, padded.  B/dp, V/mp: sharded.

Whatever mode of tensor parallelism the model was trained with, a decode step replicates the residual stream over mp: it
has one position, which cannot be sharded over time.  Prefill shards it over time where mp divides P.

Communication of a decode step over mp: one all-reduce of the embedding's output and one of each row-parallel product
(one per parallel block, two per sequential one), then what `sampling.next_token` needs.  Prefill has a reduce-scatter
and an all-gather in place of each all-reduce.  Over dp: the new tokens are gathered once per call; FSDP weights are
gathered for each layer, as in training.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from shmap_tp.config.schema import ModelConfig
from shmap_tp.hardware.devices import DEVICES
from shmap_tp.inference.cache import EmptyCache, KeyValueCache, cache_specs, layer_slots
from shmap_tp.inference.sampling import Filters, Sampling, Sequences, next_token
from shmap_tp.layers.embedding import score
from shmap_tp.model.sharded_model import ShardedModel
from shmap_tp.model.transformer import Carried, Transformer
from shmap_tp.parallel.collectives import all_gather_invariant, mark_varying
from shmap_tp.parallel.fsdp import PlacedParameters
from shmap_tp.parallel.mesh import MP, token_axes
from shmap_tp.parallel.partitioning import named_shardings, shard_bytes
from shmap_tp.parallel.tensor_parallel import AllReduce, TensorParallel, prompt_tensor_parallel
from shmap_tp.parallel.weights import quantized_specs

COPIES_FILL = 0.8
"""Share of a device's memory that weights, copies of those of the blocks and the cache may fill while decoding."""


class Progress(NamedTuple):
    """Where every sequence of a batch stands between two calls."""

    cache: KeyValueCache
    last_B: Int[Array, " B"]
    """The last token of each sequence, which is not in the cache yet."""
    sequences: Sequences


def _progress_specs(filters: Filters, batch: tuple[str, ...], unrolled: int) -> Progress:
    """PartitionSpecs of the fields; `batch` and `unrolled` as of `cache_specs`."""
    each, seen = P(batch), P(batch, MP) if filters.penalty else None
    return Progress(cache_specs(batch, unrolled), each, Sequences(each, each, each, seen))


@dataclass(frozen=True)
class PrefillShape:
    """What the shapes of a prefill depend on beside its prompts."""

    slots: int
    """Slots of the cache."""
    samples: int
    """Sequences that continue each prompt."""


def unstacked(blocks: Any) -> tuple:
    """Blocks with arrays [L ...] of all layers -> the blocks of each layer, with arrays [...] of its own: a copy.  XLA
    for TPU prefetches those to on-chip memory, and never a slice of a stacked array (docs/performance-notes.md)."""
    layers = range(len(jax.tree.leaves(blocks)[0]))
    return tuple(jax.tree.map(lambda x, layer=layer: x[layer], blocks) for layer in layers)


def with_blocks(params: Any, blocks: tuple) -> Any:
    """`params`, or a tree like them, with other blocks."""
    return eqx.tree_at(lambda params: params.blocks, params, blocks)


def _placed_by_layer(placed: PlacedParameters, layers: int) -> PlacedParameters:
    """How parameters with `unstacked` blocks are placed: as the stacked ones, without the dim of the layers."""
    each = jax.tree.map(lambda spec: P(*spec[1:]), placed.stored.blocks)
    return placed._replace(
        stored=with_blocks(placed.stored, (each,) * layers),
        placements=with_blocks(placed.placements, (placed.placements.blocks,) * layers),
    )


class GenerationPrograms:
    """Prefill and decode for one model on one mesh; compiled at the first call with other shapes, filters or count."""

    def __init__(self, model: ModelConfig, sharded: ShardedModel):
        """For the parameters of `sharded`, the model of this configuration on a mesh."""
        self.model, self.sharded, self.mesh = model, sharded, sharded.mesh
        self.batch = token_axes(sharded.mesh.axis_names)
        """The axes that serve different prompts."""
        self.batch_ranks = math.prod(self.mesh.shape[axis] for axis in self.batch)
        self.execution = replace(sharded.execution, tp=AllReduce())
        self._figures = DEVICES.get(self.mesh.devices.flat[0].device_kind)
        is_tpu = self._figures is not None and self._figures.clock is not None
        self.unrolled = is_tpu or len(set(layer_slots(model, model.context))) > 1
        """Whether the layers of a decode step are unrolled, each with its own arrays: on TPUs, and where some
        layers have a window that is shorter than the context."""
        self._by_layer = _placed_by_layer(sharded.placed, model.layers)
        self.unstack = jax.jit(self._unstacked)
        """As `unstacked`."""
        self.prefill = jax.jit(self._prefill, static_argnames=("filters", "shape"))
        """(params, sampling, prompts[B P], requests[B], filters=, shape=) -> (first new tokens[B x samples, 1],
        progress).  Negative ids before a prompt are padding.  The sequences of a prompt follow one another."""
        self.decode = jax.jit(self._decode, static_argnames=("filters", "count"), donate_argnums=2)
        """(params, sampling, progress, filters=, count=) -> (the next tokens[B C], progress).  `progress` is donated;
        `params` may be those of `for_decoding`."""

    def progress_specs(self, filters: Filters) -> Progress:
        """PartitionSpecs of `Progress`."""
        return _progress_specs(filters, self.batch, self.model.layers if self.unrolled else 0)

    def for_decoding(self, params: Transformer, cache: KeyValueCache) -> Transformer:
        """The parameters that `decode` is to be called with: with a copy of the blocks as arrays of each layer, where
        layers are unrolled and the devices have room for it beside `params`.  Communication: none."""
        return with_blocks(params, self.unstack(params.blocks)) if self.copies_blocks(params, cache) else params

    def layer_shardings(self, blocks: tuple) -> tuple:
        """The shardings of `unstacked` blocks (arrays or shapes)."""
        return named_shardings(self.mesh, quantized_specs(self._by_layer.stored.blocks, blocks))

    def _unstacked(self, blocks: Any) -> tuple:
        each = unstacked(blocks)
        return lax.with_sharding_constraint(each, self.layer_shardings(each))

    def copies_blocks(self, params: Transformer, cache: KeyValueCache) -> bool:
        """Whether `for_decoding` copies; arrays, or ShapeDtypeStructs with their shardings."""
        if not self.unrolled or self._figures is None:
            return False
        return sum(map(shard_bytes, (params, params.blocks, cache))) < COPIES_FILL * self._figures.memory

    def _prefill(
        self,
        params: Any,
        sampling: Sampling,
        prompts_BP: Int[Array, "B P"],
        request_B: Int[Array, " B"],
        *,
        filters: Filters,
        shape: PrefillShape,
    ) -> tuple[Array, Progress]:
        def run(params: Any, sampling: Sampling, prompts_BP: Array, request_B: Array) -> tuple[Array, Progress]:
            is_token_BP = prompts_BP >= 0
            start_B = jnp.argmax(is_token_BP, axis=1).astype(jnp.int32)
            empty = EmptyCache(start_B, layer_slots(self.model, shape.slots), self.execution.dtype, self.unrolled)
            ids_BP = jnp.where(is_token_BP, prompts_BP, 0)
            tp = prompt_tensor_parallel(ids_BP.shape[1], lax.axis_size(MP))
            h_BPD, cache = self._with_cache(params, ids_BP, empty, tp)

            def repeat(x: Array, axis: int = 0) -> Array:
                return jnp.repeat(x, shape.samples, axis=axis)

            keys, values = jax.tree.map(lambda x: repeat(x, x.ndim - 4), (cache.keys, cache.values))
            cache = KeyValueCache(keys, values, repeat(start_B), cache.filled)
            sample_B = jnp.tile(jnp.arange(shape.samples), request_B.shape[0])
            sequences = Sequences(repeat(request_B), sample_B, prompts_BP.shape[1] - repeat(start_B), None)
            logits_BV = self._logits(params, repeat(h_BPD[:, -1:]))
            if filters.penalty:
                unseen_BV = mark_varying(jnp.zeros(logits_BV.shape, bool), (*self.batch, MP))
                sequences = sequences._replace(seen_BV=unseen_BV).saw(repeat(prompts_BP))
            new_B, progress = self._choose(logits_BV, cache, sequences, sampling, filters)
            return new_B[:, None], progress

        in_specs = (P(), P(self.batch, None), P(self.batch))
        return self._mapped(run, filters, in_specs)(params, sampling, prompts_BP, request_B)

    def _decode(
        self, params: Any, sampling: Sampling, progress: Progress, *, filters: Filters, count: int
    ) -> tuple[Array, Progress]:
        def run(params: Any, sampling: Sampling, progress: Progress) -> tuple[Array, Progress]:
            def step(progress: Progress, _: None) -> tuple[Progress, Array]:
                h_B1D, cache = self._with_cache(params, progress.last_B[:, None], progress.cache, AllReduce())
                logits_BV = self._logits(params, h_B1D)
                new_B, progress = self._choose(logits_BV, cache, progress.sequences, sampling, filters)
                return progress, new_B

            progress, new_CB = lax.scan(step, progress, None, length=count)
            return new_CB.T, progress

        in_specs = (P(), self.progress_specs(filters))
        placed = self._by_layer if isinstance(params.blocks, tuple) else None
        return self._mapped(run, filters, in_specs, placed)(params, sampling, progress)

    def _mapped(
        self,
        run: Callable[..., tuple[Array, Progress]],
        filters: Filters,
        in_specs: tuple,
        placed: PlacedParameters | None = None,
    ) -> Callable:
        """`run` on every device; the tokens that it returns are gathered, so that every process has them."""

        def gathered(*arguments: Any) -> tuple[Array, Progress]:
            new_BC, progress = run(*arguments)
            return all_gather_invariant(new_BC, self.batch, 0), progress

        return self.sharded.mapped(gathered, in_specs, (P(), self.progress_specs(filters)), placed)

    def _with_cache(
        self, params: Transformer, ids_BT: Int[Array, "B T"], cache: EmptyCache | KeyValueCache, tp: TensorParallel
    ) -> tuple[Float[Array, "B T D"], KeyValueCache]:
        carried = Carried(cache.positions(ids_BT.shape[1]), cache=cache)
        h_BTD, extras = params(ids_BT, replace(self.execution, tp=tp), carried)
        return h_BTD, extras.cache

    def _logits(self, params: Transformer, h_B1D: Float[Array, "B 1 D"]) -> Float[Array, "B V"]:
        h_B1D, projection = params.output_projection(h_B1D, self.execution)
        return score(h_B1D[:, 0], projection)

    @jax.named_scope("sample")
    def _choose(
        self,
        logits_BV: Float[Array, "B V"],
        cache: KeyValueCache,
        sequences: Sequences,
        sampling: Sampling,
        filters: Filters,
    ) -> tuple[Int[Array, " B"], Progress]:
        new_B = next_token(logits_BV, sequences, sampling, filters, self.model.vocabulary)
        sequences = sequences._replace(position_B=sequences.position_B + 1).saw(new_B[:, None])
        return new_B, Progress(cache, new_B, sequences)
