"""`python -m shmap_tp.verify` confirms what is intact, and names every difference and damaged file."""

import os
import shutil
from pathlib import Path

import jax
import pytest

from shmap_tp import verify
from shmap_tp.data.token_files import open_token_file
from shmap_tp.runtime.run_lock import lock_directories
from shmap_tp.training import loop
from shmap_tp.training.checkpoint import Checkpoints
from tests.helpers import run_fixtures as runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The tiny run with checkpoints of steps 2 and 4; this directory has `run` and `data`."""
    directory = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        runs.make_runs_quick(patch)
        assert loop.train(runs.tiny(directory, "train.steps=4", "evaluate.every=0")) == 0
    return directory


@pytest.fixture(autouse=True)
def shared_programs(monkeypatch):
    monkeypatch.setattr("shmap_tp.trainer.build_step_functions", runs.shared_step_functions)


def call(capsys, *arguments: object) -> tuple[int, list[str]]:
    """(exit code, printed lines)."""
    code = verify.main([str(one) for one in arguments])
    printed = capsys.readouterr()
    return code, (printed.out + printed.err).splitlines()


def resume(directory: Path) -> list[object]:
    """Arguments of `verify resume` for the run in `directory`."""
    return ["resume", "--cfg", runs.FIRST, "--onto", "8,1", "--steps", 2, *runs.overrides(directory)]


def test_a_resumed_run_is_bitwise_equal_on_its_mesh_and_close_on_another(trained, capsys):
    before = runs.file_contents(trained / "run")
    code, printed = call(capsys, *resume(trained))
    assert code == 0
    assert printed[0] == "on dp=2, mp=4: the restored state is bitwise equal to the saved state"
    assert printed[1] == "  2 steps later 38 of 38 arrays are bitwise equal to those of the uninterrupted run"
    assert printed[2].startswith("  losses differ by at most 0.0e+00")
    assert printed[3] == "on dp=8, mp=1: the restored state is bitwise equal to the saved state"
    assert all(float(line.split()[0]) < 1e-5 for line in printed if "of its largest value" in line)
    assert runs.file_contents(trained / "run") == before


restore = Checkpoints.restore


def test_an_array_that_is_restored_wrongly_is_named(trained, capsys, monkeypatch):
    monkeypatch.setattr(Checkpoints, "restore", lambda *given: runs.flip_bit(restore(*given), "params/head/weight", 3))
    code, printed = call(capsys, *resume(trained))
    assert code == 1 and "on dp=2, mp=4: the restored state DIFFERS from the saved state: params/head/weight" in printed


def test_replicas_are_compared_after_each_step_from_the_newest_checkpoint(trained, capsys, monkeypatch):
    given = ["replicas", "--cfg", runs.FIRST, "--steps", 1, *runs.overrides(trained)]
    assert call(capsys, *given) == (0, [f"step {i}: all replicas of every array are equal" for i in (4, 5)])
    monkeypatch.setattr(Checkpoints, "restore", lambda *given: runs.flip_bit(restore(*given), "params/norm/scale", 6))
    code, printed = call(capsys, *given)
    assert code == 1 and printed[:2] == [
        "step 4: REPLICAS DIFFER",
        "  params/norm/scale on device 6 (process 0) differs from its 7 other replicas",
    ]


def test_replicas_are_compared_without_touching_a_run_that_is_under_way(trained, tmp_path, capsys):
    """The run holds its lock, and saves are unfinished, which is no fault; or it has no checkpoint, nor a place."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "6.orbax-checkpoint-tmp").mkdir()
    (checkpoints / "4" / "sha256.json").unlink()  # as between the last file of a checkpoint and its hashes
    given = ["replicas", "--cfg", runs.FIRST, "--steps", 1]

    def contents() -> dict[str, bytes]:
        """Without the locks, which their owner renews."""
        return {name: content for name, content in runs.file_contents(tmp_path).items() if not name.endswith(".lock")}

    with lock_directories({"run.dir": str(tmp_path / "run"), "checkpoint.dir": str(checkpoints)}):
        before = contents()
        equal = [f"step {i}: all replicas of every array are equal" for i in (2, 3)]
        assert call(capsys, *given, *runs.overrides(tmp_path)) == (0, equal)
        under_way = ["4: being saved or deleted by a run that is under way", "2: intact"]
        assert call(capsys, "checkpoint", checkpoints) == (0, under_way)
        assert call(capsys, *given, *runs.overrides(tmp_path, f"checkpoint.dir={tmp_path / 'none'}"))[0] == 0
        assert contents() == before
    assert call(capsys, "checkpoint", checkpoints)[0] == 1  # nobody finishes that save any more
    assert (checkpoints / "6.orbax-checkpoint-tmp").is_dir() and not (tmp_path / "none").exists()


