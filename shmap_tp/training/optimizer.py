"""Optimizers by optax, and two things that optax cannot know: how a state is partitioned, and the norm of a gradient
whose shards are on many devices.

Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization" (AdamW), https://arxiv.org/abs/1711.05101
Jordan et al. 2024, "Muon", https://kellerjordan.github.io/posts/muon
Liu et al. 2025, "Muon is Scalable for LLM Training" (Moonlight), https://arxiv.org/abs/2502.16982
Hu et al. 2024, "MiniCPM" (WSD), section 4, https://arxiv.org/abs/2404.06395
Hägele et al. 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations" (WSD whose decay is
linear), https://arxiv.org/abs/2405.18392
Wen et al. 2026, "Fantastic Pretraining Optimizers and Where to Find Them II: Hyperball Optimization",
https://arxiv.org/abs/2606.16899
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from shmap_tp.config.choices import MomentumDtype, OptimizerName, Schedule
from shmap_tp.config.schema import OptimizerConfig
from shmap_tp.parallel.collectives import varying_axes
from shmap_tp.parallel.mesh import mesh_order, spec_axes
from shmap_tp.parallel.partitioning import Declaration, ParameterKind, decayed, declarations, optimizer_specs
from shmap_tp.parallel.whole_matrices import UpdateSharding, is_matrix, on_whole_matrices


@dataclass(frozen=True)
class Optimizer:
    """An optax transformation, and the schedule of its learning rate.

    The transformation is given this device's shards, and its state is sharded like them: where the update of an element
    depends on that element alone (AdamW, Lion) nothing else is needed.  A part of it that needs whole matrices is
    `on_whole_matrices(function)`.  What each parameter is can be read from `partitioning.declarations`.
    """

    transformation: optax.GradientTransformation
    schedule: optax.Schedule
    """The learning rate by the number of updates so far, which the step reports."""
    on_whole_matrices: bool = False
    """Whether the transformation communicates, as `on_whole_matrices` does: it is then computed only once."""

    def init(self, params: Any) -> optax.OptState:
        return self.transformation.init(params)

    def state_specs(self, params: Any, updated: Any) -> Any:
        """PartitionSpecs of the state; `updated` are those of the part of `params` that each device updates."""
        return optimizer_specs(self.transformation, params, updated)

    def update(self, gradients: Any, state: optax.OptState, params: Any, layout: UpdateSharding) -> tuple[Any, Any]:
        """(updates, new state) of this device's shards.

        Communication  that of `on_whole_matrices`, or of `_of_matrices`; else none.
        """
        transformation = optax.with_extra_args_support(self.transformation)
        return transformation.update(gradients, state, params, layout=layout)


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
    if steps <= rise:
        return warmup + (f" (optimizer.warmup_steps), after the last step {steps:,}" if steps < rise else "")
    if config.schedule == Schedule.constant:
        return f"{warmup}, then constant"
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
    """As `optimizer.name` says; weight decay on matrices and embeddings only.  Gradients are clipped apart:
    `clip_by_global_norm`.

    adamw  Loshchilov and Hutter 2019
    muon   M = momentum M + G;  W -= rate (0.2 sqrt(max(R, C)) orthogonalized(G + momentum M) + weight_decay W)

    Muon is for matrices W[R C] of gradient G: each of q, k, v, the output projection, gate, up, down and router by
    itself, of every expert and every factor of an adapter; the heads of q, k or v are one matrix.  Embedding, head,
    learned positions, scales and biases have AdamW, with the same learning rate: 0.2 sqrt(max(R, C)) gives updates of
    Muon the root mean square that updates of AdamW usually have (Liu et al. 2025, section 2.2; Jordan et al. 2024 have
    sqrt(max(1, outputs / inputs)), and a rate of its own).  M is sharded as ZeRO and FSDP shard the moments of AdamW.

    The learning rate of embedding and learned positions, of the head, and of scales and biases has a factor each,
    `embedding_rate`, `head_rate` and `vector_rate`, which holds for their weight decay, too.

    With `hyperball` the matrices W have, from an update U of AdamW or Muon, |.| being the Frobenius norm,

        W' = W - rate |W| U / |U|;  W = |W| W' / |W'|

    so that they keep the norms that they begin with, and have no weight decay (AdamH and MuonH of Wen et al. 2026).

    M and the first moment of Adam are held in `momentum_dtype`: each update is computed from the float32 sum of the old
    one and the gradient, which is then rounded.  The second moment is float32: bfloat16 would lose the small part
    1 - beta2 of it that a step changes.

    Communication  adamw: none.  muon: `on_whole_matrices`, in the dtype of the activations.  hyperball:
                   `_of_matrices`.
    """
    schedule = learning_rate_schedule(config)
    in_bfloat16 = config.momentum_dtype == MomentumDtype.bfloat16
    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)
    chain = [_held_in_bfloat16(adam, "mu") if in_bfloat16 else adam]
    if config.name == OptimizerName.muon:
        momentum = optax.trace(config.momentum, nesterov=True)
        chain = [
            optax.masked(_held_in_bfloat16(momentum, "trace") if in_bfloat16 else momentum, _matrices),
            optax.masked(chain[0], lambda params: jax.tree.map(operator.not_, _matrices(params))),
            on_whole_matrices(partial(_muon_updates, steps=config.newton_schulz_steps)),
        ]
    kinds, hyperball = ParameterKind, config.hyperball
    factors = {kinds.embedding: config.embedding_rate, kinds.head: config.head_rate, kinds.vector: config.vector_rate}
    transformation = optax.chain(
        *chain,
        *([_of_matrices(_as_large_as_weights)] if hyperball else []),
        optax.add_decayed_weights(config.weight_decay, mask=partial(_decayed, hyperball=hyperball)),
        optax.scale_by_learning_rate(schedule),
        *([_scaled_by_kind(factors)] if {*factors.values()} != {1} else []),
        *([_of_matrices(_on_the_sphere)] if hyperball else []),
    )
    return Optimizer(transformation, schedule, config.name == OptimizerName.muon or hyperball)


def _held_in_bfloat16(inner: optax.GradientTransformation, moment: str) -> optax.GradientTransformation:
    """`inner`, with this field of its state in bfloat16 between updates, which compute with it in float32.  (The
    options of optax for that also multiply it by its decay rate in bfloat16.)"""

    def held(state: Any, dtype: DTypeLike) -> Any:
        return state._replace(**{moment: optax.tree.cast(getattr(state, moment), dtype)})

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = inner.update(gradients, held(state, jnp.float32), params)
        return updates, held(state, jnp.bfloat16)

    return optax.GradientTransformation(lambda params: held(inner.init(params), jnp.bfloat16), update)


def _decayed(params: Any, *, hyperball: bool) -> Any:
    """`params` with every array replaced by whether weight decay applies to it."""
    return jax.tree.map(lambda it, matrix: it and not (hyperball and matrix), decayed(params), _matrices(params))


def _scaled_by_kind(factors: dict[ParameterKind, float]) -> optax.GradientTransformation:
    """Updates times the factor of their parameter's kind."""
    return optax.stateless(
        lambda updates, _: jax.tree.map(lambda of, u: factors.get(of.kind, 1.0) * u, declarations(updates), updates)
    )


