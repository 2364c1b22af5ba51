"""Devices to a mesh: each stands in it once, mp on a compact tile of the torus; dp counts around rings of
neighbours, and each slice has one part in so many."""

import itertools
import math

import jax
import numpy as np
import pytest

from shmap_tp.config.schema import FsdpGradients, MeshConfig, TensorParallelMode, Zero
from shmap_tp.errors import UserError
from shmap_tp.hardware.torus import Torus
from shmap_tp.parallel.mesh import DP, MP, DataParallelGroups, make_mesh
from shmap_tp.plan.aot_compile import coordinates
from tests.helpers.fake_tpu_devices import Stand, box
from tests.helpers.model_fixtures import mesh_config

BOXES = {
    "v2 4x4": (box("v2", 4, 4), 4),
    "v3 4x8": (box("v3", 4, 8), 8),
    "v4 2x4x4": (box("v4", 2, 4, 4), 8),
    "v5e 4x4, 3 slices": (box("v5e", 4, 4, slices=3), 4),
    "v5p 4x4x4, 2 slices": (box("v5p", 4, 4, 4, slices=2), 16),
    "v6e 8x8": (box("v6e", 8, 8), 1),
    "tpu7x 2x2x2": (box("tpu7x", 2, 2, 2), 16),
}
every_tile = pytest.mark.parametrize(
    ("name", "tile"), [(name, tile) for name, (devices, mp) in BOXES.items() for tile in Torus.of(devices).tiles(mp)]
)


