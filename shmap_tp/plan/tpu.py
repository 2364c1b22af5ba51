"""TPU slices that are not attached: their devices, and how long a collective takes there.

The devices are described by libtpu, which runs on any Linux machine (`pip install -e '.[tpu]'`).  Programs can be
compiled for them but not run on them.

Collectives: an analytic model that has not been verified on a device.  Bandwidth terms follow the scaling book (Austin
et al. 2025, "How to Scale Your Model", chapter on sharded matrices, https://jax-ml.github.io/scaling-book/sharding):

    all-gather, reduce-scatter    V (n - 1) / n / rate        V bytes of the full array, n devices
    all-reduce                    a reduce-scatter followed by an all-gather
    ppermute                      bytes x hops of the longest route / link rate
    all-to-all                    V / n x a / (4 x rate of the side)   along the side of the group, of a places, where
                                  this is longest: half of what n / 2 devices have crosses its middle

rate is the sum over the torus dimensions that the group spans: two links where the group closes to a ring in that
dimension, else one link (a line: its end device receives everything over one link).  Interleaved groups share links: a
stride of s chips leaves 1/s of them to each group, and using one of a chip's c cores leaves 1/c.  Where the compiler
chooses a single ring through the whole group, that ring uses two links of each chip, however many dimensions the group
spans.  Each hop of the longest route adds HOP_LATENCY.  Between slices (DCN) each device has an equal share of the
network bandwidth of its host.
"""

import importlib.util
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies

from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import ANY_TPU, DEVICES, GENERATIONS, NETWORK_RATE, Generation

# Devices

LIBTPU_ENVIRONMENT = ANY_TPU | {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}
"""Environment variables for libtpu.  Without them it queries the cloud's metadata server for the type of this machine;
any type will do for compilation.  Several processes may compile at a time, and only errors are logged."""


@dataclass(frozen=True)
class Slice:
    """One or more slices of the same TPU version and shape."""

    version: str
    sides: tuple[int, ...]
    """Chips along each side of one slice."""
    slices: int = 1

    @property
    def generation(self) -> Generation:
        return GENERATIONS[self.version]

    @property
    def devices(self) -> int:
        """JAX devices of all slices together."""
        return math.prod(self.sides) * self.generation.cores * self.slices

    @property
    def topology(self) -> str:
        return "x".join(map(str, self.sides))

    def __str__(self) -> str:
        chips = math.prod(self.sides)
        count = f"{self.slices} x " if self.slices > 1 else ""
        return f"{count}{self.version} {self.topology} ({chips} chips, {self.devices // self.slices} devices)"


def find_slice(version: str, devices: int, topology: str | None, slices: int) -> Slice:
    """The slices of `version` with this total number of devices, of shape `topology` or else of the most compact shape.

    Raises UserError, listing the valid choices, where there is none.
    """
    if version not in GENERATIONS:
        raise UserError(f"--version {version}: unknown TPU version; use one of {', '.join(GENERATIONS)}")
    generation = GENERATIONS[version]
    if slices < 1 or devices % slices:
        raise UserError(f"--slices {slices} does not divide {devices} devices; choose a divisor")
    if topology is not None:
        found = Slice(version, _parse_topology(version, topology), slices)
        if found.devices != devices:
            raise UserError(
                f"{devices} devices differ from the {found.devices} of {found}; "
                f"choose {found.devices} devices, or another --topology"
            )
        return found
    matching = [sides for sides in slice_shapes(generation) if math.prod(sides) * generation.cores * slices == devices]
    if not matching:
        sizes = sorted({math.prod(sides) * generation.cores for sides in slice_shapes(generation)})
        raise UserError(
            f"{devices} devices: there is no {version} slice of {devices // slices} devices; "
            f"slices have {', '.join(map(str, sizes))}"
        )
    return Slice(version, min(matching, key=lambda sides: (sum(sides), sides)), slices)


