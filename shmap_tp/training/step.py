"""One optimizer step, and one evaluation, as every device runs them under shard_map.

A microbatches, B windows of a microbatch on this device, T time.  B/dp: dim B cut along dp.

The step in four sentences: make the parameters varying over dp, and where the wire says so over mp, so that gradients
stay at home; accumulate them over the microbatches, talking over mp only; meet once over dp; update, each its own part
where dp shares the update.
"""

from collections.abc import Callable
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
from shmap_tp.model.loss import LinearCrossEntropy
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.collectives import all_reduce, mark_varying, reduce_partial_gradients
from shmap_tp.parallel.fsdp import held, place_parameters
from shmap_tp.parallel.mesh import DP, MP, DataParallelGroups
from shmap_tp.parallel.modes import TENSOR_PARALLEL, TensorParallel
from shmap_tp.parallel.partitioning import named, optimizer_specs, partition_specs
from shmap_tp.training.bad_steps import BadStepState, initial_bad_step_state, select_tree
from shmap_tp.training.optimizer import clip_by_global_norm, learning_rate_schedule, make_optimizer

TOKENS = P(None, DP, None)
"""tokens[A B/dp T+1]: the layout of a step's batch."""


class State(eqx.Module):
    """All that a run is, besides its configuration: what a checkpoint holds."""

    params: Transformer
    optimizer: optax.OptState
    guard: BadStepState
    step: Int[Array, ""]
    """How many batches were used, skipped steps among them."""


