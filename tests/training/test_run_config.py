"""config.yaml of the run directory never replaces a file of the user's, nor other values without a word."""

import shutil
from pathlib import Path

import pytest
from etils import epath

from shmap_tp.config.compose import load
from shmap_tp.config.yaml_files import HEADER
from shmap_tp.errors import UserError
from shmap_tp.training import loop
from shmap_tp.training.checkpoint_files import directory_of_checkpoints
from shmap_tp.training.resume import refuse_foreign_config, write_run_config
from shmap_tp.training.run import count_in_words
from tests.helpers.run_fixtures import FIRST, file_contents, overrides, tiny


def test_a_run_directory_with_a_configuration_of_the_user_is_refused_and_not_changed(tmp_path):
    given = overrides(tmp_path)
    own = tmp_path / "run" / "config.yaml"
    own.parent.mkdir()
    own.write_bytes(Path(FIRST).read_bytes())
    before = file_contents(tmp_path)
    with pytest.raises(UserError, match="that was not written by a run, and that this one would"):
        loop.train(load(FIRST, given))
    assert file_contents(tmp_path) == before


def test_a_configuration_that_cannot_be_recognised_is_refused(tmp_path):
    file = tmp_path / "config.yaml"
    for content in (b"", b"\xff\x00", b"- a\n- b\n"):
        file.write_bytes(content)
        with pytest.raises(UserError, match="was not written by a run"):
            refuse_foreign_config(str(tmp_path))
    file.unlink()
    file.mkdir()
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        refuse_foreign_config(str(tmp_path))


def test_the_configuration_of_a_run_loads_again_and_is_accepted_in_its_directory(tmp_path):
    config = tiny(tmp_path)
    write_run_config(config, tmp_path)
    refuse_foreign_config(str(tmp_path))
    assert load(str(tmp_path / "config.yaml"), []) == config


def test_a_start_with_other_values_prints_them_and_keeps_the_earlier_file(tmp_path, capsys):
    write_run_config(tiny(tmp_path), tmp_path)
    first = (tmp_path / "config.yaml").read_bytes()
    write_run_config(tiny(tmp_path, "checkpoint.resume=must"), tmp_path)
    assert capsys.readouterr().out == "" and not (tmp_path / "config.1.yaml").exists()
    write_run_config(tiny(tmp_path, "train.steps=9", "guard.loss_spike_sigmas=6", "checkpoint.resume=must"), tmp_path)
    assert capsys.readouterr().out.splitlines() == [
        f"the configuration differs from that of the last start, which is now in {tmp_path}/config.1.yaml:",
        "  train.steps: 8 -> 9",
        "  guard.loss_spike_sigmas: null -> 6.0",
    ]
    assert (tmp_path / "config.1.yaml").read_bytes() == first.replace(b"resume: never", b"resume: must")
    many = ["train.steps=10", *(f"model.{key}=128" for key in ("width", "ffn", "vocabulary", "vocabulary_multiple"))]
    many += ["optimizer.beta1=0.8", "optimizer.beta2=0.9", "optimizer.epsilon=1e-6", "optimizer.clip_norm=2"]
    many += ["train.batch=16", "evaluate.every=3", "checkpoint.every=3", "checkpoint.keep=4"]
    write_run_config(tiny(tmp_path, *many), tmp_path)
    _, *printed, more = capsys.readouterr().out.splitlines()
    assert len(printed) == 10 and more == "  and 4 more"
    assert load(str(tmp_path / "config.2.yaml"), []).train.steps == 9


def test_a_copied_run_resumes_in_its_own_directory(uninterrupted, tmp_path):
    copy, original = shutil.copytree(uninterrupted / "run", tmp_path / "copy"), file_contents(uninterrupted)
    assert loop.train(load(str(copy / "config.yaml"), ["train.steps=10", "checkpoint.resume=must"])) == 0
    assert (copy / "checkpoints" / "10").is_dir() and file_contents(uninterrupted) == original


def written_run(directory: Path, *more: str) -> Path:
    """A run directory that has started; returns its config.yaml."""
    config = tiny(directory, *more)
    (run := Path(config.run.dir)).mkdir()
    write_run_config(config, run)
    (run / "time.jsonl").touch()
    return run / "config.yaml"


def test_a_moved_run_and_one_whose_run_dir_is_given_have_their_checkpoints_there(tmp_path, monkeypatch):
    file = written_run(tmp_path, f"checkpoint.dir={tmp_path / 'run' / 'saved'}")
    other = load(str(file), ["run.dir=other"])
    assert (other.run.dir, other.checkpoint.dir) == ("other", "other/saved")
    assert load(str(file), ["run.dir=other", "checkpoint.dir=saved"]).checkpoint.dir == "saved"
    moved = file.parent.rename(tmp_path / "moved")
    monkeypatch.chdir(moved)
    here = load("config.yaml", [])
    assert (here.run.dir, here.checkpoint.dir) == (".", "./saved")
    assert directory_of_checkpoints(epath.Path(moved)) == epath.Path(moved / "saved")


def test_a_copy_that_would_share_the_checkpoints_of_the_original_is_refused(tmp_path):
    file = written_run(tmp_path, f"checkpoint.dir={tmp_path / 'saved'}")
    copy = shutil.copytree(file.parent, tmp_path / "copy") / "config.yaml"
    with pytest.raises(UserError, match=f"copy is a copy of the run {file.parent}, and both would save to"):
        load(str(copy), [])
    assert load(str(copy), ["checkpoint.dir=own"]).run.dir == str(copy.parent)
    file.parent.rename(tmp_path / "gone")
    assert load(str(copy), []).checkpoint.dir == str(tmp_path / "saved")


def test_a_damaged_earlier_file_is_kept(tmp_path, capsys):
    damaged = f"{HEADER}\nrun: [".encode()
    (tmp_path / "config.yaml").write_bytes(damaged)
    write_run_config(tiny(tmp_path), tmp_path)
    assert "  the earlier file is damaged" in capsys.readouterr().out
    assert (tmp_path / "config.1.yaml").read_bytes() == damaged


def test_the_number_of_parameters_of_a_tiny_model_is_not_zero_million():
    words = [count_in_words(number) for number in (700, 99_999, 100_000, 1_234_567_890)]
    assert words == ["700", "99,999", "0.1M", "1,234.6M"]
