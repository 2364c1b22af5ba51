"""The devices of a slice as coordinates, without the compiler's description of them."""

import itertools
from dataclasses import dataclass
from functools import cache

import jax

from shmap_tp.plan.topologies import Slice


@dataclass(frozen=True, eq=False)
class PlannedDevice:
    """What a mesh and the selection of a kernel read of a TPU device.  It can run nothing."""

    device_kind: str
    coords: tuple[int, int, int]
    core_on_chip: int
    slice_index: int
    __class__ = jax.Device  # functions that take devices check for this type


@cache
def devices_of(target: Slice) -> list[PlannedDevice]:
    """Every device of a slice, by position."""
    sides, generation = (*target.sides, 1)[:3], target.generation
    places = itertools.product(range(target.slices), *map(range, sides), range(generation.cores))
    return [PlannedDevice(generation.kind, (x, y, z), core, number) for number, x, y, z, core in places]
