"""The arrangement of devices in a mesh: gradient rings over dp connect neighbours, and dp ranks group into slices.

The tiles of the torus that mp fills are tested in tests/hardware/test_torus.py.
"""

import itertools

import jax
import numpy as np
import pytest

from shmap_tp.config.schema import FsdpGradients, MeshConfig, TensorParallelMode, Zero
from shmap_tp.errors import UserError
from shmap_tp.hardware.torus import Torus
from shmap_tp.parallel.mesh import (
    DP,
    DP_RING,
    DP_SLICE,
    MP,
    Role,
    abstract_mesh,
    axes_of,
    axis_sizes,
    batch_axes,
    make_mesh,
    ranks,
    ring_permutation,
    token_axes,
)
from shmap_tp.plan.aot_compile import coordinates
from tests.helpers.fake_tpu_devices import fake_slice
from tests.helpers.model_fixtures import mesh_config


def test_only_collective_matmul_orders_mp_as_a_ring():
    devices = fake_slice("v5e", 4, 4)
    in_rows, in_rings = (
        make_mesh(mesh_config(4, 4, tensor_parallel=mode), devices).devices
        for mode in (TensorParallelMode.sequence, TensorParallelMode.collective_matmul)
    )
    places = [[list(row).index(device) for device in ring] for row, ring in zip(in_rows, in_rings, strict=True)]
    assert places == 4 * [[2, 3, 1, 0]]


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


def gradient_rings(name: str) -> tuple[np.ndarray, int]:
    """(the devices [ring, rings of a slice, slices, mp], the number of chips along a side of an mp tile)."""
    devices, (dp, mp), slices, ring = DP_MESHES[name]
    config = mesh_config(dp, mp, zero=Zero.fsdp, fsdp_gradients=FsdpGradients.ring, slices=slices)
    sizes, made = axis_sizes(config), make_mesh(config, devices)
    shape = tuple(sizes.get(axis, 1) for axis in (DP, DP_RING, DP_SLICE, MP))
    assert shape == (ring, dp // slices // ring, slices, mp)
    assert dict(made.shape) == sizes and 1 not in {sizes.get(DP_RING), sizes.get(DP_SLICE)}
    assert set(made.devices.flat) == set(devices) and len(set(made.devices.flat)) == dp * mp
    return made.devices.reshape(shape), 1 if mp == 1 else 2


@pytest.mark.parametrize("name", DP_MESHES)
def test_gradient_rings_connect_neighbours(name):
    """Every hop crosses one link, or with mp tiles of two chips per side two; and a ring ends where it started."""
    devices, links = gradient_rings(name)
    sides = Torus.of(DP_MESHES[name][0]).sides
    wraps = Torus.of(DP_MESHES[name][0]).wraps
    successor = dict(ring_permutation(len(devices), 1))
    for here, there in successor.items():
        for a, b in zip(devices[here].flat, devices[there].flat, strict=True):
            apart = [abs(x - y) for x, y in zip(a.coords, b.coords, strict=True)]
            assert a.slice_index == b.slice_index
            assert sum(min(d, n - d) if w else d for d, n, w in zip(apart, sides, wraps, strict=False)) <= links
    assert ring_permutation(len(devices), -1) == sorted((there, here) for here, there in successor.items())
    ring = [0]
    while (following := successor[ring[-1]]) != 0:
        ring.append(following)
    assert len(ring) == len(devices)


@pytest.mark.parametrize("name", DP_MESHES)
def test_the_axis_of_slices_and_no_other_leaves_a_slice(name):
    devices, _ = gradient_rings(name)
    for number in range(devices.shape[2]):
        assert {device.slice_index for device in devices[:, :, number].flat} == {number}


def test_axes_are_found_by_their_roles():
    config = mesh_config(64, 2, zero=Zero.fsdp, fsdp_gradients=FsdpGradients.ring, slices=2)
    assert token_axes(axis_sizes(config)) == batch_axes(axis_sizes(config)) == (DP, DP_RING, DP_SLICE)
    assert axes_of(Role.features, axis_sizes(config)) == (MP,) and axes_of(Role.time, axis_sizes(config)) == ()

    def inside():
        assert token_axes() == (DP, DP_RING, DP_SLICE) and ranks(token_axes()) == 64 and ranks(()) == 1

    jax.make_jaxpr(jax.shard_map(inside, mesh=abstract_mesh(axis_sizes(config)), in_specs=(), out_specs=None))()


def test_an_axis_of_several_slices_counts_slices_fastest():
    """So that a gather between slices and then within one leaves shards in order."""
    made = make_mesh(mesh_config(4, 2, slices=2))
    assert made.axis_names == (DP, DP_SLICE, MP)
    assert [[device.id for device in pair] for rank in made.devices for pair in rank] == [
        [0, 1],
        [4, 5],
        [2, 3],
        [6, 7],
    ]


def test_gradient_rings_connect_neighbours_in_the_program_of_one_slice():
    """By the coordinates that ahead-of-time compilation passes to the compiler."""
    config = mesh_config(64, 1, zero=Zero.fsdp, fsdp_gradients=FsdpGradients.ring, slices=2)
    one_slice = coordinates(make_mesh(config, fake_slice("v5e", 4, 8, slices=2)))
    assert sorted(one_slice) == sorted([*device.coords, 0] for device in fake_slice("v5e", 4, 8))
    ring = [one_slice[2 * r] for r in range(16)]  # the others belong to the other ring
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
        "mesh.mp=3: a slice of 4 x 4 x 1 chips with 1 devices each cannot be divided into boxes of 3 devices; "
        "use mesh.mp in {1, 2, 4, 8, 16}"
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
