"""A model on a mesh: what each device stores of it, how it is computed, and programs that call it.

Training, evaluation and generation are built from the same value, so that parameters are placed, gathered and
initialised in one way.  `ModelComponents` are replacements for parts of the model that the configuration names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.tree_util import GetAttrKey
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from shmap_tp.config.choices import MatmulScope, Precision
from shmap_tp.config.schema import Config, ModelConfig
from shmap_tp.errors import UserError
from shmap_tp.layers.attention import AnyAttention, Chunked
from shmap_tp.layers.attention_selection import select_attention
from shmap_tp.layers.grouped_matmul import select_grouped_matmul
from shmap_tp.model.blocks import MakeMlp
from shmap_tp.model.transformer import Execution, MakeBlock, Transformer
from shmap_tp.parallel.collectives import local_shard
from shmap_tp.parallel.eight_bit import EightBit, Format, select_format
from shmap_tp.parallel.fsdp import PlacedParameters, gather_between_slices, place_parameters
from shmap_tp.parallel.mesh import axis_sizes, spec_axes
from shmap_tp.parallel.partitioning import (
    ParameterKind,
    declaration,
    is_factor,
    leaves_by_path,
    named_shardings,
    path_name,
)
from shmap_tp.parallel.rounding import rounded
from shmap_tp.parallel.tensor_parallel import TENSOR_PARALLEL, TensorParallel
from shmap_tp.parallel.weights import is_int8, quantized_shape, quantized_specs


@dataclass(frozen=True)
class Frozen:
    """Parameters that are not trained: they have no gradient and no optimizer state."""

    where: Callable[[str], bool]
    """The name of a parameter's path, such as blocks/attention/query/weight -> whether it is frozen."""
    dtype: DTypeLike
    """What frozen matrices and embeddings are held in; vectors (norms, biases) keep their own dtype.  With adapters it
    is that of model.adapter.base_dtype."""


MODEL_PARTS = "block", "mlp"
"""The replacements without which the same parameters are another model."""
PARTS = (*MODEL_PARTS, "frozen", "make_optimizer")
"""The replacements without which a run goes on as another run."""


@dataclass(frozen=True)
class ModelComponents:
    """Replacements for parts of a model; None: what the configuration names."""

    block: MakeBlock | None = None
    mlp: MakeMlp | None = None
    tensor_parallel: TensorParallel | None = None
    frozen: Frozen | None = None
    """Without it every parameter that declares a gradient is trained, or with adapters these alone."""

    @property
    def replaced(self) -> list[str]:
        """Which of `PARTS` are replaced."""
        return [part for part in PARTS if getattr(self, part, None) is not None]

    def make(self, model: ModelConfig, attend: AnyAttention, key: PRNGKeyArray) -> Transformer:
        """The model with its initial parameters."""
        return Transformer(model, attend, key=key, block=self.block, mlp=self.mlp)

    def trained(self, model: ModelConfig, params: Transformer) -> Any:
        """A tree like the parameters (arrays or shapes): whether each is trained."""
        where = (lambda _: False) if self.frozen is None else self.frozen.where

        def is_trained(path: tuple, _: Any) -> bool:
            may_be = declaration(params, path).trained and not where(path_name(path))
            return may_be and (not model.adapter.rank or is_factor(path))

        return jax.tree_util.tree_map_with_path(is_trained, params)

    def held(self, model: ModelConfig, params: Transformer, dtype: DTypeLike) -> Transformer:
        """The parameters, frozen ones in the dtype that they are held in; `dtype` is that of the activations."""
        if model.adapter.rank:
            frozen = dtype if model.adapter.base_dtype == Precision.auto else model.adapter.base_dtype.value
        else:
            frozen = None if self.frozen is None else self.frozen.dtype

        def hold(path: tuple, w: Array, is_trained: bool) -> Array:
            if is_trained or declaration(params, path).kind == ParameterKind.vector:
                return w
            return w.astype(frozen)

        return jax.tree_util.tree_map_with_path(hold, params, self.trained(model, params))


CONFIGURED_MODEL = ModelComponents()
"""Everything as the configuration names it."""


