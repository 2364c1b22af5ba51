"""TPU slices by the name under which Cloud TPU rents them, such as v3-32 or v5litepod-16.

The number in a name counts cores for v2, v3, v4 and v5p, and chips for v5litepod and v6e.  A host has four chips; the
slices of eight chips of v5litepod and v6e are one host.  Source: https://cloud.google.com/tpu/docs/v5e and the pages of
the other versions.
"""

import re
from dataclasses import dataclass

from shmap_tp.errors import UserError, shown
from shmap_tp.hardware.devices import GENERATIONS

VERSIONS = {"v2": "v2", "v3": "v3", "v4": "v4", "v5litepod": "v5e", "v5p": "v5p", "v6e": "v6e"}
"""Keys of GENERATIONS by the first part of a name."""
_CORES_ON_CHIP = {"v2": 2, "v3": 2, "v4": 2, "v5p": 2}
"""Of those whose names count cores."""
_CHIPS_ON_HOST = 4
_LARGEST_HOST = {"v5litepod": 8, "v6e": 8}
"""Chips of a slice that is one host with more than _CHIPS_ON_HOST of them."""


@dataclass(frozen=True)
class RentedSlices:
    """One or more slices of a type, as one run uses them."""

    type: str
    """The name of one, such as v3-32."""
    slices: int
    devices: int
    """JAX devices of all slices together."""
    hosts: int
    """Hosts of all slices together."""

    def __str__(self) -> str:
        return f"{self.slices} x {self.type}" if self.slices > 1 else self.type


def find_slices(name: str) -> RentedSlices:
    """The slices of `name`: a type, or a number and a type as in 2xv5litepod-256.  Raises UserError if there are no
    such slices."""
    found = re.fullmatch(r"(?:([1-9][0-9]{0,3})x)?([a-z0-9]+)-([1-9][0-9]{0,4})", name)
    if found is None or found[2] not in VERSIONS:
        raise UserError(
            f"--type {shown(name) or repr('')} is no type of TPU slice; use "
            f"{', '.join(f'{version}-N' for version in VERSIONS)}, such as v3-32, or 2xv5litepod-256 for two slices"
        )
    slices, version, size = int(found[1] or 1), found[2], int(found[3])
    chips, rest = divmod(size, _CORES_ON_CHIP.get(version, 1))
    hosts = 1 if chips <= _LARGEST_HOST.get(version, _CHIPS_ON_HOST) else chips // _CHIPS_ON_HOST
    if rest or (hosts > 1 and chips % _CHIPS_ON_HOST):
        raise UserError(
            f"{version}-{size}: there is no such slice; see https://cloud.google.com/tpu/docs/regions-zones"
        )
    if slices > 1 and version in ("v2", "v3"):
        raise UserError(f"{name}: slices of {version} cannot be combined; use one, or several of v4 or later")
    devices = chips * GENERATIONS[VERSIONS[version]].cores
    return RentedSlices(f"{version}-{size}", slices, slices * devices, slices * hosts)
