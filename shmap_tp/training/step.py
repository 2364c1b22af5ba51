"""One optimizer step, and one evaluation, as every device runs them under shard_map.

A microbatches, B sequences of a microbatch on this device, T time.

The step in four sentences: mark the parameters as varying over the token axes (and, in modes with a time-sharded
residual stream, over mp), so that gradients stay local partial sums; accumulate them over the microbatches,
communicating over mp only; reduce them once over the token axes; update, each rank its own shard where ZeRO shards the
update.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from shmap_tp.config.schema import Config
from shmap_tp.hardware.devices import require_units
from shmap_tp.layers.attention import AnyAttention
from shmap_tp.layers.context import Batch, next_token_batch, of_this_device, tokens_spec
from shmap_tp.layers.experts import balanced_routers, drops_tokens
from shmap_tp.layers.xla_workarounds import recompute_from
from shmap_tp.model.loss import LossParts, Objective, all_tokens, next_token_objective
from shmap_tp.model.sharded_model import ModelComponents, ShardedModel, shard_model
from shmap_tp.model.transformer import Execution, Transformer
from shmap_tp.parallel.collectives import all_reduce, mark_varying, reduce_partial_gradients
from shmap_tp.parallel.eight_bit import gradients_of_arrays, has_noise, in_eight_bits, of_gradient, with_other_noise
from shmap_tp.parallel.fsdp import gather_between_slices
from shmap_tp.parallel.mesh import Role, axes_of, mesh_order, token_axes
from shmap_tp.parallel.partitioning import named_shardings
from shmap_tp.parallel.whole_matrices import UpdateSharding
from shmap_tp.training.bad_steps import BadStepState, StepOutcome, initial_bad_step_state, select_tree
from shmap_tp.training.dpo import preference_objective
from shmap_tp.training.optimizer import Optimizer, clip_by_global_norm, make_optimizer, update_norms
from shmap_tp.training.replay import Fingerprints, watched


class State(eqx.Module):
    """The state of a run, saved in checkpoints: with the configuration it determines every later step."""

    params: Transformer
    optimizer: optax.OptState
    guard: BadStepState
    """Statistics and counters of the bad-step guard, configured by `guard.*`."""
    step: Int[Array, ""]
    """Number of batches used, skipped steps included."""


LoadParameters = Callable[[Config, Transformer], Transformer]
"""(config, shapes with shardings) -> parameters, None in place of those that keep their initial values."""
IdentifyParameters = Callable[[Config], dict[str, str]]
"""(config) -> {"path": where the parameters are from, "sha256": of their bytes}."""


@dataclass(frozen=True)
class Components(ModelComponents):
    """Replacements for parts of the model and its step that the configuration names; None: as it names them.

    block, mlp        constructors of a block, as those of model/blocks.py, and of an MLP, as those of layers/mlp.py
    tensor_parallel   a `TensorParallel` mode
    frozen            which parameters are not trained, and their dtype: a `Frozen` of model/sharded_model.py
    make_optimizer    the `optimizer` section of the configuration -> an `Optimizer`
    load_parameters   (config, shapes with shardings) -> the parameters that a new run starts from
    identify_parameters  (config) -> "path" and "sha256" of what load_parameters reads: with adapters, checkpoints then
                      have these in place of frozen parameters

    Examples: docs/extending.md.
    """

    make_optimizer: Callable[[Any], Optimizer] | None = None
    load_parameters: LoadParameters | None = None
    identify_parameters: IdentifyParameters | None = None


CONFIGURED = Components()
"""Everything as the configuration names it."""


def microbatch(batch: Batch, i: int) -> Batch:
    """Microbatch i of batch[A B T]."""
    return jax.tree.map(lambda x: x[i], batch)


def loss_and_gradients(
    objective: Objective,
    params: Transformer,
    batch: Batch,
    frozen: Any = None,
    *,
    tokens: int | Int[Array, ""] | None = None,
    step: int | Int[Array, ""] = 0,
) -> tuple[LossParts, Transformer]:
    """(the parts of the objective, gradients) of the whole step, in the parameters' dtype; a gradient has the part of
    its parameter that this device updates.  `batch` is [A B T]; `frozen` are parameters without gradients, which
    `params` lacks; `tokens` is the result of `all_tokens`, None where it was not called; `step` is the number of the
    step, by which gradients are rounded stochastically.

    Communication  over mp what the model and the loss communicate, per microbatch, and where the residual stream is
                   sharded over time one all-reduce of the gradients of replicated parameters, once.  Over the token
                   axes once: an all-reduce of every gradient, or with ZeRO-1 a reduce-scatter.  With FSDP, per
                   microbatch, an all-gather and a reduce-scatter for each use of a weight, within a slice, and once
                   between slices.
    """
    tp, placements = objective.execution.tp, objective.execution.placements
    everything = params if frozen is None else eqx.combine(params, frozen)
    rounded = in_eight_bits(objective.execution.eight_bit, everything, step)
    whole = gather_between_slices(placements, mark_varying(rounded, (*token_axes(), *tp.time_axes)))
    is_trained = jax.tree.map(lambda _, w: w is not None, everything, params, is_leaf=lambda x: x is None)
    local, untrained = eqx.partition(whole, of_gradient(is_trained, whole))
    counted, tokens = objective.counted(batch), all_tokens(batch) if tokens is None else tokens

    def forward(batch: Batch, number: Array | None) -> tuple[Array, Any, LossParts]:
        def of_trained(trained: Transformer) -> tuple[Array, LossParts]:
            return objective(eqx.combine(trained, with_other_noise(untrained, number)), batch, counted, tokens)

        return jax.vjp(of_trained, local, has_aux=True)

    is_random = any(map(has_noise, jax.tree.leaves(whole, is_leaf=has_noise)))
    numbers = jnp.arange(len(batch.inputs)) if is_random else None
    if batch.inputs.shape[0] == 1:  # no accumulation: it would read zeros
        value, pull, parts = forward(microbatch(batch, 0), numbers[0] if is_random else None)
        (gradients,) = pull(jnp.ones_like(value))
    else:
        # The transpose of the layer scan adds each layer's gradient to its total in place, without a stack of gradients
        # beside the totals.
        totals = jax.tree.map(lambda x: jax.new_ref(jnp.zeros_like(x)), local)

        def accumulate(_: None, numbered: tuple[Batch, Array | None]) -> tuple[None, LossParts]:
            value, pull, parts = forward(*numbered)
            pull.with_refs(totals)(jnp.ones_like(value))
            return None, parts

        _, of_each = lax.scan(accumulate, None, (batch, numbers))
        parts = jax.tree.map(lambda x: jnp.sum(x, axis=0), of_each)
        gradients = jax.tree.map(jax.freeze, totals)
    with jax.named_scope("dp_gradient_reduction"):
        of_trained, gradients = eqx.partition(placements, is_trained)[0], gradients_of_arrays(gradients)
        reduced = jax.tree.map(lambda placement, dw: placement.reduce_gradient(dw), of_trained, gradients)
        for axis in axes_of(Role.features):
            reduced = reduce_partial_gradients(axis, reduced, params)
        everywhere = mesh_order({*token_axes(), *axes_of(Role.features)})
        return LossParts(all_reduce(parts.losses, token_axes()), all_reduce(parts.statistics, everywhere)), reduced


class StepFunctions(eqx.Module):
    """The functions of a run on one mesh, compiled at their first call, and the layout of the state they share."""

    init: Callable[[], State]
    """() -> State, each device initialising its own shards."""
    init_from: Callable[[Transformer], State]
    """(params) -> the State of a new run with these parameters, which are donated; those that are None have their
    initial values."""
    step: Callable[..., tuple[State, dict[str, Array]]]
    """(State, tokens[A B T+1]) -> (State, metrics); the argument state is donated.  Here and in `evaluate` segments
    [A B T+1] may follow, which say where documents are in place of their ends; here also sources[A B 1], the number
    of the source of each row among the names of data.sources, whose losses are then metrics, too."""
    evaluate: Callable[..., tuple[Array, Array, Array | None]]
    """(params, tokens[A B T+1]) -> (mean cross entropy of the targets that count, their number, share of the pairs of a
    token and an expert that were dropped, or None), or with train.dpo_beta (mean loss of the pairs, their number,
    share); the loss is differentiable."""
    replay: Callable[..., Fingerprints]
    """(State, tokens[A B T+1]), and as in `step` what may follow -> the fingerprints of the state, of the rows of the
    first microbatch, and of how its loss and gradients are computed."""
    shapes: State
    """ShapeDtypeStructs of the whole state, each with its sharding."""
    tokens: jax.ShapeDtypeStruct
    """tokens[A B T+1] of a step, int32, with its sharding."""
    trained: Any
    """A tree like the parameters: whether each is trained, or frozen."""
    attention: AnyAttention = eqx.field(static=True)
    """How the attention of each head is computed, on this mesh."""


def build_step_functions(
    config: Config, mesh: Mesh, dtype: DTypeLike, components: Components = CONFIGURED, end_of_text: int | None = None
) -> StepFunctions:
    """The programs of `config` on `mesh`, computing in `dtype`; each is compiled when first called.

    With `end_of_text`, the id that ends each document of a row, no document sees another.
    Raises UserError where these devices cannot run the kernel of model.attention or train.matmul_precision.
    """
    require_units(config.train.matmul_precision, mesh.devices.flat[0].device_kind)
    model = shard_model(config, mesh, dtype, components, isolated=end_of_text is not None)
    optimizer = (components.make_optimizer or make_optimizer)(config.optimizer)

    def init_from(params: Transformer) -> State:
        trained, _ = model.split(params)
        return State(params, optimizer.init(trained), initial_bad_step_state(), jnp.zeros((), jnp.int32))

    def init() -> State:
        return init_from(model.make())

    shapes = jax.eval_shape(init)
    updated, _ = model.split(model.placed.updated)
    specs = _state_specs(model, optimizer, shapes, updated)
    objective, axes, drops = make_objective(config, model.execution), mesh.axis_names, drops_tokens(config)
    local_step = _make_step(config, objective, optimizer, model, UpdateSharding(updated, axes, dtype))

    def batch_of(tokens_ABT: Array, segments_ABT: Array | None = None, sources_AB1: Array | None = None) -> Batch:
        free_space = bool(config.model.experts) and (segments_ABT is not None or end_of_text is not None)
        return next_token_batch(tokens_ABT, axes, segments_ABT, end_of_text, sources_AB1, free_space=free_space)

    def on_devices(function: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(function, mesh=mesh, in_specs=(specs, tokens_spec(axes)), out_specs=out_specs)

    def step(state: State, *rows: Array | None) -> tuple[State, dict[str, Array]]:
        return on_devices(local_step, (specs, P()))(state, batch_of(*rows))

    def replay(state: State, *rows: Array | None) -> Fingerprints:
        batch = batch_of(*(None if each is None else each[:1] for each in rows))
        return on_devices(partial(_replay, objective, model), P(axes))(state, batch)

    def evaluate(params: Transformer, tokens_ABT: Array, segments_ABT: Array | None = None) -> tuple[Array | None, ...]:
        batch = next_token_batch(tokens_ABT, axes, segments_ABT, end_of_text, free_space=drops)
        return model.mapped(partial(_evaluate, objective.alone()), (tokens_spec(axes),), P())(params, batch)

    shardings = named_shardings(mesh, specs)
    start = jax.jit(init_from, out_shardings=shardings, donate_argnums=0)
    return StepFunctions(
        init=jax.jit(init, out_shardings=shardings),
        init_from=lambda params: start(model.with_initial(params)),
        step=jax.jit(step, donate_argnums=0),
        replay=jax.jit(replay),
        evaluate=jax.jit(evaluate),
        shapes=jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings),
        tokens=jax.ShapeDtypeStruct(_tokens_shape(config), jnp.int32, sharding=NamedSharding(mesh, tokens_spec(axes))),
        trained=model.trained,
        attention=model.attention,
    )


def _state_specs(model: ShardedModel, optimizer: Optimizer, shapes: State, updated: Any) -> State:
    """PartitionSpecs of a state of these shapes."""
    trained, _ = model.split(shapes.params)
    placed = model.placed.stored, optimizer.state_specs(trained, updated)
    return eqx.tree_at(lambda state: (state.params, state.optimizer), jax.tree.map(lambda _: P(), shapes), placed)


def _replay(objective: Objective, model: ShardedModel, state: State, batch: Batch) -> Fingerprints:
    """The fingerprints of a microbatch of this device."""
    return watched(partial(_gradients, objective, model), state=state, batch=batch)


def make_objective(config: Config, execution: Execution) -> Objective:
    """What the step of `config` minimises: the cross entropy of the next token, or the loss of preference pairs."""
    return (next_token_objective if config.train.dpo_beta is None else preference_objective)(config, execution)


def _tokens_shape(config: Config) -> tuple[int, int, int]:
    """[A B T+1]."""
    microbatches = config.train.microbatches
    return microbatches, config.train.batch // microbatches, config.model.context + 1


def _evaluate(objective: Objective, params: Transformer, batch: Batch) -> tuple[Array, Array, Array | None]:
    """(the objective of the whole batch[A B T], of how many targets or pairs it is the mean, the share of pairs that
    experts dropped), on every device."""
    batch = of_this_device(batch)
    counted, tokens = objective.counted(batch), all_tokens(batch)

    def of_microbatch(batch: Batch) -> tuple[Array, Any]:
        loss, parts = objective(params, batch, counted, tokens)
        return loss, parts.statistics

    loss, statistics = jax.tree.map(lambda x: jnp.sum(x, axis=0), lax.map(of_microbatch, batch))
    statistics = all_reduce(statistics, mesh_order({*token_axes(), *axes_of(Role.features)}))
    dropped = None if statistics is None else statistics.metrics(tokens)["experts_dropped"]
    return all_reduce(loss, token_axes()), counted, dropped


def _gradients(objective: Objective, model: ShardedModel, state: State, batch: Batch) -> dict[str, Any]:
    """The loss and gradients of batch[A B T], on every device, as in the step."""
    params, frozen = model.split(state.params)
    parts, gradients = loss_and_gradients(objective, params, of_this_device(batch), frozen, step=state.step)
    return {"loss": parts.losses, "gradients": gradients}


def _make_step(
    config: Config, objective: Objective, optimizer: Optimizer, model: ShardedModel, layout: UpdateSharding
) -> Callable[..., Any]:
    """The step of one device; `layout` says which part of each parameter it updates."""
    placements, _ = model.split(model.placed.placements)

    def step(state: State, batch: Batch) -> tuple[State, dict[str, Array]]:
        batch = of_this_device(batch)
        (params, frozen), tokens = model.split(state.params), all_tokens(batch)
        parts, gradients = loss_and_gradients(objective, params, batch, frozen, tokens=tokens, step=state.step)
        loss = objective.total(parts.losses, batch)
        with jax.named_scope("update"):
            gradients, norm = clip_by_global_norm(gradients, config.optimizer.clip_norm)
            old = jax.tree.map(lambda placement, w: placement.local_shard(w), placements, params)

            def updated_from(gradients: Any) -> tuple[Any, Any]:
                updates, optimizer_state = optimizer.update(gradients, state.optimizer, old, layout)
                return optax.apply_updates(old, updates), optimizer_state

            new = updated_from(gradients)
            # Whether the step is good is decided by norms of the updated parameters.  On accelerators the update is
            # computed a second time for them, so that `new` need not be held in memory beside `old` until then; but not
            # by an optimizer that communicates.
            again = new if optimizer.on_whole_matrices else updated_from(recompute_from(gradients))
            outcome = StepOutcome(loss, norm, *update_norms(old, *again))
            good, guard = state.guard.update(outcome, config.guard)
            new, optimizer_state = select_tree(good, new, (old, state.optimizer))
            params = jax.tree.map(lambda placement, w: placement.all_gather_updated(w), placements, new)
            frozen = balanced_routers(frozen, parts.statistics, tokens, good)
        rate = optimizer.schedule(state.step - state.guard.skipped)
        metrics = outcome.metrics() | {"learning_rate": jnp.asarray(rate, jnp.float32)} | guard.counts()
        metrics |= objective.metrics(parts.losses, batch)
        metrics |= parts.statistics.metrics(tokens) if parts.statistics is not None else {}
        if config.guard.loss_spike_sigmas is not None:
            metrics["loss_limit"] = state.guard.limit(config.guard)
        return State(eqx.combine(params, frozen), optimizer_state, guard, state.step + 1), metrics

    return step
