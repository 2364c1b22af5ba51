"""The torus of a slice: its tiles, the order of devices in a tile, and which tiles are best."""

import itertools
import math

import numpy as np
import pytest

from shmap_tp.hardware.torus import Torus
from tests.helpers.fake_tpu_devices import FakeTpuDevice, fake_slice

BOXES = {
    "v2 4x4": (fake_slice("v2", 4, 4), 4),
    "v3 4x8": (fake_slice("v3", 4, 8), 8),
    "v4 2x4x4": (fake_slice("v4", 2, 4, 4), 8),
    "v5e 4x4, 3 slices": (fake_slice("v5e", 4, 4, slices=3), 4),
    "v5p 4x4x4, 2 slices": (fake_slice("v5p", 4, 4, 4, slices=2), 16),
    "v6e 8x8": (fake_slice("v6e", 8, 8), 1),
    "tpu7x 2x2x2": (fake_slice("tpu7x", 2, 2, 2), 16),
}
every_tile = pytest.mark.parametrize(
    ("name", "tile"), [(name, tile) for name, (devices, mp) in BOXES.items() for tile in Torus.of(devices).tiles(mp)]
)


@every_tile
def test_every_tile_arranges_every_device_once_in_boxes_of_its_shape_in_one_slice_each(name, tile):
    """An mp group is a box in row order; groups are ordered by slice.  Hops are the average over all pairs."""
    devices, mp = BOXES[name]
    torus = Torus.of(devices)
    arranged, inside = torus.arrange(tile, mp), list(itertools.product(*map(range, tile)))
    assert arranged.shape == (len(devices) // mp, mp)
    assert len(set(arranged.flat)) == len(devices) and set(arranged.flat) == set(devices)
    for group in arranged:
        corner = np.array(group[0].place)
        assert [tuple(np.array(device.place) - corner) for device in group] == inside
        assert not (corner % tile).any()
        assert len({device.slice_index for device in group}) == 1, "an mp group spans two slices"
    assert [group[0].slice_index for group in arranged] == sorted(group[0].slice_index for group in arranged)
    assert torus.mean_hops(tile) == pytest.approx(average_hops(torus, tile))


def average_hops(torus: Torus, tile: tuple[int, ...]) -> float:
    """The number of links between two devices of a tile, averaged over all pairs."""
    places = list(itertools.product(*map(range, tile[:3])))

    def apart(a, b):
        sides = zip(a, b, torus.sides, torus.wraps, strict=False)
        return sum(min(abs(i - j), side - abs(i - j)) if wraps else abs(i - j) for i, j, side, wraps in sides)

    return np.mean([apart(a, b) for a in places for b in places])


@pytest.mark.parametrize(
    ("name", "tile", "links"),
    [
        ("v5e 4x4, 3 slices", (2, 2, 1, 1), 1),
        ("v5e 4x4, 3 slices", (4, 1, 1, 1), 2),  # a line: back from its end in steps of two
        ("v6e 8x8", (4, 2, 1, 1), 1),
        ("v3 4x8", (2, 4, 1, 2), 1),
        ("v4 2x4x4", (2, 2, 2, 1), 1),
        ("v5p 4x4x4, 2 slices", (1, 4, 1, 1), 1),  # a full side, which wraps around
        ("v5p 4x4x4, 2 slices", (4, 4, 2, 1), 1),
    ],
)
def test_an_mp_ring_is_a_closed_walk_over_short_links(name, tile, links):
    torus = Torus.of(BOXES[name][0])
    places = list(itertools.product(*map(range, tile)))
    walk = [places[i][:3] for i in torus.ring_order(tile)]
    assert sorted(torus.ring_order(tile)) == list(range(math.prod(tile)))
    wraps_around = [wraps and size == side for wraps, size, side in zip(torus.wraps, tile, torus.sides, strict=False)]
    for here, there in itertools.pairwise([*walk, walk[0]]):
        apart = [abs(a - b) for a, b in zip(here, there, strict=True)]
        assert sum(min(d, n - d) if ring else d for d, n, ring in zip(apart, tile, wraps_around, strict=False)) <= links


@pytest.mark.parametrize("name", BOXES)
def test_tiles_are_all_boxes_that_divide_the_slice(name):
    devices, mp = BOXES[name]
    torus = Torus.of(devices)
    fit = [
        tile
        for tile in itertools.product(*[range(1, side + 1) for side in torus.sides])
        if math.prod(tile) == mp and not any(side % size for side, size in zip(torus.sides, tile, strict=True))
    ]
    assert torus.tiles(mp) == fit


def test_coordinates_may_start_anywhere():
    """As on a part of a larger slice."""
    moved = [FakeTpuDevice(d.device_kind, tuple(c + 4 for c in d.coords), 0, 7) for d in fake_slice("v5e", 2, 2)]
    arranged = Torus.of(moved).arrange((2, 2, 1, 1), 4)
    assert [device.coords for device in arranged[0]] == [(4, 4, 4), (4, 5, 4), (5, 4, 4), (5, 5, 4)]


# The choice of a tile


CLOSEST = {
    # T5X measured the same order on the same slice: 4x2x2 is faster than 2x4x2 and 2x2x4 (published figures)
    "v4 4x8x8": (fake_slice("v4", 4, 8, 8), 16, (4, 2, 2, 1), 2.0),  # average hops: 1 in a ring of 4, 1/2 in a pair
    # average hops: 4 in a ring of 16, 2 x 1.25 in a square, although its sides do not wrap
    "v5e 16x16": (fake_slice("v5e", 16, 16), 16, (4, 4, 1, 1), 2.5),
    "v5e 8x16": (fake_slice("v5e", 8, 16), 8, (4, 2, 1, 1), 1.75),
    "v5e 4x4": (fake_slice("v5e", 4, 4), 2, (2, 1, 1, 1), 0.5),  # of equally good tiles the one along x
    # both cores of 4 chips: 1 hop; 8 chips would need at least 1.75
    "v3 4x4": (fake_slice("v3", 4, 4), 8, (2, 2, 1, 2), 1.0),
    "v3 4x4, 2": (fake_slice("v3", 4, 4), 2, (1, 1, 1, 2), 0.0),
    "tpu7x 4x4x4": (fake_slice("tpu7x", 4, 4, 4), 16, (4, 2, 1, 2), 1.5),  # as good as 2x2x2
}


@pytest.mark.parametrize("name", CLOSEST)
def test_the_default_tile_has_the_fewest_hops(name):
    devices, mp, tile, hops = CLOSEST[name]
    torus = Torus.of(devices)
    assert torus.most_compact_tile(mp) == tile
    assert torus.mean_hops(tile) == hops == min(torus.mean_hops(other) for other in torus.tiles(mp))


def test_a_ring_of_16_needs_more_hops_than_a_square_of_4():
    torus = Torus.of(fake_slice("v5e", 16, 16))
    assert torus.mean_hops((16, 1, 1, 1)) == torus.mean_hops((1, 16, 1, 1)) == 4
    assert torus.mean_hops((8, 2, 1, 1)) == 21 / 8 + 1 / 2 > torus.mean_hops((4, 4, 1, 1))


RINGS = {
    ("v5e", 16, 16): (16, (8, 2, 1, 1)),  # per link 2/8 and 2/2; in 4 x 4 twice 2/4, in 16 x 1 2/1
    ("v5e", 8, 8): (16, (8, 2, 1, 1)),  # without wrap-around links as good as 4 x 4
    ("v5e", 4, 4): (16, (4, 4, 1, 1)),
    ("v5p", 4, 4, 4): (16, (4, 4, 1, 1)),  # as good as 4 x 2 x 2
    ("v4", 4, 4, 8): (16, (2, 1, 8, 1)),  # 2/2 and 2/1; 4 x 4 x 1 has only 2/1
    ("v3", 8, 16): (16, (4, 2, 1, 2)),
    ("v3", 2, 2): (4, (2, 1, 1, 2)),  # full chips: in 2 x 2 the rings of the two cores would share links
    ("v5e", 2, 2): (2, (2, 1, 1, 1)),
}


@pytest.mark.parametrize("slice_", RINGS, ids=str)
def test_the_tile_of_a_gradient_ring(slice_):
    size, tile = RINGS[slice_]
    assert Torus.of(fake_slice(*slice_)).best_ring_tile(size) == tile


def test_the_tile_of_a_gradient_ring_of_mp_tiles():
    """8 x 2 pairs along x are 16 x 2 chips, which leave 2/2 of a link along y; 2 x 8 would leave 2/8 and 2/4."""
    assert Torus.of(fake_slice("v5e", 16, 16)).group((2, 1, 1, 1), 2).best_ring_tile(16) == (8, 2, 1, 1)


WRAPS = {
    ("v2", 8, 8): (False, False, False),
    ("v2", 8, 16): (False, True, False),
    ("v3", 16, 32): (False, True, False),
    ("v4", 2, 4, 8): (False, True, True),
    ("v4", 4, 4, 12): (True, True, True),
    ("v5e", 8, 16): (False, True, False),
    ("v5e", 4, 4): (False, False, False),
    ("v5p", 2, 2, 4): (False, False, True),
    ("v6e", 16, 16): (True, True, False),
    ("tpu7x", 2, 4, 4): (False, True, True),
}


@pytest.mark.parametrize("slice_", WRAPS, ids=str)
def test_which_sides_of_a_slice_wrap_around(slice_):
    """In 2-D tori those of full length; in 3-D tori multiples of 4, where optical switches join cubes."""
    assert Torus.of(fake_slice(*slice_)).wraps == WRAPS[slice_]
