"""The arrangement of devices in a mesh: gradient rings over dp connect neighbours, and dp ranks group into slices.

The tiles of the torus that mp fills are tested in tests/hardware/test_torus.py.
"""

import itertools

import jax
import pytest

from shmap_tp.config.choices import FsdpGradients, TensorParallelMode, Zero
from shmap_tp.errors import UserError
from shmap_tp.hardware.torus import Torus
from shmap_tp.parallel import mesh
from shmap_tp.parallel.mesh import DP, DP_RING, DP_SLICE, MP, Role, axis_sizes, make_mesh, ring_permutation
from shmap_tp.plan.targets import coordinates
from tests.helpers.fake_tpu_devices import fake_slice
from tests.helpers.model_fixtures import mesh_config

RING = {"zero": Zero.fsdp, "fsdp_gradients": FsdpGradients.ring}


def test_only_collective_matmul_orders_mp_as_a_ring():
    devices = fake_slice("v5e", 4, 4)
    in_rows, in_rings = (
        make_mesh(mesh_config(4, 4, tensor_parallel=mode), devices).devices
        for mode in (TensorParallelMode.sequence, TensorParallelMode.collective_matmul)
    )
    places = [[list(row).index(device) for device in ring] for row, ring in zip(in_rows, in_rings, strict=True)]
    assert places == 4 * [[2, 3, 1, 0]]


