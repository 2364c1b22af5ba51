"""One optimizer step, and one evaluation, as every device runs them under shard_map.

A microbatches, B sequences of a microbatch on this device, T time.  B/dp: dim B sharded over dp.

The step in four sentences: mark the parameters as varying over dp (and, in modes with a time-sharded residual stream,
over mp), so that gradients stay local partial sums; accumulate them over the microbatches, communicating over mp only;
reduce them once over dp; update, each rank its own shard where ZeRO shards the update.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from shmap_tp.config.schema import Config, MeshConfig
from shmap_tp.layers.attention import AnyAttention
from shmap_tp.layers.attention_selection import select_attention
from shmap_tp.layers.xla_workarounds import recompute_from
from shmap_tp.model.components import ModelComponents
from shmap_tp.model.loss import LinearCrossEntropy
from shmap_tp.model.tokens import input_ids
from shmap_tp.model.transformer import Execution, Transformer
from shmap_tp.parallel.collectives import all_reduce, mark_varying, reduce_partial_gradients
from shmap_tp.parallel.fsdp import gather_between_slices, place_parameters
from shmap_tp.parallel.mesh import DP, MP, DataParallelGroups, axis_sizes
from shmap_tp.parallel.partitioning import named_shardings, partition_specs
from shmap_tp.parallel.tensor_parallel import TENSOR_PARALLEL, TensorParallel
from shmap_tp.training.bad_steps import BadStepState, StepOutcome, initial_bad_step_state, select_tree
from shmap_tp.training.optimizer import (
    Optimizer,
    clip_by_global_norm,
    learning_rate_schedule,
    make_optimizer,
    update_norms,
)

TOKENS = P(None, DP, None)
"""tokens[A B/dp T+1]: the layout of a step's batch.  A token below zero is the input -1 - token, and no target."""


class State(eqx.Module):
    """The state of a run, saved in checkpoints: with the configuration it determines every later step."""

    params: Transformer
    optimizer: optax.OptState
    guard: BadStepState
    """Statistics and counters of the bad-step guard, configured by `guard.*`."""
    step: Int[Array, ""]
    """Number of batches used, skipped steps included."""


LoadParameters = Callable[[Config, Transformer], Transformer]
"""(config, shapes with shardings) -> parameters."""


@dataclass(frozen=True)
class Components(ModelComponents):
    """Replacements for parts of the model and its step that the configuration names; None: as it names them.

    block, mlp        constructors of a block, as those of model/blocks.py, and of an MLP, as those of layers/mlp.py
    tensor_parallel   a `TensorParallel` mode
    make_optimizer    the `optimizer` section of the configuration -> an `Optimizer`
    load_parameters   (config, shapes with shardings) -> the parameters that a new run starts from

    Examples: docs/extending.md.
    """

    tensor_parallel: TensorParallel | None = None
    make_optimizer: Callable[[Any], Optimizer] | None = None
    load_parameters: LoadParameters | None = None


CONFIGURED = Components()
"""Everything as the configuration names it."""


