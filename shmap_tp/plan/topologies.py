"""TPU slices that are not attached: their devices, as the TPU compiler describes them.

The descriptions come from libtpu, which runs on any Linux machine (`pip install -e '.[tpu]'`).  Programs can be
compiled for these devices but not run on them.
"""

import importlib.util
import itertools
import math
import os
from dataclasses import dataclass
from functools import cache

import jax
from jax.experimental import topologies

from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import GENERATIONS, Generation

LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
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
    """Every slice shape of a generation, from one host up, sides in ascending order.

    2-D: powers of two with an aspect ratio of at most 1:2.  3-D: powers of two up to 4, then multiples of 4.
    """
    if generation.dims == 2:
        powers = [2**i for i in range(1, 6)]
        pairs = [(a, b) for a in powers for b in powers if a <= b <= 2 * a]
        return [(a, b) for a, b in pairs if a <= generation.largest[0] and b <= generation.largest[1]]
    sides = range(4, max(generation.largest) + 1, 4)
    small = [(2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)]
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
    options = {"chip_config_name": "megacore"} if target.version == "v4" else {}
    if target.slices > 1:
        options["num_slices"] = target.slices
    name = f"{target.generation.platform}:{target.topology}"
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"the compiler does not support the slice {name}: {str(error).splitlines()[0]}") from error
