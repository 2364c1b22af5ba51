"""`Model.restore`: the parameters of a checkpoint, bit for bit, on any mesh."""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import shmap_tp
from shmap_tp.api import build
from shmap_tp.config.choices import Precision
from shmap_tp.training.checkpoint_files import find_checkpoint, restore_parameters
from tests.helpers.assertions import assert_same_bits, by_path
from tests.helpers.fresh_process import python
from tests.helpers.run_fixtures import CONTEXT, VOCABULARY, bits, run_uninterrupted, state_at

TOKENS = np.arange(2 * CONTEXT).reshape(2, CONTEXT) % VOCABULARY


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps on the mesh (2, 4)."""
    return run_uninterrupted(tmp_path_factory) / "run"


@pytest.fixture(scope="module")
def masters(run: Path) -> shmap_tp.Model:
    """The model of the newest checkpoint, in float32."""
    return shmap_tp.Model.restore(run)


@pytest.mark.parametrize("which", ["", "checkpoints", "checkpoints/8"], ids=["run.dir", "checkpoint.dir", "checkpoint"])
def test_a_checkpoint_is_named_by_its_run_by_the_directory_of_checkpoints_or_by_itself(run, which):
    assert find_checkpoint(str(run / which), None) == find_checkpoint(str(run), 8)


def test_a_model_is_restored_bit_for_bit_on_any_mesh_without_the_optimizer_state(run, masters, monkeypatch):
    asked, load = [], ocp.load_checkpointables

    def spy(directory: Any, tree: dict, **options: Any) -> Any:
        asked.append(tree["state"])
        return load(directory, tree, **options)

    monkeypatch.setattr(ocp, "load_checkpointables", spy)
    assert dict(masters.mesh.shape) == {"dp": 2, "mp": 4}
    model = shmap_tp.Model.restore(run, dp=8, mp=1)
    assert dict(model.mesh.shape) == {"dp": 8, "mp": 1}
    for name in asked[0].keys() - {"params"}:
        assert {*jax.tree.leaves(asked[0][name])} == {ocp.PLACEHOLDER}, name
    assert_same_bits(model.parameters, masters.parameters)
    found = bits(model.parameters)
    assert found == state_at(run.parent, 8)[: len(found)]


def test_a_model_is_restored_in_a_process_that_has_used_no_device(run):
    """Reading a checkpoint initialises JAX's backend: the devices are emulated before, but not a million."""
    done = python(
        f"""
        import shmap_tp
        for shape in {{"dp": 2**10, "mp": 2**10}}, {{"dp": 8}}, {{"dp": 8, "mp": 1}}:
            try:
                print(shmap_tp.Model.restore({str(run)!r}, **shape).logits([[1, 2]]).shape)
            except shmap_tp.UserError as error:
                print(str(error).replace(chr(10), " "))
        """
    )
    million, too_many, shape = done.stdout.splitlines()
    assert "does not divide" in million and shape == "(1, 2, 64)", done.stderr
    assert "needs 32 devices" in too_many and "choose a smaller one (dp, mp)" in too_many


def test_an_older_checkpoint_can_be_named(run, masters):
    older = shmap_tp.Model.restore(run, step=6)
    assert_same_bits(older.parameters, shmap_tp.Model.restore(run / "checkpoints" / "6").parameters)
    newest = by_path(masters.parameters)
    assert all((newest[path] != array).any() for path, array in by_path(older.parameters).items())


