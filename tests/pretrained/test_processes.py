"""Several processes read a Hugging Face directory, train and write: the same as one, and each reads only its part."""

import json
from pathlib import Path

import numpy as np
import pytest

from shmap_tp.pretrained.__main__ import main
from tests.helpers.pretrained_models import read_tensors, write_directory
from tests.helpers.pretrained_processes import run_processes

MESH = ["--dp", "2", "--mp", "4"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, and what one process made of it on the mesh (2, 4)."""
    directory = tmp_path_factory.mktemp("alone")
    write_directory(directory / "model", "llama")
    run_processes(directory / "model", directory / "out", 1, *MESH)
    return directory


def assert_same_tensors(first: Path, second: Path) -> None:
    """Bit for bit."""
    before, after = read_tensors(first), read_tensors(second)
    assert before.keys() == after.keys()
    assert not [name for name in before if before[name].tobytes() != after[name].tobytes()]


def assert_same_as_alone(alone: Path, found: Path, tmp_path: Path) -> None:
    """What several processes wrote to `found` is what one wrote.  The order of sums across processes is another."""
    for name in ("model.safetensors", "config.json"):
        assert (found / "loaded" / name).read_bytes() == (alone / "out" / "loaded" / name).read_bytes()
    assert_same_tensors(found / "loaded", alone / "model")
    expected, logits = np.load(alone / "out" / "logits.npy"), np.load(found / "logits.npy")
    assert np.max(np.abs(logits - expected)) < 2e-6 * np.max(np.abs(expected))
    losses = [json.loads((out / "losses.json").read_text()) for out in (found, alone / "out")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6, abs=0) and losses[0][1] < losses[0][0]
    assert main(["export", str(found / "checkpoints"), "--out", str(tmp_path / "exported")]) == 0
    assert_same_tensors(found / "trained", tmp_path / "exported")


@pytest.mark.parametrize("mesh", [["--dp", "1", "--mp", "8"], ["--dp", "4", "--mp", "2", "--zero", "fsdp"]])
def test_two_processes_read_compute_and_write_as_one_and_each_reads_its_part(alone, tmp_path, mesh):
    measured = run_processes(alone / "model", tmp_path / "out", 2, *mesh)
    assert_same_as_alone(alone, tmp_path / "out", tmp_path)
    parameters = sum(values.nbytes for values in read_tensors(alone / "model").values()) / 1e6
    read = [each["load_read_mb"] for each in measured]
    if "fsdp" in mesh:
        assert sum(read) < 1.05 * parameters and max(read) < 0.55 * parameters, (read, parameters)
    else:  # two heads of keys and values are in both
        assert max(read) < 0.6 * parameters and sum(read) > parameters, (read, parameters)


def test_a_full_disk_of_one_process_ends_all_and_leaves_nothing(alone, tmp_path):
    with pytest.raises(AssertionError) as raised:
        run_processes(alone / "model", tmp_path / "out", 2, *MESH, "--zero", "fsdp", "--full-disk", "1", "--steps", "0")
    assert "loaded could not be written: No space left on device" in str(raised.value)
    assert "loaded could not be written by another process, which prints the reason" in str(raised.value)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.slow
def test_four_processes_read_compute_and_write_as_one(alone, tmp_path):
    run_processes(alone / "model", tmp_path / "out", 4, *MESH)
    assert_same_as_alone(alone, tmp_path / "out", tmp_path)
