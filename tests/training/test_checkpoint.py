"""Checkpoints are restored bit for bit on any mesh, and a complete one always exists."""

import json
import sys
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from shmap_tp.errors import StorageError, UserError
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.training import checkpoint
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.integrity import MANIFEST
from shmap_tp.training.step import StepFunctions, build_step_functions
from tests.helpers.checkpoint_fixtures import FACTS, checkpoint_config, files, random_state
from tests.helpers.run_fixtures import bits, tiny

DENSE = [
    "dp=1 mp=1 zero=none", "dp=8 mp=1 zero=fsdp", "dp=4 mp=2 zero=zero1", "dp=2 mp=4 zero=none", "dp=1 mp=8 zero=none",
    "dp=2 mp=2 cp=2 zero=fsdp", "dp=1 mp=2 cp=4 zero=zero1",
]  # fmt: skip
EXPERTS = [
    "dp=8 mp=1 ep=8 zero=none", "dp=4 mp=2 ep=2 zero=fsdp", "dp=2 mp=4 ep=1 zero=zero1", "dp=4 mp=2 ep=4 zero=zero1",
]  # fmt: skip
OF_EXPERTS = "model.block=sequential", "model.mlp=swiglu", "model.experts=8", "model.router_bias_rate=0.1"


@pytest.mark.parametrize(("places", "model"), [(DENSE, ()), (EXPERTS, OF_EXPERTS)], ids=["dense", "with experts"])
def test_a_state_is_restored_bit_for_bit_on_every_mesh_with_every_zero_setting(tmp_path, places, model, monkeypatch):
    """Saved at each place, split over the replicas as large arrays are, and restored at every one."""
    monkeypatch.setattr(checkpoint, "SPLIT_BYTES", 1)

    def made(place: str) -> StepFunctions:
        config = tiny(tmp_path, *(f"mesh.{size}" for size in place.split()), *model)
        return build_step_functions(config, make_mesh(config.mesh, jax.devices()[: config.mesh.devices]), jnp.float32)

    functions = [made(place) for place in places]
    with Checkpoints(checkpoint_config(tmp_path / "saved", keep=len(places)), print) as checkpoints:
        for step, source in enumerate(functions):
            state = random_state(source, seed=step)
            checkpoints.save(step, state, FACTS)
            checkpoints.wait()
            assert checkpoints.facts(step) == FACTS
            for place, other in zip(places, functions, strict=True):
                shapes = other.shapes
                restored = checkpoints.restore(step, shapes)
                assert bits(restored) == bits(state), (places[step], place)
                laid_out = jax.tree.map(lambda leaf, shape: leaf.sharding == shape.sharding, restored, shapes)
                assert all(jax.tree.leaves(laid_out)), (places[step], place)


@pytest.mark.parametrize("has_room", [True, False], ids=["copied on the devices", "copied to the host"])
def test_a_state_can_be_donated_while_it_is_being_saved(functions, tmp_path, monkeypatch, has_room):
    """With room for a copy, that is what is read, also when `save` has returned."""
    given, save = [], checkpoint.ocp.save_checkpointables_async
    state = random_state(functions(2, 4), seed=3)
    expected = bits(state)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda leaf: -leaf - 1, tree), donate_argnums=0)
    monkeypatch.setattr(Checkpoints, "_has_room", lambda self, state: has_room)
    monkeypatch.setattr(checkpoint.ocp, "save_checkpointables_async", lambda *a, **k: given.append(a) or save(*a, **k))
    with Checkpoints(checkpoint_config(tmp_path), print) as checkpoints:
        checkpoints.save(1, state, FACTS)
        jax.block_until_ready(overwrite(state))
        if has_room:
            assert bits(given[0][1]["state"]) == expected
        checkpoints.wait()
        assert bits(checkpoints.restore(1, functions(2, 4).shapes)) == expected


def test_each_byte_of_a_copy_for_a_save_is_on_one_device_and_none_is_communicated(functions, monkeypatch):
    """Where the ranks of dp have replicas of an array, each copies a part of it."""
    monkeypatch.setattr(checkpoint, "SPLIT_BYTES", 1)
    params = random_state(functions(2, 4), seed=1).params
    copied = [checkpoint._sharding_of_copy(leaf) for leaf in jax.tree.leaves(params)]
    held = sum(8 * checkpoint._shard_bytes(*pair) for pair in zip(jax.tree.leaves(params), copied, strict=True))
    assert held == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    program = checkpoint._copy(tuple(copied)).lower(jax.tree.leaves(params)).compile().as_text()
    assert not any(name in program for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))


def test_the_memory_of_earlier_copies_counts_as_room_for_the_next_one(functions, tmp_path, monkeypatch, messages):
    """The greatest use that a device reports never falls, and has the copy of the first save in it."""
    state = random_state(functions(2, 4), seed=1)
    needed = sum(checkpoint._shard_bytes(x, checkpoint._sharding_of_copy(x)) for x in jax.tree.leaves(state))
    used = {"bytes_limit": 1000 + needed, "peak_bytes_in_use": 1000}
    device = type("Device", (), {"memory_stats": lambda self: used})()
    monkeypatch.setattr(jax, "local_devices", lambda: [device])

    def has_room(peak):
        used["peak_bytes_in_use"] = peak
        return checkpoints._has_room(state)

    with Checkpoints(checkpoint_config(tmp_path), messages.append) as checkpoints:
        assert has_room(1000) and has_room(1000 + needed) and not has_room(1001 + needed) and not messages
    with Checkpoints(checkpoint_config(tmp_path), messages.append) as checkpoints:
        assert not has_room(1001)
    assert messages == ["saves wait until the state is on the host: the devices have no memory for a copy of it"]


