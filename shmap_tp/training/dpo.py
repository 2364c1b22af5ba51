"""Direct preference optimisation: an adapter learns to prefer the chosen answer of each pair to the rejected one.

Rafailov et al. 2023, "Direct Preference Optimization", section 4, https://arxiv.org/abs/2305.18290
Label smoothing: Mitchell 2023, "A note on DPO with noisy preferences", https://ericmitchell.ai/cdpo.pdf

B sequences of a microbatch on this device, T time, P pairs of a row.

The documents of a row are a chosen and a rejected one in turn, as `prepare --preferences` packs them: pair p is
segments 2p and 2p + 1.  With log p, the log-probability of a document's counted targets, and log r, that of the
reference, which is the same model without its adapters:

    margin    beta ((log p - log r)(chosen) - (log p - log r)(rejected))
    loss      -(1 - s) log sigmoid(margin) - s log sigmoid(-margin), s the smoothing; the mean over pairs of the step
    d loss / d log p(chosen)  =  -d loss / d log p(rejected)  =  beta (s - sigmoid(-margin)) / pairs

The last line makes the gradient that of a cross entropy with a weight for each target, which `LinearCrossEntropy`
computes a chunk of positions at a time.  So a step has one forward and one backward pass of the model, a forward pass
of the reference, and the head's product twice more.

`length_normalized`: log p and log r are divided by the number of counted targets of their document, as the option
average_log_prob of the authors' program does, so that an answer has no larger margin because it is longer.
Lambert et al. 2024, "Tulu 3", section 5, https://arxiv.org/abs/2411.15124; without a reference it is the reward of
Meng et al. 2024, "SimPO", https://arxiv.org/abs/2405.14734
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.layers.context import Batch
from shmap_tp.model.adapters import without_adapters
from shmap_tp.model.loss import LossParts, Objective, next_token_objective
from shmap_tp.model.transformer import Execution, Transformer
from shmap_tp.parallel.collectives import all_reduce, mark_varying
from shmap_tp.parallel.mesh import token_axes

METRICS = (
    *("reward_accuracy", "reward_margin", "chosen_log_probability", "rejected_log_probability"),
    *("chosen_log_probability_per_token", "rejected_log_probability_per_token"),
)
"""Means over the pairs of a step: how often the margin is above 0, the margin, log p of both documents, and the same
divided by their counted targets."""


@dataclass(frozen=True)
class PreferenceObjective(Objective):
    """The loss above.  Its parts are the loss and `METRICS`.

    Communication  as `Objective`; the reference has the forward pass of the model once more, and the head another
                   all-gather over mp per chunk for each of the two.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    length_normalized: bool = False

    def __call__(
        self, params: Transformer, batch: Batch, counted: Float[Array, ""], tokens: int | Int[Array, ""]
    ) -> tuple[Float[Array, ""], LossParts]:
        """This device's share of (the objective, its parts), for a microbatch[B T] that has segments.

        `counted` is the number of pairs of the whole step.
        """
        h_BTD, projection, extras = self.hidden(params, batch)
        log_p_BP2 = by_document(self._log_probabilities(h_BTD, projection, batch), batch)
        log_r_BP2 = by_document(self._reference(params, batch), batch)
        lengths_BP2 = jnp.maximum(1, counted_targets(batch)).astype(log_p_BP2.dtype)
        divisors_BP2 = lengths_BP2 if self.length_normalized else jnp.ones_like(lengths_BP2)
        margin_BP = self.beta * -jnp.diff((log_p_BP2 - log_r_BP2) / divisors_BP2)[..., 0]
        smoothing, is_pair_BP = self.label_smoothing, pairs(batch)
        share_BP = jnp.where(is_pair_BP, 1 / counted, 0.0)
        loss_BP = -(1 - smoothing) * jax.nn.log_sigmoid(margin_BP) - smoothing * jax.nn.log_sigmoid(-margin_BP)
        slope_BP = share_BP * self.beta * (jax.nn.sigmoid(-margin_BP) - smoothing)
        weights_BT = of_targets(jnp.stack([slope_BP, -slope_BP], axis=-1) / divisors_BP2, batch)
        weighted, _ = self.loss(h_BTD, projection, batch.targets, counted, weights_BT=weights_BT)
        of_documents = (x_BP2[..., i] for x_BP2 in (log_p_BP2, log_p_BP2 / lengths_BP2) for i in range(2))
        values = loss_BP, margin_BP > 0, margin_BP, *of_documents
        parts = jnp.stack([jnp.sum(jnp.where(is_pair_BP, share_BP * value, 0.0)) for value in values])
        objective = weighted + lax.stop_gradient(parts[0] - weighted)  # the loss, with the gradient of `weighted`
        return self.with_auxiliary(objective, extras, tokens), LossParts(parts, extras.statistics)

    def _reference(self, params: Transformer, batch: Batch) -> Float[Array, "B T"]:
        execution = replace(self.execution, placements=without_adapters(self.execution.placements))
        alone = replace(self, execution=execution)
        h_BTD, projection, _ = alone.hidden(without_adapters(lax.stop_gradient(params)), batch)
        return self._log_probabilities(h_BTD, projection, batch)

    def _log_probabilities(self, h_BTD: Array, projection: Any, batch: Batch) -> Float[Array, "B T"]:
        """The log probability of each target; 0 where it does not count.  No gradient is taken."""
        return lax.stop_gradient(-self.loss.negative_log_likelihoods(h_BTD, projection, batch.targets))

    def counted(self, batch: Batch) -> Float[Array, ""]:
        """The number of pairs of the whole step, at least 1.  Communication: one all-reduce of a scalar over the token
        axes."""
        rows = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), Batch(*batch[:2], None, batch.segments))
        return jnp.maximum(1, all_reduce(jnp.sum(pairs(rows)), token_axes())).astype(float)

    def total(self, losses: Float[Array, " parts"], batch: Batch) -> Float[Array, ""]:
        return losses[0]

    def metrics(self, losses: Float[Array, " parts"], batch: Batch) -> dict[str, Float[Array, ""]]:
        return dict(zip(METRICS, losses[1:], strict=True))


