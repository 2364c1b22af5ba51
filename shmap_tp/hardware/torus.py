"""Devices to a (dp, mp) mesh: the accelerators that are there, or CPU devices that are emulated."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import generation


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
            raise UserError(f"mp={mp} cannot be cut out of a slice of {self._words()}; use mp in {{{sizes}}}")
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
            raise UserError(
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
