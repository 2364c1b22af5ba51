"""Copies that have drifted apart are found, by name and device, whichever array and device it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shmap_tp.errors import UserError
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.training import loop as train
from shmap_tp.training.replica_check import ReplicaCheck, fingerprint
from shmap_tp.training.step import State, StepFunctions, build_step_functions
from tests.helpers.run_fixtures import tiny


def made(directory, *overrides: str) -> StepFunctions:
    config = tiny(directory, *overrides)
    return build_step_functions(config, make_mesh(config.mesh), jnp.float32)


def spoilt(state: State, name: str, device: int) -> State:
    """`state` with the last bit of the last element of one device's copy of one array flipped."""

    def leaf(path, x):
        if jax.tree_util.keystr(path, simple=True, separator="/") != name:
            return x
        shards = []
        for shard in x.addressable_shards:
            bits = np.array(shard.data)
            if shard.device.id == device:
                bits.reshape(-1).view(np.uint8)[-bits.itemsize] ^= 1
            shards.append(jax.device_put(bits, shard.device))
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)

    return jax.tree_util.tree_map_with_path(leaf, state)


def names(state: State) -> list[str]:
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]


@pytest.mark.parametrize("mesh", ["mesh.dp=2 mesh.mp=4", "mesh.dp=8 mesh.mp=1", "mesh.dp=4 mesh.mp=2 mesh.zero=fsdp"])
def test_any_array_that_has_copies_is_watched_on_any_device(tmp_path, mesh):
    programs = made(tmp_path, *mesh.split())
    replicas, state = ReplicaCheck(programs.shapes), programs.init()
    assert replicas.differences(state) == []
    for number, (name, leaf) in list(enumerate(zip(names(state), jax.tree.leaves(state), strict=True)))[::3]:
        device = number % 8
        index = leaf.sharding.devices_indices_map(leaf.shape)
        mine = index[jax.devices()[device]]
        copies = sum(one == mine for one in index.values())
        found = replicas.differences(spoilt(state, name, device))
        if copies == 1:
            assert found == []
        elif copies == 2:  # which of the two is wrong cannot be known
            assert len(found) == 1 and found[0].startswith(f"{name} on device "), found
        else:
            assert found == [f"{name} on device {device} (process 0) is not what its {copies - 1} other copies are"]


def test_the_trainer_stops_before_it_saves_what_has_drifted(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "machine_peak", lambda devices: None)
    check = ReplicaCheck.check
    monkeypatch.setattr(
        ReplicaCheck,
        "check",
        lambda self, state, step: check(self, spoilt(state, "params/norm/scale", 5) if step == 4 else state, step),
    )
    with pytest.raises(UserError) as caught:
        train.train(tiny(tmp_path, "train.check_replicas_every=2"))
    said = str(caught.value).splitlines()
    assert said[0].startswith(
        "after step 4 params/norm/scale on device 5 (process 0) is not what its 7 other copies are"
    )
    assert len(said) == 2 and "checkpoint.resume=must" in said[1]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["2"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool", "float64"])
def test_one_changed_element_always_changes_the_fingerprint(dtype):
    generator = np.random.default_rng(0)
    with jax.enable_x64(True):
        x = np.asarray(generator.integers(0, 2, (5, 7)), dtype=jnp.dtype(dtype))
        seen = {int(fingerprint(jnp.asarray(x)))}
        for place in range(x.size):
            other = x.copy()
            other.reshape(-1)[place] = 1 - other.reshape(-1)[place]
            seen.add(int(fingerprint(jnp.asarray(other))))
        seen.add(int(fingerprint(jnp.asarray(x.T))))
        seen.add(int(fingerprint(jnp.asarray(x[::-1]))))
    assert len(seen) == x.size + 3


def test_two_zeros_of_other_sign_are_told_apart():
    assert int(fingerprint(jnp.float32([0.0]))) != int(fingerprint(jnp.float32([-0.0])))