def preference_objective(config: Config, execution: Execution) -> PreferenceObjective:
    """The loss of pairs, as `config` has it."""
    train = config.train
    how = {"label_smoothing": train.dpo_label_smoothing, "length_normalized": train.dpo_length_normalized}
    return PreferenceObjective(next_token_objective(config, execution).loss, execution, beta=train.dpo_beta, **how)


def _document(batch: Batch) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Int[Array, "B T"]]:
    """(row, pair, 0 for the chosen and 1 for the rejected) of each target.  Raises UserError without segments."""
    if batch.segments is None:
        raise UserError("train.dpo_beta: the rows have no documents; give segments, or data of prepare --preferences")
    row_BT = jnp.broadcast_to(jnp.arange(batch.targets.shape[0])[:, None], batch.targets.shape)
    return row_BT, batch.segments // 2, batch.segments % 2


def by_document(x_BT: Float[Array, "B T"], batch: Batch) -> Float[Array, "B P 2"]:
    """The sum of x over the tokens of each document."""
    rows, time = x_BT.shape
    zeros = mark_varying(jnp.zeros((rows, -(-time // 2), 2), x_BT.dtype), token_axes())
    return zeros.at[_document(batch)].add(x_BT)


def counted_targets(batch: Batch) -> Float[Array, "B P 2"]:
    """How many targets of each document count."""
    return by_document((batch.targets >= 0).astype(jnp.float32), batch)


def of_targets(x_BP2: Float[Array, "B P 2"], batch: Batch) -> Float[Array, "B T"]:
    """The value of x for the document of each target that counts, else 0."""
    return jnp.where(batch.targets >= 0, x_BP2[_document(batch)], 0.0)


def pairs(batch: Batch) -> Bool[Array, "B P"]:
    """Whether both documents of a pair have targets that count; the filling of a row has none."""
    return jnp.all(counted_targets(batch) > 0, axis=-1)
