"""Slices of TPUs that are not here: their devices, as the compiler knows them, from a version and a size.

The devices come from libtpu, which runs on any Linux machine (`pip install -e '.[tpu]'`); nothing runs on them, but
programs can be compiled for them, and they know their coordinates.
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

ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}
"""What libtpu reads from the environment.  It asks the cloud which machine this is, and complains where nobody answers,
unless it is told: any answer will do to compile.  Two programs may compile at a time; nothing is logged but errors."""


@dataclass(frozen=True)
class Slice:
    """So many slices of `sides` chips."""

    version: str
    sides: tuple[int, ...]
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
        many = f"{self.slices} x " if self.slices > 1 else ""
        return f"{many}{self.version} {self.topology} ({chips} chips, {self.devices // self.slices} devices)"


def find_slice(version: str, devices: int, topology: str | None, slices: int) -> Slice:
    """The slice of `version` with so many devices in all, of the sides that `topology` says or else the most compact.

    Raises InputError where there is none, naming those that there are.
    """
    if version not in GENERATIONS:
        raise UserError(f"--version {version}: no such TPU here; use one of {', '.join(GENERATIONS)}")
    made = GENERATIONS[version]
    if slices < 1 or devices % slices:
        raise UserError(f"--slices {slices} does not divide dp x mp = {devices} devices; choose a divisor")
    if topology is not None:
        found = Slice(version, _sides(version, topology), slices)
        if found.devices != devices:
            raise UserError(
                f"dp x mp = {devices} is not the {found.devices} devices of {found}; "
                f"choose --dp and --mp with dp x mp = {found.devices}, or another --topology"
            )
        return found
    fit = [sides for sides in shapes(made) if math.prod(sides) * made.cores * slices == devices]
    if not fit:
        sizes = sorted({math.prod(sides) * made.cores for sides in shapes(made)})
        raise UserError(
            f"dp x mp = {devices}: there is no {version} slice of {devices // slices} devices; "
            f"slices have {', '.join(map(str, sizes))}"
        )
    return Slice(version, min(fit, key=lambda sides: (sum(sides), sides)), slices)


def _sides(version: str, topology: str) -> tuple[int, ...]:
    made, parts = GENERATIONS[version], topology.split("x")
    sides = tuple(int(part) for part in parts if part.isdecimal())
    if len(sides) != len(parts) or sorted(sides) not in [sorted(shape) for shape in shapes(made)]:
        some = [shape for shape in shapes(made) if math.prod(shape) <= 512]
        more = " and larger" if len(some) < len(shapes(made)) else ""
        raise UserError(
            f"--topology {topology}: {version} has no such slice; "
            f"it has {', '.join('x'.join(map(str, shape)) for shape in some)}{more}"
        )
    return sides


@cache
def shapes(made: Generation) -> list[tuple[int, ...]]:
    """The sides of every slice that the generation comes in, a host's own first: 2-D in powers of two at most 1 : 2;
    3-D in powers of two up to 4, then multiples of 4.  Those smaller than a host are left out."""
    if made.dims == 2:
        powers = [2**i for i in range(1, 6)]
        pairs = [(a, b) for a in powers for b in powers if a <= b <= 2 * a]
        return [(a, b) for a, b in pairs if a <= made.largest[0] and b <= made.largest[1]]
    sides = range(4, max(made.largest) + 1, 4)
    small = [(2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)]
    cubes = itertools.combinations_with_replacement(sides, 3)
    return small + [shape for shape in cubes if all(a <= b for a, b in zip(shape, made.largest, strict=True))]


def topology_devices(asked: Slice) -> list[jax.Device]:
    """The devices of a slice, to compile for.  Raises InputError where libtpu is missing or knows no such slice."""
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("predicting needs the TPU compiler, libtpu, which is not installed: pip install -e '.[tpu]'")
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    options = {"chip_config_name": "megacore"} if asked.version == "v4" else {}  # the others are so by themselves
    if asked.slices > 1:
        options["num_slices"] = asked.slices
    name = f"{asked.generation.platform}:{asked.topology}"
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"the compiler has no slice {name}: {str(error).splitlines()[0]}") from error
