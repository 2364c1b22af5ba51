"""The (dp, mp) mesh: which devices form it, in which order, and how dp ranks group into slices and rings."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from shmap_tp.config.schema import FsdpGradients, MeshConfig, TensorParallelMode
from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import Device
from shmap_tp.hardware.torus import Torus

DP = "dp"
"""The data-parallel axis: its ranks process different sequences."""
MP = "mp"
"""The model-parallel axis: its ranks share every layer (tensor parallelism)."""
AXES = (DP, MP)
"""All mesh axes, the slowest-varying first."""

MAX_RING_SIZE = 16
"""Ranks of a gradient ring at most: a weight gradient is computed in as many pieces."""

Groups = Sequence[Sequence[int]]
"""Disjoint groups of ranks along one axis, as `axis_index_groups` of JAX's collectives."""


def axis_sizes(config: MeshConfig) -> dict[str, int]:
    """The size of every axis of AXES."""
    return {DP: config.dp, MP: config.mp}


@dataclass(frozen=True)
class DataParallelGroups:
    """How dp ranks group into slices, and within a slice into rings of neighbours.

    Rank (r, o, s) is number (r x rings + o) x slices + s: r is the place in a ring, o the ring of a slice, s the slice.
    So the ranks of a slice are `slices` apart, and a reduce-scatter within a slice leaves its shards in rank order.
    """

    count: int
    slices: int = 1
    ring: int = 1

    @classmethod
    def of(cls, config: MeshConfig) -> "DataParallelGroups":
        """Raises UserError where mesh.fsdp_gradients=ring and dp / slices has no divisor that a ring could have."""
        within = config.dp // config.slices
        if config.fsdp_gradients == FsdpGradients.reduce_scatter or within == 1:
            return cls(config.dp, config.slices)
        ring = max(n for n in range(1, MAX_RING_SIZE + 1) if within % n == 0)
        if ring == 1:
            raise UserError(
                f"mesh.fsdp_gradients=ring: no number from 2 to {MAX_RING_SIZE} divides "
                f"mesh.dp / mesh.slices = {within}; use mesh.fsdp_gradients=reduce_scatter"
            )
        return cls(config.dp, config.slices, ring)

    @property
    def intra_slice(self) -> Groups | None:
        """The ranks of each slice; None where that is all of dp."""
        return self._groups(self.count // self.slices, self.slices)

    @property
    def inter_slice(self) -> Groups | None:
        """The ranks with the same place in every slice; None where that is all of dp."""
        return self._groups(self.slices, 1)

    @property
    def inter_ring(self) -> Groups | None:
        """The ranks with the same place in the rings of one slice; None where a slice has one ring."""
        rings = self.count // self.slices // self.ring
        return self._groups(rings, self.slices) if rings > 1 else None

    def ring_permutation(self, by: int) -> list[tuple[int, int]]:
        """(from, to) pairs of a ppermute that passes a value `by` places further along every ring."""
        each = self.count // self.ring
        return [(r * each + i, (r + by) % self.ring * each + i) for r in range(self.ring) for i in range(each)]

    def _groups(self, size: int, stride: int) -> Groups | None:
        if size == self.count:
            return None
        ranks = np.arange(self.count).reshape(-1, size, stride)
        return ranks.transpose(0, 2, 1).reshape(-1, size).tolist()


def make_mesh(config: MeshConfig, devices: list[Device] | None = None) -> Mesh:
    """A (dp, mp) mesh over `devices` (by default all of this process group).

    On a TPU torus, mp fills tiles of `config.tile` chips and cores, or by default of the shape with the fewest hops
    between its devices; with collective matmul in the order of a closed walk round the tile.  dp counts tiles, in the
    order of `DataParallelGroups`; gradient rings are closed walks round groups of tiles.  Elsewhere mp is consecutive
    devices, which are those of one host.

    Raises UserError where the number of devices, the tile or the slices do not fit.
    """
    devices = jax.devices() if devices is None else devices
    wanted = config.dp * config.mp
    if wanted != len(devices):
        raise UserError(
            f"mesh dp={config.dp} x mp={config.mp} needs {wanted} devices, this machine has {len(devices)} "
            f"({devices[0].device_kind}); choose mesh.dp and mesh.mp with dp x mp = {len(devices)}"
        )
    torus = Torus.of(devices)
    if torus is None and config.tile is not None:
        raise UserError(f"mesh.tile={config.tile}: {devices[0].device_kind} devices are not on a torus; leave it null")
    _check_slices(config, devices, fixed=torus is not None)
    groups = DataParallelGroups.of(config)
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
        rings = tiles.best_ring_tile(groups.ring)
        arranged = tiles.arrange(rings, groups.ring)[:, tiles.ring_order(rings)]
        arranged = np.array([group[i] for group in arranged.flat for i in mp_order], object)
    by_slice = arranged.reshape(groups.slices, -1, groups.ring, config.mp)
    return Mesh(
        by_slice.transpose(2, 1, 0, 3).reshape(config.dp, config.mp), AXES, axis_types=(AxisType.Auto,) * len(AXES)
    )


def abstract_mesh(dp: int, mp: int) -> AbstractMesh:
    """A (dp, mp) mesh without devices, to trace programs on."""
    return AbstractMesh((dp, mp), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _check_slices(config: MeshConfig, devices: list[Device], *, fixed: bool) -> None:
    """Raises UserError where the devices are of another number of slices than mesh.slices says.  Devices that are not
    on a torus (not `fixed`) may be divided into slices at will."""
    there = len({getattr(device, "slice_index", None) or 0 for device in devices})
    if config.slices != there and (fixed or there > 1):
        raise UserError(f"mesh.slices={config.slices}, but these devices form {there} slices; set mesh.slices={there}")
