"""Position encodings at given positions: the default positions 0, 1 ... T - 1, and those of a part of a sequence.

B batch, T time, D model width, H heads, K head dim.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shmap_tp.layers.positions import Learned, Rotary, Rotation, rotate_pairs_at
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.parallel.tensor_parallel import TensorParallel
from tests.helpers.assertions import RELATIVE, assert_close
from tests.helpers.layer_cases import ROTATIONS
from tests.helpers.model_fixtures import mesh, random_like, shapes_of
from tests.helpers.sharded_harness import ALL_REDUCE, BATCH_SHARDED, SEQUENCE, TIME_SHARDED

B, T, D, H, K = 4, 32, 24, 8, 6
X = np.random.default_rng(0).normal(size=(B, T, H, K))


def rotated(x: np.ndarray, positions: Any = None) -> dict[str, dict[str, np.ndarray]]:
    """x rotated on a (2, 4) mesh by each of ROTATIONS, and the gradient of x for the cotangent 2x."""
    spec = P(DP, None, MP, None)

    def local(x):
        at = None if positions is None else jnp.broadcast_to(positions, x.shape[:2])
        found = {}
        for name, rotation in ROTATIONS.items():
            y, pull = jax.vjp(lambda x, rotation=rotation: Rotary(rotation).rotate(x, at), x)
            found[name] = {"y": y, "dx": pull(2 * x)[0]}
        return found

    with jax.enable_x64(True):
        return jax.device_get(jax.jit(jax.shard_map(local, mesh=mesh((2, 4)), in_specs=spec, out_specs=spec))(x))


def test_rotation_at_given_positions_is_that_of_a_slice_of_a_sequence_which_begins_at_zero():
    """Rotation at positions and without are computed differently."""
    default, shifted, start = rotated(X), np.arange(T, dtype=np.int32), 13
    assert_close(rotated(X, shifted), default, RELATIVE["float64"])
    part = jax.tree.map(lambda y: y[:, start:], default)
    assert_close(rotated(X[:, start:], shifted[start:]), part, RELATIVE["float64"])
    with pytest.raises(AssertionError):
        assert_close(rotated(X[:, start:]), part, 1e-2)


@pytest.mark.parametrize("first", [131_072 - 64, 2**20 - 64])
def test_rotation_at_large_positions_is_exact_in_float32(first):
    """Against float64: the product of a position and a rounded rate would be wrong by 0.008 radians and 0.06."""
    rotation, size = Rotation(10_000.0), 128
    positions, x = np.arange(first, first + 64), np.ones((1, 64, 1, size), np.float32)
    angle = positions[:, None] * rotation.rates(size)
    expected = np.concatenate([np.cos(angle) - np.sin(angle), np.sin(angle) + np.cos(angle)], axis=-1)
    found = rotate_pairs_at(rotation, jnp.asarray(positions)[None], jnp.asarray(x))[0, :, 0]
    assert np.abs(found - expected).max() < 3e-6


def with_learned_positions(x: np.ndarray, layer: Learned, tp: TensorParallel, positions: Any) -> np.ndarray:
    spec = BATCH_SHARDED if tp == ALL_REDUCE else TIME_SHARDED

    def local(layer, x):
        at = None if positions is None else jnp.broadcast_to(positions, (x.shape[0], len(positions)))
        return layer.add_to_input(x, tp, at)

    run = jax.shard_map(local, mesh=mesh((2, 4)), in_specs=(P(), spec), out_specs=spec)
    return np.asarray(jax.jit(run)(layer, x))


@pytest.mark.parametrize("tp", [ALL_REDUCE, SEQUENCE], ids=["all_reduce", "sequence"])
def test_learned_positions_at_shifted_positions_equal_a_slice_of_the_longer_sequence(tp):
    """Exactly, also where time is sharded over mp."""
    layer = random_like(shapes_of(partial(Learned, T, D, std=1.0)), "float32")
    x, start = np.random.default_rng(1).normal(size=(B, T, D)).astype(np.float32), 12
    full, part = with_learned_positions(x, layer, tp, None)[:, start:], x[:, start:]
    shifted = with_learned_positions(part, layer, tp, np.arange(start, T, dtype=np.int32))
    np.testing.assert_array_equal(shifted, full)
    assert np.any(with_learned_positions(part, layer, tp, None) != full)
