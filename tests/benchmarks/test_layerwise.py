"""Weights that are gathered layer by layer: every program of the study is the dense stack of products."""

from types import SimpleNamespace

import gathered
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from tests.helpers.assertions import RELATIVE, assert_close

LAYERS, WIDTH, ROWS = 3, 32, 16


@pytest.fixture(scope="module")
def arrays():
    """x and the weights, whole, on the host."""
    generator = np.random.default_rng(0)
    shapes = [(ROWS, WIDTH)] + [(WIDTH, WIDTH)] * LAYERS
    x, *weights = (generator.normal(size=shape).astype(np.float32) / WIDTH**0.5 for shape in shapes)
    return x, tuple(weights)


def dense(x, weights):
    """(y, (dx, dw)) in float64, on the host."""
    inputs = [np.float64(x)]
    for w in weights:
        inputs.append(inputs[-1] @ np.float64(w))
    dy, gradients = inputs[-1], []
    for x, w in zip(inputs[-2::-1], weights[::-1], strict=True):
        gradients.insert(0, x.T @ dy)
        dy = dy @ np.float64(w).T
    return inputs[-1], (dy, tuple(gradients))


@pytest.mark.parametrize("devices", [1, 4, 8])
@pytest.mark.parametrize("name", gathered.PROGRAMS)
def test_every_program_is_the_dense_one(name, devices, arrays):
    mesh = gathered.ring_mesh(jax.devices()[:devices])
    mesh_fields = jax.device_put(arrays, NamedSharding(mesh, gathered.ROWS))
    y, gradients = dense(*arrays)
    forward, both = (gathered.build(name, mesh, LAYERS, backward) for backward in (False, True))
    assert_close(forward(*mesh_fields), y, RELATIVE["float32"])
    found = both(*mesh_fields)
    assert_close(found, gradients, RELATIVE["float32"])
    assert all(array.sharding.spec[0] == gathered.ROWS[0] for array in jax.tree.leaves(found))


def collectives(name: str) -> str:
    """The collectives of forward and backward on 4 devices, as they are traced, in order."""
    mesh = gathered.ring_mesh(jax.devices()[:4])
    shape = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    text = str(gathered.build(name, mesh, LAYERS, True).trace(shape, (shape,) * LAYERS).jaxpr)
    words = {"all_gather": "G", "reduce_scatter": "S", "ppermute": "P", "dot_general": "x"}
    found = [word.split("[")[0] for word in text.split() if word.split("[")[0] in words]
    return "".join(words[word] for word in found)


def test_ahead_asks_for_the_next_layer_before_it_multiplies():
    """G gather, x product, S reduce-scatter; backward two products a layer."""
    assert collectives("ahead") == "GGxGxx" + "GxSxGxSxxSx"


def test_the_ring_replaces_each_reduce_scatter():
    traced = collectives("ring")
    assert "S" not in traced
    assert traced.count("G") == 2 * LAYERS - 1
    assert traced.count("P") == LAYERS * 3


@pytest.mark.parametrize("sides", [(2, 2, 1), (4, 4, 1), (4, 8, 1), (2, 2, 2), (4, 4, 4), (4, 4, 12)])
def test_a_ring_is_one_link_from_device_to_device(sides):
    devices = [SimpleNamespace(coords=coords, core_on_chip=0) for coords in np.ndindex(*sides)]
    at = np.array([device.coords for device in gathered.ring_order(devices)])
    assert len({tuple(coords) for coords in at}) == len(devices)
    assert (np.abs(at - np.roll(at, 1, axis=0)).sum(axis=1) == 1).all()