Dot = Callable[[Array, Array], Array]
"""The inner product of each matrix of one stack with that of another, with the dims of a matrix kept as 1."""


def _of_matrices(function: Callable[[Array, Array, Dot], Array]) -> optax.GradientTransformation:
    """The updates u of matrices w replaced by function(u, w, dot).

    Communication  of each `dot` one all-reduce of a number for each matrix over the axes that shard its dims.
    """

    def update(updates: Any, state: Any, params: Any, *, layout: UpdateSharding, **_: Any) -> tuple[Any, Any]:
        def of_leaf(declared: Declaration, u: Array, w: Array, spec: P) -> Array:
            if not is_matrix(declared):
                return u
            leading = declared.stacked + (declared.kind == ParameterKind.experts)
            axes = mesh_order({axis for entry in spec[leading:] for axis in spec_axes(entry)})

            def dot(x: Array, y: Array) -> Array:
                local = jnp.sum(x * y, axis=tuple(range(leading, x.ndim)), keepdims=True)
                return lax.psum(local, axes) if axes else local

            return function(u, w, dot)

        return jax.tree.map(of_leaf, declarations(updates), updates, params, layout.specs), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def _as_large_as_weights(u: Array, w: Array, dot: Dot) -> Array:
    """u with the norm of w; 0 of 0."""
    return u * jnp.sqrt(dot(w, w) / jnp.maximum(dot(u, u), jnp.finfo(u.dtype).tiny))


def _on_the_sphere(u: Array, w: Array, dot: Dot) -> Array:
    """What changes w to w + u with the norm of w: s u + (s - 1) w, with s = |w| / |w + u|, and s - 1 without the
    difference of two norms that are almost equal."""
    grown = 2 * dot(w, u) + dot(u, u)
    before = dot(w, w)
    after = jnp.maximum(before + grown, jnp.finfo(u.dtype).tiny)
    shrinks = -grown / (after + jnp.sqrt(before * after))
    return (1 + shrinks) * u + shrinks * w


def _matrices(params: Any) -> Any:
    """`params` with every array replaced by whether Muon updates it."""
    return jax.tree.map(is_matrix, declarations(params))


def _muon_updates(momenta_NRC: Float[Array, "N R C"], steps: int) -> Float[Array, "N R C"]:
    """The updates of matrices, one after the other, so that temporary memory is that of one."""
    scale = 0.2 * max(momenta_NRC.shape[1:]) ** 0.5
    return lax.map(lambda momentum_RC: scale * orthogonalized(momentum_RC, steps), momenta_NRC)


def orthogonalized(x_RC: Float[Array, "R C"], steps: int) -> Float[Array, "R C"]:
    """About U V' of x = U S V', by the iteration of Newton and Schulz in x's dtype; 0 of 0.

        x = x / |x|, |.| the Frobenius norm;  then `steps` times  x = a x + (b x x' + c (x x')^2) x

    a, b and c are from Jordan et al. 2024: after 5 steps singular values are about 0.7 to 1.2.  x x' is
    [m m], where m is the shorter of the dims m and n: 4 m^2 n + 2 m^3 FLOPs a step.
    """
    with jax.named_scope("newton_schulz"):
        norm = jnp.sqrt(jnp.sum(jnp.square(x_RC.astype(jnp.float32))))
        x_mn = (x_RC / (norm + 1e-7)).astype(x_RC.dtype)
        x_mn = x_mn.T if x_mn.shape[0] > x_mn.shape[1] else x_mn
        a, b, c = 3.4445, -4.7750, 2.0315
        for _ in range(steps):
            gram_mm = x_mn @ x_mn.T
            x_mn = a * x_mn + (b * gram_mm + c * (gram_mm @ gram_mm)) @ x_mn
        return x_mn if x_mn.shape == x_RC.shape else x_mn.T


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
