"""Devices to a (dp, mp) mesh: the accelerators that are there, or CPU devices that are emulated."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from shmap_tp.config.schema import FsdpGradients, MeshConfig, TensorParallelMode
from shmap_tp.errors import UserError
from shmap_tp.hardware.torus import Torus

DP = "dp"


MP = "mp"


MAX_RING_SIZE = 16
"""Parts of dp that a ring of gradients has at most: a product is made in as many pieces."""

Groups = Sequence[Sequence[int]]


@dataclass(frozen=True)
class DataParallelGroups:
    """How the parts of dp lie: part (r, o, s) is number (r x others + o) x slices + s, counting from 0.

    r goes around a ring of neighbours, o counts the rings of a slice, s the slices: so each slice has one part in every
    `slices`, and what a slice has met over falls to its devices in the order of their numbers.
    """

    count: int
    slices: int = 1
    ring: int = 1

    @classmethod
    def of(cls, config: MeshConfig) -> "DpParts":
        """Raises InputError where no ring can be made."""
        inside = config.dp // config.slices
        if config.fsdp_gradients == FsdpGradients.reduce_scatter or inside == 1:
            return cls(config.dp, config.slices)
        ring = max(n for n in range(1, MAX_RING_SIZE + 1) if inside % n == 0)
        if ring == 1:
            raise UserError(
                f"mesh.fsdp_gradients=ring: no number from 2 to {MAX_RING_SIZE} divides mesh.dp / mesh.slices = {inside}; "
                f"use mesh.fsdp_gradients=reduce_scatter"
            )
        return cls(config.dp, config.slices, ring)

    @property
    def inside(self) -> Groups | None:
        """The parts of each slice; None where that is all of dp."""
        return self._groups(self.count // self.slices, self.slices)

    @property
    def between(self) -> Groups | None:
        """The parts that stand for one another in the slices; None where that is all of dp."""
        return self._groups(self.slices, 1)

    @property
    def beside(self) -> Groups | None:
        """The parts that stand for one another in the rings of a slice; None where it has one."""
        others = self.count // self.slices // self.ring
        return self._groups(others, self.slices) if others > 1 else None

    def passed(self, by: int) -> list[tuple[int, int]]:
        """(from, to) of what all pass on to who is `by` farther around their ring."""
        each = self.count // self.ring
        return [(r * each + i, (r + by) % self.ring * each + i) for r in range(self.ring) for i in range(each)]

    def _groups(self, size: int, apart: int) -> Groups | None:
        if size == self.count:
            return None
        numbers = np.arange(self.count).reshape(-1, size, apart)
        return numbers.transpose(0, 2, 1).reshape(-1, size).tolist()


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """A (dp, mp) mesh over `devices` (all there are, unless given).

    On a torus, mp fills tiles of `config.tile` chips and cores, or where that is None of the shape with the fewest hops
    between its devices, with the ring wire in the order of a walk round the tile; dp is what the tiles make of the
    slice.  Elsewhere mp is consecutive devices, which are those of one host.  In which order dp counts its parts, says
    DpParts; the rings of gradients are walks round tiles, too.
    Raises InputError where the devices cannot be cut so.
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
        raise UserError(f"mesh.tile={config.tile}: {devices[0].device_kind} devices lie on no torus; leave it null")
    _check_slices(config, devices, fixed=torus is not None)
    parts = DataParallelGroups.of(config)
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
        rings = tiles.best_ring_tile(parts.ring)
        arranged = tiles.arrange(rings, parts.ring)[:, tiles.ring_order(rings)]
        arranged = np.array([group[i] for group in arranged.flat for i in mp_order], object)
    by_slice = arranged.reshape(parts.slices, -1, parts.ring, config.mp)
    return Mesh(by_slice.transpose(2, 1, 0, 3).reshape(config.dp, config.mp), (DP, MP), axis_types=(AxisType.Auto,) * 2)


def _check_slices(config: MeshConfig, devices: list[jax.Device], *, fixed: bool) -> None:
    """Raises InputError where the devices are of other slices than mesh.slices says; without a torus, which is not
    `fixed`, one may be cut as one likes."""
    there = len({getattr(device, "slice_index", None) or 0 for device in devices})
    if config.slices != there and (fixed or there > 1):
        raise UserError(
            f"mesh.slices={config.slices}, but these devices lie in slices: {there}; set mesh.slices={there}"
        )