def parameter_shapes(
    model: ModelConfig,
    components: ModelComponents = CONFIGURED_MODEL,
    attend: AnyAttention | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Transformer:
    """The model with a ShapeDtypeStruct, of the whole array, in the place of every parameter; `dtype` is that of
    the activations.  No array is made, and no device is used."""
    attend = attend or Chunked(model.attention_chunk)
    make = partial(components.make, model, attend)
    return eqx.filter_eval_shape(lambda: components.held(model, make(jax.random.key(0)), dtype))


def held_in(shapes: Transformer, dtype: DTypeLike, *, int8: bool = False) -> Transformer:
    """`shapes`, which have shardings, of a model that is used and not trained: its matrices are of `dtype`.  Vectors,
    which norms compute with, stay as they are.

    A model that computes in `dtype` gives the same bits: every use of a matrix casts it to that first.  With `int8`
    those matrices of the blocks are `Int8` that mp shards and that a linear layer or experts multiply with; embedding,
    head, routers and factors of adapters are not.
    """

    def held(path: tuple, leaf: jax.ShapeDtypeStruct) -> Any:
        declared = declaration(shapes, path)
        if declared.kind == ParameterKind.vector:
            return leaf
        whole = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
        can_be_int8 = declared.by_linear or declared.kind == ParameterKind.experts
        can_be_int8 = can_be_int8 and declared.stacked and any(declared.axes) and not is_factor(path)
        return quantized_shape(whole, declared.inputs) if int8 and can_be_int8 else whole

    return jax.tree_util.tree_map_with_path(held, shapes)


def eight_bit_weights(
    model: Any,
    stored: Any,
    trained: Any,
    to: Format | None,
    seed: int = 0,
    scope: MatmulScope = MatmulScope.blocks,
) -> Any:
    """A tree like the parameters (arrays or shapes): for each sharded matrix that a linear layer multiplies with, and
    for those of experts, a function that rounds it to eight bits, as this device stores it, in a step whose number is
    given, and None for the rest; None alone if `to` is None.  `scope` names the parts of a block whose matrices these
    are.  `stored` are the PartitionSpecs, and `trained` says which are.  Random numbers for gradients that are rounded
    stochastically depend on `seed`, the step, the matrix and the layer."""
    if to is None:
        return None

    def of(path: tuple, leaf: Any, spec: P, is_trained: bool) -> Callable[[Array], EightBit] | None:
        declared = declaration(model, path)
        of_experts = declared.kind == ParameterKind.experts and to.grouped
        if not ((declared.by_linear or of_experts) and any(declared.axes)) or is_factor(path):
            return None
        if scope == MatmulScope.mlp and GetAttrKey("mlp") not in path:
            return None
        dims = (-2, -1) if of_experts else declared.inputs
        axes = tuple(axis for dim in dims for axis in spec_axes(spec[dim]))
        shape = tuple(1 if dim in dims else leaf.shape[dim] for dim in range(-leaf.ndim, 0))

        def random(step: int | Array) -> Array:
            key = jax.random.fold_in(jax.random.key(seed), step)
            numbers = jax.random.bits(jax.random.fold_in(key, crc32(path_name(path).encode())), shape)
            for dim, entry in enumerate(spec, -leaf.ndim):
                is_sharded = spec_axes(entry) and dim not in dims
                numbers = local_shard(numbers, spec_axes(entry), dim) if is_sharded else numbers
            return numbers

        def round_weight(w: Array, step: int | Array) -> EightBit:
            values, scale = rounded(lax.stop_gradient(w), dims, to.values, axes)
            numbers = random(step) if to.stochastic else None
            return EightBit(values, scale, w if is_trained else None, to, dims, numbers)

        return round_weight

    return jax.tree_util.tree_map_with_path(of, model, stored, trained)


@dataclass(frozen=True)
class ShardedModel:
    """See `shard_model`."""

    mesh: Mesh
    make: Callable[[], Transformer]
    """() -> the initial parameters, to be called under jit; the same bits on every mesh."""
    shapes: Transformer
    """ShapeDtypeStructs of the parameters, each with its sharding."""
    placed: PlacedParameters
    execution: Execution
    attention: AnyAttention
    """How the attention of each head is computed, on this mesh."""
    trained: Any
    """A tree like the parameters: whether each is trained, or frozen."""
    components: ModelComponents

    def mapped(
        self, function: Callable[..., Any], in_specs: tuple, out_specs: Any, placed: PlacedParameters | None = None
    ) -> Callable[..., Any]:
        """(params, *arguments) -> function(params, *arguments) as every device runs it, to be called under jit; FSDP
        weights are gathered between slices before, once.  `placed` describes parameters of another structure; any of
        their matrices may be of int8."""
        placed = placed or self.placed

        def on_device(params: Transformer, *arguments: Any) -> Any:
            return function(gather_between_slices(placed.placements, params), *arguments)

        def run(params: Transformer, *arguments: Any) -> Any:
            specs = quantized_specs(placed.stored, params), *in_specs
            return jax.shard_map(on_device, mesh=self.mesh, in_specs=specs, out_specs=out_specs)(params, *arguments)

        return run

    def with_initial(self, params: Transformer) -> Transformer:
        """`params`, with initial values in place of those that are None."""
        given = leaves_by_path(params, is_leaf=is_int8)
        is_missing = jax.tree_util.tree_map_with_path(lambda path, _: path_name(path) not in given, self.shapes)
        missing = eqx.filter(self.shapes, is_missing)
        if not jax.tree.leaves(missing):
            return params
        shardings = jax.tree.map(lambda shape: shape.sharding, missing)
        return eqx.combine(params, jax.jit(lambda: eqx.filter(self.make(), is_missing), out_shardings=shardings)())

    def split(self, tree: Any) -> tuple[Any, Any]:
        """(the part of a tree like the parameters that belongs to trained ones, the part of frozen ones); the rest of
        each is None."""
        return eqx.partition(tree, self.trained)


def shard_model(
    config: Config,
    mesh: Mesh,
    dtype: DTypeLike,
    components: ModelComponents = CONFIGURED_MODEL,
    *,
    isolated: bool = False,
) -> ShardedModel:
    """The model of `config` on `mesh`, computing in `dtype`; its rows have several documents if these are `isolated`.

    Raises UserError where model.attention names a kernel that these devices cannot run, or run.components names parts
    and none are given.
    """
    if config.run.components is not None and components == type(components)():
        raise UserError(
            f"run.components={config.run.components} replaces parts of the model or its step, which are not used here; "
            f"give run.components=null to leave them out"
        )
    assert dict(mesh.shape) == axis_sizes(config.mesh), f"{mesh.shape} is not a mesh of {config.mesh}"
    device = mesh.devices.flat[0]
    attend = select_attention(config.model, device, dtype, isolated, config.mesh.cp)
    to = select_format(config.train.matmul_precision, config.train.matmul_rounding, device)

    def make() -> Transformer:
        made = components.make(config.model, attend, jax.random.key(config.run.seed))
        return components.held(config.model, made, dtype)

    shapes = jax.eval_shape(make)
    trained = components.trained(config.model, shapes)
    placed = place_parameters(config.mesh, shapes, trained)
    shardings = named_shardings(mesh, placed.stored)
    train = config.train
    rounding = eight_bit_weights(shapes, placed.stored, trained, to, config.run.seed, train.matmul_scope)
    if to is not None and not jax.tree.leaves(rounding):
        raise UserError(
            f"train.matmul_scope={train.matmul_scope}: nothing would be multiplied in {train.matmul_precision} on "
            f"{device.device_kind} with train.matmul_rounding={train.matmul_rounding}: experts stay in bfloat16 with "
            f"stochastic rounding, on v4 and on GPUs; use train.matmul_scope=blocks or train.matmul_precision=bfloat16"
        )
    return ShardedModel(
        mesh=mesh,
        make=make,
        shapes=jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings),
        placed=placed,
        execution=Execution(
            components.tensor_parallel or TENSOR_PARALLEL[config.mesh.tensor_parallel],
            dtype,
            placed.placements,
            select_grouped_matmul(device),
            rounding,
        ),
        attention=attend,
        trained=trained,
        components=components,
    )
