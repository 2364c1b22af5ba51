"""What a step says on the wire, by the rules in the docstrings: from the configuration, before anything is traced.

Nothing here looks at the program; what was traced and what was compiled are held to this.

A microbatches, B windows of a microbatch on this device, T time, D model width, N key/value heads, K head dim, L
layers.

    embedding        leaves with x[B T D]                                                              A times
    parallel block   goes into its region with h[B T D], and out of it with y[B T D]                   A L times
    sequential       the same, twice; with remat full out of the attention's once more                 A L times
    remat            any but none goes once more into whatever a block goes into                       A L times
    key, value       where mp > N: backward all-reduce of dw[D N K] over mp, float32, each;            A L times
                     in the dtype of the activations where dp shares the weight
    head             enters with h[B T D]                                                              A times
    cross entropy    forward, of each chunk of the B T, an all-gather of [3 chunk] over mp, float32    A chunks times
    step             over dp the count of targets, the loss, and every gradient; over mp the norm      once
    zero: optimizer  a matrix's gradient is reduce-scattered instead, its update all-gathered          once
    zero: parameters a matrix is all-gathered, that of a block in the backward pass again              A times a layer
                     and its gradient reduce-scattered, both in the dtype of the activations           A times a layer
    offload          where gradients go around a ring, the last matrix of a block is gathered ahead of its turn in the
                     backward pass, and not where that computes again
    gradients: ring  of a block's matrix goes around a ring of dp, and is reduce-scattered between     A times a layer
                     the rings
    slices           all of that within a slice; between slices, float32: what `zero` keeps is         once
                     all-gathered, and the gradient of what it updates reduce-scattered

What these are, by wire, is said by `entering` and `leaving`, `into` and `out_of`, and by nothing else.  Where the wire
cuts time the step sums over mp, once, every gradient of what is whole there: norms, learned positions, and key and
value where mp > N, which then are not summed A L times.
"""

import math
from dataclasses import replace

import jax.numpy as jnp
from jax.typing import DTypeLike

from shmap_tp.config.schema import Block, Config, MeshConfig, ModelConfig, Remat, TensorParallelMode, Zero
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.plan.communication.ledger import ArrayTraffic, Direction, Entry, Operation
from shmap_tp.plan.communication.parameters import holding, parameters, passes, summing, update, using

# The wires


