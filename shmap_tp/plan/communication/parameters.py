"""The communication of parameters in a step: FSDP gathers, gradient reductions, updates.  Analytic, from declarations.

What the parameters are, which axes shard each and how the others place it, is read from the model's own declarations
(`partitioning.partition_specs`, `fsdp.place_parameters`): nothing here names a layer.  The rules for what a placement
communicates are those of `fsdp.py`; `analytic.py` lists them beside those of activations.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.typing import DTypeLike

from shmap_tp.config.schema import Config, MeshConfig, ModelConfig
from shmap_tp.model.components import CONFIGURED_MODEL, ModelComponents, parameter_shapes
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.fsdp import Fsdp, Placement, Replicated, Zero1, is_ring_reduced, place_parameters, within_slice
from shmap_tp.parallel.key_paths import path_name
from shmap_tp.parallel.mesh import DP, DP_RING, DP_SLICE, axis_sizes, mesh_order
from shmap_tp.parallel.partitioning import axes_in, is_stacked, partition_specs
from shmap_tp.plan.communication.ledger import ArrayTraffic, Direction, Entry, Operation


def all_reduce_once(axis: str, what: str, x: ArrayTraffic) -> list[Entry]:
    """One all-reduce of x over `axis` (as in `Entry.axis`), after the last microbatch."""
    return [x.over(axis, what, Operation.all_reduce, Direction.once)]


@dataclass(frozen=True)
class Parameter:
    """A parameter, as the axes that it declares leave it to one device."""

    name: str
    values: int
    """Number of values of one layer."""
    layers: int
    """How many are stacked; 1 outside the blocks."""
    in_block: bool
    declared: tuple[str, ...]
    """The axes that its declaration shards it over."""
    placement: Placement
    shards: int
    """Over how many ranks its placement shards the update, and the optimizer state."""
    uses: int
    """How often a microbatch uses it: 2 for an embedding that is also the head."""
    trained: bool
    """Whether it has a gradient and moments."""
    dtype: str
    """What it is stored in."""

    def traffic(self, dtype: str, *, stacked: bool) -> ArrayTraffic:
        """All layers at once, or one after the other."""
        if stacked:
            return ArrayTraffic(self.values * self.layers, dtype, 1)
        return ArrayTraffic(self.values, dtype, self.layers)


def placed_shapes(
    model: ModelConfig, mesh: MeshConfig, components: ModelComponents, dtype: DTypeLike
) -> tuple[Transformer, Transformer, Transformer]:
    """(the shapes of the parameters, their PartitionSpecs as declared, their placements), three trees alike; `dtype` is
    that of the activations."""
    shapes = parameter_shapes(model, components, dtype=dtype)
    placed = place_parameters(mesh, shapes, components.trained(model, shapes))
    return shapes, partition_specs(shapes, axis_sizes(mesh)), placed.placements


def shapes_in_use(
    model: ModelConfig, mesh: MeshConfig, dtype: DTypeLike, components: ModelComponents = CONFIGURED_MODEL
) -> Transformer:
    """The shapes of the parameters as layers are given them: FSDP weights are gathered in `dtype`."""
    shapes, _, placements = placed_shapes(model, mesh, components, dtype)
    return jax.tree.map(
        lambda leaf, placement: jax.ShapeDtypeStruct(leaf.shape, dtype) if isinstance(placement, Fsdp) else leaf,
        shapes,
        placements,
    )


def parameters(
    model: ModelConfig, mesh: MeshConfig, dtype: DTypeLike, components: ModelComponents = CONFIGURED_MODEL
) -> list[Parameter]:
    """Every parameter of the model on a mesh, in the order of its tree; `dtype` is that of the activations."""
    shapes, declared, placements = placed_shapes(model, mesh, components, dtype)
    trained = components.trained(model, shapes)
    sizes = axis_sizes(mesh)

    def describe(path: tuple, leaf: jax.ShapeDtypeStruct, spec: Any, placement: Placement, *is_: bool) -> Parameter:
        stacked, trained = is_
        shards = math.prod(sizes[axis] for axis in axes_in(spec))
        layers = leaf.shape[0] if stacked else 1
        is_head_too = shapes.head is None and leaf is shapes.embedding.weight
        return Parameter(
            name=path_name(path, ".").removesuffix(".weight"),
            values=math.prod(leaf.shape) // layers // shards,
            layers=layers,
            in_block=stacked,
            declared=axes_in(spec),
            placement=placement,
            shards=1 if isinstance(placement, Replicated) else math.prod(sizes[axis] for axis in placement.axes),
            uses=1 + is_head_too,
            trained=trained,
            dtype=str(leaf.dtype),
        )

    found = jax.tree_util.tree_map_with_path(describe, shapes, declared, placements, is_stacked(shapes), trained)
    return jax.tree.leaves(found, is_leaf=lambda node: isinstance(node, Parameter))


def fsdp_uses(config: Config, every: list[Parameter], dtype: str) -> list[Entry]:
    """FSDP weights gathered within a slice for each use, in a block once more in the backward pass; a tied embedding
    also as the head; and the reduction of their gradients."""
    entries, sizes = [], axis_sizes(config.mesh)
    for parameter in [each for each in every for _ in range(each.uses)]:
        if not isinstance(parameter.placement, Fsdp):
            continue
        full = replace(parameter.traffic(dtype, stacked=False), count=parameter.layers * config.train.microbatches)
        entries += _gathers(parameter, full, sizes)
        entries += _reduction(full, parameter, sizes) if parameter.trained else []
    return entries


def _part(x: ArrayTraffic, axes: Iterable[str], sizes: Mapping[str, int]) -> ArrayTraffic:
    """The shard of x over these axes."""
    return replace(x, values=x.values // math.prod(sizes[axis] for axis in axes))


def _gathers(parameter: Parameter, full: ArrayTraffic, sizes: Mapping[str, int]) -> list[Entry]:
    within = within_slice(parameter.placement.axes)
    shard, axis = _part(full, within, sizes), " ".join(within)
    directions = [Direction.forward, Direction.recompute] if parameter.in_block else [Direction.forward]
    return [shard.over(axis, parameter.name, Operation.all_gather, direction) for direction in directions]


def _reduction(full: ArrayTraffic, parameter: Parameter, sizes: Mapping[str, int]) -> list[Entry]:
    """One reduce-scatter within the slice; or ring - 1 ppermutes of a piece, then one reduce-scatter of it between
    rings."""
    what, within = f"gradient of {parameter.name}", within_slice(parameter.placement.axes)
    if not is_ring_reduced(parameter.placement):
        return [full.over(" ".join(within), what, Operation.reduce_scatter, Direction.backward)]
    piece = _part(full, [DP], sizes)
    hops = replace(piece, count=piece.count * (sizes[DP] - 1))
    entries = [hops.over(DP, what, Operation.ppermute, Direction.backward)]
    if DP_RING in sizes:
        entries.append(piece.over(DP_RING, what, Operation.reduce_scatter, Direction.backward))
    return entries


def gathers_between_slices(config: Config, every: list[Parameter]) -> list[Entry]:
    """FSDP weights gathered between slices, once per step."""
    sizes, entries = axis_sizes(config.mesh), []
    for parameter in every:
        if isinstance(parameter.placement, Fsdp) and DP_SLICE in parameter.placement.axes:
            shard = _part(parameter.traffic(parameter.dtype, stacked=True), parameter.placement.axes, sizes)
            entries.append(shard.over(DP_SLICE, parameter.name, Operation.all_gather, Direction.once))
    return entries


def update(config: Config, every: list[Parameter], *, partial_over: tuple[str, ...]) -> list[Entry]:
    """After the last microbatch, of what is trained: gradients reduced over the token axes and, where they are partial
    sums over other axes (`partial_over`), those of parameters replicated over these reduced over them, too; the
    gradient norm; the norms of the parameters before and after the update; the updates of ZeRO-1 gathered.

    The squares of a norm are summed over the axes that shard a gradient: one all-reduce for each set of axes.
    """
    entries, shardings, sizes = [], set(), axis_sizes(config.mesh)
    for parameter in [each for each in every if each.trained]:
        placement, axes = parameter.placement, parameter.placement.axes
        sharded = not isinstance(placement, Replicated)
        shardings.add(mesh_order({*parameter.declared, *(axes if sharded else ())}))
        full, what = parameter.traffic("float32", stacked=True), f"gradient of {parameter.name}"
        shard = _part(full, axes, sizes) if sharded else full
        if sharded and DP_SLICE in axes:
            of_slice = _part(full, within_slice(axes), sizes)
            entries.append(of_slice.over(DP_SLICE, what, Operation.reduce_scatter, Direction.once))
        if isinstance(placement, Zero1):
            within = " ".join(within_slice(axes))
            entries.append(full.over(within, what, Operation.reduce_scatter, Direction.once))
            entries.append(
                shard.over(" ".join(axes), f"update of {parameter.name}", Operation.all_gather, Direction.once)
            )
        if not sharded and axes:
            entries += all_reduce_once(" ".join(axes), what, full)
        for axis in partial_over:
            entries += [] if axis in parameter.declared else all_reduce_once(axis, what, shard)
    scalars = {"gradient norm": ArrayTraffic(1, "float32", 1), "parameter norms": ArrayTraffic(2, "float32", 1)}
    norms = [all_reduce_once(" ".join(axes), *norm) for norm in scalars.items() for axes in sorted(shardings) if axes]
    return entries + [entry for norm in norms for entry in norm]
