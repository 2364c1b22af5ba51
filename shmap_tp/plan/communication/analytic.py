"""The communication of a step, and of generation, derived from the configuration and the modules of the model.

Nothing here looks at the program that runs: the traced step (`from_jaxpr.py`) and the compiled one (`from_hlo.py`) are
compared with this.  What the model itself communicates is found by tracing its modules (`model_communication`), in any
tensor-parallel mode; its parameters are those of its tree (`parameters.py`).  The tests compare both with rules that
are written down by hand (`tests/helpers/communication_rules.py`).

A microbatches, B sequences of a microbatch on this device, T time, D model width, N key/value heads, K head dim, L
layers.  `enter` and `reduce` are those of the tensor-parallel mode, as are `column_parallel` and `row_parallel`.  For
the blocks of model/blocks.py this comes to:

    embedding          reduce x[B T D]                                                                 A times
    parallel block     column_parallel on h[B T D], row_parallel to y[B T D]                           A L times
    sequential block   the same twice; with remat full and attention_output the attention's            A L times
                       row_parallel once more
    remat              any but none repeats every column_parallel of a block                           A L times
    key, value         where mp > N: backward all-reduce of dw[D N K] over mp, float32, each;          A L times
                       in the dtype of the activations where the weight is FSDP
    head               enter with h[B T D]                                                             A times
    cross entropy      forward, for each chunk of the B T positions, an all-gather over mp of          A chunks times
                       [3 chunk], float32
    experts            over ep all-to-alls of rows, of their weights and of the numbers of experts     A L times
    step               over dp the number of targets, the loss, every gradient; the gradient norm,     once
                       and the norms of the parameters before and after the update; over dp and mp
                       the statistics of routers
    zero: zero1        a matrix's gradient is reduce-scattered instead, its update all-gathered        once
    zero: fsdp         a matrix is all-gathered, in a block again in the backward pass, and its        A times a layer
                       gradient reduce-scattered, both in the dtype of the activations
    fsdp_gradients:    the gradient of a block's matrix is reduced in a ring of dp, and                A times a layer
      ring             reduce-scattered between rings
    optimizer: muon    over each axis the shards of all matrices' momenta, exchanged for whole ones,       once
                       and the updates back, in the dtype of the activations (`whole_matrices.py`)
    slices             all of that within a slice; between slices, float32, FSDP weights are           once
                       all-gathered and sharded gradients reduce-scattered

Where the residual stream is sharded over time, the gradients of parameters replicated over mp (norms, learned
positions, key and value where mp > N) are summed over mp, once per step; key and value then not A L times.

Generation reads T positions together (a prompt, or one new token) of each of B/dp sequences of a device, and makes N
tokens a call.  Decoding replicates the residual stream over mp, whatever the mode of training; a prompt shards it over
time where mp divides T, and has a reduce-scatter and an all-gather in place of each all-reduce:

    embedding          all-reduce of x[B/dp T D] over mp                                               N times
    parallel block     all-reduce of y[B/dp T D] over mp                                               N L times
    sequential block   the same twice                                                                  N L times
    next token         all-gather over mp of [B/dp], float32, and of [B/dp], int32                     N times
    new tokens         all-gather over dp of [B/dp N], int32                                           once
    zero: fsdp         a matrix is all-gathered over dp, in the dtype of the activations               N times a layer
"""

import math
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from shmap_tp.config.schema import Config
from shmap_tp.layers.experts import Experts
from shmap_tp.model.components import parameter_shapes
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.fsdp import Fsdp, place_parameters
from shmap_tp.parallel.mesh import (
    MP,
    Role,
    abstract_mesh,
    axes_of,
    axis_sizes,
    batch_axes,
    mesh_order,
    token_axes,
)
from shmap_tp.parallel.tensor_parallel import TENSOR_PARALLEL, AllReduce, TensorParallel, prompt_tensor_parallel
from shmap_tp.parallel.whole_matrices import UpdateSharding
from shmap_tp.plan.communication.from_jaxpr import communication_in_jaxpr, model_communication
from shmap_tp.plan.communication.ledger import ArrayTraffic, Direction, Entry, Operation
from shmap_tp.plan.communication.parameters import (
    all_reduce_once,
    fsdp_uses,
    gathers_between_slices,
    parameters,
    placed_shapes,
    shapes_in_use,
    update,
)
from shmap_tp.training.optimizer import make_optimizer
from shmap_tp.training.step import CONFIGURED, Components

