"""What a step communicates, written down by hand: the reference for what the planner reads from traced and compiled
programs.  The rules for the placements of parameters are those of the search's formulas
(`search/collective_seconds.py`).

x[B T D] is the residual stream with all of its positions, N the number of key/value heads, K a head's dim.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax.typing import DTypeLike

from shmap_tp.config.choices import Block, Remat, TensorParallelMode, Zero
from shmap_tp.config.schema import Config, MeshConfig, ModelConfig
from shmap_tp.parallel.fsdp import Replicated
from shmap_tp.parallel.mesh import MP, axis_sizes, mesh_order, token_axes
from shmap_tp.plan.ledger import Direction, Entry, Operation
from shmap_tp.plan.search.collective_seconds import local_parameters, placement_communication
from shmap_tp.training.step import CONFIGURED, Components

FORWARD, RECOMPUTE, BACKWARD = Direction.forward, Direction.recompute, Direction.backward


def tally(entries: Iterable[Entry]) -> Counter[tuple[Operation, str, str, int]]:
    """How often each (operation, axis, dtype, bytes) runs per step."""
    total = Counter()
    for entry in entries:
        total[entry.operation, entry.axis, entry.dtype, entry.bytes] += entry.count
    return +total


@dataclass(frozen=True)
class ArrayTraffic:
    """The local size of an array, and how often it is communicated per step."""

    values: int
    dtype: str
    count: int

    def over(self, axis: str, what: str, operation: Operation, direction: Direction) -> Entry:
        """The ledger entry of communicating this array over `axis`."""
        size = self.values * jnp.dtype(self.dtype).itemsize
        return Entry(what, operation, axis, self.dtype, size, self.count, direction)


def all_reduce_once(axis: str, what: str, x: ArrayTraffic) -> Entry:
    """One all-reduce of x over `axis` (as in `Entry.axis`), after the last microbatch."""
    return x.over(axis, what, Operation.all_reduce, Direction.once)


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
    """The entries of one projection, key or value: where mp > N its weight is replicated over mp, and its gradient, in
    the `dtype` in which it is used, is summed over mp: here, or after the last microbatch where the residual stream is
    sharded over time."""
    if mesh.mp <= model.kv_heads or mesh.tensor_parallel != TensorParallelMode.all_reduce:
        return []
    values = model.kv_heads * model.head_dim
    weight = ArrayTraffic(model.width * values, jnp.dtype(dtype).name, count)
    bias = [ArrayTraffic(values, "float32", count)] if model.qkv_bias else []
    return [x.over(MP, "key/value weight", Operation.all_reduce, BACKWARD) for x in (weight, *bias)]


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
    """A model, from the embedding to the final norm, in all microbatches.  Beside adapters the embedding has no
    gradient; they have none over mp themselves."""
    model, mesh, microbatches = config.model, config.mesh, config.train.microbatches
    values = config.train.batch // (microbatches * mesh.dp) * model.context * model.width
    x = ArrayTraffic(values, jnp.dtype(dtype).name, microbatches)
    embedding = reducing(mesh, "embedding", x)
    return [
        *(embedding if not model.adapter.rank else [entry for entry in embedding if entry.direction == FORWARD]),
        *block(model, mesh, replace(x, count=microbatches * model.layers)),
        *entering(mesh, "head", x),
    ]


# A step


def cross_entropy(positions: ArrayTraffic, chunk: int) -> list[Entry]:
    """For each chunk together: the largest logit, the sum of exponentials and the target's logit of each device's
    columns.  The chunks are as few as possible, and of equal size."""
    chunks = math.ceil(positions.values / chunk)
    each = replace(positions, values=3 * math.ceil(positions.values / chunks), count=positions.count * chunks)
    return [each.over(MP, "loss", Operation.all_gather, FORWARD)]


def parameters(config: Config, dtype: str, components: Components = CONFIGURED) -> list[Entry]:
    """The parameters and their gradients; the squares of the gradient norm, and of the norms of the parameters before
    and after the update, are summed over each set of axes that shards any."""
    sizes, mode = axis_sizes(config.mesh), config.mesh.tensor_parallel
    partial_over = () if mode == TensorParallelMode.all_reduce else (MP,)
    every, found, shardings = local_parameters(config.model, config.mesh, dtype, components), [], set()
    for one in every:
        found += placement_communication(one, sizes, config.train.microbatches, dtype, partial_over)
        sharded = () if isinstance(one.placement, Replicated) else one.placement.axes
        shardings |= {mesh_order({*one.declared, *sharded})} if one.trained else set()
    norms = ArrayTraffic(1, "float32", 1), ArrayTraffic(2, "float32", 1)
    return found + [all_reduce_once(" ".join(axes), "norm", norm) for norm in norms for axes in shardings if axes]


def step(config: Config, dtype: str) -> list[Entry]:
    """A whole step of the blocks of model/blocks.py, without experts and what Muon exchanges."""
    axes, microbatches = " ".join(token_axes(axis_sizes(config.mesh))), config.train.microbatches
    positions = config.train.batch // (microbatches * config.mesh.dp) * config.model.context
    return [
        *activations(config, dtype),
        *cross_entropy(ArrayTraffic(positions, "float32", microbatches), config.train.loss_chunk),
        *parameters(config, dtype),
        *[all_reduce_once(axes, "loss", ArrayTraffic(1, of, 1)) for of in ("int32", "float32")],
    ]
