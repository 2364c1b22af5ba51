"""The functions of a model that need no optimizer: initialise, logits, loss, gradients, each compiled over a mesh.

B batch, T time, V vocabulary rows, padded.  B/dp: dim B sharded over dp.  V/mp: dim V sharded over mp.
"""

from collections.abc import Callable
from dataclasses import replace

import equinox as eqx
import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from shmap_tp.config.schema import Config
from shmap_tp.layers.attention_selection import select_attention
from shmap_tp.layers.embedding import score
from shmap_tp.model.loss import LinearCrossEntropy
from shmap_tp.model.transformer import Execution, Transformer
from shmap_tp.parallel.collectives import all_reduce
from shmap_tp.parallel.fsdp import gather_between_slices, place_parameters
from shmap_tp.parallel.mesh import DP, MP, DataParallelGroups, axis_sizes
from shmap_tp.parallel.partitioning import named_shardings, partition_specs
from shmap_tp.parallel.tensor_parallel import TENSOR_PARALLEL
from shmap_tp.training.step import CONFIGURED, TOKENS, Components, Objective, counted_tokens, loss_and_gradients


class ModelFunctions(eqx.Module):
    """The compiled functions of a model on one mesh.  The batch must be divisible by dp; T is the model's context."""

    initialize: Callable[[], Transformer]
    """() -> parameters, each made where it is stored; the same bits on every mesh."""
    logits: Callable[[Transformer, Array], Array]
    """(params, tokens[B T]) -> logits[B T V], float32 or wider, sharded P(dp, None, mp)."""
    loss: Callable[[Transformer, Array], Array]
    """(params, tokens[1 B T+1]) -> mean cross entropy of the targets that are 0 or more."""
    loss_and_gradients: Callable[[Transformer, Array], tuple[Array, Transformer]]
    """(params, tokens[1 B T+1]) -> (mean cross entropy, gradients of the objective: z_loss is included)."""
    shapes: Transformer
    """ShapeDtypeStructs of the parameters, each with its sharding."""
    execution: Execution
    """How the functions compute the model."""


def build_model_functions(
    config: Config, mesh: Mesh, dtype: DTypeLike, components: Components = CONFIGURED
) -> ModelFunctions:
    """The functions of `config` on `mesh`, computing in `dtype`; nothing is compiled before its first call.

    Raises UserError if model.attention names a kernel that these devices cannot run.
    """
    attend = select_attention(config.model, mesh.devices.flat[0], dtype)

    def initialize() -> Transformer:
        key = jax.random.key(config.run.seed)
        return Transformer(config.model, attend, key=key, block=components.block, mlp=components.mlp)

    shapes = jax.eval_shape(initialize)
    sizes = axis_sizes(config.mesh)
    specs, gradient_specs, placements = place_parameters(
        config.mesh.zero, shapes, partition_specs(shapes, sizes), sizes, DataParallelGroups.of(config.mesh)
    )
    execution = Execution(components.tensor_parallel or TENSOR_PARALLEL[config.mesh.tensor_parallel], dtype, placements)
    cross_entropy = LinearCrossEntropy(config.model.vocabulary, config.train.z_loss, config.train.loss_chunk)
    objective = Objective(cross_entropy, execution)

    def logits(params: Transformer, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        params = gather_between_slices(placements, params)
        h_BTD, table_VD = params.output_projection(params(tokens_BT, execution), execution)
        return score(h_BTD.reshape(-1, h_BTD.shape[-1]), table_VD).reshape(*h_BTD.shape[:2], -1)

    def loss(params: Transformer, tokens_ABT: Int[Array, "1 B T"]) -> Float[Array, ""]:
        without_z_loss = replace(objective, loss=replace(cross_entropy, z_loss=0.0))  # differentiable
        loss, _ = without_z_loss(gather_between_slices(placements, params), tokens_ABT[0], counted_tokens(tokens_ABT))
        return all_reduce(loss, DP)

    def gradients(params: Transformer, tokens_ABT: Int[Array, "1 B T"]) -> tuple[Float[Array, ""], Transformer]:
        return loss_and_gradients(objective, params, tokens_ABT)

    shardings = named_shardings(mesh, specs)

    def compiled(function: Callable, tokens: P, out_specs: P | tuple[P, Transformer]) -> Callable:
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(specs, tokens), out_specs=out_specs))

    return ModelFunctions(
        initialize=jax.jit(initialize, out_shardings=shardings),
        logits=compiled(logits, P(DP, None), P(DP, None, MP)),
        loss=compiled(loss, TOKENS, P()),
        loss_and_gradients=compiled(gradients, TOKENS, (P(), gradient_specs)),
        shapes=jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings),
        execution=execution,
    )
