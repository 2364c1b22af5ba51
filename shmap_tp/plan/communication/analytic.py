"""The communication of a step, derived from its configuration and its modules before the step is traced.

Nothing here looks at the program: what is traced (`from_jaxpr.py`) and what is compiled (`from_hlo.py`) are compared
with this.  Which products a model has, and which of them rematerialisation repeats, is found by tracing its modules
with a recording tensor-parallel mode (`model_calls.py`); its parameters are those of its tree (`parameters.py`).  The
rules here say what a product communicates in a mode.

A microbatches, B sequences of a microbatch on this device, T time, D model width, N key/value heads, K head dim, L
layers.  `enter` and `reduce` are those of the tensor-parallel mode (`entering`, `reducing`), as are `column_parallel`
and `row_parallel`.  For the blocks of model/blocks.py this comes to:

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
from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
from jax.typing import DTypeLike

from shmap_tp.config.schema import Config, TensorParallelMode
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.parallel.tensor_parallel import TENSOR_PARALLEL, AllReduce, SequenceParallel, TensorParallel
from shmap_tp.plan.communication.ledger import ArrayTraffic, Direction, Entry, Operation
from shmap_tp.plan.communication.model_calls import gradients_are_partial, model_calls, traced_communication
from shmap_tp.plan.communication.parameters import (
    all_reduce_once,
    fsdp_uses,
    gathers_between_slices,
    parameters,
    shapes_in_use,
    update,
)
from shmap_tp.training.step import CONFIGURED, Components

# Tensor-parallel modes: what a call communicates in one pass, x[B T D] being all positions

Rule = Callable[[TensorParallelMode, int, str, ArrayTraffic, Direction], list[Entry]]
"""(mode, mp, the part of the model, x, direction) -> entries."""


def entering(mode: TensorParallelMode, mp: int, what: str, x: ArrayTraffic, direction: Direction) -> list[Entry]:
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


def reducing(mode: TensorParallelMode, mp: int, what: str, x: ArrayTraffic, direction: Direction) -> list[Entry]:
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


def column_parallel(mode: TensorParallelMode, mp: int, what: str, x: ArrayTraffic, direction: Direction) -> list[Entry]:
    """`column_parallel` on x[B T D].

    collective_matmul   forward mp - 1 ppermutes over mp of a chunk of x; backward as many of a chunk of dx
    the others          `entering`
    """
    if mode != TensorParallelMode.collective_matmul:
        return entering(mode, mp, what, x, direction)
    return _ring(mp, f"{what} column-parallel", x, direction)


def row_parallel(mode: TensorParallelMode, mp: int, what: str, x: ArrayTraffic, direction: Direction) -> list[Entry]:
    """`row_parallel` to x[B T D].

    collective_matmul   forward mp - 1 ppermutes over mp of a chunk of the sum; backward as many of its gradient
    the others          `reducing`
    """
    if mode != TensorParallelMode.collective_matmul:
        return reducing(mode, mp, what, x, direction)
    return _ring(mp, f"{what} row-parallel", x, direction)


def _ring(mp: int, what: str, x: ArrayTraffic, direction: Direction) -> list[Entry]:
    chunk = replace(x, values=x.values // mp, count=x.count * (mp - 1))
    return [chunk.over(MP, what, Operation.ppermute, direction)] if chunk.count else []


RULES: dict[str, Rule] = {
    "column_parallel": column_parallel,
    "row_parallel": row_parallel,
    "enter": entering,
    "reduce": reducing,
}
"""The rule of each method of `TensorParallel` that communicates."""


# The parts of a step


def activations(config: Config, dtype: DTypeLike, components: Components = CONFIGURED) -> list[Entry]:
    """What the model itself, from the embedding to the final norm, communicates over mp in all microbatches.

    For a tensor-parallel mode of the user's own there is no rule: its collectives are listed as they are traced.
    Raises ValueError where it is unknown how often something runs.
    """
    mesh, microbatches = config.mesh, config.train.microbatches
    model = replace(config.model, offload=[])  # changes where activations are saved, not what is communicated over mp
    used = shapes_in_use(model, mesh, dtype, components)
    tokens = config.train.batch // (microbatches * mesh.dp), model.context
    tp = components.tensor_parallel or TENSOR_PARALLEL[mesh.tensor_parallel]
    mode = _name(tp)
    if mode is None:
        own = traced_communication(used, tp, tokens, mesh.mp, dtype)
        return [replace(entry, count=entry.count * microbatches) for entry in own]
    simple = AllReduce() if mode == TensorParallelMode.all_reduce else SequenceParallel()
    calls, own = model_calls(used, simple, tokens, mesh.mp, dtype)
    entries = [replace(entry, count=entry.count * microbatches) for entry in own]
    for traced in calls:
        x = ArrayTraffic(traced.call.values, traced.call.dtype, traced.count * microbatches)
        entries += RULES[traced.call.method](mode, mesh.mp, traced.what, x, traced.direction)
    return entries


def _name(tp: TensorParallel) -> TensorParallelMode | None:
    """The name that mesh.tensor_parallel has for a mode; None for one of the user's own."""
    return next((name for name, mode in TENSOR_PARALLEL.items() if mode == tp), None)