@dataclass(frozen=True)
class Objective:
    """The training objective, a function of parameters and tokens."""

    loss: LinearCrossEntropy
    execution: Execution

    def __call__(
        self, params: Transformer, tokens_BT: Int[Array, "B T"], counted: Array
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """This device's share of (the objective, the cross entropy); `counted` is the number of targets of the step."""
        h_BTD = params(input_ids(tokens_BT[:, :-1]), self.execution)
        h_BTD, table_VD = params.output_projection(h_BTD, self.execution)
        return self.loss(h_BTD, table_VD, tokens_BT[:, 1:], counted)


def counted_tokens(tokens_ABT: Int[Array, "A B T"]) -> Float[Array, ""]:
    """How many targets of the whole step count, at least 1.  Communication: one all-reduce of a scalar over dp."""
    return jnp.maximum(1, all_reduce(jnp.sum(tokens_ABT[..., 1:] >= 0), DP)).astype(float)


def loss_and_gradients(
    objective: Objective, params: Transformer, tokens_ABT: Int[Array, "A B T"]
) -> tuple[Float[Array, ""], Transformer]:
    """(cross entropy, gradients) of the whole step, in the parameters' dtype; of each parameter the gradient of what
    this device updates.

    Communication  over mp that of the model and the loss, per microbatch, and where the residual stream is sharded over
                   time one all-reduce of the gradients of replicated parameters, once.  Over dp once: an all-reduce of
                   every gradient, or with ZeRO-1 a reduce-scatter.  With FSDP, per microbatch, an all-gather and a
                   reduce-scatter for each use of a weight, within a slice, and once between slices.
    """
    tp, placements = objective.execution.tp, objective.execution.placements
    local = gather_between_slices(placements, tp.mark_varying(params))
    counted = counted_tokens(tokens_ABT)

    def forward(tokens_BT: Array) -> tuple[Array, Any, Array]:
        return jax.vjp(lambda params: objective(params, tokens_BT, counted), local, has_aux=True)

    if tokens_ABT.shape[0] == 1:  # no accumulation: it would read zeros
        value, pull, loss = forward(tokens_ABT[0])
        (gradients,) = pull(jnp.ones_like(value))
    else:
        # The transpose of the layer scan adds each layer's gradient to its total in place, without a stack of gradients
        # beside the totals (except in `offloaded_scan`).
        totals = jax.tree.map(lambda x: jax.new_ref(jnp.zeros_like(x)), local)

        def microbatch(total: Array, tokens_BT: Array) -> tuple[Array, None]:
            value, pull, loss = forward(tokens_BT)
            pull.with_refs(totals)(jnp.ones_like(value))
            return total + loss, None

        loss, _ = lax.scan(microbatch, mark_varying(jnp.zeros(()), DP), tokens_ABT)
        gradients = jax.tree.map(jax.freeze, totals)
    with jax.named_scope("dp_gradient_reduction"):
        reduced = jax.tree.map(lambda placement, dw: placement.reduce_gradient(dw), placements, gradients)
        return all_reduce(loss, DP), reduce_partial_gradients(MP, reduced, params)


class StepFunctions(eqx.Module):
    """The functions of a run on one mesh, compiled at their first call, and the layout of the state they share."""

    init: Callable[[], State]
    """() -> State, each device initialising its own shards."""
    init_from: Callable[[Transformer], State]
    """(params) -> the State of a new run with these parameters, which are donated."""
    step: Callable[[State, Array], tuple[State, dict[str, Array]]]
    """(State, tokens[A B T+1]) -> (State, metrics); the argument state is donated."""
    evaluate: Callable[[Transformer, Array], Array]
    """(params, tokens[A B T+1]) -> mean cross entropy; differentiable."""
    shapes: State
    """ShapeDtypeStructs of the whole state, each with its sharding."""
    tokens: jax.ShapeDtypeStruct
    """tokens[A B T+1] of a step, int32, with its sharding."""
    attention: AnyAttention = eqx.field(static=True)
    """How the attention of each head is computed, on this mesh."""


def build_step_functions(
    config: Config, mesh: Mesh, dtype: DTypeLike, components: Components = CONFIGURED
) -> StepFunctions:
    """The programs of `config` on `mesh`, computing in `dtype`; each is compiled when first called.

    Raises UserError where model.attention names a kernel that these devices cannot run.
    """
    attend = select_attention(config.model, mesh.devices.flat[0], dtype)
    optimizer = (components.make_optimizer or make_optimizer)(config.optimizer)
    make = {"block": components.block, "mlp": components.mlp}

    def init_from(params: Transformer) -> State:
        return State(params, optimizer.init(params), initial_bad_step_state(), jnp.zeros((), jnp.int32))

    def init() -> State:
        return init_from(Transformer(config.model, attend, key=jax.random.key(config.run.seed), **make))

    shapes = jax.eval_shape(init)
    specs, updated, placements = state_specs(shapes, optimizer, config.mesh)
    tp = components.tensor_parallel or TENSOR_PARALLEL[config.mesh.tensor_parallel]
    loss = LinearCrossEntropy(config.model.vocabulary, config.train.z_loss, config.train.loss_chunk)
    objective = Objective(loss, Execution(tp, dtype, placements))
    cross_entropy = replace(objective, loss=replace(loss, z_loss=0.0))  # the objective without z-loss, differentiable
    step = _make_step(config, objective, optimizer, updated)

    def evaluate(params: Transformer, tokens_ABT: Array) -> Array:
        params, counted = gather_between_slices(placements, params), counted_tokens(tokens_ABT)
        losses = lax.map(lambda tokens_BT: cross_entropy(params, tokens_BT, counted)[0], tokens_ABT)
        return all_reduce(jnp.sum(losses), DP)

    shardings = named_shardings(mesh, specs)
    microbatches = config.train.microbatches
    tokens = (microbatches, config.train.batch // microbatches, config.model.context + 1)
    return StepFunctions(
        init=jax.jit(init, out_shardings=shardings),
        init_from=jax.jit(init_from, out_shardings=shardings, donate_argnums=0),
        step=jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=(specs, TOKENS), out_specs=(specs, P())),
            donate_argnums=0,
        ),
        evaluate=jax.jit(jax.shard_map(evaluate, mesh=mesh, in_specs=(specs.params, TOKENS), out_specs=P())),
        shapes=jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings),
        tokens=jax.ShapeDtypeStruct(tokens, jnp.int32, sharding=NamedSharding(mesh, TOKENS)),
        attention=attend,
    )


