"""The functions of a model that need no optimizer: initialise, logits, loss, gradients, each compiled over a mesh.

B batch, T time, V vocabulary rows, padded.  B/dp: dim B sharded over dp.  V/mp: dim V sharded over mp.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from shmap_tp.config.schema import Config
from shmap_tp.layers.context import Batch, next_token_batch, of_this_device, positions_of, tokens_spec
from shmap_tp.layers.embedding import score
from shmap_tp.model.loss import all_tokens, next_token_objective
from shmap_tp.model.sharded_model import ShardedModel, shard_model
from shmap_tp.model.transformer import Carried, Transformer
from shmap_tp.parallel.collectives import all_reduce
from shmap_tp.parallel.context_parallel import own_chunks, row_order, time_ranks
from shmap_tp.parallel.mesh import Role, axes_of, token_axes
from shmap_tp.training.step import CONFIGURED, Components, loss_and_gradients, microbatch


class ModelFunctions(eqx.Module):
    """The compiled functions of a model on one mesh.  The batch must be divisible by dp; T is the model's context."""

    initialize: Callable[[], Transformer]
    """() -> parameters, each made where it is stored; the same bits on every mesh."""
    logits: Callable[..., Array]
    """(params, tokens[B T]) -> logits[B T V], float32 or wider, sharded P(dp, None, mp).  Here and below segments of
    the shape of the tokens may follow: the document of each token, which sees only earlier ones of its own."""
    loss: Callable[..., Array]
    """(params, tokens[1 B T+1]) -> mean cross entropy of the targets that are 0 or more."""
    loss_and_gradients: Callable[..., tuple[Array, Transformer]]
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
    objective = next_token_objective(config, model.execution)
    updated, _ = model.split(model.placed.updated)

    def local_logits(params: Transformer, ids_BT: Int[Array, "B T"], carried: Carried) -> Float[Array, "B _ V"]:
        ids_BT, positions = own_chunks((ids_BT, carried.positions))
        h_BTD, _ = params(ids_BT, model.execution, Carried(positions, carried.segments))
        h_BTD, projection = params.output_projection(h_BTD, model.execution)
        return score(h_BTD.reshape(-1, h_BTD.shape[-1]), projection).reshape(*h_BTD.shape[:2], -1)

    def local_loss(params: Transformer, batch: Batch) -> Float[Array, ""]:
        batch = of_this_device(batch)
        share, _ = objective.alone()(params, microbatch(batch, 0), objective.counted(batch), all_tokens(batch))
        return all_reduce(share, token_axes())

    def local_gradients(params: Transformer, batch: Batch) -> tuple[Float[Array, ""], Transformer]:
        trained, frozen = model.split(params)
        parts, gradients = loss_and_gradients(objective, trained, of_this_device(batch), frozen)
        return parts.losses, gradients

    def logits(params: Transformer, ids_BT: Array, segments_BT: Array | None = None) -> Array:
        carried, (_, *rows) = Carried(positions_of(ids_BT, axes, segments_BT), segments_BT), tokens_spec(axes)
        out_specs = P(rows[0], axes_of(Role.time, axes) or None, axes_of(Role.features, axes))
        run = model.mapped(local_logits, (P(*rows), P(*rows)), out_specs)
        return row_order(run(params, ids_BT, carried), time_ranks(mesh.shape), dim=1)

    def batch_of(tokens_ABT: Array, segments_ABT: Array | None) -> Batch:
        free_space = bool(config.model.experts) and segments_ABT is not None
        return next_token_batch(tokens_ABT, axes, segments_ABT, free_space=free_space)

    def loss(params: Transformer, tokens_ABT: Array, segments_ABT: Array | None = None) -> Array:
        batch = batch_of(tokens_ABT, segments_ABT)
        return model.mapped(local_loss, (tokens_spec(axes),), P())(params, batch)

    def gradients(params: Transformer, tokens_ABT: Array, segments_ABT: Array | None = None) -> tuple[Array, Any]:
        batch = batch_of(tokens_ABT, segments_ABT)
        in_specs, out_specs = (model.placed.stored, tokens_spec(axes)), (P(), updated)
        return jax.shard_map(local_gradients, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(params, batch)

    return ModelFunctions(
        initialize=jax.jit(model.make, out_shardings=jax.tree.map(lambda shape: shape.sharding, model.shapes)),
        logits=jax.jit(logits),
        loss=jax.jit(loss),
        loss_and_gradients=jax.jit(gradients),
        shapes=model.shapes,
        model=model,
    )