def _parse_topology(version: str, topology: str) -> tuple[int, ...]:
    generation, words = GENERATIONS[version], topology.split("x")
    sides = tuple(int(word) for word in words if word.isdecimal())
    if len(sides) != len(words) or sorted(sides) not in [sorted(shape) for shape in slice_shapes(generation)]:
        listed = [shape for shape in slice_shapes(generation) if math.prod(shape) <= 512]
        more = " and larger" if len(listed) < len(slice_shapes(generation)) else ""
        raise UserError(
            f"--topology {topology}: there is no such {version} slice; "
            f"use one of {', '.join('x'.join(map(str, shape)) for shape in listed)}{more}"
        )
    return sides


@cache
def slice_shapes(generation: Generation) -> list[tuple[int, ...]]:
    """Every slice shape of a generation, sides in ascending order: one chip, which is a slice or which a process uses
    alone of a host's, then from one host up.

    2-D: powers of two with an aspect ratio of at most 1:2.  3-D: powers of two up to 4, then multiples of 4.
    """
    if generation.dims == 2:
        powers = [2**i for i in range(1, 6)]
        pairs = [(a, b) for a in powers for b in powers if a <= b <= 2 * a]
        return [(1, 1), *((a, b) for a, b in pairs if a <= generation.largest[0] and b <= generation.largest[1])]
    sides = range(4, max(generation.largest) + 1, 4)
    small = [(1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)]
    cubes = itertools.combinations_with_replacement(sides, 3)
    return small + [shape for shape in cubes if all(a <= b for a, b in zip(shape, generation.largest, strict=True))]


def topology_devices(target: Slice) -> list[jax.Device]:
    """The devices of a slice, as a target for compilation.

    Raises UserError where libtpu is missing or does not support the slice.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("predicting needs the TPU compiler, libtpu, which is not installed: pip install -e '.[tpu]'")
    for name, value in LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # v4 in megacore mode: one device per chip; all other generations have the right default
    options: dict[str, Any] = {"chip_config_name": "megacore"} if target.version == "v4" else {}
    if target.slices > 1:
        options["num_slices"] = target.slices
    if math.prod(target.sides) == 1:
        options["chips_per_host_bounds"] = [1, 1, 1]
    name = f"{target.generation.platform}:{target.topology}"
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"the compiler does not support the slice {name}: {str(error).splitlines()[0]}") from error


# Collectives

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
        sides = self._sides(group)
        rate, latency = sum(side.rate for side in sides), HOP_LATENCY * sum(side.hops for side in sides)
        if kind == "all-to-all":
            return full_bytes / len(group) * max(side.places / side.rate for side in sides) / 4 + latency
        if one_ring:
            rate = min(rate, 2 * self.generation.link_rate)
        gather = full_bytes * (len(group) - 1) / len(group) / rate + latency
        return gather * {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}[kind]

    def permute_seconds(self, size: float, pairs: Sequence[tuple[int, int]]) -> float:
        """Seconds of a ppermute: `size` bytes from source to target of every pair, all at once."""
        hops = max((self._hops(source, target) for source, target in pairs), default=0)
        return hops * (size / self.generation.link_rate + HOP_LATENCY)

    def neighbour_seconds(self, size: float, group: Sequence[int]) -> float:
        """Seconds of one step of a ring: `size` bytes from each device of a group to the next, one hop away."""
        return size / self.generation.link_rate

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

    def _sides(self, group: Sequence[int]) -> list["Side"]:
        """The sides of a group of devices along the dimensions that it spans; of cores of one chip, between which
        there is no link, all of its links."""
        at = self.coordinates[list(group)]
        cores = len(np.unique(at[:, 3]))
        share, sides = cores / self.generation.cores, []
        for dim in range(3):
            positions = np.unique(at[:, dim])
            if len(positions) == 1:
                continue
            stride = int(np.diff(positions).max())
            ring = self.wraps(dim) and len(positions) * stride == self.sides[dim]
            rate = self.generation.link_rate * (2 if ring else 1) / stride
            hops = len(positions) * stride // 2 if ring else int(positions[-1] - positions[0])
            sides.append(Side(cores * len(positions), rate * share, hops))
        return sides or [Side(cores, self.generation.link_rate * 2 * self.generation.dims, 1)]


class Side(NamedTuple):
    """A line or ring of the chips of a group along one dimension of the torus."""

    places: int
    """Devices."""
    rate: float
    """Bytes/s that each device can receive along it."""
    hops: int
    """Hops of the longest route."""