def _make_step(config: Config, objective: Objective, optimizer: Optimizer, updated: Any) -> Callable[..., Any]:
    """The step of one device.  `updated` are the PartitionSpecs of what each device updates."""
    schedule = learning_rate_schedule(config.optimizer)
    placements = objective.execution.placements

    def step(state: State, tokens_ABT: Array) -> tuple[State, dict[str, Array]]:
        loss, gradients = loss_and_gradients(objective, state.params, tokens_ABT)
        with jax.named_scope("update"):
            gradients, norm = clip_by_global_norm(gradients, config.optimizer.clip_norm)
            old = jax.tree.map(lambda placement, w: placement.local_shard(w), placements, state.params)

            def updated_from(gradients: Any) -> tuple[Any, Any]:
                updates, optimizer_state = optimizer.update(gradients, state.optimizer, old, updated)
                return optax.apply_updates(old, updates), optimizer_state

            new = updated_from(gradients)
            # The outcome has an update of its own, on accelerators computed again, so that `new` is not in memory
            # beside `old`.
            again = updated_from(recompute_from(gradients)) if optimizer.elementwise else new
            outcome = StepOutcome(loss, norm, *update_norms(old, *again))
            good, guard = state.guard.update(outcome, config.guard)
            new, optimizer_state = select_tree(good, new, (old, state.optimizer))
            params = jax.tree.map(lambda placement, w: placement.all_gather_updated(w), placements, new)
        rate = schedule(state.step - state.guard.skipped)
        metrics = outcome.metrics() | {"learning_rate": rate} | guard.counts()
        if config.guard.loss_spike_sigmas is not None:
            metrics["loss_limit"] = state.guard.limit(config.guard)
        return State(params, optimizer_state, guard, state.step + 1), metrics

    return step


def state_specs(shapes: State, optimizer: Optimizer, mesh: MeshConfig) -> tuple[Any, Any, Any]:
    """(PartitionSpecs of a State, those of the parameters that each device updates, the placement of each
    parameter)."""
    sizes, groups = axis_sizes(mesh), DataParallelGroups.of(mesh)
    declared = partition_specs(shapes.params, sizes)
    stored, updated, placements = place_parameters(mesh.zero, shapes.params, declared, sizes, groups)
    replicated = jax.tree.map(lambda _: P(), shapes)
    partitioned = (stored, optimizer.state_specs(shapes.params, updated))
    specs = eqx.tree_at(lambda state: (state.params, state.optimizer), replicated, partitioned)
    return specs, updated, placements
