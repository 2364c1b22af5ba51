"""The communication of a step, derived from its configuration before anything is traced.

Nothing here looks at the program: what is traced (`from_jaxpr.py`) and what is compiled (`from_hlo.py`) are compared
with this.

A microbatches, B sequences of a microbatch on this device, T time, D model width, N key/value heads, K head dim, L
layers.  `enter` and `reduce` are those of the tensor-parallel mode (`entering`, `reducing`), as are `column_parallel`
and `row_parallel`.

    embedding          reduce x[B T D]                                                                 A times
    parallel block     column_parallel on h[B T D], row_parallel to y[B T D]                           A L times
    sequential block   the same twice; with remat full the attention's row_parallel once more          A L times
    remat              any but none repeats every column_parallel of a block                           A L times
    key, value         where mp > N: backward all-reduce of dw[D N K] over mp, float32, each;          A L times
                       in the dtype of the activations where the weight is FSDP
    head               enter with h[B T D]                                                             A times
    cross entropy      forward, for each chunk of the B T positions, an all-gather over mp of          A chunks times
                       [3 chunk], float32
    step               over dp the number of targets, the loss, every gradient; the gradient norm,     once
                       and the norms of the parameters before and after the update
    zero: zero1        a matrix's gradient is reduce-scattered instead, its update all-gathered        once
    zero: fsdp         a matrix is all-gathered, in a block again in the backward pass, and its        A times a layer
                       gradient reduce-scattered, both in the dtype of the activations
    offload            with gradient rings the last weight of a block is prefetched in the backward pass, and not
                       gathered where that recomputes
    fsdp_gradients:    the gradient of a block's matrix is reduced in a ring of dp, and                A times a layer
      ring             reduce-scattered between rings
    slices             all of that within a slice; between slices, float32, FSDP weights are           once
                       all-gathered and sharded gradients reduce-scattered

Where the residual stream is sharded over time, the gradients of parameters replicated over mp (norms, learned
positions, key and value where mp > N) are summed over mp, once per step; key and value then not A L times.
"""

import math
from dataclasses import replace

import jax.numpy as jnp
from jax.typing import DTypeLike

from shmap_tp.config.schema import Block, Config, MeshConfig, ModelConfig, Remat, TensorParallelMode, Zero
from shmap_tp.parallel.fsdp import Fsdp
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.plan.communication.ledger import ArrayTraffic, Direction, Entry, Operation
from shmap_tp.plan.communication.parameters import (
    all_reduce_once,
    fsdp_uses,
    gathers_between_slices,
    parameters,
    passes,
    update,
)

# Tensor-parallel modes