@pytest.mark.parametrize(
    ("devices", "dp_mp", "slices", "ring"),
    [
        (fake_slice("v5e", 4, 4), (16, 1), 1, 16),
        (fake_slice("v5e", 16, 16), (64, 4), 1, 16),
        (fake_slice("v3", 4, 4), (32, 1), 1, 16),
        (fake_slice("v4", 2, 2, 4), (16, 1), 1, 16),
        (fake_slice("v5e", 4, 8, slices=2), (64, 1), 2, 16),
        (fake_slice("v5p", 4, 4, 4, slices=2), (32, 4), 2, 16),
    ],
    ids=["v5e 4x4", "v5e 16x16, mp 4", "v3 4x4", "v4 2x2x4", "v5e 4x8, 2 slices", "v5p 4x4x4, 2 slices"],
)
def test_gradient_rings_connect_neighbours_and_only_the_axis_of_slices_leaves_a_slice(devices, dp_mp, slices, ring):
    """Every hop crosses one link, or with mp tiles of two chips per side two; and a ring ends where it started."""
    (dp, mp), torus = dp_mp, Torus.of(devices)
    config = mesh_config(dp, mp, **RING, slices=slices)
    sizes, made = axis_sizes(config), make_mesh(config, devices)
    shape = tuple(sizes.get(axis, 1) for axis in (DP, DP_RING, DP_SLICE, MP))
    assert shape == (ring, dp // slices // ring, slices, mp)
    assert dict(made.shape) == sizes and 1 not in {sizes.get(DP_RING), sizes.get(DP_SLICE)}
    assert set(made.devices.flat) == set(devices) and made.devices.size == dp * mp
    placed, links = made.devices.reshape(shape), 1 if mp == 1 else 2
    for number in range(slices):
        assert {device.slice_index for device in placed[:, :, number].flat} == {number}
    successor = dict(ring_permutation(ring, 1))
    for here, there in successor.items():
        for a, b in zip(placed[here].flat, placed[there].flat, strict=True):
            apart = [abs(x - y) for x, y in zip(a.coords, b.coords, strict=True)]
            hops = zip(apart, torus.sides, torus.wraps, strict=False)
            assert sum(min(d, n - d) if wraps else d for d, n, wraps in hops) <= links
    assert ring_permutation(ring, -1) == sorted((there, here) for here, there in successor.items())
    visited = [0]
    while (following := successor[visited[-1]]) != 0:
        visited.append(following)
    assert len(visited) == ring


def test_axes_are_found_by_their_roles():
    sizes = axis_sizes(mesh_config(64, 2, **RING, slices=2))
    assert mesh.token_axes(sizes) == mesh.batch_axes(sizes) == (DP, DP_RING, DP_SLICE)
    assert mesh.axes_of(Role.features, sizes) == (MP,) and mesh.axes_of(Role.time, sizes) == ()

    def inside():
        assert mesh.token_axes() == (DP, DP_RING, DP_SLICE)
        assert mesh.ranks(mesh.token_axes()) == 64 and mesh.ranks(()) == 1

    jax.make_jaxpr(jax.shard_map(inside, mesh=mesh.abstract_mesh(sizes), in_specs=(), out_specs=None))()


def test_an_axis_of_several_slices_counts_slices_fastest():
    """So that a gather between slices and then within one leaves shards in order."""
    made = make_mesh(mesh_config(4, 2, slices=2))
    assert made.axis_names == (DP, DP_SLICE, MP)
    ids = [[device.id for device in pair] for rank in made.devices for pair in rank]
    assert ids == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_gradient_rings_connect_neighbours_in_the_program_of_one_slice():
    """By the coordinates that ahead-of-time compilation passes to the compiler."""
    config = mesh_config(64, 1, **RING, slices=2)
    one_slice = coordinates(make_mesh(config, fake_slice("v5e", 4, 8, slices=2)))
    assert sorted(one_slice) == sorted([*device.coords, 0] for device in fake_slice("v5e", 4, 8))
    ring = [one_slice[2 * r] for r in range(16)]  # the others belong to the other ring
    assert all(sum(abs(x - y) for x, y in zip(a, b, strict=True)) == 1 for a, b in itertools.pairwise(ring))


def test_devices_that_are_not_on_a_torus_are_arranged_in_row_order():
    made = make_mesh(mesh_config(2, 4))
    assert dict(made.shape) == {DP: 2, MP: 4} and made.axis_names == (DP, MP)
    assert list(made.devices.flat) == jax.devices()
    assert Torus.of(jax.devices()) is Torus.of(fake_slice("v5e", 2, 2)[:3]) is None


V5E, TILES = fake_slice("v5e", 4, 4), "use one of 1,4,1,1; 2,2,1,1; 4,1,1,1"
CHIPS = "4 x 4 x 1 chips with 1 devices each"
NO_TILE = f"mesh.mp=3: a slice of {CHIPS} cannot be divided into boxes of 3 devices; use mesh.mp in {{1, 2, 4, 8, 16}}"
REFUSED = [
    (V5E[:1] * 17, (17, 1), RING, "no number from 2 to 16 divides mesh.dp / mesh.slices = 17"),
    (fake_slice("v5e", 2, 4, slices=2), (16, 1), {},
        "mesh.slices=1, but these devices form 2 slices; set mesh.slices=2"),
    (V5E, (16, 1), {"slices": 2}, "mesh.slices=2, but these devices form 1 slices; set mesh.slices=1"),
    (V5E, (4, 4), {"tile": [1, 1, 4, 1]},
        f"mesh.tile=[1, 1, 4, 1] does not divide a slice of {CHIPS} into boxes of mp=4 devices; {TILES}"),
    *((V5E, (4, 4), {"tile": tile}, TILES) for tile in ([4, 4, 1, 1], [2, 2], [3, 1, 1, 1], [-2, -2, 1, 1])),
    *((fake_slice("v5e", 4, 4, slices=3), (16, 3), {"tile": tile, "slices": 3}, NO_TILE)
        for tile in (None, [3, 1, 1, 1])),
    (jax.devices(), (2, 4), {"tile": [2, 2, 1, 1]},
        "mesh.tile=[2, 2, 1, 1]: cpu devices are not on a torus; leave it null"),
    (fake_slice("v5e", 2, 2)[:3], (1, 3), {"tile": [3, 1, 1, 1]}, "are not on a torus"),
    *((devices, (2, 2), {}, f"mesh dp=2 x mp=2 needs 4 devices, this machine has 8 ({devices[0].device_kind}); "
        "choose mesh.dp and mesh.mp with dp x mp = 8") for devices in (jax.devices(), fake_slice("v3", 2, 2))),
]  # fmt: skip


@pytest.mark.parametrize(("devices", "dp_mp", "others", "message"), REFUSED, ids=lambda x: str(x)[-40:])
def test_a_mesh_that_the_devices_cannot_form_is_refused_with_what_they_can(devices, dp_mp, others, message):
    with pytest.raises(UserError) as found:
        make_mesh(mesh_config(*dp_mp, **others), devices)
    assert message in str(found.value) and len(str(found.value).splitlines()) <= 2
