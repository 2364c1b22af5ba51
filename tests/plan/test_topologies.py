"""Slices of TPUs by version and size: what there is, what there is not, and that the compiler knows the same."""

import importlib.util
import itertools
import math

import pytest

from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import GENERATIONS
from shmap_tp.hardware.torus import Torus
from shmap_tp.plan.topologies import Slice, find_slice, shapes, topology_devices

every_version = pytest.mark.parametrize("version", GENERATIONS)

# By Google's pages of each version, smaller than a host left out, and of the 3-D ones those up to 128 chips
KNOWN = {
    "v2": ["2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"],
    "v3": ["2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16", "16x32", "32x32"],
    "v5e": ["2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"],
    "v6e": ["2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"],
}
KNOWN |= {name: ["2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8"] for name in ("v4", "v5p", "tpu7x")}


def sides(topology: str) -> tuple[int, ...]:
    return tuple(map(int, topology.split("x")))


@every_version
def test_the_slices_there_are(version):
    found = shapes(GENERATIONS[version])
    assert sorted(sides(t) for t in KNOWN[version]) == sorted(
        shape for shape in found if len(shape) == 2 or math.prod(shape) <= 128
    )
    assert GENERATIONS[version].largest in found
    assert all(all(a <= b for a, b in zip(shape, GENERATIONS[version].largest, strict=True)) for shape in found)


@every_version
@pytest.mark.parametrize("slices", [1, 2, 4])
def test_every_slice_is_found_by_its_size_and_by_its_topology(version, slices):
    made = GENERATIONS[version]
    for shape in shapes(made):
        size = math.prod(shape) * made.cores * slices
        by_size = find_slice(version, size, None, slices)
        assert by_size.devices == size and by_size.sides in shapes(made)
        assert sum(by_size.sides) <= sum(shape), "the most compact of its size"
        for order in set(itertools.permutations(shape)):
            topology = "x".join(map(str, order))
            found = find_slice(version, size, topology, slices)
            assert found == Slice(version, order, slices) and found.topology == topology and found.devices == size


PUBLISHED = {
    ("v2", 32): "4x4",
    ("v3", 32): "4x4",
    ("v3", 256): "8x16",
    ("v4", 64): "4x4x4",
    ("v4", 256): "4x8x8",
    ("v5e", 256): "16x16",
    ("v5p", 128): "4x4x8",
    ("v6e", 256): "16x16",
    ("tpu7x", 128): "4x4x4",
}


@pytest.mark.parametrize(("version", "devices"), PUBLISHED)
def test_sizes_that_were_published_with_their_sides(version, devices):
    assert find_slice(version, devices, None, 1).topology == PUBLISHED[version, devices]


def test_in_words():
    assert str(find_slice("v3", 32, None, 1)) == "v3 4x4 (16 chips, 32 devices)"
    assert str(find_slice("v5e", 512, None, 2)) == "2 x v5e 16x16 (256 chips, 256 devices)"


# What there is not

SIZES = "slices have 4, 8, 16, 32, 64, 128, 256"
REFUSED = {
    ("v7", 4, None, 1): "--version v7: no such TPU here; use one of v2, v3, v4, v5e, v5p, v6e, tpu7x",
    ("v5e", 6, None, 1): f"dp x mp = 6: there is no v5e slice of 6 devices; {SIZES}",
    ("v5e", 12, None, 2): f"dp x mp = 12: there is no v5e slice of 6 devices; {SIZES}",
    ("v5e", 1, None, 1): f"dp x mp = 1: there is no v5e slice of 1 devices; {SIZES}",
    ("v5e", 512, None, 1): f"dp x mp = 512: there is no v5e slice of 512 devices; {SIZES}",
    (
        "v3",
        4,
        None,
        1,
    ): "dp x mp = 4: there is no v3 slice of 4 devices; slices have 8, 16, 32, 64, 128, 256, 512, 1024, 2048",
    ("v5e", 32, None, 3): "--slices 3 does not divide dp x mp = 32 devices; choose a divisor",
    ("v5e", 32, None, 0): "--slices 0 does not divide dp x mp = 32 devices; choose a divisor",
    ("v5e", 32, "4x4", 1): "dp x mp = 32 is not the 16 devices of v5e 4x4 (16 chips, 16 devices); "
    "choose --dp and --mp with dp x mp = 16, or another --topology",
    ("v3", 32, "4x8", 1): "dp x mp = 32 is not the 64 devices of v3 4x8 (32 chips, 64 devices); "
    "choose --dp and --mp with dp x mp = 64, or another --topology",
    ("v5e", 16, "4x4", 2): "dp x mp = 16 is not the 32 devices of 2 x v5e 4x4 (16 chips, 16 devices); "
    "choose --dp and --mp with dp x mp = 32, or another --topology",
}
REFUSED |= {
    ("v5e", 16, topology, 1): f"--topology {topology}: v5e has no such slice; "
    "it has 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"
    for topology in ("2x8", "4x4x1", "16", "4x", "x", "4X4", "4x-4", "4x4.0", "", "0x0", "4x²")
}


@pytest.mark.parametrize("asked", REFUSED, ids=str)
def test_what_there_is_not_is_answered_with_what_there_is(asked):
    with pytest.raises(UserError) as found:
        find_slice(*asked)
    assert str(found.value) == REFUSED[asked]


def test_of_many_slices_the_smaller_are_named():
    with pytest.raises(UserError, match=r"it has 2x2x1, .*, 8x8x8 and larger$"):
        find_slice("v4", 64, "3x3x3", 1)


def test_without_the_compiler_the_way_to_get_it_is_said(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as found:
        topology_devices(Slice("v5e", (2, 2)))
    assert str(found.value) == (
        "predicting needs the TPU compiler, libtpu, which is not installed: pip install -e '.[tpu]'"
    )


# As the compiler knows them

COMPILED = {
    Slice("v2", (4, 4)): (4, 4, 1, 2),
    Slice("v3", (2, 4)): (2, 4, 1, 2),
    Slice("v4", (2, 2, 1)): (2, 2, 1, 1),
    Slice("v4", (2, 2, 4)): (2, 2, 4, 1),
    Slice("v4", (4, 8, 8)): (4, 8, 8, 1),
    Slice("v5e", (4, 8)): (4, 8, 1, 1),
    Slice("v5e", (8, 4)): (8, 4, 1, 1),
    Slice("v5p", (2, 2, 2)): (2, 2, 2, 1),
    Slice("v6e", (16, 16)): (16, 16, 1, 1),
    Slice("tpu7x", (4, 4, 4)): (4, 4, 4, 2),
    Slice("v5e", (4, 4), 2): (4, 4, 1, 1),
    Slice("v4", (2, 2, 2), 3): (2, 2, 2, 1),
}


@pytest.mark.parametrize("asked", COMPILED, ids=str)
def test_the_compiler_knows_the_same_slice(asked):
    """Its devices are of that kind, as many, and their coordinates fill the box, once in each slice."""
    pytest.importorskip("libtpu")
    devices = topology_devices(asked)
    assert len(devices) == asked.devices
    assert {device.device_kind for device in devices} == {asked.generation.kind}
    torus = Torus.of(devices)
    assert torus.grid.shape == (asked.slices, *COMPILED[asked])
    assert set(torus.grid.flat) == set(devices)
    for number, grid in enumerate(torus.grid):
        assert {getattr(device, "slice_index", 0) for device in grid.flat} == {number}