@every_tile
def test_every_tile_lays_out_every_device_once(name, tile):
    devices, mp = BOXES[name]
    laid = Torus.of(devices).arrange(tile, mp)
    assert laid.shape == (len(devices) // mp, mp)
    assert len(set(laid.flat)) == len(devices) and set(laid.flat) == set(devices)


@every_tile
def test_mp_is_the_box_that_the_tile_says_row_by_row(name, tile):
    devices, mp = BOXES[name]
    inside = list(itertools.product(*map(range, tile)))
    for group in Torus.of(devices).arrange(tile, mp):
        corner = np.array(group[0].place)
        assert [tuple(np.array(device.place) - corner) for device in group] == inside
        assert not (corner % tile).any()


@pytest.mark.parametrize(
    ("name", "tile", "links"),
    [
        ("v5e 4x4, 3 slices", (2, 2, 1, 1), 1),
        ("v5e 4x4, 3 slices", (4, 1, 1, 1), 2),  # a line, from end to end
        ("v6e 8x8", (4, 2, 1, 1), 1),
        ("v3 4x8", (2, 4, 1, 2), 1),
        ("v4 2x4x4", (2, 2, 2, 1), 1),
        ("v5p 4x4x4, 2 slices", (1, 4, 1, 1), 1),  # a whole side, which closes
        ("v5p 4x4x4, 2 slices", (4, 4, 2, 1), 1),
    ],
)
def test_a_ring_goes_round_its_tile_link_by_link(name, tile, links):
    torus = Torus.of(BOXES[name][0])
    places = list(itertools.product(*map(range, tile)))
    trip = [places[i][:3] for i in torus.ring_order(tile)]
    assert sorted(torus.ring_order(tile)) == list(range(math.prod(tile)))
    closes = [wraps and size == side for wraps, size, side in zip(torus.wraps, tile, torus.sides, strict=False)]
    for here, there in itertools.pairwise([*trip, trip[0]]):
        apart = [abs(a - b) for a, b in zip(here, there, strict=True)]
        assert sum(min(d, n - d) if ring else d for d, n, ring in zip(apart, tile, closes, strict=False)) <= links


def test_only_the_ring_wire_takes_that_order():
    devices = box("v5e", 4, 4)
    one, ring = (
        make_mesh(mesh_config(4, 4, wire=wire), devices).devices
        for wire in (TensorParallelMode.sequence, TensorParallelMode.collective_matmul)
    )
    assert [[list(group).index(device) for device in there] for group, there in zip(one, ring, strict=True)] == (
        4 * [[2, 3, 1, 0]]
    )


@every_tile
def test_tiles_are_laid_out_slice_by_slice(name, tile):
    devices, mp = BOXES[name]
    numbers = [[device.slice_index for device in group] for group in Torus.of(devices).arrange(tile, mp)]
    assert all(len(set(group)) == 1 for group in numbers), "an mp group on two slices"
    assert [group[0] for group in numbers] == sorted(group[0] for group in numbers)


PARTS = {
    # name: (devices, (dp, mp), slices, devices of a ring)
    "v5e 4x4": (box("v5e", 4, 4), (16, 1), 1, 16),
    "v5e 16x16": (box("v5e", 16, 16), (256, 1), 1, 16),
    "v5e 16x16, mp 4": (box("v5e", 16, 16), (64, 4), 1, 16),
    "v3 4x4": (box("v3", 4, 4), (32, 1), 1, 16),
    "v4 2x2x4": (box("v4", 2, 2, 4), (16, 1), 1, 16),
    "v5e 4x8, 2 slices": (box("v5e", 4, 8, slices=2), (64, 1), 2, 16),
    "v5p 4x4x4, 2 slices": (box("v5p", 4, 4, 4, slices=2), (32, 4), 2, 16),
}


def counted(name: str) -> tuple[list[list], DataParallelGroups, int]:
    """(the devices of each part of dp, how the parts lie, the chips along a side of an mp tile)."""
    devices, (dp, mp), slices, ring = PARTS[name]
    config = mesh_config(dp, mp, zero=Zero.fsdp, fsdp_gradients=FsdpGradients.ring, slices=slices)
    parts = DataParallelGroups.of(config)
    assert (parts.count, parts.slices, parts.ring) == (dp, slices, ring)
    made = make_mesh(config, devices).devices
    assert set(made.flat) == set(devices) and len(set(made.flat)) == dp * mp
    return made.tolist(), parts, 1 if mp == 1 else 2


@pytest.mark.parametrize("name", PARTS)
def test_a_ring_of_gradients_is_one_of_neighbours(name):
    """All pass on along one link, or with tiles of two chips a side along two, and around comes back where it began."""
    laid, parts, links = counted(name)
    sides = Torus.of(PARTS[name][0]).sides
    wraps = Torus.of(PARTS[name][0]).wraps
    for here, there in parts.passed(1):
        for a, b in zip(laid[here], laid[there], strict=True):
            apart = [abs(x - y) for x, y in zip(a.coords, b.coords, strict=True)]
            assert a.slice_index == b.slice_index
            assert sum(min(d, n - d) if w else d for d, n, w in zip(apart, sides, wraps, strict=False)) <= links
    at = {here: there for here, there in parts.passed(1)}
    assert parts.passed(-1) == sorted((there, here) for here, there in at.items())
    steps = [0]
    while (following := at[steps[-1]]) != 0:
        steps.append(following)
    assert len(steps) == parts.ring


@pytest.mark.parametrize("name", PARTS)
def test_parts_meet_within_a_slice_and_between_slices(name):
    laid, parts, _ = counted(name)
    slices = [part[0].slice_index for part in laid]
    within = parts.inside or [list(range(parts.count))]
    assert all(len({slices[i] for i in group}) == 1 for group in within)
    assert sorted(itertools.chain(*within)) == list(range(parts.count))
    if parts.slices > 1:
        assert all(sorted(slices[i] for i in group) == list(range(parts.slices)) for group in parts.between)
    around = dict(parts.passed(1))
    for group in parts.beside or []:
        assert len({slices[i] for i in group}) == 1 and not {around[i] for i in group} & set(group)


def test_the_module_of_a_slice_numbers_its_devices_as_the_mesh_does():
    """Passing on around a ring is between neighbours by their numbers there, too."""
    config = mesh_config(64, 1, zero=Zero.fsdp, fsdp_gradients=FsdpGradients.ring, slices=2)
    of_one = coordinates(make_mesh(config, box("v5e", 4, 8, slices=2)))
    assert sorted(of_one) == sorted([*device.coords, 0] for device in box("v5e", 4, 8))
    around = [of_one[2 * r] for r in range(16)]  # every second one is of the other ring
    assert all(sum(abs(x - y) for x, y in zip(a, b, strict=True)) == 1 for a, b in itertools.pairwise(around))


def test_a_ring_needs_a_divisor():
    said = refused(mesh_config(17, 1, zero=Zero.fsdp, fsdp_gradients=FsdpGradients.ring), box("v5e", 4, 4)[:1] * 17)
    assert "no number from 2 to 16 divides mesh.dp / mesh.slices = 17" in said


def test_slices_are_those_of_the_devices():
    said = refused(mesh_config(16, 1, slices=1), box("v5e", 2, 4, slices=2))
    assert said == "mesh.slices=1, but these devices form 2 slices; set mesh.slices=2"
    assert "in slices: 1;" in refused(mesh_config(16, 1, slices=2), box("v5e", 4, 4))
    made = make_mesh(mesh_config(4, 2, slices=2))
    assert [[d.id for d in part] for part in made.devices] == [[0, 1], [4, 5], [2, 3], [6, 7]]


@pytest.mark.parametrize("name", BOXES)
def test_tiles_are_all_boxes_that_fit(name):
    devices, mp = BOXES[name]
    torus = Torus.of(devices)
    fit = [
        tile
        for tile in itertools.product(*[range(1, side + 1) for side in torus.sides])
        if math.prod(tile) == mp and not any(side % size for side, size in zip(torus.sides, tile, strict=True))
    ]
    assert torus.tiles(mp) == fit


def test_coordinates_may_begin_anywhere():
    """Part of a larger slice: a process that was given a corner of it."""
    moved = [Stand(d.device_kind, tuple(c + 4 for c in d.coords), 0, 7) for d in box("v5e", 2, 2)]
    laid = Torus.of(moved).arrange((2, 2, 1, 1), 4)
    assert [device.coords for device in laid[0]] == [(4, 4, 4), (4, 5, 4), (5, 4, 4), (5, 5, 4)]


# Which tile


def average(torus: Torus, tile: tuple[int, ...]) -> float:
    """Links between two devices of a tile, over all pairs, walked one after the other."""
    places = list(itertools.product(*map(range, tile[:3])))

    def apart(a, b):
        sides = zip(a, b, torus.sides, torus.wraps, strict=False)
        return sum(min(abs(i - j), side - abs(i - j)) if wraps else abs(i - j) for i, j, side, wraps in sides)

    return np.mean([apart(a, b) for a in places for b in places])


@every_tile
def test_hops_are_those_of_all_pairs(name, tile):
    torus = Torus.of(BOXES[name][0])
    assert torus.mean_hops(tile) == pytest.approx(average(torus, tile))


CLOSEST = {
    # T5X measured the same order of tiles on the same slice: 4x2x2 before 2x4x2 and 2x2x4 (published figures)
    "v4 4x8x8": (box("v4", 4, 8, 8), 16, (4, 2, 2, 1), 2.0),  # a ring of 4 is 1 on average, a pair 1/2
    # a ring of 16 is 4 links wide on average, a square 2 x 1.25, though nothing of it wraps
    "v5e 16x16": (box("v5e", 16, 16), 16, (4, 4, 1, 1), 2.5),
    "v5e 8x16": (box("v5e", 8, 16), 8, (4, 2, 1, 1), 1.75),
    "v5e 4x4": (box("v5e", 4, 4), 2, (2, 1, 1, 1), 0.5),  # of equals the one along x
    # both cores of 4 chips: 1 link; 8 chips would be 1.75 at best
    "v3 4x4": (box("v3", 4, 4), 8, (2, 2, 1, 2), 1.0),
    "v3 4x4, 2": (box("v3", 4, 4), 2, (1, 1, 1, 2), 0.0),
    "tpu7x 4x4x4": (box("tpu7x", 4, 4, 4), 16, (4, 2, 1, 2), 1.5),  # as near as 2x2x2
}


@pytest.mark.parametrize("name", CLOSEST)
def test_the_closest_tile(name):
    devices, mp, tile, hops = CLOSEST[name]
    torus = Torus.of(devices)
    assert torus.most_compact_tile(mp) == tile
    assert torus.mean_hops(tile) == hops == min(torus.mean_hops(other) for other in torus.tiles(mp))


def test_a_ring_of_16_is_further_than_a_square_of_4():
    torus = Torus.of(box("v5e", 16, 16))
    assert torus.mean_hops((16, 1, 1, 1)) == torus.mean_hops((1, 16, 1, 1)) == 4
    assert torus.mean_hops((8, 2, 1, 1)) == 21 / 8 + 1 / 2 > torus.mean_hops((4, 4, 1, 1))


RINGS = {
    "v5e 16x16": (box("v5e", 16, 16), 16, (8, 2, 1, 1)),  # 2/8 and 2/2 of a link; of 4 x 4 twice 2/4, of 16 x 1 2/1
    "v5e 8x8": (box("v5e", 8, 8), 16, (8, 2, 1, 1)),  # nothing wraps: as good as 4 x 4
    "v5e 4x4": (box("v5e", 4, 4), 16, (4, 4, 1, 1)),
    "v5p 4x4x4": (box("v5p", 4, 4, 4), 16, (4, 4, 1, 1)),  # as good as 4 x 2 x 2
    "v4 4x4x8": (box("v4", 4, 4, 8), 16, (2, 1, 8, 1)),  # 2/2 and 2/1; of 4 x 4 x 1 but 2/1
    "v3 8x16": (box("v3", 8, 16), 16, (4, 2, 1, 2)),
    "v3 2x2": (box("v3", 2, 2), 4, (2, 1, 1, 2)),  # whole chips: of 2 x 2 the cores' rings would share links
    "v5e 2x2": (box("v5e", 2, 2), 2, (2, 1, 1, 1)),
}


@pytest.mark.parametrize("name", RINGS)
def test_the_tile_of_a_ring(name):
    devices, size, tile = RINGS[name]
    assert Torus.of(devices).best_ring_tile(size) == tile


def test_the_tile_of_a_ring_of_tiles():
    """Of pairs along x 8 x 2 are 16 x 2 chips: they leave 2/2 of a link along y; 2 x 8 would leave 2/8 and 2/4."""
    assert Torus.of(box("v5e", 16, 16)).group((2, 1, 1, 1), 2).best_ring_tile(16) == (8, 2, 1, 1)


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
def test_which_sides_close_to_a_ring(slice_):
    """2-D tori on a full side, 3-D ones where optical switches join cubes of 4."""
    assert Torus.of(box(*slice_)).wraps == WRAPS[slice_]


# What cannot be


def refused(config: MeshConfig, devices: list) -> str:
    with pytest.raises(UserError) as found:
        make_mesh(config, devices)
    assert len(str(found.value).splitlines()) <= 2
    return str(found.value)


def test_a_bad_tile_names_the_good_ones():
    said = refused(mesh_config(4, 4, tile=[1, 1, 4, 1]), box("v5e", 4, 4))
    assert said == (
        "mesh.tile=[1, 1, 4, 1] does not divide a slice of 4 x 4 x 1 chips with 1 devices each into boxes of mp=4 "
        "devices; "
        "use one of 1,4,1,1; 2,2,1,1; 4,1,1,1"
    )
    for tile in ([4, 4, 1, 1], [2, 2], [3, 1, 1, 1], [-2, -2, 1, 1]):
        assert "use one of 1,4,1,1; 2,2,1,1; 4,1,1,1" in refused(mesh_config(4, 4, tile=tile), box("v5e", 4, 4))


@pytest.mark.parametrize("tile", [None, [3, 1, 1, 1]])
def test_an_mp_that_no_tile_makes_is_named(tile):
    said = refused(mesh_config(16, 3, tile=tile, slices=3), box("v5e", 4, 4, slices=3))
    assert said == (
        "mp=3: a slice of 4 x 4 x 1 chips with 1 devices each cannot be divided into boxes of 3 devices; "
        "use mp in {1, 2, 4, 8, 16}"
    )


def test_a_tile_needs_a_torus():
    said = refused(mesh_config(2, 4, tile=[2, 2, 1, 1]), jax.devices())
    assert said == "mesh.tile=[2, 2, 1, 1]: cpu devices are not on a torus; leave it null"
    hole = box("v5e", 2, 2)[:3]
    assert Torus.of(hole) is None
    assert "are not on a torus" in refused(mesh_config(1, 3, tile=[3, 1, 1, 1]), hole)


@pytest.mark.parametrize("devices", [jax.devices(), box("v3", 2, 2)], ids=["cpu", "v3"])
def test_dp_times_mp_is_the_number_of_devices(devices):
    said = refused(mesh_config(2, 2), devices)
    assert said == (
        f"mesh dp=2 x mp=2 needs 4 devices, this machine has 8 ({devices[0].device_kind}); "
        "choose mesh.dp and mesh.mp with dp x mp = 8"
    )


# Where there is no torus


@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (4, 2), (8, 1)], ids=str)
def test_cpu_devices_stand_row_by_row(shape):
    made = make_mesh(mesh_config(*shape))
    assert dict(made.shape) == {DP: shape[0], MP: shape[1]} and made.axis_names == (DP, MP)
    assert list(made.devices.flat) == jax.devices()
    assert Torus.of(jax.devices()) is None