def test_matrices_are_held_in_the_dtype_asked_for_with_the_same_results(run, masters):
    """Matrices that are rounded when the checkpoint is read are what each use of a float32 matrix rounds to."""
    held = shmap_tp.Model.restore(run, dtype="bfloat16")
    train = dataclasses.replace(masters.config.train, precision=Precision.bfloat16)
    in_bfloat16 = build(dataclasses.replace(masters.config, train=train), shmap_tp.Components())
    rounding = shmap_tp.Model(*in_bfloat16[:2], masters.parameters, in_bfloat16[2])
    dtypes = {array.dtype.name for array in jax.tree.leaves(held.parameters)}
    assert dtypes == {"float32", "bfloat16"}, "vectors, such as the scales of norms, stay float32"
    np.testing.assert_array_equal(held.logits(TOKENS), rounding.logits(TOKENS))
    assert_same_bits(shmap_tp.Model.restore(run, dtype="auto").parameters, masters.parameters)
    with pytest.raises(shmap_tp.UserError, match="dtype=float8 must be one of auto, float32, bfloat16"):
        shmap_tp.Model.restore(run, dtype="float8")


def test_a_checkpoint_can_be_held_in_int8(run, masters):
    held = shmap_tp.Model.restore(run, dtype="int8")
    found, w = held.parameters.blocks.mlp.up.weight, np.asarray(masters.parameters.blocks.mlp.up.weight)
    assert found.values.dtype == np.int8 and held.parameters.embedding.weight.dtype == np.float32
    assert (np.abs(found.astype(np.float32) - w) <= 0.501 / 127 * np.abs(w).max(-1, keepdims=True)).all()
    logits = np.asarray(masters.logits(TOKENS))
    assert 0 < np.abs(held.logits(TOKENS) - logits).max() < 0.05 * np.abs(logits).max()


def test_a_damaged_checkpoint_is_skipped_with_a_warning_and_refused_if_it_is_named(run, tmp_path):
    shutil.copytree(run / "checkpoints", tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "checkpoints" / "8" / "sha256.json").unlink()
    with pytest.warns(UserWarning, match="checkpoints/8 is skipped: sha256.json is missing"):
        model = shmap_tp.Model.restore(tmp_path / "run")
    assert_same_bits(model.parameters, shmap_tp.Model.restore(run, step=6).parameters)
    with pytest.raises(shmap_tp.UserError, match=r"checkpoints/8 cannot be used: sha256.json is missing"):
        shmap_tp.Model.restore(tmp_path / "run", step=8)


def test_a_directory_without_the_checkpoint_is_explained(run, tmp_path):
    with pytest.raises(shmap_tp.UserError, match=r"holds no checkpoint; name the run\.dir or the checkpoint.dir"):
        shmap_tp.Model.restore(tmp_path)
    with pytest.raises(shmap_tp.UserError, match=r"no checkpoint of step 7; it has .*6, 8"):
        shmap_tp.Model.restore(run, step=7)
    with pytest.raises(shmap_tp.UserError, match=r"mesh\.mp=3 does not divide"):
        shmap_tp.Model.restore(run, dp=1, mp=3)


@pytest.mark.parametrize("name", ["foo://bar", "", "~/x"])
def test_a_directory_that_cannot_exist_is_explained(name):
    with pytest.raises(shmap_tp.UserError, match=r"^directory(=| is empty)"):
        shmap_tp.Model.restore(name)


@pytest.mark.parametrize("content", [b"- 1\n", b"\xff\0", b"run: *a", b"a: " + b"[" * 5000, b"checkpoint: {dir: [x]}"])
def test_the_checkpoints_of_a_run_whose_configuration_is_damaged_are_found_beside_it(run, tmp_path, content):
    shutil.copytree(run / "checkpoints" / "8", tmp_path / "8")
    (tmp_path / "config.yaml").write_bytes(content)
    assert find_checkpoint(str(tmp_path), None).name == "8"


def test_a_fifo_in_the_place_of_the_configuration_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(shmap_tp.UserError, match="holds no checkpoint"):
        shmap_tp.Model.restore(tmp_path)


def test_a_checkpoint_with_other_parameters_is_explained(run):
    other = build(shmap_tp.load_config("model=test", "mesh.dp=2", "mesh.mp=4"), shmap_tp.Components())[2].shapes
    with pytest.raises(shmap_tp.UserError, match=r"holds params/.* as float32\[.*\], needed is float32\["):
        restore_parameters(find_checkpoint(str(run), None), other)
