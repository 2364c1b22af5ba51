"""How long a collective takes on a torus of chips: a model, stated here in full, that no device has confirmed.

Bytes on the links, by the scaling book (Austin et al. 2025, "How to Scale Your Model", chapter on sharded matrices,
https://jax-ml.github.io/scaling-book/sharding):

    all-gather, reduce-scatter    V (n - 1) / n / rate        V bytes of the whole array, n devices
    all-reduce                    both, one after the other
    ppermute                      bytes x hops of the longest way / link rate
    all-to-all                    V / 4 of an all-gather's time

rate is the sum over the torus dimensions that the group spans: two links' where the group closes to a ring there, else
one link's (a line: the end of it gets everything over one link).  Groups that interleave share the links: a stride of s
chips gives each 1/s of them, and one core of a chip 1/cores.  Where the compiler says that it makes one ring of all the
group, it uses two links of each chip, whatever dimensions there are.  Each hop of the longest way adds LATENCY.

Between slices each device reduces or gathers over its share of its host's network.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shmap_tp.hardware.devices import NETWORK_RATE, Generation

LATENCY = 1e-6
"""Seconds a hop takes at least (scaling book, same chapter)."""


NETWORK_LATENCY = 1e-4
"""Seconds a message between slices takes at least: an assumption."""

Coordinates = Sequence[Sequence[int]]


Lanes = frozenset[tuple[tuple[int, ...], tuple[int, ...]]]
"""Links in one direction: (chip, chip), by coordinates."""


@dataclass(frozen=True, eq=False)
class Links:
    """The torus that a program's devices lie on: where each is, by its number in the program."""

    generation: Generation
    coordinates: np.ndarray
    """[devices, 4]: x, y, z, core of each device."""
    sides: tuple[int, int, int]

    @classmethod
    def of(cls, generation: Generation, coordinates: Coordinates) -> "Links":
        at = np.array(coordinates)
        return cls(generation, at, tuple(int(side) + 1 for side in at[:, :3].max(axis=0)))

    @property
    def host_rate(self) -> float:
        """Bytes/s of one device to the memory of its host, and from there."""
        return self.generation.host_rate / self.generation.cores

    def collective(self, kind: str, whole: float, group: Sequence[int], *, one_ring: bool = False) -> float:
        """Seconds of `kind` (all-gather, reduce-scatter, all-reduce, all-to-all) on `whole` bytes of the whole array,
        among the devices of one group; `one_ring` where the compiler goes once around all of them."""
        if len(group) == 1:
            return 0.0
        rate, hops = self._spread(group)
        if one_ring:
            rate = min(rate, 2 * self.generation.link_rate)
        once = whole * (len(group) - 1) / len(group) / rate + hops * LATENCY
        return once * {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 0.25}[kind]

    def permute(self, size: float, pairs: Sequence[tuple[int, int]]) -> float:
        """Seconds to send `size` bytes over every (from, to) at once."""
        hops = max((self._hops(a, b) for a, b in pairs), default=0)
        return hops * (size / self.generation.link_rate + LATENCY)

    def lanes(self, pairs: Sequence[tuple[int, int]]) -> Lanes | None:
        """The links that a permute between neighbours takes; None where one of its ways is longer."""
        if any(self._hops(a, b) > 1 for a, b in pairs):
            return None
        chips = [tuple(int(side) for side in place[:3]) for place in self.coordinates]
        return frozenset((chips[a], chips[b]) for a, b in pairs)

    def network(self, kind: str, whole: float, slices: int) -> float:
        """Seconds of `kind` on `whole` bytes of each device, among as many slices."""
        hosts_share = int(np.prod(self.generation.host)) * self.generation.cores
        once = whole * (slices - 1) / slices / (NETWORK_RATE / hosts_share) + NETWORK_LATENCY
        return once * (2 if kind == "all-reduce" else 1)

    def _hops(self, a: int, b: int) -> int:
        return sum(self._apart(dim, int(self.coordinates[a, dim]), int(self.coordinates[b, dim])) for dim in range(3))

    def _apart(self, dim: int, a: int, b: int) -> int:
        side, apart = self.sides[dim], abs(a - b)
        return min(apart, side - apart) if self.wraps(dim) else apart

    def wraps(self, dim: int) -> bool:
        """Whether this side of the slice closes to a ring."""
        return self.generation.wraps(self.sides[dim])

    def _spread(self, group: Sequence[int]) -> tuple[float, int]:
        """(bytes/s that every device of the group can take in, links of the longest way)."""
        at = self.coordinates[list(group)]
        cores = len(np.unique(at[:, 3]))
        share = cores / self.generation.cores
        rate, hops = 0.0, 0
        for dim in range(3):
            places = np.unique(at[:, dim])
            if len(places) == 1:
                continue
            stride = int(np.diff(places).max())
            ring = self.wraps(dim) and len(places) * stride == self.sides[dim]
            rate += self.generation.link_rate * (2 if ring else 1) / stride
            hops += len(places) * stride // 2 if ring else int(places[-1] - places[0])
        if rate == 0.0:  # cores of one chip: no link between them
            return self.generation.link_rate * 2 * self.generation.dims, 1
        return rate * share, hops


class Traffic:
    """What is under way on the wires of a device: a transfer begins when those in its way have ended."""

    def __init__(self):
        self._under_way: list[tuple[str, Lanes | None, float]] = []

    def end(self, wire: str, lanes: Lanes | None, now: float, seconds: float) -> float:
        """When a transfer ends that is asked for now; it takes these lanes of the wire, or where None all of them."""
        self._under_way = [one for one in self._under_way if one[2] > now]
        begin = now
        for other, taken, end in self._under_way:
            if other == wire and (lanes is None or taken is None or lanes & taken):
                begin = max(begin, end)
        self._under_way.append((wire, lanes, begin + seconds))
        return begin + seconds
