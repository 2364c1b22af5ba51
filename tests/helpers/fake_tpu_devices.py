"""Fake TPU devices: they have a kind and coordinates, and cannot run anything."""

import itertools
from dataclasses import dataclass

import numpy as np

from shmap_tp.hardware.devices import GENERATIONS


@dataclass(frozen=True, eq=False)  # JAX may compare a device cached in a mesh with a CPU device, which lacks the fields
class FakeTpuDevice:
    """What a mesh reads of a TPU device."""

    device_kind: str
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    slice_index: int = 0

    @property
    def place(self) -> tuple[int, ...]:
        """(x, y, z, core)."""
        return (*self.coords, self.core_on_chip)


def fake_slice(version: str, *sides: int, slices: int = 1) -> list[FakeTpuDevice]:
    """The devices of `slices` slices of `sides` chips, in random order."""
    generation = GENERATIONS[version]
    sides = (*sides, 1)[:3]
    places = itertools.product(range(slices), *map(range, sides), range(generation.cores))
    devices = [FakeTpuDevice(generation.kind, (x, y, z), core, number) for number, x, y, z, core in places]
    return [devices[i] for i in np.random.default_rng(0).permutation(len(devices))]
