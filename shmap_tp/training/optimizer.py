"""Optimizers by optax, and two things that optax cannot know: how a state is partitioned, and the norm of a gradient
whose shards are on many devices.

Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization" (AdamW), https://arxiv.org/abs/1711.05101
Hu et al. 2024, "MiniCPM" (WSD), section 4, https://arxiv.org/abs/2404.06395
Hägele et al. 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations" (WSD whose decay is
linear), https://arxiv.org/abs/2405.18392
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float

from shmap_tp.config.schema import OptimizerConfig, Schedule
from shmap_tp.parallel.collectives import varying_axes
from shmap_tp.parallel.mesh import mesh_order
from shmap_tp.parallel.partitioning import ParameterKind, decayed, optimizer_specs
from shmap_tp.parallel.whole_layers import from_whole_layers, to_whole_layers, whole_layer_specs


@dataclass(frozen=True)
class Optimizer:
    """An optax transformation, the schedule of its learning rate, and which arrays it must see whole.

    Where the update of an element depends on that element alone (AdamW, Lion) it is computed shard by shard.
    Parameters whose kind is in `whole` (for Muon, matrices) are passed to the transformation as whole arrays instead:
    each device has those of some layers, and stores their state alike (`parallel/whole_layers.py`).  The transformation
    can read from `partitioning.declarations` what each parameter is.
    """

    transformation: optax.GradientTransformation
    schedule: optax.Schedule
    """The learning rate by the number of updates so far, which the step reports."""
    whole: frozenset[ParameterKind] = frozenset()

    def init(self, params: Any) -> optax.OptState:
        return self.transformation.init(params)

    def specs(self, params: Any, updated: Any, axis_sizes: Mapping[str, int]) -> Any:
        """PartitionSpecs of the parameters (arrays or shapes) as the transformation is given them; `updated` are those
        of what each device updates."""
        return whole_layer_specs(params, updated, self.whole, axis_sizes)

    def state_specs(self, params: Any, specs: Any) -> Any:
        """PartitionSpecs of the state, from those of the parameters (arrays or shapes) that `specs` gives."""
        return optimizer_specs(self.transformation, params, specs)

    def update(
        self, gradients: Any, state: optax.OptState, params: Any, updated: Any, specs: Any
    ) -> tuple[Any, optax.OptState]:
        """(updates, new state) of this device's shards, whose PartitionSpecs are `updated`.

        Communication  what brings gradients and parameters from `updated` to `specs`, and the updates back; none for
                       parameters that need not be whole.
        """
        gradients, params = (jax.tree.map(to_whole_layers, tree, updated, specs) for tree in (gradients, params))
        updates, state = self.transformation.update(gradients, state, params)
        return jax.tree.map(from_whole_layers, updates, updated, specs), state


def learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
    """The learning rate of step n, counted from 1; the schedule is given n - 1, and depends on nothing else.

    n / warmup_steps of the peak during the warm-up, so that no step has the rate 0 (without one, the first step has the
    peak); the peak until step `_stable_until`; with k the part of the steps from there to decay_steps, and rates in
    units from the final rate (0) to the peak (1):

        cosine       (1 + cos(pi k)) / 2
        linear, wsd  1 - k
        constant     1

    then constant.  The rates of wsd until its decay are the same for every longer decay_steps.
    """
    peak, final = config.learning_rate, config.final_learning_rate
    first, last = max(config.warmup_steps, 1), _stable_until(config)
    steps = max(config.decay_steps - last, 1)
    stable = decay = optax.constant_schedule(peak)
    if config.schedule == Schedule.cosine:
        decay = optax.cosine_decay_schedule(peak, steps, final / peak if peak else 0.0)
    elif config.schedule != Schedule.constant:
        decay = optax.linear_schedule(peak, final, steps)
    warmup = optax.linear_schedule(peak / first, peak, first - 1)
    return optax.join_schedules([warmup, stable, decay], [first - 1, last - 1])


def describe_schedule(config: OptimizerConfig, steps: int) -> str:
    """The learning rate over a run of `steps` steps, as a sentence for users."""
    rise, last, end = config.warmup_steps, _stable_until(config), config.decay_steps
    warmup = f"up to {config.learning_rate:g} at step {rise:,}" if rise else f"{config.learning_rate:g}"
    if config.schedule == Schedule.constant:
        return f"{warmup}, then constant" + (" (optimizer.warmup_steps is above train.steps)" if steps < rise else "")
    if config.schedule == Schedule.wsd:
        if steps <= last:
            unreached = f"the decay after step {last:,} (optimizer.decay_steps={end}) begins after train.steps"
            return f"{warmup}, then constant; {unreached}"
        warmup += f", constant until step {last:,}"
    decay = f"{warmup}, then a {'cosine' if config.schedule == Schedule.cosine else 'linear decay'}"
    if steps < end:
        return f"{decay} that would end at step {end:,} (optimizer.decay_steps), after train.steps"
    after = f", constant until step {steps:,} (optimizer.decay_steps={end} is apart from train.steps)"
    return f"{decay} down to {config.final_learning_rate:g} at step {end:,}" + (after if steps > end else "")


def make_optimizer(config: OptimizerConfig) -> Optimizer:
    """AdamW, its weight decay on matrices and embeddings only.  Gradients are clipped apart: `clip_by_global_norm`."""
    schedule = learning_rate_schedule(config)
    transformation = optax.chain(
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon),
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
        optax.scale_by_learning_rate(schedule),
    )
    return Optimizer(transformation, schedule)


def global_norm(tree: Any) -> Float[Array, ""]:
    """sqrt of the sum of squares of every value in `tree`, each counted once whatever devices hold it.

    A leaf's type says over which axes its values differ between devices: its squares are summed over just those.
    (`optax.global_norm` inside shard_map would be the norm of one device's shards.)

    Communication  one all-reduce of a scalar per set of axes.
    """
    squares: dict[frozenset[str], Array] = {}
    for leaf in jax.tree.leaves(tree):
        _add(squares, leaf, jnp.sum(jnp.square(leaf)))
    return jnp.sqrt(_total(squares))


def update_norms(old: Any, new: Any, optimizer_state: Any) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(global norm of the parameters `old`, that of `new`), the latter NaN if the new state has a non-finite value.

    Communication  one all-reduce of two scalars per set of axes.
    """
    before: dict[frozenset[str], Array] = {}
    after: dict[frozenset[str], Array] = {}
    for tree, squares in ((old, before), (new, after)):
        for leaf in jax.tree.leaves(tree):
            _add(squares, leaf, jnp.sum(jnp.square(leaf)))
    for leaf in jax.tree.leaves(eqx.filter(optimizer_state, eqx.is_inexact_array)):
        _add(after, leaf, jnp.sum(jnp.where(jnp.isfinite(leaf), 0.0, jnp.nan).astype(leaf.dtype)))
    pairs = {axes: jnp.stack([before.get(axes, jnp.zeros_like(total)), total]) for axes, total in after.items()}
    norm_before, norm_after = jnp.sqrt(_total(pairs))
    return norm_before, norm_after


def _add(totals: dict[frozenset[str], Array], leaf: Array, value: Float[Array, ""]) -> None:
    """Add this device's `value` of `leaf` to the total of the axes over which the leaf varies."""
    axes = varying_axes(leaf)
    totals[axes] = totals[axes] + value if axes in totals else value


def _total(totals: dict[frozenset[str], Array]) -> Array:
    """The sum of the totals, each first summed over its axes.  Communication: one all-reduce per set of axes."""
    return sum(lax.psum(total, mesh_order(axes)) if axes else total for axes, total in totals.items())


def clip_by_global_norm(gradients: Any, limit: float) -> tuple[Any, Float[Array, ""]]:
    """(gradients scaled so that their global norm is at most `limit`, their norm before)."""
    norm = global_norm(gradients)
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
    return jax.tree.map(lambda g: g * scale, gradients), norm


def _stable_until(optimizer: OptimizerConfig) -> int:
    """The last step that has the peak learning rate if the schedule has a decay."""
    decay = round(optimizer.decay_fraction * optimizer.decay_steps)
    stable = optimizer.decay_steps - decay if optimizer.schedule == Schedule.wsd else 0
    return max(stable, optimizer.warmup_steps, 1)
