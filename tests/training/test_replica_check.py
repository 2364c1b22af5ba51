"""Replicas that differ are found, with the name of the array and the device, for every array on every device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shmap_tp.errors import HardwareError
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.parallel.partitioning import leaves_by_path
from shmap_tp.training import loop
from shmap_tp.training.integrity import ReplicaCheck, fingerprint
from shmap_tp.training.step import build_step_functions
from tests.helpers.checkpoint_fixtures import random_state
from tests.helpers.run_fixtures import flip_bit, tiny


@pytest.mark.parametrize("mesh", ["mesh.dp=2 mesh.mp=4", "mesh.dp=4 mesh.mp=2 mesh.zero=fsdp"])
def test_a_flipped_bit_is_found_in_every_replicated_array_on_every_device(tmp_path, mesh):
    config = tiny(tmp_path, *mesh.split())
    functions = build_step_functions(config, make_mesh(config.mesh), jnp.float32)
    check, state = ReplicaCheck(functions.shapes), random_state(functions, 0)
    assert check.differences(state) == []
    for number, (name, leaf) in list(enumerate(leaves_by_path(state).items()))[::3]:
        device = number % 8
        index = leaf.sharding.devices_indices_map(leaf.shape)
        mine = index[jax.devices()[device]]
        replicas = sum(one == mine for one in index.values())
        found = check.differences(flip_bit(state, name, device))
        if replicas == 1:
            assert found == []
        elif replicas == 2:  # which of the two is wrong is unknown
            assert len(found) == 1 and found[0].startswith(f"{name} on device "), found
        else:
            assert found == [f"{name} on device {device} (process 0) differs from its {replicas - 1} other replicas"]


def test_a_run_with_differing_replicas_stops_before_it_saves_them(tmp_path, monkeypatch):
    check = ReplicaCheck.check
    monkeypatch.setattr(
        ReplicaCheck,
        "check",
        lambda self, state, step: check(self, flip_bit(state, "params/norm/scale", 5) if step == 4 else state, step),
    )
    with pytest.raises(HardwareError) as caught:
        loop.train(tiny(tmp_path, "train.check_replicas_every=2"))
    message = str(caught.value).splitlines()
    assert message[0].startswith(
        "after step 4 params/norm/scale on device 5 (process 0) differs from its 7 other replicas"
    )
    assert len(message) == 2 and "checkpoint.resume=must" in message[1]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["2"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool", "float64"])
def test_one_changed_element_always_changes_the_fingerprint(dtype):
    generator = np.random.default_rng(0)
    with jax.enable_x64(True):
        of = jax.jit(fingerprint)
        x = np.asarray(generator.integers(0, 2, (5, 7)), dtype=jnp.dtype(dtype))
        seen = {int(of(x))}
        for position in range(x.size):
            other = x.copy()
            other.reshape(-1)[position] = 1 - other.reshape(-1)[position]
            seen.add(int(of(other)))
        seen.add(int(of(x.T)))
        seen.add(int(of(x[::-1])))
    assert len(seen) == x.size + 3


def test_zeros_of_different_sign_have_different_fingerprints():
    assert int(fingerprint(jnp.float32([0.0]))) != int(fingerprint(jnp.float32([-0.0])))
