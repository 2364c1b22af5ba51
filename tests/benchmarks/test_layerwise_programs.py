"""Layerwise FSDP matmuls: every program computes the same as the dense stack of matmuls."""

import benchmark_layerwise
import jax
import jax.numpy as jnp
import layerwise_programs
import numpy as np
import pytest
from jax.sharding import NamedSharding

from tests.helpers.assertions import RELATIVE, assert_close
from tests.helpers.fake_tpu_devices import fake_slice

LAYERS, WIDTH, ROWS = 3, 32, 16


@pytest.fixture(scope="module")
def arrays():
    """x and the full weights, on the host."""
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
@pytest.mark.parametrize("name", layerwise_programs.PROGRAMS)
def test_every_program_equals_the_dense_computation(name, devices, arrays):
    mesh = layerwise_programs.ring_mesh(jax.devices()[:devices])
    sharded = jax.device_put(arrays, NamedSharding(mesh, layerwise_programs.ROWS))
    y, gradients = dense(*arrays)
    forward, with_backward = (layerwise_programs.build(name, mesh, LAYERS, backward) for backward in (False, True))
    assert_close(forward(*sharded), y, RELATIVE["float32"])
    found = with_backward(*sharded)
    assert_close(found, gradients, RELATIVE["float32"])
    assert all(array.sharding.spec[0] == layerwise_programs.ROWS[0] for array in jax.tree.leaves(found))


def collectives(name: str) -> str:
    """Collectives and matmuls of forward and backward on 4 devices, in the order of the trace."""
    mesh = layerwise_programs.ring_mesh(jax.devices()[:4])
    shape = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    text = str(layerwise_programs.build(name, mesh, LAYERS, True).trace(shape, (shape,) * LAYERS).jaxpr)
    words = {"all_gather": "G", "reduce_scatter": "S", "ppermute": "P", "dot_general": "x"}
    found = [word.split("[")[0] for word in text.split() if word.split("[")[0] in words]
    return "".join(words[word] for word in found)


def test_ahead_gathers_the_next_layer_before_each_matmul():
    """G gather, x matmul, S reduce-scatter; backward two matmuls per layer."""
    assert collectives("ahead") == "GGxGxx" + "GxSxGxSxxSx"


def test_ring_replaces_each_reduce_scatter_by_ppermutes():
    traced = collectives("ring")
    assert "S" not in traced
    assert traced.count("G") == 2 * LAYERS - 1
    assert traced.count("P") == LAYERS * 3


@pytest.mark.parametrize("sides", [(2, 2, 1), (4, 4, 1), (4, 8, 1), (2, 2, 2), (4, 4, 4), (4, 4, 12)])
def test_consecutive_devices_of_a_ring_are_one_hop_apart(sides):
    devices = fake_slice("v4", *sides)
    at = np.array([device.coords for device in layerwise_programs.ring_order(devices)])
    assert len({tuple(coords) for coords in at}) == len(devices)
    assert (np.abs(at - np.roll(at, 1, axis=0)).sum(axis=1) == 1).all()


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(benchmark_layerwise.sys, "argv", ["benchmark_layerwise.py", "--json", "nowhere/rows"])
    monkeypatch.setattr(benchmark_layerwise, "find_devices", None)
    assert benchmark_layerwise.main() == 2
    assert capsys.readouterr().err.startswith("error: --json nowhere/rows cannot be written: ")