def entering(mesh: MeshConfig, what: str, x: ArrayTraffic, *, recomputed: bool = False) -> list[Entry]:
    """`enter` with x[B T D] as a result, and once more where it is `recomputed`.

    all_reduce   forward nothing; backward one all-reduce of dx over mp
    the others   forward one all-gather over mp of the shards of x; backward one reduce-scatter of dx
    """
    what = f"{what} enter"
    if mesh.tensor_parallel == TensorParallelMode.all_reduce:
        return [x.over(MP, what, Operation.all_reduce, Direction.backward)]
    shard = replace(x, values=x.values // mesh.mp)
    forward = [shard.over(MP, what, Operation.all_gather, direction) for direction in passes(recomputed)]
    return [*forward, x.over(MP, what, Operation.reduce_scatter, Direction.backward)]


def reducing(mesh: MeshConfig, what: str, x: ArrayTraffic, *, recomputed: bool = False) -> list[Entry]:
    """`reduce` of x[B T D] {+mp}, and once more where it is `recomputed`.

    all_reduce   forward one all-reduce of x over mp; backward nothing
    the others   forward one reduce-scatter of x over mp; backward one all-gather of the shards of dx
    """
    what = f"{what} reduce"
    if mesh.tensor_parallel == TensorParallelMode.all_reduce:
        return [x.over(MP, what, Operation.all_reduce, direction) for direction in passes(recomputed)]
    shard = replace(x, values=x.values // mesh.mp)
    forward = [x.over(MP, what, Operation.reduce_scatter, direction) for direction in passes(recomputed)]
    return [*forward, shard.over(MP, what, Operation.all_gather, Direction.backward)]


def column_parallel(mesh: MeshConfig, what: str, x: ArrayTraffic, *, recomputed: bool = False) -> list[Entry]:
    """`column_parallel` on x[B T D], and once more where it is `recomputed`.

    collective_matmul   forward mp - 1 ppermutes over mp of a chunk of x; backward as many of a chunk of dx
    the others          `entering`
    """
    if mesh.tensor_parallel != TensorParallelMode.collective_matmul:
        return entering(mesh, what, x, recomputed=recomputed)
    return _ring(mesh, f"{what} column-parallel", x, [*passes(recomputed), Direction.backward])


def row_parallel(mesh: MeshConfig, what: str, x: ArrayTraffic, *, recomputed: bool = False) -> list[Entry]:
    """`row_parallel` to x[B T D], and once more where it is `recomputed`.

    collective_matmul   forward mp - 1 ppermutes over mp of a chunk of the sum; backward as many of its gradient
    the others          `reducing`
    """
    if mesh.tensor_parallel != TensorParallelMode.collective_matmul:
        return reducing(mesh, what, x, recomputed=recomputed)
    return _ring(mesh, f"{what} row-parallel", x, [*passes(recomputed), Direction.backward])


def _ring(mesh: MeshConfig, what: str, x: ArrayTraffic, directions: list[Direction]) -> list[Entry]:
    chunk = replace(x, values=x.values // mesh.mp, count=x.count * (mesh.mp - 1))
    return [chunk.over(MP, what, Operation.ppermute, direction) for direction in directions if chunk.count]


# The parts of a model


def key_value(model: ModelConfig, mesh: MeshConfig, count: int, dtype: DTypeLike = jnp.float32) -> list[Entry]:
    """Of one projection, key or value: where mp > N its weight is replicated over mp, and its gradient, in the `dtype`
    in which it is used, is summed over mp: here, or after the last microbatch where the residual stream is sharded over
    time."""
    if mesh.mp <= model.kv_heads or mesh.tensor_parallel != TensorParallelMode.all_reduce:
        return []
    weight = ArrayTraffic(model.width * model.kv_heads * model.head_dim, jnp.dtype(dtype).name, count)
    return [weight.over(MP, "key/value weight", Operation.all_reduce, Direction.backward)]


def attention(model: ModelConfig, mesh: MeshConfig, x: ArrayTraffic) -> list[Entry]:
    """Attention's own communication beside its column- and row-parallel products."""
    gathered = mesh.zero == Zero.fsdp and any(
        isinstance(parameter.placement, Fsdp)
        for parameter in parameters(model, mesh)
        if parameter.name == "blocks.attention.key"
    )
    return 2 * key_value(model, mesh, x.count, x.dtype if gathered else jnp.float32)


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


def cross_entropy(positions: ArrayTraffic, chunk: int) -> list[Entry]:
    """For each chunk together: the largest logit, the sum of exponentials and the target's logit of each device's
    columns. The chunks are as few as possible, and of equal size."""
    chunks = math.ceil(positions.values / chunk)
    each = replace(positions, values=3 * math.ceil(positions.values / chunks), count=positions.count * chunks)
    return [each.over(MP, "loss", Operation.all_gather, Direction.forward)]


# The programs


def _forward_and_backward(config: Config, dtype: DTypeLike) -> list[Entry]:
    """The communication of all microbatches of a step."""
    model, mesh, microbatches = config.model, config.mesh, config.train.microbatches
    positions = config.train.batch // (microbatches * mesh.dp) * model.context
    x = ArrayTraffic(positions * model.width, jnp.dtype(dtype).name, microbatches)
    wide = jnp.promote_types(dtype, jnp.float32).name
    return [
        *fsdp_uses(config, x.dtype),
        *reducing(mesh, "embedding", x),
        *block(model, mesh, replace(x, count=microbatches * model.layers)),
        *entering(mesh, "head", x),
        *cross_entropy(ArrayTraffic(positions, wide, microbatches), config.train.loss_chunk),
    ]


def _counts() -> list[Entry]:
    targets, loss = ArrayTraffic(1, "int32", 1), ArrayTraffic(1, "float32", 1)
    return [*all_reduce_once(DP, "number of targets", targets), *all_reduce_once(DP, "loss", loss)]


def analytic_communication(config: Config, dtype: DTypeLike) -> list[Entry]:
    """Everything that one optimizer step of `config` communicates, computing in `dtype`, by the rules above.

    Entries over a mesh axis of size 1 are included, since they are in the program: see `ledger.without_trivial_axes`.
    """
    return [
        *gathers_between_slices(config),
        *_forward_and_backward(config, dtype),
        *_counts(),
        *update(config),
    ]


def analytic_evaluation_communication(config: Config, dtype: DTypeLike) -> list[Entry]:
    """The same for one evaluation of as many tokens: the forward half of it."""
    forward = [entry for entry in _forward_and_backward(config, dtype) if entry.direction == Direction.forward]
    return [*gathers_between_slices(config), *forward, *_counts()]
