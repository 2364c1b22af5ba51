"""Several processes read a Hugging Face directory, train and write: the same as one, and each reads only its part."""

import json
from pathlib import Path

import numpy as np
import pytest

from shmap_tp.pretrained.__main__ import main
from tests.helpers.pretrained_models import assert_same_tensors, read_tensors, write_directory
from tests.helpers.pretrained_processes import parsed, run_processes, work

MESH = "2-4-none"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, and what this process made of it on the mesh (2, 4)."""
    directory = tmp_path_factory.mktemp("alone")
    write_directory(directory / "model", "llama")
    work(parsed([str(directory / "model"), str(directory / "out"), "--mesh", MESH]))
    return directory


def assert_same_as_alone(alone: Path, found: Path, tmp_path: Path) -> None:
    """What several processes computed in `found` is what one did.  The order of sums across processes is another."""
    one = alone / "out" / MESH
    expected, logits = np.load(one / "logits.npy"), np.load(found / "logits.npy")
    assert np.max(np.abs(logits - expected)) < 2e-6 * np.max(np.abs(expected))
    losses = [json.loads((out / "losses.json").read_text()) for out in (found, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6, abs=0) and losses[0][1] < losses[0][0]
    assert main(["export", str(found / "checkpoints"), "--out", str(tmp_path / f"exported {found.name}")]) == 0
    assert_same_tensors(found / "trained", tmp_path / f"exported {found.name}")


def test_two_processes_read_compute_and_write_as_one_and_a_full_disk_of_one_ends_both(alone, tmp_path):
    """Each reads its part, on two meshes one after the other; then the second has no room for what it writes."""
    meshes = "1-8-none", "4-2-fsdp"
    given = [text for mesh in meshes for text in ("--mesh", mesh)]
    measured = run_processes(alone / "model", tmp_path / "out", 2, *given, "--full-disk", "1")
    for mesh in meshes:
        for name in ("model.safetensors", "config.json"):
            content = (tmp_path / "out" / mesh / "loaded" / name).read_bytes()
            assert content == (alone / "out" / MESH / "loaded" / name).read_bytes(), (mesh, name)
        assert_same_tensors(tmp_path / "out" / mesh / "loaded", alone / "model")
    assert_same_as_alone(alone, tmp_path / "out" / meshes[-1], tmp_path)
    parameters = sum(values.nbytes for values in read_tensors(alone / "model").values()) / 1e6
    heads, fsdp = ([each[mesh]["load_read_mb"] for each in measured] for mesh in meshes)
    assert max(heads) < 0.6 * parameters and sum(heads) > parameters, "two heads of keys and values are in both"
    assert sum(fsdp) < 1.05 * parameters and max(fsdp) < 0.55 * parameters, (fsdp, parameters)
    assert "full could not be written by another process, which prints the reason" in measured[0]["error"]
    assert "full could not be written: No space left on device" in measured[1]["error"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(meshes)


@pytest.mark.slow
def test_four_processes_read_compute_and_write_as_one(alone, tmp_path):
    run_processes(alone / "model", tmp_path / "out", 4, "--mesh", MESH)
    assert_same_as_alone(alone, tmp_path / "out" / MESH, tmp_path)