def test_each_damaged_missing_or_added_file_of_a_checkpoint_is_named(trained, tmp_path, capsys):
    directory = Path(shutil.copytree(trained / "run" / "checkpoints", tmp_path / "checkpoints"))
    assert call(capsys, "checkpoint", directory) == (0, ["4: intact", "2: intact"])
    data = max((directory / "4").rglob("*"), key=lambda file: file.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1])
    (directory / "4" / "_CHECKPOINT_METADATA").unlink()
    (directory / "4" / "notes").touch()
    before = runs.file_contents(directory)
    code, (first, *faults, last) = call(capsys, "checkpoint", directory)
    assert call(capsys, "checkpoint", directory.parent) == (code, [first, *faults, last])
    assert (code, first, last) == (1, "4: DAMAGED", "2: intact")
    assert faults == [
        "  file _CHECKPOINT_METADATA is missing",
        "  file notes was added after the save: it is not in sha256.json",
        f"  file {data.relative_to(directory / '4')} is damaged: its sha256 differs from the one in sha256.json",
    ]
    (directory / "2" / "sha256.json").write_text("[]")
    assert call(capsys, "checkpoint", directory)[1][-1] == "  sha256.json is damaged (it lists no files)"
    (directory / "2" / "sha256.json").unlink()
    assert call(capsys, "checkpoint", directory)[1][-1].endswith("missing, so its save was not finished")
    assert runs.file_contents(directory).keys() == before.keys() - {"2/sha256.json"}


def test_bad_input_is_reported_in_one_line(trained, tmp_path, capsys):
    for given, printed in [
        (["checkpoint", tmp_path], f"error: {tmp_path} has no checkpoint; name a run.dir or checkpoint.dir"),
        (["resume", "--cfg", runs.FIRST, "--onto", "3,1", *runs.overrides(trained)], "error: mesh.dp=3 does not"),
    ]:
        code, (line, *more) = call(capsys, *given)
        assert code == 2 and line.startswith(printed) and not more, line
    left = Path(shutil.copytree(trained / "run" / "checkpoints", tmp_path / "c-verify"))
    code, (line,) = call(capsys, *resume(trained), f"checkpoint.dir={tmp_path / 'c'}")
    assert code == 2 and line.startswith(f"error: {left} exists already, from a `verify` that was killed: remove it")
    assert (left / "4").exists()
    with pytest.raises(SystemExit):
        verify.parser().parse_args(["resume", "--cfg", runs.FIRST, "--onto", "8"])
    assert verify.parser().parse_args(["resume", "--cfg", runs.FIRST, "--onto", "2,4,1"]).onto == (2, 4, 1)
    assert "'8' is not a mesh; write it as in 8,1" in capsys.readouterr().err
    assert len(jax.devices()) == 8


def test_verify_data_reads_files_that_a_start_trusts(tmp_path, capsys):
    directory = runs.write_tokens(tmp_path / "data")
    for name in ("train.bin", "validation.bin"):
        os.utime(directory / name, (1e9, 1e9))
        open_token_file(directory, name.split(".")[0], context=4, vocabulary=64)
    assert call(capsys, "data", directory)[0] == 0
    runs.complete_meta(directory)
    code, said = call(capsys, "data", directory)
    assert code == 0 and all("as meta.json says" in line for line in said)
    (file := directory / "train.bin").write_bytes(b"\1" + file.read_bytes()[1:])
    os.utime(file, (1e9, 1e9))  # as a bit that has flipped on the disk
    open_token_file(directory, "train", context=4, vocabulary=64)
    code, said = call(capsys, "data", directory)
    assert code == 1 and "train.bin: sha256" in said[0] and "DAMAGED" in said[0] and "as meta.json says" in said[1]
    runs.complete_meta(directory, vocabulary=32)
    assert call(capsys, "data", directory)[0] == 1, "an id beyond the vocabulary"
    assert verify.main(["data", str(tmp_path / "nowhere")]) == 2
