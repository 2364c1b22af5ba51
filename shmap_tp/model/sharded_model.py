"""A model on a mesh: what each device stores of it, how it is computed, and programs that call it.

Training, evaluation and generation are built from the same value, so that parameters are placed, gathered and
initialised in one way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.layers.attention import AnyAttention
from shmap_tp.layers.attention_selection import select_attention
from shmap_tp.layers.grouped_matmul import select_grouped_matmul
from shmap_tp.model.components import CONFIGURED_MODEL, ModelComponents
from shmap_tp.model.transformer import Execution, Transformer
from shmap_tp.parallel.fsdp import PlacedParameters, gather_between_slices, place_parameters
from shmap_tp.parallel.int8 import is_int8, quantized_specs
from shmap_tp.parallel.key_paths import leaves_by_path, path_name
from shmap_tp.parallel.mesh import axis_sizes
from shmap_tp.parallel.partitioning import named_shardings
from shmap_tp.parallel.tensor_parallel import TENSOR_PARALLEL


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
    attend = select_attention(config.model, mesh.devices.flat[0], dtype, isolated, config.mesh.cp)

    def make() -> Transformer:
        made = components.make(config.model, attend, jax.random.key(config.run.seed))
        return components.held(config.model, made, dtype)

    shapes = jax.eval_shape(make)
    trained = components.trained(config.model, shapes)
    placed = place_parameters(config.mesh, shapes, trained)
    shardings = named_shardings(mesh, placed.stored)
    return ShardedModel(
        mesh=mesh,
        make=make,
        shapes=jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings),
        placed=placed,
        execution=Execution(
            components.tensor_parallel or TENSOR_PARALLEL[config.mesh.tensor_parallel],
            dtype,
            placed.placements,
            select_grouped_matmul(mesh.devices.flat[0]),
        ),
        attention=attend,
        trained=trained,
        components=components,
    )
