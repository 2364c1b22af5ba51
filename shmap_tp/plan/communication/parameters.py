"""The communication of parameters in a step: FSDP gathers, gradient reductions, updates.  Analytic, from declarations.

What the parameters are, how mp shards each and how dp places it, is read from the model's own declarations
(`partitioning.partition_specs`, `fsdp.place_parameters`): nothing here names a layer.  The rules for what a placement
communicates are those of `fsdp.py`; `analytic.py` lists them beside those of activations.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.typing import DTypeLike

from shmap_tp.config.schema import Config, MeshConfig, ModelConfig
from shmap_tp.model.components import CONFIGURED_MODEL, ModelComponents, parameter_shapes
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.fsdp import Fsdp, Placement, Replicated, Zero1, is_ring_reduced, place_parameters
from shmap_tp.parallel.key_paths import path_name
from shmap_tp.parallel.mesh import DP, MP, DataParallelGroups, axis_sizes
from shmap_tp.parallel.partitioning import is_stacked, partition_specs, sharded_dim
from shmap_tp.plan.communication.ledger import ArrayTraffic, Direction, Entry, Operation, group_name


def all_reduce_once(axis: str, what: str, x: ArrayTraffic) -> list[Entry]:
    """One all-reduce of x over `axis` after the last microbatch."""
    return [x.over(axis, what, Operation.all_reduce, Direction.once)]


@dataclass(frozen=True)
class Parameter:
    """A parameter, as mp leaves it to one device."""

    name: str
    values: int
    """Number of values of one layer."""
    layers: int
    """How many are stacked; 1 outside the blocks."""
    in_block: bool
    sharded_over_mp: bool
    placement: Placement
    prefetched: bool
    """Whether its gather in the backward pass is prefetched (`model/offloaded_scan.py`)."""
    uses: int
    """How often a microbatch uses it: 2 for an embedding that is also the head."""

    def traffic(self, dtype: str, *, stacked: bool) -> ArrayTraffic:
        """All layers at once, or one after the other."""
        if stacked:
            return ArrayTraffic(self.values * self.layers, dtype, 1)
        return ArrayTraffic(self.values, dtype, self.layers)


def placed_shapes(
    model: ModelConfig, mesh: MeshConfig, components: ModelComponents = CONFIGURED_MODEL
) -> tuple[Transformer, Transformer, Transformer]:
    """(the shapes of the parameters, their PartitionSpecs as declared, their placements), three trees alike."""
    sizes, shapes = axis_sizes(mesh), parameter_shapes(model, components)
    declared = partition_specs(shapes, sizes)
    return shapes, declared, place_parameters(mesh.zero, shapes, declared, sizes, DataParallelGroups.of(mesh))[2]


def shapes_in_use(
    model: ModelConfig, mesh: MeshConfig, dtype: DTypeLike, components: ModelComponents = CONFIGURED_MODEL
) -> Transformer:
    """The shapes of the parameters as layers are given them: FSDP weights are gathered in `dtype`."""
    shapes, _, placements = placed_shapes(model, mesh, components)
    return jax.tree.map(
        lambda leaf, placement: jax.ShapeDtypeStruct(leaf.shape, dtype) if isinstance(placement, Fsdp) else leaf,
        shapes,
        placements,
    )


def parameters(model: ModelConfig, mesh: MeshConfig, components: ModelComponents = CONFIGURED_MODEL) -> list[Parameter]:
    """Every parameter of the model on a mesh, in the order of its tree."""
    shapes, declared, placements = placed_shapes(model, mesh, components)
    prefetched = _prefetched(model, placements)

    def describe(path: tuple, leaf: jax.ShapeDtypeStruct, spec: Any, placement: Placement, stacked: bool) -> Parameter:
        over_mp = sharded_dim(spec, MP) is not None
        layers = leaf.shape[0] if stacked else 1
        is_head_too = shapes.head is None and leaf is shapes.embedding.weight
        return Parameter(
            name=path_name(path, ".").removesuffix(".weight"),
            values=math.prod(leaf.shape) // layers // (mesh.mp if over_mp else 1),
            layers=layers,
            in_block=stacked,
            sharded_over_mp=over_mp,
            placement=placement,
            prefetched=placement is prefetched,
            uses=1 + is_head_too,
        )

    found = jax.tree_util.tree_map_with_path(describe, shapes, declared, placements, is_stacked(shapes))
    return jax.tree.leaves(found, is_leaf=lambda node: isinstance(node, Parameter))


def _prefetched(model: ModelConfig, placements: Transformer) -> Placement | None:
    """The placement of the weight that `offloaded_scan` prefetches, where it is used."""
    if not model.offload or model.layers == 1:
        return None
    last = getattr(placements.blocks, "last_weight", None)
    return last if is_ring_reduced(last) else None


def fsdp_uses(config: Config, every: list[Parameter], dtype: str) -> list[Entry]:
    """FSDP weights gathered within a slice for each use, in a block once more in the backward pass; a tied embedding
    also as the head; and the reduction of their gradients."""
    entries, groups = [], DataParallelGroups.of(config.mesh)
    offloaded_scan = any(parameter.prefetched for parameter in every)
    for parameter in [each for each in every for _ in range(each.uses)]:
        if not isinstance(parameter.placement, Fsdp):
            continue
        ring = is_ring_reduced(parameter.placement)
        split = [(parameter.layers, ring)]
        if ring and offloaded_scan:  # its last layer reduces gradients by reduce-scatters
            split = [(parameter.layers - 1, True), (1, False)]
        for layers, in_ring in split:
            full = replace(parameter.traffic(dtype, stacked=False), count=layers * config.train.microbatches)
            entries += _gathers(config, parameter, full, groups, prefetched=parameter.prefetched and in_ring)
            entries += _reduction(full, f"gradient of {parameter.name}", groups, in_ring=in_ring)
    return entries


def _gathers(
    config: Config, parameter: Parameter, full: ArrayTraffic, groups: DataParallelGroups, *, prefetched: bool
) -> list[Entry]:
    shard = replace(full, values=full.values // config.mesh.dp * groups.slices)
    within = group_name(DP, groups.intra_slice)
    if not prefetched:
        directions = [Direction.forward, Direction.recompute] if parameter.in_block else [Direction.forward]
        return [shard.over(within, parameter.name, Operation.all_gather, direction) for direction in directions]
    # prefetched: once before the backward scan and once in each of its iterations, the last of which is unused
    ahead = replace(shard, count=parameter.layers * config.train.microbatches)
    return [
        shard.over(within, parameter.name, Operation.all_gather, Direction.forward),
        ahead.over(within, parameter.name, Operation.all_gather, Direction.backward),
    ]


def _reduction(full: ArrayTraffic, what: str, groups: DataParallelGroups, *, in_ring: bool) -> list[Entry]:
    """One reduce-scatter within the slice; or ring - 1 ppermutes of a piece, then one reduce-scatter of it between
    rings."""
    if not in_ring:
        return [full.over(group_name(DP, groups.intra_slice), what, Operation.reduce_scatter, Direction.backward)]
    piece = replace(full, values=full.values // groups.ring)
    hops = replace(piece, count=piece.count * (groups.ring - 1))
    entries = [hops.over(DP, what, Operation.ppermute, Direction.backward)]
    if groups.inter_ring is not None:
        between = group_name(DP, groups.inter_ring)
        entries.append(piece.over(between, what, Operation.reduce_scatter, Direction.backward))
    return entries


def gathers_between_slices(config: Config, every: list[Parameter]) -> list[Entry]:
    """FSDP weights gathered between slices, once per step."""
    groups = DataParallelGroups.of(config.mesh)
    if groups.slices == 1:
        return []
    between, entries = group_name(DP, groups.inter_slice), []
    for parameter in every:
        if isinstance(parameter.placement, Fsdp):
            full = parameter.traffic("float32", stacked=True)
            shard = replace(full, values=full.values // groups.count)
            entries.append(shard.over(between, parameter.name, Operation.all_gather, Direction.once))
    return entries


def update(config: Config, every: list[Parameter], *, partial_over_mp: bool) -> list[Entry]:
    """After the last microbatch: gradients reduced over dp and, where they are `partial_over_mp`, those of parameters
    replicated over mp reduced over mp; the gradient norm; the norms of the parameters before and after the update; the
    updates of ZeRO-1 gathered.

    The squares of a norm are summed over the axes that shard a gradient: one all-reduce for each set of axes.
    """
    entries, axes, groups = [], set(), DataParallelGroups.of(config.mesh)
    for parameter in every:
        sharded = not isinstance(parameter.placement, Replicated)
        axes.add((DP,) * sharded + (MP,) * parameter.sharded_over_mp)
        full, what = parameter.traffic("float32", stacked=True), f"gradient of {parameter.name}"
        shard = replace(full, values=full.values // groups.count) if sharded else full
        if sharded and groups.slices > 1:
            of_slice = replace(full, values=full.values // groups.count * groups.slices)
            between = group_name(DP, groups.inter_slice)
            entries.append(of_slice.over(between, what, Operation.reduce_scatter, Direction.once))
        if isinstance(parameter.placement, Zero1):
            within = group_name(DP, groups.intra_slice)
            entries.append(full.over(within, what, Operation.reduce_scatter, Direction.once))
            entries.append(shard.over(DP, f"update of {parameter.name}", Operation.all_gather, Direction.once))
        if not sharded:
            entries += all_reduce_once(DP, what, full)
        if partial_over_mp and not parameter.sharded_over_mp:
            entries += all_reduce_once(MP, what, shard)
    scalars = {"gradient norm": ArrayTraffic(1, "float32", 1), "parameter norms": ArrayTraffic(2, "float32", 1)}
    norms = [all_reduce_once(" ".join(each), *norm) for norm in scalars.items() for each in sorted(axes) if each]
    return entries + [entry for norm in norms for entry in norm]
