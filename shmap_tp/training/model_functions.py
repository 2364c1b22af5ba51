"""The functions of a model that need no optimizer: initialise, logits, loss, gradients, each compiled over a mesh.

B batch, T time, V vocabulary rows, padded.  B/dp: dim B sharded over dp.  V/mp: dim V sharded over mp.
"""

from collections.abc import Callable

import equinox as eqx
import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from shmap_tp.config.schema import Config
from shmap_tp.layers.embedding import score
from shmap_tp.model.sharded_model import ShardedModel, shard_model
from shmap_tp.model.tokens import Batch, batch_specs, next_token_batch, positions_of
from shmap_tp.model.transformer import Carried, Transformer
from shmap_tp.parallel.collectives import all_reduce
from shmap_tp.parallel.mesh import Role, axes_of, token_axes
from shmap_tp.training.step import (
    CONFIGURED,
    Components,
    all_tokens,
    counted_targets,
    loss_and_gradients,
    make_objective,
    microbatch,
)


class ModelFunctions(eqx.Module):
    """The compiled functions of a model on one mesh.  The batch must be divisible by dp; T is the model's context."""

    initialize: Callable[[], Transformer]
    """() -> parameters, each made where it is stored; the same bits on every mesh."""
    logits: Callable[[Transformer, Array], Array]
    """(params, tokens[B T]) -> logits[B T V], float32 or wider, sharded P(dp, None, mp)."""
    loss: Callable[[Transformer, Array], Array]
    """(params, tokens[1 B T+1]) -> mean cross entropy of the targets that are 0 or more."""
    loss_and_gradients: Callable[[Transformer, Array], tuple[Array, Transformer]]
    """(params, tokens[1 B T+1]) -> (mean cross entropy, gradients of the objective: z_loss and auxiliary losses are
    included; None for what is frozen)."""
    shapes: Transformer
    """ShapeDtypeStructs of the parameters, each with its sharding."""
    model: ShardedModel = eqx.field(static=True)
    """The model on the mesh, for programs of other kinds (generation, scoring)."""


def build_model_functions(
    config: Config, mesh: Mesh, dtype: DTypeLike, components: Components = CONFIGURED
) -> ModelFunctions:
    """The functions of `config` on `mesh`, computing in `dtype`; nothing is compiled before its first call.

    Raises UserError if model.attention names a kernel that these devices cannot run.
    """
    model, axes = shard_model(config, mesh, dtype, components), mesh.axis_names
    objective, specs = make_objective(config, model.execution), batch_specs(axes)
    updated, _ = model.split(model.placed.updated)

    def logits(
        params: Transformer, ids_BT: Int[Array, "B T"], positions_BT: Int[Array, "B T"] | None
    ) -> Float[Array, "B T V"]:
        h_BTD, _ = params(ids_BT, model.execution, Carried(positions_BT))
        h_BTD, projection = params.output_projection(h_BTD, model.execution)
        return score(h_BTD.reshape(-1, h_BTD.shape[-1]), projection).reshape(*h_BTD.shape[:2], -1)

    def loss(params: Transformer, batch: Batch) -> Float[Array, ""]:
        cross_entropy = objective.cross_entropy()
        share, _ = cross_entropy(params, microbatch(batch, 0), counted_targets(batch), all_tokens(batch))
        return all_reduce(share, token_axes())

    def gradients(params: Transformer, batch: Batch) -> tuple[Float[Array, ""], Transformer]:
        trained, frozen = model.split(params)
        return loss_and_gradients(objective, trained, batch, frozen)

    in_time = P(*specs.inputs[1:])
    mapped_logits = model.mapped(
        logits, (in_time, in_time if specs.positions else None), P(*in_time, axes_of(Role.features, axes))
    )
    mapped_loss = model.mapped(loss, (specs,), P())
    mapped_gradients = jax.shard_map(
        gradients, mesh=mesh, in_specs=(model.placed.stored, specs), out_specs=(P(), updated)
    )
    return ModelFunctions(
        initialize=jax.jit(model.make, out_shardings=jax.tree.map(lambda shape: shape.sharding, model.shapes)),
        logits=jax.jit(lambda params, ids: mapped_logits(params, ids, positions_of(ids, axes))),
        loss=jax.jit(lambda params, tokens: mapped_loss(params, next_token_batch(tokens, axes))),
        loss_and_gradients=jax.jit(lambda params, tokens: mapped_gradients(params, next_token_batch(tokens, axes))),
        shapes=model.shapes,
        model=model,
    )