# The parts of a step


def activations(config: Config, dtype: DTypeLike, components: Components = CONFIGURED) -> list[Entry]:
    """What the model itself, from the embedding to the final norm, communicates in all microbatches, as its modules are
    traced.  Raises ValueError where it is unknown how often something runs."""
    mesh, microbatches = config.mesh, config.train.microbatches
    model = replace(config.model, offload=[])  # changes where activations are saved, not what is communicated
    used = shapes_in_use(model, mesh, dtype, components)
    sizes = axis_sizes(mesh)
    is_gathered = jax.tree.map(lambda it: isinstance(it, Fsdp), placed_shapes(model, mesh, components, dtype)[2])
    tokens, tp = microbatch_shape(config), _mode(config, components)
    is_trained = components.trained(model, used)
    found = model_communication(used, tp, tokens, sizes, dtype, is_gathered, is_trained)
    return [replace(entry, count=entry.count * microbatches) for entry in found]


def microbatch_shape(config: Config) -> tuple[int, int]:
    """[B, T] of a microbatch on one device."""
    sizes = axis_sizes(config.mesh)
    sequences = math.prod(sizes[axis] for axis in batch_axes(sizes))
    time = math.prod(sizes[axis] for axis in token_axes(sizes)) // sequences
    return config.train.batch // config.train.microbatches // sequences, config.model.context // time


def _mode(config: Config, components: Components) -> TensorParallel:
    return components.tensor_parallel or TENSOR_PARALLEL[config.mesh.tensor_parallel]


def cross_entropy(positions: ArrayTraffic, chunk: int) -> list[Entry]:
    """For each chunk together: the largest logit, the sum of exponentials and the target's logit of each device's
    columns. The chunks are as few as possible, and of equal size."""
    chunks = math.ceil(positions.values / chunk)
    each = replace(positions, values=3 * math.ceil(positions.values / chunks), count=positions.count * chunks)
    return [each.over(MP, "loss", Operation.all_gather, Direction.forward)]


def _counts(config: Config) -> list[Entry]:
    targets, loss = ArrayTraffic(1, "int32", 1), ArrayTraffic(1, "float32", 1)
    axes = " ".join(token_axes(axis_sizes(config.mesh)))
    return [*all_reduce_once(axes, "number of targets", targets), *all_reduce_once(axes, "loss", loss)]


def whole_matrices(config: Config, dtype: DTypeLike, components: Components = CONFIGURED) -> list[Entry]:
    """What the optimizer communicates, as its update is traced on a mesh without devices."""
    optimizer = (components.make_optimizer or make_optimizer)(config.optimizer)
    if not optimizer.on_whole_matrices:
        return []
    sizes, shapes = axis_sizes(config.mesh), parameter_shapes(config.model, components, dtype=dtype)
    is_trained = components.trained(config.model, shapes)
    updated = place_parameters(config.mesh, shapes, is_trained).updated
    trained, specs = eqx.filter(shapes, is_trained), eqx.filter(updated, is_trained)

    def first_update(params: Transformer) -> Transformer:
        return optimizer.update(params, optimizer.init(params), params, UpdateSharding(specs, tuple(sizes), dtype))[0]

    program = jax.shard_map(first_update, mesh=abstract_mesh(sizes), in_specs=(specs,), out_specs=specs)
    found = communication_in_jaxpr(jax.make_jaxpr(program)(trained).jaxpr)
    return [replace(entry, what="momenta as whole matrices, and updates back") for entry in found]


def router_statistics(config: Config, components: Components) -> list[Entry]:
    """Of each layer of experts the load of each expert, the entropy and the number of dropped rows."""
    model, sizes = config.model, axis_sizes(config.mesh)
    blocks = parameter_shapes(model, components).blocks
    layers = jax.tree.leaves(blocks, is_leaf=lambda node: isinstance(node, Experts))
    if not any(isinstance(node, Experts) for node in layers):
        return []
    axes = " ".join(mesh_order({*token_axes(sizes), *axes_of(Role.features, sizes)}))
    of = ((model.experts, "int32"), (1, "float32"), (1, "float32"))
    arrays = [ArrayTraffic(model.layers * size, dtype, 1) for size, dtype in of]
    return [entry for array in arrays for entry in all_reduce_once(axes, "statistics of routers", array)]


