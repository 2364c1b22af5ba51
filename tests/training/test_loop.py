"""The training loop: an interrupted run equals an uninterrupted one, on any mesh."""

import errno
import os
import shutil
import signal
import threading

import jax
import pytest

from shmap_tp.config.compose import load
from shmap_tp.data.batches import Batches
from shmap_tp.errors import StorageError
from shmap_tp.runtime.exit_codes import STOPPED
from shmap_tp.runtime.shutdown import StopRequest
from shmap_tp.training import checkpoint, loop
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.integrity import MANIFEST
from tests.helpers import run_fixtures as runs


@pytest.mark.parametrize(
    "number, owner, name, when, stops_at",
    [
        (signal.SIGTERM, Batches, "training", lambda step: step == 4, 5),  # in step 5, which is finished and saved
        (signal.SIGINT, Batches, "validation", lambda index, _: index == 1, 4),  # in the evaluation after step 4
        (signal.SIGTERM, Checkpoints, "save", lambda step, *_: step == 2, 2),  # while step 2 is being saved
        (signal.SIGINT, Batches, "training", lambda step: step == 7, 8),  # in the last step, before its evaluation
    ],
    ids=["in a step", "in an evaluation", "in a save", "in the last step"],
)
def test_a_resumed_run_equals_an_uninterrupted_run(
    uninterrupted, tmp_path, monkeypatch, capsys, number, owner, name, when, stops_at
):
    with monkeypatch.context() as patch:
        runs.signal_during(patch, owner, name, number, when)
        assert loop.train(runs.tiny(tmp_path)) == STOPPED
    message = capsys.readouterr().out
    assert f"stopped and saved at step {stops_at} of {runs.STEPS}" in message and "--resume" in message
    assert max(runs.checkpoint_steps(tmp_path)) == stops_at == runs.lines(tmp_path)[-1]["step"]
    assert (tmp_path / "run" / "report.html").exists()
    assert loop.train(runs.tiny(tmp_path, "checkpoint.resume=must")) == 0
    assert f"resuming from step {stops_at}" in capsys.readouterr().out
    runs.assert_same_run(tmp_path, uninterrupted)


@pytest.mark.parametrize("keep_every, saved", [("null", [2, 5, 6, 8]), ("4", [2, 4, 6, 8])])
def test_a_save_that_is_not_finished_delays_the_next_one_unless_that_is_kept_forever(
    uninterrupted, tmp_path, monkeypatch, capsys, keep_every, saved
):
    """The save of step 2 lasts until step 5 is begun, or until the loop has waited for it after step 4."""
    finish, made = threading.Event(), list[Checkpoints]()
    training, delays, hashes = Batches.training, Checkpoints.delays, checkpoint.hashes

    def next_batch(batches, step):
        if step == 4:
            finish.set()
            made[0]._saving.exception()
        return training(batches, step)

    def asked(checkpoints, step, patience):
        made.append(checkpoints)
        if keep_every == "4":
            threading.Timer(0.2, finish.set).start()
        return delays(checkpoints, step, 0.0 if step == 4 else patience)

    monkeypatch.setattr(Batches, "training", next_batch)
    monkeypatch.setattr(Checkpoints, "delays", asked)
    monkeypatch.setattr(checkpoint, "hashes", lambda directory: finish.wait(60) and hashes(directory))
    assert loop.train(runs.tiny(tmp_path, f"checkpoint.keep_every={keep_every}", "checkpoint.keep=9")) == 0
    said = "the checkpoint of step 4 is delayed until the one before it is written"
    assert capsys.readouterr().out.count(said) == (keep_every == "null")
    assert runs.checkpoint_steps(tmp_path) == saved
    runs.assert_same_run(tmp_path, uninterrupted)


def test_a_failed_save_ends_the_run_at_the_next_step(tmp_path, monkeypatch):
    """Not when the next checkpoint is due, three steps later."""
    original, made = Batches.training, list[Checkpoints]()

    def training(batches, step):
        if step == 3:
            assert made[0]._saving.exception()
        return original(batches, step)

    def full(directory):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(Batches, "training", training)
    monkeypatch.setattr(Checkpoints, "__enter__", lambda self: made.append(self) or self)
    monkeypatch.setattr(checkpoint, "hashes", full)
    with pytest.raises(StorageError, match=r"checkpoint .*/3 could not be written: No space left"):
        loop.train(runs.tiny(tmp_path, "checkpoint.every=3"))
    assert runs.lines(tmp_path)[-1]["step"] == 3


