"""What blocks, attention and their parts communicate over mp, written down by hand: an independent reference for what
`plan/communication` derives from the modules.

x[B T D] is the residual stream with all of its positions, N the number of key/value heads, K a head's dim.
"""

from dataclasses import replace

import jax.numpy as jnp
from jax.typing import DTypeLike

from shmap_tp.config.schema import Block, Config, MeshConfig, ModelConfig, Remat, TensorParallelMode, Zero
from shmap_tp.parallel.mesh import MP
from shmap_tp.plan.communication import analytic
from shmap_tp.plan.communication.ledger import ArrayTraffic, Direction, Entry, Operation

FORWARD, RECOMPUTE, BACKWARD = Direction.forward, Direction.recompute, Direction.backward


def _passes(rule: analytic.Rule, mesh: MeshConfig, what: str, x: ArrayTraffic, *, recomputed: bool) -> list[Entry]:
    directions = [FORWARD, RECOMPUTE, BACKWARD] if recomputed else [FORWARD, BACKWARD]
    return [entry for one in directions for entry in rule(mesh.tensor_parallel, mesh.mp, what, x, one)]


def entering(mesh: MeshConfig, what: str, x: ArrayTraffic) -> list[Entry]:
    return _passes(analytic.entering, mesh, what, x, recomputed=False)


def reducing(mesh: MeshConfig, what: str, x: ArrayTraffic) -> list[Entry]:
    return _passes(analytic.reducing, mesh, what, x, recomputed=False)


def column_parallel(mesh: MeshConfig, what: str, x: ArrayTraffic, *, recomputed: bool = False) -> list[Entry]:
    return _passes(analytic.column_parallel, mesh, what, x, recomputed=recomputed)


def row_parallel(mesh: MeshConfig, what: str, x: ArrayTraffic, *, recomputed: bool = False) -> list[Entry]:
    return _passes(analytic.row_parallel, mesh, what, x, recomputed=recomputed)


def sublayer(x: ArrayTraffic, mesh: MeshConfig) -> list[Entry]:
    return [*column_parallel(mesh, "x", x), *row_parallel(mesh, "x", x)]


def key_value(model: ModelConfig, mesh: MeshConfig, count: int, dtype: DTypeLike = jnp.float32) -> list[Entry]:
    """Of one projection, key or value: where mp > N its weight is replicated over mp, and its gradient, in the `dtype`
    in which it is used, is summed over mp: here, or after the last microbatch where the residual stream is sharded over
    time."""
    if mesh.mp <= model.kv_heads or mesh.tensor_parallel != TensorParallelMode.all_reduce:
        return []
    weight = ArrayTraffic(model.width * model.kv_heads * model.head_dim, jnp.dtype(dtype).name, count)
    return [weight.over(MP, "key/value weight", Operation.all_reduce, BACKWARD)]


def attention(model: ModelConfig, mesh: MeshConfig, x: ArrayTraffic) -> list[Entry]:
    """Attention's own communication beside its column- and row-parallel products.  The tests' dp divides every key and
    value weight, so FSDP gathers it in the dtype of the activations."""
    return 2 * key_value(model, mesh, x.count, x.dtype if mesh.zero == Zero.fsdp else jnp.float32)


def block(model: ModelConfig, mesh: MeshConfig, x: ArrayTraffic) -> list[Entry]:
    """A block, from x to x.

    No policy but `none` saves what a column-parallel product gathered.  With remat full a sequential block repeats the
    row-parallel product of attention, because the norm of the MLP reads its result; nothing in the block reads that of
    the last one.  The other policies save sublayer outputs.
    """
    own, recomputed = attention(model, mesh, x), model.remat != Remat.none
    if model.block == Block.parallel:
        return [*own, *column_parallel(mesh, "block", x, recomputed=recomputed), *row_parallel(mesh, "block", x)]
    return [
        *own,
        *column_parallel(mesh, "attention", x, recomputed=recomputed),
        *row_parallel(mesh, "attention", x, recomputed=model.remat == Remat.full),
        *column_parallel(mesh, "MLP", x, recomputed=recomputed),
        *row_parallel(mesh, "MLP", x),
    ]


def activations(config: Config, dtype: DTypeLike) -> list[Entry]:
    """A model, from the embedding to the final norm, in all microbatches."""
    model, mesh, microbatches = config.model, config.mesh, config.train.microbatches
    values = config.train.batch // (microbatches * mesh.dp) * model.context * model.width
    x = ArrayTraffic(values, jnp.dtype(dtype).name, microbatches)
    return [
        *reducing(mesh, "embedding", x),
        *block(model, mesh, replace(x, count=microbatches * model.layers)),
        *entering(mesh, "head", x),
    ]
