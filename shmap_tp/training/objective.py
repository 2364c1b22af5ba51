"""What a step minimises: the cross entropy of the next token, and what auxiliary losses add to it.

A microbatches, B sequences of a microbatch on this device, T time.  Another objective is a subclass (`dpo.py`).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from shmap_tp.config.schema import Config
from shmap_tp.config.sources import each_source
from shmap_tp.layers.context import Extras, Statistics
from shmap_tp.layers.embedding import OutputProjection
from shmap_tp.model.loss import LinearCrossEntropy
from shmap_tp.model.tokens import Batch
from shmap_tp.model.transformer import Carried, Execution, Transformer
from shmap_tp.parallel.collectives import all_reduce, mark_varying, varying_axes
from shmap_tp.parallel.mesh import ranks, token_axes


class LossParts(NamedTuple):
    """What an objective says beside its value, summed over devices and microbatches."""

    losses: Float[Array, "*parts"]
    """The cross entropy, by source where rows have one; of another objective its own parts."""
    statistics: Statistics | None
    """Those of the blocks."""


@dataclass(frozen=True)
class Objective:
    """The training objective, a function of parameters and tokens."""

    loss: LinearCrossEntropy
    execution: Execution
    auxiliary: bool = True
    """Whether the auxiliary losses of the blocks are part of it."""
    sources: tuple[str, ...] = ()
    """The names of the sources of rows that have one."""

    def __call__(
        self, params: Transformer, batch: Batch, counted: Float[Array, ""], tokens: int | Int[Array, ""]
    ) -> tuple[Float[Array, ""], LossParts]:
        """This device's share of (the objective, its parts), for a microbatch[B T].  Only the first is differentiated.

        `counted` is what `counted` says of the whole step, and `tokens` what `all_tokens` does.
        """
        h_BTD, projection, extras = self.hidden(params, batch)
        objective, loss = self.loss(h_BTD, projection, batch.targets, counted, batch.sources)
        return self.with_auxiliary(objective, extras, tokens), LossParts(loss, extras.statistics)

    def hidden(self, params: Transformer, batch: Batch) -> tuple[Float[Array, "B T D"], OutputProjection, Extras]:
        """(h and the projection to logits, which the loss reads; the extras of the blocks)."""
        h_BTD, extras = params(batch.inputs, self.execution, Carried(batch.positions, batch.segments, batch.is_token))
        return *params.output_projection(h_BTD, self.execution), extras

    def with_auxiliary(
        self, objective: Float[Array, ""], extras: Extras, tokens: int | Int[Array, ""]
    ) -> Float[Array, ""]:
        """`objective` plus this device's share of the auxiliary losses."""
        if extras.auxiliary_loss is None or not self.auxiliary:
            return objective
        # in a mode that shards time, each device of mp has a sum over its positions
        over = tuple(axis for axis in self.execution.tp.time_axes if axis in varying_axes(extras.auxiliary_loss))
        share = mark_varying(all_reduce(extras.auxiliary_loss, over), token_axes())
        return objective + share / jnp.asarray(tokens, share.dtype)

    def counted(self, batch: Batch) -> Float[Array, ""]:
        """How many things of the whole step the loss is the mean of: targets that count, at least 1.  Communication:
        one all-reduce of a scalar over the token axes."""
        return jnp.maximum(1, all_reduce(jnp.sum(batch.targets >= 0), token_axes())).astype(float)

    def total(self, losses: Float[Array, "*parts"], batch: Batch) -> Float[Array, ""]:
        """The loss of which `losses` are the parts, summed over devices."""
        return losses if batch.sources is None else jnp.sum(losses)

    def metrics(self, losses: Float[Array, "*parts"], batch: Batch) -> dict[str, Float[Array, ""]]:
        """By name the mean cross entropy of the counted targets of each source; NaN where it has none.  Communication:
        one all-reduce of a number for each source."""
        if batch.sources is None:
            return {}
        counted = jnp.where(batch.targets >= 0, batch.sources, -1)  # -1: of no source
        local = jnp.stack([jnp.sum(counted == number) for number in range(len(self.sources))])
        counts = all_reduce(local, token_axes()).astype(losses.dtype)
        means = jnp.where(counts > 0, losses * jnp.sum(counts) / jnp.maximum(counts, 1), jnp.nan)
        return {f"{name}/loss": mean for name, mean in zip(self.sources, means, strict=True)}

    def alone(self) -> "Objective":
        """The objective without z_loss and auxiliary losses, which evaluation reports; it can be differentiated."""
        return replace(self, loss=replace(self.loss, z_loss=0.0), auxiliary=False)


def all_tokens(batch: Batch) -> int | Int[Array, ""]:
    """The number of inputs of the whole step that are tokens, on all devices; at least 1.  Communication: where the
    batch has free space, one all-reduce of a scalar over the token axes."""
    if batch.is_token is None:
        return batch.inputs.size * ranks(token_axes())
    return jnp.maximum(1, all_reduce(jnp.sum(batch.is_token, dtype=jnp.int32), token_axes()))


def next_token_objective(config: Config, execution: Execution) -> Objective:
    """The cross entropy of the next token, as `config` has it."""
    train, sources = config.train, (*each_source(config.data),) if config.data.sources else ()
    loss = LinearCrossEntropy(config.model.vocabulary, train.z_loss, train.loss_chunk, len(sources))
    return Objective(loss, execution, sources=sources)
