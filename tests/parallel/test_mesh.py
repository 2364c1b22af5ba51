"""The arrangement of devices in a mesh: mp fills compact tiles of the torus, gradient rings over dp connect
neighbours, and dp ranks group into slices."""

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
from tests.helpers.fake_tpu_devices import FakeTpuDevice, fake_slice
from tests.helpers.model_fixtures import mesh_config

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
def test_every_tile_arranges_every_device_once(name, tile):
    devices, mp = BOXES[name]
    arranged = Torus.of(devices).arrange(tile, mp)
    assert arranged.shape == (len(devices) // mp, mp)
    assert len(set(arranged.flat)) == len(devices) and set(arranged.flat) == set(devices)


@every_tile
def test_an_mp_group_is_a_box_of_the_shape_of_the_tile_in_row_order(name, tile):
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


def test_only_collective_matmul_orders_mp_as_a_ring():
    devices = fake_slice("v5e", 4, 4)
    in_rows, in_rings = (
        make_mesh(mesh_config(4, 4, tensor_parallel=mode), devices).devices
        for mode in (TensorParallelMode.sequence, TensorParallelMode.collective_matmul)
    )
    places = [[list(row).index(device) for device in ring] for row, ring in zip(in_rows, in_rings, strict=True)]
    assert places == 4 * [[2, 3, 1, 0]]


@every_tile
def test_mp_groups_are_ordered_by_slice_and_lie_in_one_slice(name, tile):
    devices, mp = BOXES[name]
    numbers = [[device.slice_index for device in group] for group in Torus.of(devices).arrange(tile, mp)]
    assert all(len(set(group)) == 1 for group in numbers), "an mp group spans two slices"
    assert [group[0] for group in numbers] == sorted(group[0] for group in numbers)


DP_MESHES = {
    # name: (devices, (dp, mp), slices, ranks of a ring)
    "v5e 4x4": (fake_slice("v5e", 4, 4), (16, 1), 1, 16),
    "v5e 16x16": (fake_slice("v5e", 16, 16), (256, 1), 1, 16),
    "v5e 16x16, mp 4": (fake_slice("v5e", 16, 16), (64, 4), 1, 16),
    "v3 4x4": (fake_slice("v3", 4, 4), (32, 1), 1, 16),
    "v4 2x2x4": (fake_slice("v4", 2, 2, 4), (16, 1), 1, 16),
    "v5e 4x8, 2 slices": (fake_slice("v5e", 4, 8, slices=2), (64, 1), 2, 16),
    "v5p 4x4x4, 2 slices": (fake_slice("v5p", 4, 4, 4, slices=2), (32, 4), 2, 16),
}


def gradient_rings(name: str) -> tuple[list[list], DataParallelGroups, int]:
    """(the devices of every dp rank, the groups of dp ranks, the number of chips along a side of an mp tile)."""
    devices, (dp, mp), slices, ring = DP_MESHES[name]
    config = mesh_config(dp, mp, zero=Zero.fsdp, fsdp_gradients=FsdpGradients.ring, slices=slices)
    groups = DataParallelGroups.of(config)
    assert (groups.count, groups.slices, groups.ring) == (dp, slices, ring)
    made = make_mesh(config, devices).devices
    assert set(made.flat) == set(devices) and len(set(made.flat)) == dp * mp
    return made.tolist(), groups, 1 if mp == 1 else 2


@pytest.mark.parametrize("name", DP_MESHES)
def test_gradient_rings_connect_neighbours(name):
    """Every hop crosses one link, or with mp tiles of two chips per side two; and a ring ends where it started."""
    ranks, groups, links = gradient_rings(name)
    sides = Torus.of(DP_MESHES[name][0]).sides
    wraps = Torus.of(DP_MESHES[name][0]).wraps
    for here, there in groups.ring_permutation(1):
        for a, b in zip(ranks[here], ranks[there], strict=True):
            apart = [abs(x - y) for x, y in zip(a.coords, b.coords, strict=True)]
            assert a.slice_index == b.slice_index
            assert sum(min(d, n - d) if w else d for d, n, w in zip(apart, sides, wraps, strict=False)) <= links
    successor = {here: there for here, there in groups.ring_permutation(1)}
    assert groups.ring_permutation(-1) == sorted((there, here) for here, there in successor.items())
    ring = [0]
    while (following := successor[ring[-1]]) != 0:
        ring.append(following)
    assert len(ring) == groups.ring


@pytest.mark.parametrize("name", DP_MESHES)
def test_dp_groups_lie_in_one_slice_or_contain_one_rank_of_every_slice(name):
    ranks, groups, _ = gradient_rings(name)
    slices = [devices[0].slice_index for devices in ranks]
    intra_slice = groups.intra_slice or [list(range(groups.count))]
    assert all(len({slices[i] for i in group}) == 1 for group in intra_slice)
    assert sorted(itertools.chain(*intra_slice)) == list(range(groups.count))
    if groups.slices > 1:
        assert all(sorted(slices[i] for i in group) == list(range(groups.slices)) for group in groups.inter_slice)
    successor = dict(groups.ring_permutation(1))
    for group in groups.inter_ring or []:
        assert len({slices[i] for i in group}) == 1 and not {successor[i] for i in group} & set(group)


def test_gradient_rings_connect_neighbours_in_the_program_of_one_slice():
    """By the coordinates that ahead-of-time compilation passes to the compiler."""
    config = mesh_config(64, 1, zero=Zero.fsdp, fsdp_gradients=FsdpGradients.ring, slices=2)
    one_slice = coordinates(make_mesh(config, fake_slice("v5e", 4, 8, slices=2)))
    assert sorted(one_slice) == sorted([*device.coords, 0] for device in fake_slice("v5e", 4, 8))
    ring = [one_slice[2 * r] for r in range(16)]  # the other ranks belong to the other ring
    assert all(sum(abs(x - y) for x, y in zip(a, b, strict=True)) == 1 for a, b in itertools.pairwise(ring))


def test_a_gradient_ring_needs_a_divisor():
    config = mesh_config(17, 1, zero=Zero.fsdp, fsdp_gradients=FsdpGradients.ring)
    message = error_message(config, fake_slice("v5e", 4, 4)[:1] * 17)
    assert "no number from 2 to 16 divides mesh.dp / mesh.slices = 17" in message


def test_slices_must_be_those_of_the_devices():
    message = error_message(mesh_config(16, 1, slices=1), fake_slice("v5e", 2, 4, slices=2))
    assert message == "mesh.slices=1, but these devices form 2 slices; set mesh.slices=2"
    message = error_message(mesh_config(16, 1, slices=2), fake_slice("v5e", 4, 4))
    assert message == "mesh.slices=2, but these devices form 1 slices; set mesh.slices=1"
    made = make_mesh(mesh_config(4, 2, slices=2))
    assert [[device.id for device in rank] for rank in made.devices] == [[0, 1], [4, 5], [2, 3], [6, 7]]


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


def average_hops(torus: Torus, tile: tuple[int, ...]) -> float:
    """The number of links between two devices of a tile, averaged over all pairs."""
    places = list(itertools.product(*map(range, tile[:3])))

    def apart(a, b):
        sides = zip(a, b, torus.sides, torus.wraps, strict=False)
        return sum(min(abs(i - j), side - abs(i - j)) if wraps else abs(i - j) for i, j, side, wraps in sides)

    return np.mean([apart(a, b) for a in places for b in places])


@every_tile
def test_hops_are_the_average_over_all_pairs(name, tile):
    torus = Torus.of(BOXES[name][0])
    assert torus.mean_hops(tile) == pytest.approx(average_hops(torus, tile))


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
    "v5e 16x16": (
        fake_slice("v5e", 16, 16),
        16,
        (8, 2, 1, 1),
    ),  # per link 2/8, 2/2; 4 x 4: twice 2/4; 16 x 1: 2/1
    "v5e 8x8": (fake_slice("v5e", 8, 8), 16, (8, 2, 1, 1)),  # without wrap-around links as good as 4 x 4
    "v5e 4x4": (fake_slice("v5e", 4, 4), 16, (4, 4, 1, 1)),
    "v5p 4x4x4": (fake_slice("v5p", 4, 4, 4), 16, (4, 4, 1, 1)),  # as good as 4 x 2 x 2
    "v4 4x4x8": (fake_slice("v4", 4, 4, 8), 16, (2, 1, 8, 1)),  # 2/2 and 2/1; 4 x 4 x 1 has only 2/1
    "v3 8x16": (fake_slice("v3", 8, 16), 16, (4, 2, 1, 2)),
    "v3 2x2": (
        fake_slice("v3", 2, 2),
        4,
        (2, 1, 1, 2),
    ),  # in 2 x 2 the rings of a chip's cores share links
    "v5e 2x2": (fake_slice("v5e", 2, 2), 2, (2, 1, 1, 1)),
}