def test_a_step_whose_checkpoint_was_damaged_can_be_saved_again(pair_copy, messages, functions):
    (pair_copy / "2" / MANIFEST).unlink()
    state = random_state(functions(2, 4), seed=5)
    with Checkpoints(checkpoint_config(pair_copy), messages.append) as checkpoints:
        step = checkpoints.newest_intact()
        checkpoints.set_aside_after(step)
        assert checkpoints.steps() == [1]
        checkpoints.save(2, state, FACTS)
        checkpoints.wait()
        assert checkpoints.newest_intact() == 2
        assert bits(checkpoints.restore(2, functions(2, 4).shapes)) == bits(state)


@pytest.mark.parametrize("keep, keep_every, left", [(2, None, [5, 6]), (3, 2, [2, 4, 5, 6]), (2, 3, [3, 5, 6])])
def test_the_newest_and_every_kth_checkpoint_are_kept(functions, tmp_path, keep, keep_every, left):
    with Checkpoints(checkpoint_config(tmp_path, keep=keep, keep_every=keep_every), print) as checkpoints:
        for step in range(1, 7):
            checkpoints.save(step, random_state(functions(2, 4), step), FACTS)
        checkpoints.wait()
        assert checkpoints.steps() == left[::-1]
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == left


@pytest.mark.parametrize("damaged", [False, True], ids=["from the start", "after a damaged one was skipped"])
def test_a_complete_checkpoint_exists_at_every_moment(functions, pair_copy, monkeypatch, damaged):
    """The critical moment is when a new checkpoint is in place but has no hashes yet."""
    if damaged:
        (pair_copy / "2" / MANIFEST).unlink()
    complete = []
    hashes = checkpoint.hashes

    def watched(directory):
        complete.append([path.parent.name for path in pair_copy.glob(f"*/{MANIFEST}")])
        return hashes(directory)

    with Checkpoints(checkpoint_config(pair_copy, keep=2), print) as checkpoints:
        step = checkpoints.newest_intact()
        checkpoints.set_aside_after(step)
        monkeypatch.setattr(checkpoint, "hashes", watched)
        for later in range(step + 1, step + 5):
            checkpoints.save(later, random_state(functions(2, 4), later), FACTS)
        checkpoints.wait()
    assert len(complete) == 4 and all(complete), complete


def test_leaving_the_context_waits_for_the_save_and_its_hashes(functions, tmp_path):
    with Checkpoints(checkpoint_config(tmp_path), print) as checkpoints:
        checkpoints.save(1, random_state(functions(2, 4), 1), FACTS)
    hashed = json.loads((tmp_path / "1" / MANIFEST).read_text())
    assert {*hashed, MANIFEST} == {str(path.relative_to(tmp_path / "1")) for path in files(tmp_path / "1")}


def test_an_error_of_a_background_save_is_raised(functions, tmp_path, monkeypatch):
    def full(directory):
        raise OSError("no space left on device")

    state = random_state(functions(2, 4), 1)
    monkeypatch.setattr(checkpoint, "hashes", full)
    with (
        pytest.raises(StorageError, match=r"checkpoint .*/1 could not be written: no space left"),
        Checkpoints(checkpoint_config(tmp_path), print) as checkpoints,
    ):
        checkpoints.save(1, state, FACTS)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=r"checkpoint\.dir=.*file.*cannot be written"):
            Checkpoints(checkpoint_config(directory), print)


def test_a_bucket_url_does_not_create_a_local_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(checkpoint.absolute("gs://bucket/run")) == "gs://bucket/run"
    assert str(checkpoint.absolute("run")) == str(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=r"^checkpoint\.dir=gs://bucket/run needs gcsfs: pip install -e '\.\[gcs\]'$"):
        Checkpoints(replace(checkpoint_config(tmp_path), dir="gs://bucket/run"), print)
    assert list(tmp_path.iterdir()) == []


def test_a_state_of_another_shape_or_dtype_or_with_a_missing_leaf_is_refused_with_the_name_of_the_leaf(pair, functions):
    """Orbax would cast the dtype, and would refuse the shape in two thousand lines."""
    shapes, has = functions(2, 4).shapes, f"checkpoint {pair[0]}/2 has params/"
    sharding = shapes.params.embedding.weight.sharding
    fewer = eqx.tree_at(lambda state: state.params.head.weight, shapes, None)
    refused = [(fewer, f"{has}head/weight as fl")]
    for shape, dtype in [((64, 96), "float32"), ((64, 32), "bfloat16")]:
        leaf = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
        other = eqx.tree_at(lambda state: state.params.embedding.weight, shapes, leaf)
        refused.append((other, f"{has}embedding/weight as float32[64, 32], needed is {dtype}{list(shape)};"))
    with Checkpoints(checkpoint_config(pair[0]), print) as checkpoints:
        for wrong, message in refused:
            with pytest.raises(UserError) as caught:
                checkpoints.restore(2, wrong)
            assert str(caught.value).startswith(message) and len(str(caught.value).splitlines()) == 2
