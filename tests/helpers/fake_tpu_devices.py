"""Stand-ins for the devices of TPU slices, which tell where they are and can do nothing."""

import itertools
from dataclasses import dataclass

import jax
import numpy as np

from shmap_tp.hardware.devices import GENERATIONS


@dataclass(frozen=True, eq=False)  # JAX may compare one, kept in a mesh, with a CPU device, which has no such fields
class Stand:
    """What a mesh asks of a TPU device; passes for one where types are checked."""

    device_kind: str
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    slice_index: int = 0
    __class__ = jax.Device

    @property
    def place(self) -> tuple[int, ...]:
        """(x, y, z, core)."""
        return (*self.coords, self.core_on_chip)


def box(version: str, *sides: int, slices: int = 1) -> list[Stand]:
    """The devices of `slices` slices of `sides` chips, in an order that means nothing."""
    made = GENERATIONS[version]
    sides = (*sides, 1)[:3]
    places = itertools.product(range(slices), *map(range, sides), range(made.cores))
    devices = [Stand(made.kind, (x, y, z), core, number) for number, x, y, z, core in places]
    return [devices[i] for i in np.random.default_rng(0).permutation(len(devices))]