class Objective(eqx.Module):
    """What is minimised, of a model's parameters and tokens."""

    loss: LinearCrossEntropy
    dtype: DTypeLike
    wire: TensorParallel = eqx.field(static=True)
    placements: Any = eqx.field(static=True)
    """A tree like the parameters: who keeps, uses and updates what of each (`zero`)."""

    def __call__(
        self, params: Transformer, tokens_BT: Int[Array, "B T"], counted: Array
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """This device's share of (the objective, the cross entropy), `counted` being the tokens of the whole step."""
        h_BTD = params(tokens_BT[:, :-1], self.dtype, self.wire, self.placements)
        h_BTD, table_VD = params.scored_by(h_BTD, self.dtype, self.placements)
        return self.loss(h_BTD, table_VD, tokens_BT[:, 1:], counted)


def counted_tokens(tokens_ABT: Int[Array, "A B T"]) -> Float[Array, ""]:
    """How many targets of the whole step count, at least 1.  Wire: one all-reduce of a scalar over dp."""
    return jnp.maximum(1, all_reduce(jnp.sum(tokens_ABT[..., 1:] >= 0), DP)).astype(float)


def loss_and_gradients(
    objective: Objective, params: Transformer, tokens_ABT: Int[Array, "A B T"]
) -> tuple[Float[Array, ""], Transformer]:
    """(cross entropy, gradients) of the whole step, in the parameters' dtype: of each parameter what this device
    updates.

    Wire    over mp what the model and the loss say, per microbatch; over dp, once, one all-reduce of every gradient, or
            one reduce-scatter where dp shares the update; where it shares the weight, an all-gather and a
            reduce-scatter for each use, per microbatch, within a slice, and between slices once.  SequenceParallel:
            over mp one all-reduce of each gradient of what is whole there, once.
    """
    at_home = held(objective.placements, objective.wire.at_home(params))
    counted = counted_tokens(tokens_ABT)

    def forward(tokens_BT: Array) -> tuple[Array, Any, Array]:
        return jax.vjp(lambda params: objective(params, tokens_BT, counted), at_home, has_aux=True)

    if tokens_ABT.shape[0] == 1:  # there is nothing to add to, and zeros would be read
        objected, pull, loss = forward(tokens_ABT[0])
        (gradients,) = pull(jnp.ones_like(objected))
    else:
        # The transpose of the layer scan adds each layer's gradient to its total in place: no stack of them beside,
        # but where `through` goes instead.
        totals = jax.tree.map(lambda x: jax.new_ref(jnp.zeros_like(x)), at_home)

        def microbatch(total: Array, tokens_BT: Array) -> tuple[Array, None]:
            objected, pull, loss = forward(tokens_BT)
            pull.with_refs(totals)(jnp.ones_like(objected))
            return total + loss, None

        loss, _ = lax.scan(microbatch, mark_varying(jnp.zeros(()), DP), tokens_ABT)
        gradients = jax.tree.map(jax.freeze, totals)
    with jax.named_scope("dp_gradient_reduction"):
        met = jax.tree.map(lambda owner, dw: owner.meet(dw), objective.placements, gradients)
        return all_reduce(loss, DP), reduce_partial_gradients(MP, met, params)


class StepFunctions(eqx.Module):
    """What a run compiles, all over one mesh: initialise, step, evaluate; and the layout of the state they share."""

    init: Callable[[], State]
    """() -> State, its leaves made where they lie."""
    step: Callable[[State, Array], tuple[State, dict[str, Array]]]
    """(State, tokens[A B T+1]) -> (State, metrics); the state given is donated."""
    evaluate: Callable[[Transformer, Array], Array]
    """(params, tokens[A B T+1]) -> mean cross entropy."""
    shapes: State
    """ShapeDtypeStructs of the whole state, each with its sharding."""
    tokens: jax.ShapeDtypeStruct
    """tokens[A B T+1] of a step, int32, with its sharding."""
    attention: AnyAttention = eqx.field(static=True)
    """What computes the attention of each head, on this mesh."""


def build_step_functions(config: Config, mesh: Mesh, dtype: DTypeLike) -> StepFunctions:
    """The programs of `config` on `mesh`, computing in `dtype`; nothing is compiled before its first call.

    Raises InputError where model.attention names a kernel that these devices cannot run.
    """
    attend = select_attention(config.model, mesh.devices.flat[0], dtype)
    optimizer = make_optimizer(config.optimizer)
    schedule = learning_rate_schedule(config.optimizer)

    def init() -> State:
        params = Transformer(config.model, attend, key=jax.random.key(config.run.seed))
        return State(params, optimizer.init(params), initial_bad_step_state(), jnp.zeros((), jnp.int32))

    def step(state: State, tokens_ABT: Array) -> tuple[State, dict[str, Array]]:
        loss, gradients = loss_and_gradients(objective, state.params, tokens_ABT)
        with jax.named_scope("update"):
            gradients, norm = clip_by_global_norm(gradients, config.optimizer.clip_norm)
            good, guard = state.guard.update(loss, norm, config.guard)
            own = jax.tree.map(lambda owner, w: owner.own(w), placements, state.params)
            updates, optimizer_state = optimizer.update(gradients, state.optimizer, own)
            updated = select_tree(good, optax.apply_updates(own, updates), own)
            params = jax.tree.map(lambda owner, w: owner.keep(w), placements, updated)
        rate = schedule(state.step - state.guard.skipped)
        metrics = {"loss": loss, "grad_norm": norm, "learning_rate": rate} | guard.counts()
        if config.guard.loss_spike_sigmas is not None:
            metrics["loss_limit"] = state.guard.limit(config.guard)
        return State(params, select_tree(good, optimizer_state, state.optimizer), guard, state.step + 1), metrics

    def evaluate(params: Transformer, tokens_ABT: Array) -> Array:
        params, counted = held(placements, params), counted_tokens(tokens_ABT)
        return all_reduce(jnp.sum(lax.map(lambda tokens_BT: objective(params, tokens_BT, counted)[1], tokens_ABT)), DP)

    shapes = jax.eval_shape(init)
    specs, placements = state_specs(shapes, optimizer, config.mesh)
    wire = TENSOR_PARALLEL[config.mesh.tensor_parallel]
    loss = LinearCrossEntropy(config.model.vocabulary, config.train.z_loss, config.train.loss_chunk)
    objective = Objective(loss, dtype, wire, placements)
    shardings = named(mesh, specs)
    parts = config.train.microbatches
    tokens = (parts, config.train.batch // parts, config.model.context + 1)
    return StepFunctions(
        init=jax.jit(init, out_shardings=shardings),
        step=jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=(specs, TOKENS), out_specs=(specs, P())),
            donate_argnums=0,
        ),
        evaluate=jax.jit(jax.shard_map(evaluate, mesh=mesh, in_specs=(specs.params, TOKENS), out_specs=P())),
        shapes=jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings),
        tokens=jax.ShapeDtypeStruct(tokens, jnp.int32, sharding=NamedSharding(mesh, TOKENS)),
        attention=attend,
    )


def state_specs(shapes: State, optimizer: optax.GradientTransformation, mesh: MeshConfig) -> tuple[Any, Any]:
    """(PartitionSpecs of a State, the owner of each parameter): declared by the layers, derived for the rest."""
    sizes, parts = {DP: mesh.dp, MP: mesh.mp}, DataParallelGroups.of(mesh)
    kept, updated, placements = place_parameters(
        mesh.zero, shapes.params, partition_specs(shapes.params, sizes), sizes, parts
    )
    state = jax.tree.map(lambda _: P(), shapes)  # but for:
    cut = (kept, optimizer_specs(optimizer, shapes.params, updated))
    return eqx.tree_at(lambda state: (state.params, state.optimizer), state, cut), placements
