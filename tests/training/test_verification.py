"""`python -m shmap_tp.verify`: what is well is said to be, and what is not is found and named."""

import shutil
from pathlib import Path

import jax
import pytest

from shmap_tp.training import loop as train
from shmap_tp.training import verification as verify
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.step import State
from tests.helpers.run_fixtures import FIRST, overrides, tiny
from tests.training.test_replica_check import spoilt


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The tiny run, with the checkpoints 2 and 4; `run` and `data` lie in this directory."""
    directory = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "machine_peak", lambda devices: None)
        assert train.train(tiny(directory, "train.steps=4", "evaluate.every=0")) == 0
    return directory


def call(capsys, *arguments: object) -> tuple[int, list[str]]:
    """(exit code, lines of what is said)."""
    parsed = verify.parser().parse_args([str(one) for one in arguments])
    code = verify.door(lambda: verify.main(parsed))
    said = capsys.readouterr()
    return code, (said.out + said.err).splitlines()


def resume(directory: Path) -> list[object]:
    return ["resume", "--cfg", FIRST, "--onto", "8,1", "--steps", 2, *overrides(directory)]


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def test_a_run_goes_on_bit_for_bit_on_its_mesh_and_close_on_another(trained, capsys):
    before = snapshot(trained)
    code, said = call(capsys, *resume(trained))
    assert code == 0
    assert said[0] == "on dp=2, mp=4: restored bit for bit what was saved"
    assert said[1] == "  2 steps on 38 of 38 arrays are bit for bit those of the straight run"
    assert said[2].startswith("  losses      0.0e+00 apart at most")
    assert said[3] == "on dp=8, mp=1: restored bit for bit what was saved"
    assert all(float(line.split()[0]) < 1e-5 for line in said if "of its largest value" in line)
    assert snapshot(trained) == before


def flipped(checkpoints: Checkpoints, step: int, shapes: State) -> State:
    return spoilt(restore(checkpoints, step, shapes), "params/head/weight", 3)


restore = Checkpoints.restore


def test_a_bit_that_a_restore_gets_wrong_is_named(trained, capsys, monkeypatch):
    monkeypatch.setattr(Checkpoints, "restore", flipped)
    code, said = call(capsys, *resume(trained))
    assert code == 1 and "on dp=2, mp=4: restored NOT what was saved: params/head/weight" in said


def test_copies_are_compared_after_each_step_from_the_newest_checkpoint(trained, capsys, monkeypatch):
    given = ["replicas", "--cfg", FIRST, "--steps", 1, *overrides(trained)]
    assert call(capsys, *given) == (0, [f"step {i}: all copies of every array are the same bits" for i in (4, 5)])
    monkeypatch.setattr(Checkpoints, "restore", lambda *given: spoilt(restore(*given), "params/norm/scale", 6))
    code, said = call(capsys, *given)
    assert code == 1 and said[:2] == [
        "step 4: COPIES DIFFER",
        "  params/norm/scale on device 6 (process 0) is not what its 7 other copies are",
    ]


def test_each_damaged_missing_or_added_file_of_a_checkpoint_is_named(trained, tmp_path, capsys):
    where = Path(shutil.copytree(trained / "run" / "checkpoints", tmp_path / "checkpoints"))
    assert call(capsys, "checkpoint", where) == (0, ["4: intact", "2: intact"])
    data = max((where / "4").rglob("*"), key=lambda file: file.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1])
    (where / "4" / "_CHECKPOINT_METADATA").unlink()
    (where / "4" / "notes").touch()
    before = snapshot(where)
    code, (first, *faults, last) = call(capsys, "checkpoint", where)
    assert (code, first, last) == (1, "4: NOT to be used", "2: intact")
    assert faults == [
        "  file _CHECKPOINT_METADATA is missing",
        "  file notes was not saved with it: it is not in sha256.json",
        f"  file {data.relative_to(where / '4')} is not what was saved: its sha256 is not the one in sha256.json",
    ]
    (where / "2" / "sha256.json").write_text("[]")
    assert call(capsys, "checkpoint", where)[1][-1] == "  sha256.json is not what was saved (it names no files)"
    (where / "2" / "sha256.json").unlink()
    assert call(capsys, "checkpoint", where)[1][-1].endswith("missing, so its save was not finished")
    assert snapshot(where).keys() == before.keys() - {str(where / "2" / "sha256.json")}


def test_mistakes_are_told_in_a_line(trained, tmp_path, capsys):
    for given, said in [
        (["checkpoint", tmp_path], f"error: {tmp_path} holds no checkpoint; name the checkpoint.dir of a run"),
        (["resume", "--cfg", FIRST, "--onto", "3,1", *overrides(trained)], "error: mesh.dp=3 does not divide"),
        (["resume", "--cfg", FIRST, "--onto", "2,2", *overrides(trained)], "error: mesh dp=2 x mp=2 needs 4 devices"),
    ]:
        code, (line, *more) = call(capsys, *given)
        assert code == 2 and line.startswith(said) and not more, line
    left = Path(shutil.copytree(trained / "run" / "checkpoints", tmp_path / "c-doctor"))
    code, (line,) = call(capsys, *resume(trained), f"checkpoint.dir={tmp_path / 'c'}")
    assert code == 2 and line.startswith(f"error: {left} is there already, of a doctor that was killed: remove it")
    assert (left / "4").exists()
    with pytest.raises(SystemExit):
        verify.parser().parse_args(["resume", "--cfg", FIRST, "--onto", "8"])
    assert "'8' is no mesh; write it as in 8,1" in capsys.readouterr().err
    assert len(jax.devices()) == 8