def test_a_stop_during_resume_changes_nothing(copied, monkeypatch):
    shutil.rmtree(copied / "run" / "checkpoints" / "8")
    before = runs.file_contents(copied)
    for name in ("newest_intact", "restore", "facts"):
        with monkeypatch.context() as patch:
            runs.signal_during(patch, Checkpoints, name, signal.SIGTERM, lambda *_: True)
            assert loop.train(runs.tiny(copied, "checkpoint.resume=must")) == STOPPED, name
        assert runs.file_contents(copied) == before, name


def test_a_finished_run_can_be_extended(uninterrupted, tmp_path):
    assert loop.train(runs.tiny(tmp_path, "train.steps=4")) == 0
    assert loop.train(runs.tiny(tmp_path, "checkpoint.resume=must")) == 0
    runs.assert_same_run(tmp_path, uninterrupted)
    assert [line["segment"] for line in runs.lines(tmp_path)] == [0] * 4 + [1] * 4


def test_a_killed_run_resumes_from_its_newest_complete_checkpoint(uninterrupted, copied):
    """The state that SIGKILL leaves: metrics.jsonl has lost steps and a partial last line, a save is incomplete."""
    run = copied / "run"
    shutil.rmtree(run / "checkpoints" / "8")
    shutil.copytree(run / "checkpoints" / "6", run / "checkpoints" / "8.orbax-checkpoint-tmp")
    (run / "checkpoints" / "6" / MANIFEST).unlink()  # killed between the files and their hashes
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text[: text.index('"step": 7') + 30])
    assert loop.train(runs.tiny(copied, "checkpoint.resume=must")) == 0
    runs.assert_same_run(copied, uninterrupted)
    assert [line["segment"] for line in runs.lines(copied)] == [0] * 4 + [1] * 4


def test_a_run_resumes_on_the_remaining_devices_in_another_tensor_parallel_mode(uninterrupted, copied, monkeypatch):
    """With mesh.dp=auto on four of eight devices, each of which computes one sequence at a time.

    That a state is restored bit for bit on every mesh: test_checkpoint.py; that all have one curve: test_step.py.
    """
    for step in (6, 8):
        shutil.rmtree(copied / "run" / "checkpoints" / str(step))
    remaining = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda: remaining)
    given = ["mesh.dp=auto", "mesh.mp=2", "mesh.tensor_parallel=sequence", "train.max_sequences_per_device=1"]
    assert loop.train(runs.tiny(copied, "checkpoint.resume=if_present", "evaluate.every=0", *given)) == 0
    assert [line["mesh"] for line in runs.lines(copied)] == [[2, 4]] * 4 + [[2, 2]] * 4
    found, expected = ([line["loss"] for line in runs.lines(each)] for each in (copied, uninterrupted))
    assert found == pytest.approx(expected, rel=1e-6, abs=0)
    assert load(str(copied / "run" / "config.yaml"), []).mesh.dp == "auto"


def test_evaluation_does_not_change_the_training(uninterrupted, tmp_path):
    assert loop.train(runs.tiny(tmp_path, "evaluate.every=0", "checkpoint.every=0")) == 0
    assert runs.values(tmp_path) == runs.values(uninterrupted)
    assert runs.state_at(tmp_path, runs.STEPS) == runs.state_at(uninterrupted, runs.STEPS)
    assert [line["step"] for line in runs.lines(tmp_path, "validation")] == [runs.STEPS]
    assert [line["step"] for line in runs.lines(uninterrupted, "validation")] == [4, runs.STEPS]


def test_the_first_signal_requests_a_stop_and_a_second_ctrl_c_interrupts():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with StopRequest() as stop:
        stop.begin_training()
        assert not stop.requested()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert {number: signal.getsignal(number) for number in before} == before
