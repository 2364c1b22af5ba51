"""The mesh: its axes and what each is for, which devices form it, and in which order.

Code asks for the axes of a role.  It names mp where weights that are sharded over it are declared and used, and by the
modes of tensor parallelism; dp, dp_ring and dp_slice where gradient rings and slices are meant:

    tokens    ranks hold different tokens: gradients and the loss are summed over these axes, and ZeRO shards over them
    time      ranks hold different positions of the same sequences; such an axis has the role tokens as well
    features  ranks share every layer (tensor parallelism)
    experts   ranks have different experts of a layer, whatever else they hold

    axis      roles     its ranks are
    dp        tokens    neighbours; all data-parallel ranks where there are no rings and slices
    dp_ring   tokens    the rings of a slice, where weight gradients are reduced in several (`mesh.fsdp_gradients=ring`)
    cp        tokens,   the devices that share rows, each with two chunks of their time (`context_parallel.py`)
              time
    ep        tokens,   neighbours of dp that send tokens to each other's experts (`layers/expert_dispatch.py`)
              experts
    dp_slice  tokens    the slices
    mp        features, the devices that share a model
              experts

`mesh.dp` in the configuration is the product of dp, dp_ring, ep and dp_slice.  A mesh has dp and mp, and every other
axis that has more than one rank.
"""

import math
from collections.abc import Collection, Iterable
from enum import Enum, auto

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, get_abstract_mesh

from shmap_tp.config.choices import FsdpGradients, TensorParallelMode
from shmap_tp.config.schema import MeshConfig
from shmap_tp.config.validate import keys_in_words, product_in_words
from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import Device
from shmap_tp.hardware.torus import Torus


class Role(Enum):
    """What a mesh axis is for."""

    tokens = auto()
    time = auto()
    features = auto()
    experts = auto()


DP, DP_RING, EP, CP, DP_SLICE, MP = "dp", "dp_ring", "ep", "cp", "dp_slice", "mp"
AXES: dict[str, frozenset[Role]] = {
    DP: frozenset({Role.tokens}),
    DP_RING: frozenset({Role.tokens}),
    EP: frozenset({Role.tokens, Role.experts}),
    CP: frozenset({Role.tokens, Role.time}),
    DP_SLICE: frozenset({Role.tokens}),
    MP: frozenset({Role.features, Role.experts}),
}
"""All mesh axes, the slowest-varying first, and their roles.  Those within a slice stand before the slices, over which
gradients are reduced last, in shards."""

MAX_RING_SIZE = 16
"""Ranks of a gradient ring at most: a weight gradient is computed in as many pieces."""


def axes_of(role: Role, names: Iterable[str] | None = None) -> tuple[str, ...]:
    """The axes of a mesh that have a role, in the order of the mesh.

    `names` are the axes of the mesh; by default, inside shard_map, of the one that it maps over.
    """
    present = set(get_abstract_mesh().axis_names if names is None else names)
    return tuple(name for name, roles in AXES.items() if role in roles and name in present)


def token_axes(names: Iterable[str] | None = None) -> tuple[str, ...]:
    """The axes whose ranks hold different tokens; `names` as for `axes_of`."""
    return axes_of(Role.tokens, names)


def batch_axes(names: Iterable[str] | None = None) -> tuple[str, ...]:
    """The axes whose ranks hold different sequences; `names` as for `axes_of`."""
    time = axes_of(Role.time, names)
    return tuple(name for name in token_axes(names) if name not in time)


def mesh_order(axes: Collection[str]) -> tuple[str, ...]:
    """These axes in the order of the mesh."""
    return tuple(name for name in AXES if name in axes)


