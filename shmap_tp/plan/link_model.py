"""How long a collective takes on a torus of chips: an analytic model that has not been verified on a device.

Bandwidth terms follow the scaling book (Austin et al. 2025, "How to Scale Your Model", chapter on sharded matrices,
https://jax-ml.github.io/scaling-book/sharding):

    all-gather, reduce-scatter    V (n - 1) / n / rate        V bytes of the full array, n devices
    all-reduce                    a reduce-scatter followed by an all-gather
    ppermute                      bytes x hops of the longest route / link rate
    all-to-all                    1/4 of the time of an all-gather of V

rate is the sum over the torus dimensions that the group spans: two links where the group closes to a ring in that
dimension, else one link (a line: its end device receives everything over one link).  Interleaved groups share links: a
stride of s chips leaves 1/s of them to each group, and using one of a chip's c cores leaves 1/c.  Where the compiler
chooses a single ring through the whole group, that ring uses two links of each chip, however many dimensions the group
spans.  Each hop of the longest route adds HOP_LATENCY.

Between slices (DCN) each device has an equal share of the network bandwidth of its host.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shmap_tp.hardware.devices import DEVICES, NETWORK_RATE, Generation

HOP_LATENCY = 1e-6
"""Seconds per hop (scaling book, same chapter)."""

NETWORK_LATENCY = 1e-4
"""Seconds per message between slices: an assumption."""

Coordinates = Sequence[Sequence[int]]

DirectedLinks = frozenset[tuple[tuple[int, ...], tuple[int, ...]]]
"""Links, each in one direction: (source chip, target chip), by coordinates."""


@dataclass(frozen=True, eq=False)
class LinkModel:
    """The torus on which the devices of a program lie; devices are identified by their number in the program."""

    generation: Generation
    coordinates: np.ndarray
    """[devices, 4]: x, y, z, core of each device."""
    sides: tuple[int, int, int]

    @classmethod
    def of(cls, generation: Generation, coordinates: Coordinates) -> "LinkModel":
        at = np.array(coordinates)
        return cls(generation, at, tuple(int(side) + 1 for side in at[:, :3].max(axis=0)))

    @property
    def devices(self) -> int:
        return len(self.coordinates)

    @property
    def memory_rate(self) -> float:
        """Bytes/s of one device's memory."""
        return DEVICES[self.generation.kind].memory_rate

    @property
    def host_rate(self) -> float:
        """Bytes/s between one device and its host's memory, in each direction."""
        return self.generation.host_rate / self.generation.cores

    def collective_seconds(
        self, kind: str, full_bytes: float, group: Sequence[int], *, one_ring: bool = False
    ) -> float:
        """Seconds of an all-gather, reduce-scatter, all-reduce or all-to-all within one group of devices.

        `full_bytes` is the size of the full (gathered) array.  `one_ring`: the compiler chose a single ring through the
        whole group.
        """
        if len(group) == 1:
            return 0.0
        rate, hops = self._rate_and_hops(group)
        if one_ring:
            rate = min(rate, 2 * self.generation.link_rate)
        gather = full_bytes * (len(group) - 1) / len(group) / rate + hops * HOP_LATENCY
        return gather * {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 0.25}[kind]

    def permute_seconds(self, size: float, pairs: Sequence[tuple[int, int]]) -> float:
        """Seconds of a ppermute: `size` bytes from source to target of every pair, all at once."""
        hops = max((self._hops(source, target) for source, target in pairs), default=0)
        return hops * (size / self.generation.link_rate + HOP_LATENCY)

    def links_of_permute(self, pairs: Sequence[tuple[int, int]]) -> DirectedLinks | None:
        """The directed links that a ppermute between neighbours uses; None if any pair is more than one hop apart."""
        if any(self._hops(source, target) > 1 for source, target in pairs):
            return None
        chips = [tuple(int(side) for side in row[:3]) for row in self.coordinates]
        return frozenset((chips[source], chips[target]) for source, target in pairs)

    def inter_slice_seconds(self, kind: str, full_bytes: float, slices: int) -> float:
        """Seconds of a collective between `slices` slices; `full_bytes` is the size of the full (gathered) array."""
        devices_per_host = int(np.prod(self.generation.host)) * self.generation.cores
        gather = full_bytes * (slices - 1) / slices / (NETWORK_RATE / devices_per_host) + NETWORK_LATENCY
        return gather * (2 if kind == "all-reduce" else 1)

    def wraps(self, dim: int) -> bool:
        """Whether the slice closes to a ring in this dimension."""
        return self.generation.wraps(self.sides[dim])

    def _hops(self, a: int, b: int) -> int:
        return sum(
            self._distance(dim, int(self.coordinates[a, dim]), int(self.coordinates[b, dim])) for dim in range(3)
        )

    def _distance(self, dim: int, a: int, b: int) -> int:
        side, distance = self.sides[dim], abs(a - b)
        return min(distance, side - distance) if self.wraps(dim) else distance

    def _rate_and_hops(self, group: Sequence[int]) -> tuple[float, int]:
        """(bytes/s that each device of the group can receive, hops of the longest route)."""
        at = self.coordinates[list(group)]
        share = len(np.unique(at[:, 3])) / self.generation.cores
        rate, hops = 0.0, 0
        for dim in range(3):
            positions = np.unique(at[:, dim])
            if len(positions) == 1:
                continue
            stride = int(np.diff(positions).max())
            ring = self.wraps(dim) and len(positions) * stride == self.sides[dim]
            rate += self.generation.link_rate * (2 if ring else 1) / stride
            hops += len(positions) * stride // 2 if ring else int(positions[-1] - positions[0])
        if rate == 0.0:  # cores of one chip, with no link between them
            return self.generation.link_rate * 2 * self.generation.dims, 1
        return rate * share, hops


class TransferQueue:
    """Transfers in flight on each channel of a device.  A transfer begins when all conflicting transfers have ended."""

    def __init__(self):
        self._in_flight: list[tuple[str, DirectedLinks | None, float]] = []

    def schedule(self, channel: str, links: DirectedLinks | None, now: float, seconds: float) -> tuple[float, float]:
        """(begin, end) of a transfer requested at `now` that uses these links of a channel, or all of it if None."""
        self._in_flight = [transfer for transfer in self._in_flight if transfer[2] > now]
        begin = now
        for other, used, end in self._in_flight:
            if other == channel and (links is None or used is None or links & used):
                begin = max(begin, end)
        self._in_flight.append((channel, links, begin + seconds))
        return begin, begin + seconds