@pytest.mark.parametrize("name", RINGS)
def test_the_tile_of_a_gradient_ring(name):
    devices, size, tile = RINGS[name]
    assert Torus.of(devices).best_ring_tile(size) == tile


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


# Errors


def error_message(config: MeshConfig, devices: list) -> str:
    with pytest.raises(UserError) as found:
        make_mesh(config, devices)
    assert len(str(found.value).splitlines()) <= 2
    return str(found.value)


def test_an_invalid_tile_is_refused_with_the_valid_ones():
    message = error_message(mesh_config(4, 4, tile=[1, 1, 4, 1]), fake_slice("v5e", 4, 4))
    assert message == (
        "mesh.tile=[1, 1, 4, 1] does not divide a slice of 4 x 4 x 1 chips with 1 devices each into boxes of mp=4 "
        "devices; "
        "use one of 1,4,1,1; 2,2,1,1; 4,1,1,1"
    )
    for tile in ([4, 4, 1, 1], [2, 2], [3, 1, 1, 1], [-2, -2, 1, 1]):
        message = error_message(mesh_config(4, 4, tile=tile), fake_slice("v5e", 4, 4))
        assert "use one of 1,4,1,1; 2,2,1,1; 4,1,1,1" in message


@pytest.mark.parametrize("tile", [None, [3, 1, 1, 1]])
def test_an_mp_without_a_tile_is_refused_with_the_valid_ones(tile):
    message = error_message(mesh_config(16, 3, tile=tile, slices=3), fake_slice("v5e", 4, 4, slices=3))
    assert message == (
        "mp=3: a slice of 4 x 4 x 1 chips with 1 devices each cannot be divided into boxes of 3 devices; "
        "use mp in {1, 2, 4, 8, 16}"
    )


