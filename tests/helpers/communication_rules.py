"""What tensor-parallel modes, blocks and their parts communicate over mp, written down by hand: a reference for what
`plan/communication` finds by tracing the modules.

x[B T D] is the residual stream with all of its positions, N the number of key/value heads, K a head's dim.
"""

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
from jax.typing import DTypeLike

from shmap_tp.config.schema import Block, Config, MeshConfig, ModelConfig, Remat, TensorParallelMode, Zero
from shmap_tp.parallel.mesh import MP
from shmap_tp.plan.communication.ledger import ArrayTraffic, Direction, Entry, Operation

FORWARD, RECOMPUTE, BACKWARD = Direction.forward, Direction.recompute, Direction.backward


# Tensor-parallel modes: what a call communicates in one pass, x[B T D] being all positions

Rule = Callable[[TensorParallelMode, int, str, ArrayTraffic, Direction], list[Entry]]
"""(mode, mp, the part of the model, x, direction) -> entries."""


def enter_rule(mode: TensorParallelMode, mp: int, what: str, x: ArrayTraffic, direction: Direction) -> list[Entry]:
    """`enter` with x[B T D] as a result.

    all_reduce   forward nothing; backward one all-reduce of dx over mp
    the others   forward one all-gather over mp of the shards of x; backward one reduce-scatter of dx
    """
    what, is_backward = f"{what} enter", direction == Direction.backward
    if mode == TensorParallelMode.all_reduce:
        return [x.over(MP, what, Operation.all_reduce, direction)] if is_backward else []
    if is_backward:
        return [x.over(MP, what, Operation.reduce_scatter, direction)]
    return [replace(x, values=x.values // mp).over(MP, what, Operation.all_gather, direction)]


def reduce_rule(mode: TensorParallelMode, mp: int, what: str, x: ArrayTraffic, direction: Direction) -> list[Entry]:
    """`reduce` of x[B T D] {+mp}.

    all_reduce   forward one all-reduce of x over mp; backward nothing
    the others   forward one reduce-scatter of x over mp; backward one all-gather of the shards of dx
    """
    what, is_backward = f"{what} reduce", direction == Direction.backward
    if mode == TensorParallelMode.all_reduce:
        return [] if is_backward else [x.over(MP, what, Operation.all_reduce, direction)]
    if is_backward:
        return [replace(x, values=x.values // mp).over(MP, what, Operation.all_gather, direction)]
    return [x.over(MP, what, Operation.reduce_scatter, direction)]


def column_rule(mode: TensorParallelMode, mp: int, what: str, x: ArrayTraffic, direction: Direction) -> list[Entry]:
    """`column_parallel` on x[B T D].

    collective_matmul   forward mp - 1 ppermutes over mp of a chunk of x; backward as many of a chunk of dx
    the others          `enter_rule`
    """
    if mode != TensorParallelMode.collective_matmul:
        return enter_rule(mode, mp, what, x, direction)
    return _ring(mp, f"{what} column-parallel", x, direction)


def row_rule(mode: TensorParallelMode, mp: int, what: str, x: ArrayTraffic, direction: Direction) -> list[Entry]:
    """`row_parallel` to x[B T D].

    collective_matmul   forward mp - 1 ppermutes over mp of a chunk of the sum; backward as many of its gradient
    the others          `reduce_rule`
    """
    if mode != TensorParallelMode.collective_matmul:
        return reduce_rule(mode, mp, what, x, direction)
    return _ring(mp, f"{what} row-parallel", x, direction)


def _ring(mp: int, what: str, x: ArrayTraffic, direction: Direction) -> list[Entry]:
    chunk = replace(x, values=x.values // mp, count=x.count * (mp - 1))
    return [chunk.over(MP, what, Operation.ppermute, direction)] if chunk.count else []


# The parts of a model


def _passes(rule: Rule, mesh: MeshConfig, what: str, x: ArrayTraffic, *, recomputed: bool) -> list[Entry]:
    directions = [FORWARD, RECOMPUTE, BACKWARD] if recomputed else [FORWARD, BACKWARD]
    return [entry for one in directions for entry in rule(mesh.tensor_parallel, mesh.mp, what, x, one)]


def entering(mesh: MeshConfig, what: str, x: ArrayTraffic) -> list[Entry]:
    return _passes(enter_rule, mesh, what, x, recomputed=False)


def reducing(mesh: MeshConfig, what: str, x: ArrayTraffic) -> list[Entry]:
    return _passes(reduce_rule, mesh, what, x, recomputed=False)


def column_parallel(mesh: MeshConfig, what: str, x: ArrayTraffic, *, recomputed: bool = False) -> list[Entry]:
    return _passes(column_rule, mesh, what, x, recomputed=recomputed)


def row_parallel(mesh: MeshConfig, what: str, x: ArrayTraffic, *, recomputed: bool = False) -> list[Entry]:
    return _passes(row_rule, mesh, what, x, recomputed=recomputed)


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

    No policy but `none` saves what a column-parallel product gathered.  With remat full and attention_output a
    sequential block repeats the row-parallel product of attention, because the norm of the MLP reads its result;
    nothing in the block reads that of the last one.  The other policies save sublayer outputs.
    """
    own, recomputed = attention(model, mesh, x), model.remat != Remat.none
    reduced_again = model.remat in (Remat.full, Remat.attention_output)
    if model.block == Block.parallel:
        return [*own, *column_parallel(mesh, "block", x, recomputed=recomputed), *row_parallel(mesh, "block", x)]
    return [
        *own,
        *column_parallel(mesh, "attention", x, recomputed=recomputed),
        *row_parallel(mesh, "attention", x, recomputed=reduced_again),
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
