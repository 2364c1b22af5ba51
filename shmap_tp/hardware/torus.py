"""The torus of a TPU slice, and which boxes of its chips the mesh axes occupy.

A tile is a box (x, y, z, cores) of devices; a slice is divided into tiles of equal shape.  `parallel/mesh.py` places
each mp group on one tile, and each ring of data-parallel gradients on a tile of such tiles.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import Device, generation

Tile = tuple[int, ...]
"""(x, y, z, cores): the size of a box of devices along each side of a slice."""


@dataclass(frozen=True, eq=False)
class Torus:
    """Devices, or tiles of devices, by position: grid[slice, x, y, z, core]."""

    grid: np.ndarray
    wraps: tuple[bool, ...]
    """For x, y and z: whether links join the last chip to the first."""
    links_per_step: tuple[int, ...] = (1, 1, 1)
    """Links between neighbours of the grid along x, y and z: the sides of the tile, if the elements are tiles."""

    @classmethod
    def of(cls, devices: list[Device]) -> "Torus | None":
        """The torus of `devices`; None if they have no coordinates or do not fill a box."""
        version = generation(devices[0].device_kind)
        if version is None or not hasattr(devices[0], "coords"):
            return None
        positions = np.array([[getattr(d, "slice_index", 0) or 0, *d.coords, d.core_on_chip] for d in devices])
        positions -= positions.min(axis=0)
        grid = np.full(positions.max(axis=0) + 1, None, object)
        grid[tuple(positions.T)] = devices
        if grid.size != len(devices):
            return None
        return cls(grid, tuple(version.wraps(side) for side in grid.shape[1:4]))

    @property
    def sides(self) -> tuple[int, ...]:
        """(x, y, z, cores per chip) of one slice."""
        return self.grid.shape[1:]

    def tiles(self, size: int, key: str = "mesh.mp") -> list[Tile]:
        """Every tile of `size` devices, or tiles, whose sides divide those of the slice.  Raises UserError if there is
        none; `key` is what it calls the size."""
        divisors = [[n for n in range(1, side + 1) if side % n == 0] for side in self.sides]
        candidates = list(itertools.product(*divisors))
        found = [tile for tile in candidates if math.prod(tile) == size]
        if not found:
            sizes = ", ".join(map(str, sorted(set(map(math.prod, candidates)))))
            raise UserError(
                f"{key}={size}: a slice of {self._describe()} cannot be divided into boxes of {size} devices; "
                f"use {key} in {{{sizes}}}"
            )
        return found

    def arrange(self, tile: Tile, size: int) -> np.ndarray:
        """The devices as [number of tiles, size], each row a tile in row-major order.  Raises UserError if `tile` does
        not have `size` devices or does not divide the slice."""
        tiles = self.tiles(size)
        if tile not in tiles:
            fit = "; ".join(",".join(map(str, one)) for one in tiles)
            raise UserError(
                f"mesh.tile={list(tile)} does not divide a slice of {self._describe()} into boxes of mp={size} "
                f"devices; use one of {fit}"
            )
        split = [n for side, part in zip(self.sides, tile, strict=True) for n in (side // part, part)]
        outer, inner = [2 * i + 1 for i in range(4)], [2 * i + 2 for i in range(4)]
        return self.grid.reshape(-1, *split).transpose(0, *outer, *inner).reshape(-1, size)

    def group(self, tile: Tile, size: int) -> "Torus":
        """The torus whose elements are the tiles of this one, each a tuple of `size` devices."""
        rows = self.arrange(tile, size)
        elements = np.empty(len(rows), object)
        elements[:] = [tuple(row) for row in rows]
        sides = (side // part for side, part in zip(self.sides, tile, strict=True))
        links = tuple(links * part for links, part in zip(self.links_per_step, tile, strict=False))
        return Torus(elements.reshape(-1, *sides), self.wraps, links)

    def mean_hops(self, tile: Tile) -> float:
        """Links between two devices of a tile, averaged over all pairs; cores of one chip are 0 links apart."""
        total = 0.0
        for size, side, wraps in zip(tile, self.sides, self.wraps, strict=False):
            distance = np.abs(np.subtract.outer(np.arange(size), np.arange(size)))
            total += np.minimum(distance, side - distance).mean() if wraps else distance.mean()
        return total

    def most_compact_tile(self, size: int, key: str = "mesh.mp") -> Tile:
        """The tile with the fewest hops on average; among equals the longest along x, then y.  `key` as for `tiles`.

        T5X measured this order of tiles on a v4 4x8x8 slice.
        """
        return min(reversed(self.tiles(size, key)), key=self.mean_hops)

    def best_ring_tile(self, size: int) -> Tile:
        """The tile for a ring of data-parallel gradients of `size` devices.

        It has whole chips and, if possible, a ring of single links (`_edge_sides`).  Among those it leaves most links
        for the reduction between rings, which follows the ring: the sum over the sides of the links per tile.  A line
        is avoided even where it leaves more, because XLA does not overlap a ppermute around a whole side of the torus.
        """

        def links_between_tiles(tile: Tile) -> float:
            """Links of one device to its counterparts in other tiles; the devices in between share each link."""
            sides = zip(tile, self.sides, self.wraps, self.links_per_step, strict=False)
            counts = ((2 if wraps else 1) / (part * links) for part, side, wraps, links in sides if part < side)
            return sum(counts, 0.0)

        candidates = reversed(self.tiles(size))
        return max(candidates, key=lambda tile: (tile[3], bool(_edge_sides(tile[:3])), links_between_tiles(tile)))

    def ring_order(self, tile: Tile) -> list[int]:
        """The order of a tile's devices (positions in a row of `arrange`) in which each is one link from the next.

        The last is one link from the first.  The ring goes row by row through all but one edge of the tile, and back
        along that edge.  A line that does not wrap takes every second chip forwards and the rest backwards, in steps of
        two links.  The cores of a chip follow each other.  A tile of odd sides has no such ring: its devices stay in
        row-major order, and some steps are longer.
        """
        *sides, cores = tile
        chips = list(itertools.product(*map(range, sides)))
        long, edges = [dim for dim in range(3) if sides[dim] > 1], _edge_sides(sides)
        is_line = len(long) == 1
        if edges:
            ring = sorted(chips, key=lambda chip: _snake_key(chip, sides, edges[0]))
        elif is_line and not (self.wraps[long[0]] and sides[long[0]] == self.sides[long[0]]):
            ring = sorted(chips, key=_line_key)
        else:
            ring = chips
        return [chips.index(chip) * cores + core for chip in ring for core in range(cores)]

    def _describe(self) -> str:
        return " x ".join(map(str, self.sides[:3])) + f" chips with {self.sides[3]} devices each"


def _edge_sides(sides: Sequence[int]) -> list[int]:
    """The dims along which a ring of single links through all chips of a tile can return: the other sides must have an
    even number of rows."""
    return [dim for dim in range(3) if sides[dim] > 1 and math.prod(sides) // sides[dim] % 2 == 0]


def _snake_key(chip: tuple[int, ...], sides: Sequence[int], edge: int) -> tuple[int, ...]:
    """Sort key of a ring: rows away from the edge in alternating direction, then back along the chips of the edge."""
    depth, (near, far) = chip[edge], (dim for dim in range(3) if dim != edge)
    row = chip[far] * sides[near] + (sides[near] - 1 - chip[near] if chip[far] % 2 else chip[near])
    return (0, row, -depth if row % 2 else depth) if depth else (1, -row, 0)


def _line_key(chip: tuple[int, ...]) -> tuple[int, int]:
    """Sort key of a line: chips at even positions forwards, then those at odd positions backwards."""
    position = sum(chip)
    return (1, -position) if position % 2 else (0, position)
