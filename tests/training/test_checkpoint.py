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
from shmap_tp.training.checkpoint_files import MANIFEST
from shmap_tp.training.step import StepFunctions, build_step_functions
from tests.helpers.checkpoint_fixtures import FACTS, checkpoint_config, files, random_state
from tests.helpers.run_fixtures import bits, tiny

MESHES = [(1, 1), (8, 1), (4, 2), (2, 4), (1, 8)]


@pytest.mark.parametrize("source", MESHES)
def test_a_state_is_restored_bit_for_bit_on_every_mesh(functions, tmp_path, source):
    state = random_state(functions(*source), seed=sum(source))
    with Checkpoints(checkpoint_config(tmp_path), print) as checkpoints:
        checkpoints.save(7, state, FACTS)
        checkpoints.wait()
        assert checkpoints.facts(7) == FACTS
        for target in MESHES:
            shapes = functions(*target).shapes
            restored = checkpoints.restore(7, shapes)
            assert bits(restored) == bits(state), target
            laid_out = jax.tree.map(lambda leaf, shape: leaf.sharding == shape.sharding, restored, shapes)
            assert all(jax.tree.leaves(laid_out)), target


def test_a_state_is_restored_bit_for_bit_with_every_zero_setting(tmp_path):
    """Saved without ZeRO, with ZeRO-1 or with FSDP, and restored with each of them; also over cp."""

    def made(dp: int, mp: int, zero: str, cp: int = 1) -> StepFunctions:
        config = tiny(tmp_path, f"mesh.dp={dp}", f"mesh.mp={mp}", f"mesh.cp={cp}", f"mesh.zero={zero}")
        return build_step_functions(config, make_mesh(config.mesh, jax.devices()[: dp * mp * cp]), jnp.float32)

    levels = [made(4, 2, "zero1"), made(2, 4, "none"), made(8, 1, "fsdp"), made(2, 2, "fsdp")]
    levels += [made(2, 2, "fsdp", cp=2), made(1, 2, "zero1", cp=4), made(1, 1, "none", cp=8)]
    with Checkpoints(checkpoint_config(tmp_path), print) as checkpoints:
        for step, source in enumerate(levels):
            state = random_state(source, seed=step)
            checkpoints.save(step, state, FACTS)
            checkpoints.wait()
            for target in levels:
                assert bits(checkpoints.restore(step, target.shapes)) == bits(state)


def test_a_state_with_experts_is_restored_bit_for_bit_wherever_they_are(tmp_path):
    experts = ("model.block=sequential", "model.mlp=swiglu", "model.experts=8", "model.router_bias_rate=0.1")

    def made(dp: int, mp: int, ep: int, zero: str) -> StepFunctions:
        settings = (f"mesh.dp={dp}", f"mesh.mp={mp}", f"mesh.ep={ep}", f"mesh.zero={zero}")
        config = tiny(tmp_path, *settings, *experts)
        return build_step_functions(config, make_mesh(config.mesh, jax.devices()[: dp * mp]), jnp.float32)

    places = [made(8, 1, 8, "none"), made(4, 2, 2, "fsdp"), made(2, 4, 1, "zero1"), made(4, 2, 4, "zero1")]
    with Checkpoints(checkpoint_config(tmp_path), print) as checkpoints:
        for step, source in enumerate(places):
            state = random_state(source, seed=step)
            checkpoints.save(step, state, FACTS)
            checkpoints.wait()
            for target in places:
                assert bits(checkpoints.restore(step, target.shapes)) == bits(state)


def test_a_state_can_be_donated_while_it_is_being_saved(functions, tmp_path):
    state = random_state(functions(2, 4), seed=3)
    expected = bits(state)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda leaf: -leaf - 1, tree), donate_argnums=0)
    with Checkpoints(checkpoint_config(tmp_path), print) as checkpoints:
        checkpoints.save(1, state, FACTS)
        jax.block_until_ready(overwrite(state))
        checkpoints.wait()
        assert bits(checkpoints.restore(1, functions(2, 4).shapes)) == expected


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


@pytest.mark.parametrize("keep, keep_every, left", [(2, None, [8, 9]), (3, 4, [4, 7, 8, 9]), (2, 3, [3, 6, 8, 9])])
def test_the_newest_and_every_kth_checkpoint_are_kept(functions, tmp_path, keep, keep_every, left):
    with Checkpoints(checkpoint_config(tmp_path, keep=keep, keep_every=keep_every), print) as checkpoints:
        for step in range(1, 10):
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


@pytest.mark.parametrize("shape, dtype", [((64, 96), "float32"), ((64, 32), "bfloat16")])
def test_a_state_of_another_shape_or_dtype_is_refused_with_the_name_of_the_leaf(pair, functions, shape, dtype):
    """Orbax would cast the dtype, and would refuse the shape in two thousand lines."""
    leaf = functions(2, 4).shapes.params.embedding.weight
    other = eqx.tree_at(
        lambda state: state.params.embedding.weight,
        functions(2, 4).shapes,
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=leaf.sharding),
    )
    with Checkpoints(checkpoint_config(pair[0]), print) as checkpoints, pytest.raises(UserError) as caught:
        checkpoints.restore(2, other)
    message = str(caught.value)
    prefix = f"checkpoint {pair[0]}/2 has params/embedding/weight"
    assert message.startswith(f"{prefix} as float32[64, 32], this run needs {dtype}{list(shape)};")
    assert len(message.splitlines()) == 2


def test_a_state_with_a_missing_leaf_is_refused_with_its_name(pair, functions):
    shapes = functions(2, 4).shapes
    fewer = eqx.tree_at(lambda state: state.params.head.weight, shapes, None)
    with (
        Checkpoints(checkpoint_config(pair[0]), print) as checkpoints,
        pytest.raises(UserError, match="params/head/weight as fl"),
    ):
        checkpoints.restore(2, fewer)