def spec_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """One entry of a PartitionSpec as the axes that shard its dim."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def axis_sizes(config: MeshConfig) -> dict[str, int]:
    """The axes of the mesh of `config`, in the order of AXES, and their sizes.

    Raises UserError where mesh.fsdp_gradients=ring and dp / slices has no divisor that a ring could have.
    """
    within = config.dp // config.slices // config.ep
    ring = _ring_size(within) if has_rings(config) else within
    data_parallel = {DP: ring, DP_RING: within // ring, EP: config.ep, DP_SLICE: config.slices}
    sizes = {name: data_parallel[name] if name in data_parallel else getattr(config, name) for name in AXES}
    return {name: size for name, size in sizes.items() if size > 1 or name in (DP, MP)}


def has_rings(config: MeshConfig) -> bool:
    """Whether weight gradients are to be reduced in rings, and a slice has more than one data-parallel rank for one."""
    return config.fsdp_gradients == FsdpGradients.ring and config.dp > config.slices


def _ring_size(within: int) -> int:
    ring = max(n for n in range(1, MAX_RING_SIZE + 1) if within % n == 0)
    if ring == 1:
        raise UserError(
            f"mesh.fsdp_gradients=ring: no number from 2 to {MAX_RING_SIZE} divides "
            f"mesh.dp / mesh.slices = {within}; use mesh.fsdp_gradients=reduce_scatter"
        )
    return ring


def ring_permutation(size: int, by: int) -> list[tuple[int, int]]:
    """(from, to) pairs of a ppermute that passes a value `by` places further along an axis of `size` ranks."""
    return [(i, (i + by) % size) for i in range(size)]


def make_mesh(config: MeshConfig, devices: list[Device] | None = None) -> Mesh:
    """The mesh of `config` over `devices` (by default all of this process group).

    On a TPU torus, mp fills tiles of `config.tile` chips and cores, or by default of the shape with the fewest hops
    between its devices; with collective matmul in the order of a closed walk round the tile.  cp is a closed walk round
    the most compact group of such tiles, and ep is the most compact group of these.  The other axes count these groups;
    gradient rings are closed walks round several.  Elsewhere mp is consecutive devices, which are those of one host, cp
    are consecutive ones of these, and ep consecutive ones of these.

    Raises UserError where the number of devices, the tile or the slices do not fit.
    """
    devices = jax.devices() if devices is None else devices
    sizes = axis_sizes(config)
    wanted = config.dp * math.prod(size for axis, size in sizes.items() if axis not in (DP, DP_RING, EP, DP_SLICE))
    if wanted != len(devices):
        raise UserError(
            f"mesh {product_in_words(config)} needs {wanted} devices, this machine has {len(devices)} "
            f"({devices[0].device_kind}); choose {keys_in_words(config)} = {len(devices)}"
        )
    torus = Torus.of(devices)
    if torus is None and config.tile is not None:
        raise UserError(f"mesh.tile={config.tile}: {devices[0].device_kind} devices are not on a torus; leave it null")
    _check_slices(config, devices, fixed=torus is not None)
    ring = sizes[DP] if has_rings(config) else 1
    if torus is None:
        arranged = np.array(devices, object)
    else:
        tile = tuple(config.tile) if config.tile else torus.most_compact_tile(config.mp)
        mp_order = (
            torus.ring_order(tile)
            if config.tensor_parallel == TensorParallelMode.collective_matmul
            else list(range(config.mp))
        )
        tiles = torus.group(tile, config.mp)
        cp_tile = tiles.most_compact_tile(config.cp, "mesh.cp")
        cp_order, groups = tiles.ring_order(cp_tile), tiles.group(cp_tile, config.cp)
        groups = groups.group(groups.most_compact_tile(config.ep, "mesh.ep"), config.ep)
        ring_tile = groups.best_ring_tile(ring)
        arranged = groups.arrange(ring_tile, ring)[:, groups.ring_order(ring_tile)]
        arranged = np.array(
            [one[c][m] for group in arranged.flat for one in group for c in cp_order for m in mp_order], object
        )
    rings = config.dp // config.slices // config.ep // ring
    by_axis = arranged.reshape(config.slices, rings, ring, config.ep, config.cp, -1).transpose(2, 1, 3, 4, 0, 5)
    return Mesh(by_axis.reshape(tuple(sizes.values())), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def abstract_mesh(sizes: dict[str, int]) -> AbstractMesh:
    """A mesh without devices, to trace programs on; `sizes` as `axis_sizes` gives them."""
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def ranks(axes: tuple[str, ...]) -> int:
    """Number of ranks along `axes` together, inside shard_map; 1 without axes."""
    return math.prod(lax.axis_size(axis) for axis in axes)


def _check_slices(config: MeshConfig, devices: list[Device], *, fixed: bool) -> None:
    """Raises UserError where the devices are of another number of slices than mesh.slices says.  Devices that are not
    on a torus (not `fixed`) may be divided into slices at will."""
    there = len({getattr(device, "slice_index", None) or 0 for device in devices})
    if config.slices != there and (fixed or there > 1):
        raise UserError(f"mesh.slices={config.slices}, but these devices form {there} slices; set mesh.slices={there}")
