"""TPU slices by version and size: valid ones, invalid ones, and agreement with the compiler."""

import importlib.util
import itertools
import math

import pytest

from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import GENERATIONS
from shmap_tp.hardware.torus import Torus
from shmap_tp.plan.tpu import Slice, find_slice, slice_shapes, topology_devices

every_version = pytest.mark.parametrize("version", GENERATIONS)

# From Google's documentation of each version: one chip, and slices of at least one host, 3-D ones up to 128 chips
KNOWN = {
    "v2": ["1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"],
    "v3": ["1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16", "16x32", "32x32"],
    "v5e": ["1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"],
    "v6e": ["1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"],
}
KNOWN |= {name: ["1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8"] for name in ("v4", "v5p", "tpu7x")}


def sides(topology: str) -> tuple[int, ...]:
    return tuple(map(int, topology.split("x")))


@every_version
def test_slice_shapes_are_the_documented_ones(version):
    found = slice_shapes(GENERATIONS[version])
    assert sorted(sides(t) for t in KNOWN[version]) == sorted(
        shape for shape in found if len(shape) == 2 or math.prod(shape) <= 128
    )
    assert GENERATIONS[version].largest in found
    assert all(all(a <= b for a, b in zip(shape, GENERATIONS[version].largest, strict=True)) for shape in found)


@every_version
@pytest.mark.parametrize("slices", [1, 2, 4])
def test_every_slice_is_found_by_size_and_by_topology(version, slices):
    generation = GENERATIONS[version]
    for shape in slice_shapes(generation):
        size = math.prod(shape) * generation.cores * slices
        by_size = find_slice(version, size, None, slices)
        assert by_size.devices == size and by_size.sides in slice_shapes(generation)
        assert sum(by_size.sides) <= sum(shape), "the most compact of its size"
        for order in set(itertools.permutations(shape)):
            topology = "x".join(map(str, order))
            found = find_slice(version, size, topology, slices)
            assert found == Slice(version, order, slices) and found.topology == topology and found.devices == size


PUBLISHED = {
    ("v2", 32): "4x4", ("v3", 32): "4x4", ("v3", 256): "8x16", ("v4", 64): "4x4x4", ("v4", 256): "4x8x8",
    ("v5e", 256): "16x16", ("v5p", 128): "4x4x8", ("v6e", 256): "16x16", ("tpu7x", 128): "4x4x4",
}  # fmt: skip


def test_published_sizes_have_the_published_shape_and_print_it():
    assert {key: find_slice(*key, None, 1).topology for key in PUBLISHED} == PUBLISHED
    assert str(find_slice("v3", 32, None, 1)) == "v3 4x4 (16 chips, 32 devices)"
    assert str(find_slice("v5e", 512, None, 2)) == "2 x v5e 16x16 (256 chips, 256 devices)"


# Invalid slices

SIZES = "slices have 1, 4, 8, 16, 32, 64, 128, 256"
INVALID = {
    ("v7", 4, None, 1): "--version v7: unknown TPU version; use one of v2, v3, v4, v5e, v5p, v6e, tpu7x",
    ("v5e", 6, None, 1): f"6 devices: there is no v5e slice of 6 devices; {SIZES}",
    ("v5e", 12, None, 2): f"12 devices: there is no v5e slice of 6 devices; {SIZES}",
    ("v5e", 2, None, 1): f"2 devices: there is no v5e slice of 2 devices; {SIZES}",
    ("v5e", 512, None, 1): f"512 devices: there is no v5e slice of 512 devices; {SIZES}",
    ("v3", 4, None, 1): "4 devices: there is no v3 slice of 4 devices; slices have 2, 8, 16, 32, 64, 128, 256, 512, "
    "1024, 2048",
    ("v5e", 32, None, 3): "--slices 3 does not divide 32 devices; choose a divisor",
    ("v5e", 32, None, 0): "--slices 0 does not divide 32 devices; choose a divisor",
    ("v5e", 32, "4x4", 1): "32 devices differ from the 16 of v5e 4x4 (16 chips, 16 devices); "
    "choose 16 devices, or another --topology",
    ("v3", 32, "4x8", 1): "32 devices differ from the 64 of v3 4x8 (32 chips, 64 devices); "
    "choose 64 devices, or another --topology",
    ("v5e", 16, "4x4", 2): "16 devices differ from the 32 of 2 x v5e 4x4 (16 chips, 16 devices); "
    "choose 32 devices, or another --topology",
}
INVALID |= {
    ("v5e", 16, topology, 1): f"--topology {topology}: there is no such v5e slice; "
    "use one of 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"
    for topology in ("2x8", "4x4x1", "16", "4x", "x", "4X4", "4x-4", "4x4.0", "", "0x0", "4x²")
}


@pytest.mark.parametrize("arguments", INVALID, ids=str)
def test_an_invalid_slice_is_rejected_with_the_valid_choices(arguments):
    with pytest.raises(UserError) as found:
        find_slice(*arguments)
    assert str(found.value) == INVALID[arguments]


def test_only_the_smaller_ones_of_many_choices_are_listed():
    with pytest.raises(UserError, match=r"use one of 1x1x1, .*, 8x8x8 and larger$"):
        find_slice("v4", 64, "3x3x3", 1)


def test_a_missing_compiler_is_reported_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^predicting needs .* libtpu, which is not installed: pip install -e '.\[tpu"):
        topology_devices(Slice("v5e", (2, 2)))


# Agreement with the compiler

COMPILED = {
    Slice("v2", (4, 4)): (4, 4, 1, 2), Slice("v3", (2, 4)): (2, 4, 1, 2), Slice("v3", (1, 1)): (1, 1, 1, 2),
    Slice("v4", (1, 1, 1)): (1, 1, 1, 1), Slice("v4", (2, 2, 4)): (2, 2, 4, 1), Slice("v4", (4, 8, 8)): (4, 8, 8, 1),
    Slice("v5e", (4, 8)): (4, 8, 1, 1), Slice("v5e", (8, 4)): (8, 4, 1, 1), Slice("v5p", (2, 2, 2)): (2, 2, 2, 1),
    Slice("v6e", (16, 16)): (16, 16, 1, 1), Slice("tpu7x", (4, 4, 4)): (4, 4, 4, 2),
    Slice("v5e", (4, 4), 2): (4, 4, 1, 1), Slice("v4", (2, 2, 2), 3): (2, 2, 2, 1),
}  # fmt: skip


@pytest.mark.parametrize("target", COMPILED, ids=str)
def test_the_compiler_has_the_same_slices(target):
    """Same kind and number of devices, whose coordinates fill the shape once per slice."""
    pytest.importorskip("libtpu")
    devices = topology_devices(target)
    assert len(devices) == target.devices
    assert {device.device_kind for device in devices} == {target.generation.kind}
    torus = Torus.of(devices)
    assert torus.grid.shape == (target.slices, *COMPILED[target])
    assert set(torus.grid.flat) == set(devices)
    for number, grid in enumerate(torus.grid):
        assert {getattr(device, "slice_index", 0) for device in grid.flat} == {number}