def test_a_tile_needs_a_torus():
    message = error_message(mesh_config(2, 4, tile=[2, 2, 1, 1]), jax.devices())
    assert message == "mesh.tile=[2, 2, 1, 1]: cpu devices are not on a torus; leave it null"
    incomplete = fake_slice("v5e", 2, 2)[:3]
    assert Torus.of(incomplete) is None
    assert "are not on a torus" in error_message(mesh_config(1, 3, tile=[3, 1, 1, 1]), incomplete)


@pytest.mark.parametrize("devices", [jax.devices(), fake_slice("v3", 2, 2)], ids=["cpu", "v3"])
def test_dp_times_mp_must_be_the_number_of_devices(devices):
    message = error_message(mesh_config(2, 2), devices)
    assert message == (
        f"mesh dp=2 x mp=2 needs 4 devices, this machine has 8 ({devices[0].device_kind}); "
        "choose mesh.dp and mesh.mp with dp x mp = 8"
    )


# Devices that are not on a torus


@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (4, 2), (8, 1)], ids=str)
def test_cpu_devices_are_arranged_in_row_order(shape):
    made = make_mesh(mesh_config(*shape))
    assert dict(made.shape) == {DP: shape[0], MP: shape[1]} and made.axis_names == (DP, MP)
    assert list(made.devices.flat) == jax.devices()
    assert Torus.of(jax.devices()) is None