def entering(mesh: MeshConfig, what: str, x: ArrayTraffic, *, again: bool = False) -> list[Entry]:
    """`enter` to a whole x, and once more where a recomputation needs it `again`.

    all_reduce   forward nothing; backward one all-reduce of dx over mp
    the others   forward one all-gather over mp of the parts of x; backward one reduce-scatter of dx
    """
    what = f"{what} enter"
    if mesh.tensor_parallel == TensorParallelMode.all_reduce:
        return [x.over(MP, what, Operation.all_reduce, Direction.backward)]
    part = replace(x, values=x.values // mesh.mp)
    forward = [part.over(MP, what, Operation.all_gather, direction) for direction in passes(again)]
    return [*forward, x.over(MP, what, Operation.reduce_scatter, Direction.backward)]


def leaving(mesh: MeshConfig, what: str, x: ArrayTraffic, *, again: bool = False) -> list[Entry]:
    """`leave` with a whole x {+mp}, and once more where a recomputation needs it `again`.

    all_reduce   forward one all-reduce of x over mp; backward nothing
    the others   forward one reduce-scatter of x over mp; backward one all-gather of the parts of dx
    """
    what = f"{what} leave"
    if mesh.tensor_parallel == TensorParallelMode.all_reduce:
        return [x.over(MP, what, Operation.all_reduce, direction) for direction in passes(again)]
    part = replace(x, values=x.values // mesh.mp)
    forward = [x.over(MP, what, Operation.reduce_scatter, direction) for direction in passes(again)]
    return [*forward, part.over(MP, what, Operation.all_gather, Direction.backward)]


def into(mesh: MeshConfig, what: str, x: ArrayTraffic, *, again: bool = False) -> list[Entry]:
    """`into` a region with a whole x, and once more where a recomputation needs it `again`.

    ring         forward mp - 1 ppermutes over mp of a part of x; backward as many of a part of dx
    the others   `entering`
    """
    if mesh.tensor_parallel != TensorParallelMode.collective_matmul:
        return entering(mesh, what, x, again=again)
    return _around(mesh, f"{what} into", x, [*passes(again), Direction.backward])


def out_of(mesh: MeshConfig, what: str, x: ArrayTraffic, *, again: bool = False) -> list[Entry]:
    """`out_of` a region with a whole x {+mp}, and once more where a recomputation needs it `again`.

    ring         forward mp - 1 ppermutes over mp of a part of the sum; backward as many of a part of its gradient
    the others   `leaving`
    """
    if mesh.tensor_parallel != TensorParallelMode.collective_matmul:
        return leaving(mesh, what, x, again=again)
    return _around(mesh, f"{what} out of", x, [*passes(again), Direction.backward])


def _around(mesh: MeshConfig, what: str, x: ArrayTraffic, directions: list[Direction]) -> list[Entry]:
    part = replace(x, values=x.values // mesh.mp, count=x.count * (mesh.mp - 1))
    return [part.over(MP, what, Operation.ppermute, direction) for direction in directions if part.count]


# The parts of a model


def key_value(model: ModelConfig, mesh: MeshConfig, count: int, dtype: DTypeLike = jnp.float32) -> list[Entry]:
    """Of one projection, key or value: where mp > N its weight is whole on every device of mp, and its gradient, in the
    `dtype` that it is used in, summed: here, or where the wire cuts time after the last microbatch."""
    if mesh.mp <= model.kv_heads or mesh.tensor_parallel != TensorParallelMode.all_reduce:
        return []
    weight = ArrayTraffic(model.width * model.kv_heads * model.head_dim, jnp.dtype(dtype).name, count)
    return [weight.over(MP, "key/value weight", Operation.all_reduce, Direction.backward)]


def attention(model: ModelConfig, mesh: MeshConfig, x: ArrayTraffic) -> list[Entry]:
    """In a region with x."""
    weight = parameters(model, mesh.mp)["key"]
    gathered = mesh.zero == Zero.fsdp and weight.is_shared(mesh.dp)
    return 2 * key_value(model, mesh, x.count, x.dtype if gathered else jnp.float32)


def block(model: ModelConfig, mesh: MeshConfig, x: ArrayTraffic) -> list[Entry]:
    """A block, from x to x.

    What it entered with is never kept where anything is recomputed.  With remat full a sequential block sums the
    attention again, because the norm of the MLP reads it; what a block leaves with at its end is read by nothing in it.
    The other policies keep whatever left.
    """
    within, again = attention(model, mesh, x), model.remat != Remat.none
    if model.block == Block.parallel:
        return [*within, *into(mesh, "block", x, again=again), *out_of(mesh, "block", x)]
    return [
        *within,
        *into(mesh, "attention", x, again=again),
        *out_of(mesh, "attention", x, again=model.remat == Remat.full),
        *into(mesh, "MLP", x, again=again),
        *out_of(mesh, "MLP", x),
    ]


def cross_entropy(positions: ArrayTraffic, chunk: int) -> list[Entry]:
    """Of each chunk together: the greatest logit, the sum of exponentials and the target's own logit, as each device
    has them of its columns.  As few chunks as it takes, of as even a size as there is."""
    chunks = math.ceil(positions.values / chunk)
    each = replace(positions, values=3 * math.ceil(positions.values / chunks), count=positions.count * chunks)
    return [each.over(MP, "loss", Operation.all_gather, Direction.forward)]


# The programs


def _forward_and_backward(config: Config, dtype: DTypeLike) -> list[Entry]:
    """All that travels for the sake of the microbatches, in a step."""
    model, mesh, times = config.model, config.mesh, config.train.microbatches
    positions = config.train.batch // (times * mesh.dp) * model.context
    x = ArrayTraffic(positions * model.width, jnp.dtype(dtype).name, times)
    wide = jnp.promote_types(dtype, jnp.float32).name
    return [
        *using(config, x.dtype),
        *leaving(mesh, "embedding", x),
        *block(model, mesh, replace(x, count=times * model.layers)),
        *entering(mesh, "head", x),
        *cross_entropy(ArrayTraffic(positions, wide, times), config.train.loss_chunk),
    ]


def _counts() -> list[Entry]:
    targets, loss = ArrayTraffic(1, "int32", 1), ArrayTraffic(1, "float32", 1)
    return [*summing(DP, "count of targets", targets), *summing(DP, "loss", loss)]


def analytic_communication(config: Config, dtype: DTypeLike) -> list[Entry]:
    """All that one optimizer step of `config` says on the wire, computing in `dtype`, by the rules above.

    A mesh axis of one device is there too, since it stands in the program: see `ledger.travelling`.
    """
    return [*holding(config), *_forward_and_backward(config, dtype), *_counts(), *update(config)]


def analytic_evaluation_communication(config: Config, dtype: DTypeLike) -> list[Entry]:
    """The same of one evaluation of as many tokens: the forward half of it."""
    forward = [entry for entry in _forward_and_backward(config, dtype) if entry.direction == Direction.forward]
    return [*holding(config), *forward, *_counts()]
