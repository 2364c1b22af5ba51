"""The compiled functions of generation: prefill reads the prompts, decode appends tokens.

B sequences, P slots of the padded prompts, C new tokens of a call, V vocabulary rows, padded.  B/dp, V/mp: sharded.

Whatever mode of tensor parallelism the model was trained with, the residual stream is replicated over mp here: a decode
step has one position, which cannot be sharded over time.

Communication of prefill, and of each decode step, over mp: one all-reduce of the embedding's output and one of each
row-parallel product (one per parallel block, two per sequential one), then what `sampling.next_token` needs.  Over dp:
the new tokens are gathered once per call; FSDP weights are gathered for each layer, as in training.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from shmap_tp.config.schema import ModelConfig
from shmap_tp.inference.cache import KeyValueCache, cache_specs, empty_cache
from shmap_tp.inference.sampling import Filters, Sampling, Sequences, next_token
from shmap_tp.layers.embedding import score
from shmap_tp.model.sharded_model import ShardedModel
from shmap_tp.model.transformer import Carried, Transformer
from shmap_tp.parallel.collectives import all_gather_invariant, mark_varying
from shmap_tp.parallel.mesh import MP, token_axes
from shmap_tp.parallel.tensor_parallel import AllReduce


class Progress(NamedTuple):
    """Where every sequence of a batch stands between two calls."""

    cache: KeyValueCache
    last_B: Int[Array, " B"]
    """The last token of each sequence, which is not in the cache yet."""
    sequences: Sequences


def progress_specs(filters: Filters, batch: tuple[str, ...]) -> Progress:
    """PartitionSpecs of the fields; `batch` are the axes whose ranks hold different sequences."""
    each, seen = P(batch), P(batch, MP) if filters.penalty else None
    return Progress(cache_specs(batch), each, Sequences(each, each, each, seen))


@dataclass(frozen=True)
class PrefillShape:
    """What the shapes of a prefill depend on beside its prompts."""

    slots: int
    """Slots of the cache."""
    samples: int
    """Sequences that continue each prompt."""


class GenerationPrograms:
    """Prefill and decode for one model on one mesh; compiled at the first call with other shapes, filters or count."""

    def __init__(self, model: ModelConfig, sharded: ShardedModel):
        """For the parameters of `sharded`, the model of this configuration on a mesh."""
        self.model, self.sharded, self.mesh = model, sharded, sharded.mesh
        self.batch = token_axes(sharded.mesh.axis_names)
        """The axes that serve different prompts."""
        self.batch_ranks = math.prod(self.mesh.shape[axis] for axis in self.batch)
        self.execution = replace(sharded.execution, tp=AllReduce())
        self.prefill = jax.jit(self._prefill, static_argnames=("filters", "shape"))
        """(params, sampling, prompts[B P], requests[B], filters=, shape=) -> (first new tokens[B x samples, 1],
        progress).  Negative ids before a prompt are padding.  The sequences of a prompt follow one another."""
        self.decode = jax.jit(self._decode, static_argnames=("filters", "count"), donate_argnums=2)
        """(params, sampling, progress, filters=, count=) -> (the next tokens[B C], progress).  `progress` is
        donated."""

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
            cache = empty_cache(self.model, start_B, shape.slots, self.execution.dtype)
            ids_BP = jnp.where(is_token_BP, prompts_BP, 0)
            h_BPD, cache = self._with_cache(params, ids_BP, cache)

            def repeat(x: Array, axis: int = 0) -> Array:
                return jnp.repeat(x, shape.samples, axis=axis)

            cache = KeyValueCache(repeat(cache.keys, 1), repeat(cache.values, 1), repeat(start_B), cache.filled)
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
                h_B1D, cache = self._with_cache(params, progress.last_B[:, None], progress.cache)
                logits_BV = self._logits(params, h_B1D)
                new_B, progress = self._choose(logits_BV, cache, progress.sequences, sampling, filters)
                return progress, new_B

            progress, new_CB = lax.scan(step, progress, None, length=count)
            return new_CB.T, progress

        in_specs = (P(), progress_specs(filters, self.batch))
        return self._mapped(run, filters, in_specs)(params, sampling, progress)

    def _mapped(self, run: Callable[..., tuple[Array, Progress]], filters: Filters, in_specs: tuple) -> Callable:
        """`run` on every device; the tokens that it returns are gathered, so that every process has them."""

        def gathered(*arguments: Any) -> tuple[Array, Progress]:
            new_BC, progress = run(*arguments)
            return all_gather_invariant(new_BC, self.batch, 0), progress

        return self.sharded.mapped(gathered, in_specs, (P(), progress_specs(filters, self.batch)))

    def _with_cache(
        self, params: Transformer, ids_BT: Int[Array, "B T"], cache: KeyValueCache
    ) -> tuple[Float[Array, "B T D"], KeyValueCache]:
        h_BTD, extras = params(ids_BT, self.execution, Carried(cache.positions(ids_BT.shape[1]), cache=cache))
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