def cross_entropy(positions: ArrayTraffic, chunk: int) -> list[Entry]:
    """For each chunk together: the largest logit, the sum of exponentials and the target's logit of each device's
    columns. The chunks are as few as possible, and of equal size."""
    chunks = math.ceil(positions.values / chunk)
    each = replace(positions, values=3 * math.ceil(positions.values / chunks), count=positions.count * chunks)
    return [each.over(MP, "loss", Operation.all_gather, Direction.forward)]


def _counts() -> list[Entry]:
    targets, loss = ArrayTraffic(1, "int32", 1), ArrayTraffic(1, "float32", 1)
    return [*all_reduce_once(DP, "number of targets", targets), *all_reduce_once(DP, "loss", loss)]


# The programs


def analytic_communication(config: Config, dtype: DTypeLike, components: Components = CONFIGURED) -> list[Entry]:
    """Everything that one optimizer step of `config` communicates, computing in `dtype`, by the rules above.

    Entries over a mesh axis of size 1 are included, since they are in the program: see `ledger.without_trivial_axes`.
    Raises ValueError where it is unknown how often something runs.
    """
    every = parameters(config.model, config.mesh, components)
    tp = components.tensor_parallel or TENSOR_PARALLEL[config.mesh.tensor_parallel]
    return [
        *gathers_between_slices(config, every),
        *_forward_and_backward(config, dtype, components),
        *_counts(),
        *update(config, every, partial_over_mp=gradients_are_partial(tp)),
    ]


def analytic_evaluation_communication(
    config: Config, dtype: DTypeLike, components: Components = CONFIGURED
) -> list[Entry]:
    """The same for one evaluation of as many tokens: the forward half of it."""
    both = _forward_and_backward(config, dtype, components)
    forward = [entry for entry in both if entry.direction == Direction.forward]
    every = parameters(config.model, config.mesh, components)
    return [*gathers_between_slices(config, every), *forward, *_counts()]


def _forward_and_backward(config: Config, dtype: DTypeLike, components: Components) -> list[Entry]:
    """The communication of all microbatches of a step."""
    model, microbatches = config.model, config.train.microbatches
    positions = config.train.batch // (microbatches * config.mesh.dp) * model.context
    wide = jnp.promote_types(dtype, jnp.float32).name
    return [
        *fsdp_uses(config, parameters(model, config.mesh, components), jnp.dtype(dtype).name),
        *activations(config, dtype, components),
        *cross_entropy(ArrayTraffic(positions, wide, microbatches), config.train.loss_chunk),
    ]
