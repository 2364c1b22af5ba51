"""Devices to a (dp, mp) mesh: the accelerators that are there, or CPU devices that are emulated."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from shmap_tp.config import Gradients, InputError, MeshConfig, Wire
from shmap_tp.hardware import generation

DP = "dp"
MP = "mp"


LONGEST = 16
"""Parts of dp that a ring of gradients has at most: a product is made in as many pieces."""

Groups = Sequence[Sequence[int]]


@dataclass(frozen=True)
class DpParts:
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
        if config.gradients == Gradients.scatter or inside == 1:
            return cls(config.dp, config.slices)
        ring = max(n for n in range(1, LONGEST + 1) if inside % n == 0)
        if ring == 1:
            raise InputError(
                f"mesh.gradients=ring: no number from 2 to {LONGEST} divides mesh.dp / mesh.slices = {inside}; "
                f"use mesh.gradients=scatter"
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


def emulate(devices: int) -> None:
    """Make this process's CPU look like `devices` devices.  Must come before JAX's first use of a backend.

    Harmless where there are accelerators: JAX then prefers those, and the CPU devices stay unused.
    """
    jax.config.update("jax_num_cpu_devices", devices)


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
        raise InputError(
            f"mesh dp={config.dp} x mp={config.mp} needs {wanted} devices, this machine has {len(devices)} "
            f"({devices[0].device_kind}); choose mesh.dp and mesh.mp with dp x mp = {len(devices)}"
        )
    torus = Torus.of(devices)
    if torus is None and config.tile is not None:
        raise InputError(f"mesh.tile={config.tile}: {devices[0].device_kind} devices lie on no torus; leave it null")
    _check_slices(config, devices, fixed=torus is not None)
    parts = DpParts.of(config)
    if torus is None:
        arranged = np.array(devices, object)
    else:
        tile = tuple(config.tile) if config.tile else torus.closest_tile(config.mp)
        mp_order = torus.round_trip(tile) if config.wire == Wire.ring else list(range(config.mp))
        tiles = torus.tiled(tile, config.mp)
        rings = tiles.ring_tile(parts.ring)
        arranged = tiles.laid_out(rings, parts.ring)[:, tiles.round_trip(rings)]
        arranged = np.array([group[i] for group in arranged.flat for i in mp_order], object)
    by_slice = arranged.reshape(parts.slices, -1, parts.ring, config.mp)
    return Mesh(by_slice.transpose(2, 1, 0, 3).reshape(config.dp, config.mp), (DP, MP), axis_types=(AxisType.Auto,) * 2)


def _check_slices(config: MeshConfig, devices: list[jax.Device], *, fixed: bool) -> None:
    """Raises InputError where the devices are of other slices than mesh.slices says; without a torus, which is not
    `fixed`, one may be cut as one likes."""
    there = len({getattr(device, "slice_index", None) or 0 for device in devices})
    if config.slices != there and (fixed or there > 1):
        raise InputError(
            f"mesh.slices={config.slices}, but these devices lie in slices: {there}; set mesh.slices={there}"
        )


@dataclass(frozen=True, eq=False)
class Torus:
    """Devices, or tiles of them, by where they are: grid[slice, x, y, z, core], and which sides close to a ring."""

    grid: np.ndarray
    wraps: tuple[bool, ...]
    widths: tuple[int, ...] = (1, 1, 1)
    """Links from one to the next along each side: more than 1 where these are tiles."""

    @classmethod
    def of(cls, devices: list[jax.Device]) -> "Torus | None":
        """None where the devices tell no coordinates, or do not fill a box."""
        made = generation(devices[0].device_kind)
        if made is None or not hasattr(devices[0], "coords"):
            return None
        at = np.array([[getattr(d, "slice_index", 0) or 0, *d.coords, d.core_on_chip] for d in devices])
        at -= at.min(axis=0)
        grid = np.full(at.max(axis=0) + 1, None, object)
        grid[tuple(at.T)] = devices
        if grid.size != len(devices):
            return None
        return cls(grid, tuple(made.wraps(side) for side in grid.shape[1:4]))

    @property
    def sides(self) -> tuple[int, ...]:
        """(x, y, z, cores of a chip) of one slice."""
        return self.grid.shape[1:]

    def tiles(self, mp: int) -> list[tuple[int, ...]]:
        """Every (x, y, z, core) of `mp` devices that cuts the slice.  Raises InputError where there is none."""
        choices = list(itertools.product(*[[n for n in range(1, side + 1) if side % n == 0] for side in self.sides]))
        found = [tile for tile in choices if math.prod(tile) == mp]
        if not found:
            sizes = ", ".join(map(str, sorted(set(map(math.prod, choices)))))
            raise InputError(f"mp={mp} cannot be cut out of a slice of {self._words()}; use mp in {{{sizes}}}")
        return found

    def tiled(self, tile: tuple[int, ...], mp: int) -> "Torus":
        """The same with a tuple of the devices of each tile in one place."""
        groups = self.laid_out(tile, mp)
        places = np.empty(len(groups), object)
        places[:] = [tuple(group) for group in groups]
        sides = (side // size for side, size in zip(self.sides, tile, strict=True))
        return Torus(places.reshape(-1, *sides), self.wraps, tile[:3])

    def hops(self, tile: tuple[int, ...]) -> float:
        """Links between two devices of a tile, on average over all pairs; cores of one chip are no link apart."""
        total = 0.0
        for size, side, wraps in zip(tile, self.sides, self.wraps, strict=False):
            apart = np.abs(np.subtract.outer(np.arange(size), np.arange(size)))
            total += np.minimum(apart, side - apart).mean() if wraps else apart.mean()
        return total

    def closest_tile(self, mp: int) -> tuple[int, ...]:
        """The tile with the fewest hops; of equals the longest along x, then y (as T5X measured on a v4 4x8x8)."""
        return min(reversed(self.tiles(mp)), key=self.hops)

    def ring_tile(self, size: int) -> tuple[int, ...]:
        """The tile for a ring of gradients: of whole chips, of two rows at least (`_edges`), if there is one, and then
        the one that leaves most links to like devices of all tiles, which sum once more what each ring has summed.
        So 16 x 16 is cut in 8 x 2, not in 4 x 4 (128B on a v5e-256: 12.28 s a step instead of 12.35, predicted; other
        slices go by the count of links alone).  Not in lines: they leave still more, but around a whole side XLA for
        TPU (libtpu 0.0.42) lets no ppermute flow (an earlier 16B there: 10.65 s by 16 x 1, 9.80 by 4 x 4)."""

        def links(tile: tuple[int, ...]) -> float:
            """Of one device to the like ones, each shared by those in between."""
            along = zip(tile, self.sides, self.wraps, self.widths, strict=False)
            return sum(((2 if wraps else 1) / (part * width) for part, side, wraps, width in along if part < side), 0.0)

        return max(reversed(self.tiles(size)), key=lambda tile: (tile[3], bool(_edges(tile[:3])), links(tile)))

    def laid_out(self, tile: tuple[int, ...], mp: int) -> np.ndarray:
        """The devices as [dp, mp]."""
        tiles = self.tiles(mp)
        if tile not in tiles:
            fit = "; ".join(",".join(map(str, one)) for one in tiles)
            raise InputError(
                f"mesh.tile={list(tile)} does not cut mp={mp} out of a slice of {self._words()}; use one of {fit}"
            )
        cut = [n for side, size in zip(self.sides, tile, strict=True) for n in (side // size, size)]
        outer, inner = [2 * i + 1 for i in range(4)], [2 * i + 2 for i in range(4)]
        return self.grid.reshape(-1, *cut).transpose(0, *outer, *inner).reshape(-1, mp)

    def round_trip(self, tile: tuple[int, ...]) -> list[int]:
        """The devices of a tile, by their places in `laid_out`, so that each is one link from the next, the last from
        the first: out row by row through all but an edge, and back along that.  Of a line that closes to no ring every
        other one, then the rest backwards: two links.  Cores of a chip follow each other.  A tile of odd sides has no
        such trip: row by row, and some ways are long."""
        *sides, cores = tile
        chips = list(itertools.product(*map(range, sides)))
        long, edges = [dim for dim in range(3) if sides[dim] > 1], _edges(sides)

        def across(chip: tuple[int, ...]) -> tuple[int, ...]:
            out, (near, far) = chip[edges[0]], (dim for dim in range(3) if dim != edges[0])
            row = chip[far] * sides[near] + (sides[near] - 1 - chip[near] if chip[far] % 2 else chip[near])
            return (0, row, -out if row % 2 else out) if out else (1, -row, 0)

        def along(chip: tuple[int, ...]) -> tuple[int, ...]:
            return (1, -sum(chip)) if sum(chip) % 2 else (0, sum(chip))

        if edges:
            trip = sorted(chips, key=across)
        elif len(long) == 1 and not (self.wraps[long[0]] and sides[long[0]] == self.sides[long[0]]):
            trip = sorted(chips, key=along)
        else:
            trip = chips
        return [chips.index(chip) * cores + core for chip in trip for core in range(cores)]

    def _words(self) -> str:
        return " x ".join(map(str, self.sides[:3])) + f" chips with {self.sides[3]} devices each"


def _edges(sides: Sequence[int]) -> list[int]:
    """The dims along which a trip round a tile of chips, each one link from the next, can come back at an edge."""
    return [dim for dim in range(3) if sides[dim] > 1 and math.prod(sides) // sides[dim] % 2 == 0]