# The programs


def analytic_communication(config: Config, dtype: DTypeLike, components: Components = CONFIGURED) -> list[Entry]:
    """Everything that one optimizer step of `config` communicates, computing in `dtype`, by the rules above.

    Entries over a mesh axis of size 1 are included, since they are in the program: see `ledger.without_trivial_axes`.
    Raises ValueError where it is unknown how often something runs.
    """
    every = parameters(config.model, config.mesh, dtype, components)
    return [
        *gathers_between_slices(config, every),
        *_forward_and_backward(config, dtype, components),
        *_counts(config),
        *router_statistics(config, components),
        *update(config, every, partial_over=_mode(config, components).time_axes),
        *whole_matrices(config, dtype, components),
    ]


def analytic_evaluation_communication(
    config: Config, dtype: DTypeLike, components: Components = CONFIGURED
) -> list[Entry]:
    """The same for one evaluation of as many tokens: the forward half of it."""
    both = _forward_and_backward(config, dtype, components)
    forward = [entry for entry in both if entry.direction == Direction.forward]
    every = parameters(config.model, config.mesh, dtype, components)
    return [*gathers_between_slices(config, every), *forward, *_counts(config)]


def _forward_and_backward(config: Config, dtype: DTypeLike, components: Components) -> list[Entry]:
    """The communication of all microbatches of a step."""
    model, microbatches = config.model, config.train.microbatches
    positions = math.prod(microbatch_shape(config))
    wide = jnp.promote_types(dtype, jnp.float32).name
    return [
        *fsdp_uses(config, parameters(model, config.mesh, dtype, components), jnp.dtype(dtype).name),
        *activations(config, dtype, components),
        *cross_entropy(ArrayTraffic(positions, wide, microbatches), config.train.loss_chunk),
    ]


# Generation


def prefill_communication(config: Config, batch: int, prompt: int, dtype: DTypeLike) -> list[Entry]:
    """What reading `batch` prompts of `prompt` tokens communicates, and choosing a token for each, without noise.

    `batch` is that of all devices of one slice; the model computes in `dtype`.  Entries over a mesh axis of size 1 are
    included.
    """
    tp = prompt_tensor_parallel(prompt, config.mesh.mp)
    return _generation(config, (batch // config.mesh.dp, prompt), 1, tp, dtype)


def decode_communication(config: Config, batch: int, tokens: int, dtype: DTypeLike) -> list[Entry]:
    """What one call that decodes `tokens` tokens of each of `batch` sequences communicates; as above."""
    return _generation(config, (batch // config.mesh.dp, 1), tokens, AllReduce(), dtype)


def _generation(
    config: Config, shape: tuple[int, int], steps: int, tp: TensorParallel, dtype: DTypeLike
) -> list[Entry]:
    """`shape` is (sequences of a device, positions of each), which are computed `steps` times."""
    batch, _ = shape
    model = replace(config.model, offload=[])
    used = shapes_in_use(model, config.mesh, dtype)
    found = model_communication(used, tp, shape, axis_sizes(config.mesh), dtype)
    once = replace(config, train=replace(config.train, microbatches=1))
    found += fsdp_uses(once, parameters(model, config.mesh, dtype), jnp.dtype(dtype).name)
    repeated = [replace(e, count=e.count * steps) for e in found if e.direction == Direction.forward]
    wide = jnp.promote_types(dtype, jnp.float32).name
    chosen = [ArrayTraffic(batch, of, steps) for of in (wide, "int32")]
    prompts = " ".join(token_axes(axis_sizes(config.mesh)))
    return [
        *repeated,
        *(x.over(MP, "next token", Operation.all_gather, Direction.forward) for x in chosen),
        ArrayTraffic(batch * steps, "int32", 1).over(prompts, "new tokens", Operation.all_gather, Direction.once),
    ]
