"""The training loop: an interrupted run equals an uninterrupted one, on any mesh."""

import os
import shutil
import signal

import jax
import pytest

from shmap_tp.config.compose import load
from shmap_tp.data.batches import Batches
from shmap_tp.runtime.exit_codes import STOPPED
from shmap_tp.runtime.shutdown import StopRequest
from shmap_tp.training import loop
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.checkpoint_files import MANIFEST
from shmap_tp.training.optimizer import learning_rate_schedule
from shmap_tp.training.step import State
from tests.helpers.run_fixtures import (
    STEPS,
    checkpoint_steps,
    file_contents,
    lines,
    signal_during,
    state_at,
    tiny,
    values,
)

MESHES = [(1, 1), (8, 1), (4, 2), (2, 4), (1, 8)]


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
        signal_during(patch, owner, name, number, when)
        assert loop.train(tiny(tmp_path)) == STOPPED
    message = capsys.readouterr().out
    assert f"stopped and saved at step {stops_at} of {STEPS}" in message and "--resume" in message
    assert max(checkpoint_steps(tmp_path)) == stops_at == lines(tmp_path)[-1]["step"]
    assert (tmp_path / "run" / "loss.png").stat().st_size > 1000
    assert loop.train(tiny(tmp_path, "checkpoint.resume=must")) == 0
    assert f"resuming from step {stops_at}" in capsys.readouterr().out
    assert state_at(tmp_path, STEPS) == state_at(uninterrupted, STEPS)
    assert values(tmp_path) == values(uninterrupted)
    assert values(tmp_path, "validation") == values(uninterrupted, "validation")


@pytest.mark.parametrize("name", ["newest_intact", "restore", "facts"])
def test_a_stop_during_resume_changes_nothing(copied, monkeypatch, name):
    shutil.rmtree(copied / "run" / "checkpoints" / "8")
    before = file_contents(copied)
    signal_during(monkeypatch, Checkpoints, name, signal.SIGTERM, lambda *_: True)
    assert loop.train(tiny(copied, "checkpoint.resume=must")) == STOPPED
    assert file_contents(copied) == before


def test_a_finished_run_can_be_extended(uninterrupted, tmp_path):
    assert loop.train(tiny(tmp_path, "train.steps=4")) == 0
    assert loop.train(tiny(tmp_path, "checkpoint.resume=must")) == 0
    assert state_at(tmp_path, STEPS) == state_at(uninterrupted, STEPS)
    assert values(tmp_path) == values(uninterrupted)
    assert [line["segment"] for line in lines(tmp_path)] == [0] * 4 + [1] * 4


def test_a_wsd_run_goes_on_from_its_stable_part_at_the_rates_of_the_longer_schedule(tmp_path, capsys):
    wsd = ["mesh.dp=1", "mesh.mp=1", "evaluate.every=0", "optimizer.schedule=wsd", "optimizer.decay_fraction=0.5"]
    assert loop.train(tiny(tmp_path, *wsd, "train.steps=3", "optimizer.decay_steps=6")) == 0
    assert "; the decay after step 3 (optimizer.decay_steps=6) begins after train.steps" in capsys.readouterr().out
    longer = tiny(tmp_path, *wsd, "train.steps=8", "optimizer.decay_steps=8", "checkpoint.resume=must")
    assert loop.train(longer) == 0
    assert "constant until step 4, then a linear decay down to 0.0003 at step 8\n" in capsys.readouterr().out
    schedule = learning_rate_schedule(longer.optimizer)
    assert [line["learning_rate"] for line in lines(tmp_path)] == [float(schedule(n)) for n in range(8)]


def test_a_killed_run_resumes_from_its_newest_complete_checkpoint(uninterrupted, copied):
    """The state that SIGKILL leaves: metrics.jsonl has lost steps and a partial last line, a save is incomplete."""
    run = copied / "run"
    shutil.rmtree(run / "checkpoints" / "8")
    shutil.copytree(run / "checkpoints" / "6", run / "checkpoints" / "8.orbax-checkpoint-tmp")
    (run / "checkpoints" / "6" / MANIFEST).unlink()  # killed between the files and their hashes
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text[: text.index('"step": 7') + 30])
    assert loop.train(tiny(copied, "checkpoint.resume=must")) == 0
    assert state_at(copied, STEPS) == state_at(uninterrupted, STEPS)
    assert values(copied) == values(uninterrupted)
    assert values(copied, "validation") == values(uninterrupted, "validation")
    assert [line["segment"] for line in lines(copied)] == [0] * 4 + [1] * 4


def test_a_checkpoint_of_any_mesh_continues_on_another_mesh(functions, tmp_path):
    """Each mesh saves for itself and for the next one: the losses that follow agree to 1e-6, on its own mesh exactly.

    That a state is restored bit for bit on every mesh: test_checkpoint.py.
    """
    trained, more = 3, 3
    config = tiny(tmp_path, "checkpoint.keep=9")

    def train_on(mesh: tuple[int, int], state: State, first: int, last: int) -> tuple[State, list[float]]:
        batches, losses = Batches(config, functions(*mesh).tokens), []
        for step in range(first, last):
            state, measured = functions(*mesh).step(state, batches.training(step))
            losses.append(float(measured["loss"]))
        return state, losses

    initial = functions(2, 4).init()
    with Checkpoints(config.checkpoint, print) as checkpoints:
        checkpoints.save(0, initial, {})
        checkpoints.wait()
        for number, source in enumerate(MESHES, start=1):
            state, _ = train_on(source, checkpoints.restore(0, functions(*source).shapes), 0, trained)
            checkpoints.save(number, state, {})
            checkpoints.wait()
            _, expected = train_on(source, state, trained, trained + more)
            for target in (source, MESHES[number % len(MESHES)]):
                restored = checkpoints.restore(number, functions(*target).shapes)
                _, losses = train_on(target, restored, trained, trained + more)
                assert losses == pytest.approx(expected, rel=1e-6, abs=0), (source, target)
                assert target != source or losses == expected
            assert len(set(expected)) == more, "otherwise the comparison would be empty"


def test_a_run_resumes_on_another_mesh_in_another_tensor_parallel_mode(uninterrupted, copied):
    run = copied / "run"
    for step in (6, 8):
        shutil.rmtree(run / "checkpoints" / str(step))
    other = ["mesh.dp=4", "mesh.mp=2", "mesh.tensor_parallel=sequence"]
    assert loop.train(tiny(copied, "checkpoint.resume=must", *other)) == 0
    assert [line["mesh"] for line in lines(copied)] == [[2, 4]] * 4 + [[4, 2]] * 4
    assert [line["loss"] for line in lines(copied)] == pytest.approx(
        [line["loss"] for line in lines(uninterrupted)], rel=1e-6
    )


def test_dp_auto_resumes_on_the_remaining_devices(uninterrupted, tmp_path, monkeypatch):
    """Four steps each on 8 and 2 devices, with the same command; a device computes one sequence at a time."""
    every = jax.devices()
    for steps, devices in ((4, 8), (8, 2)):
        monkeypatch.setattr(jax, "devices", lambda count=devices: every[:count])
        given = ["mesh.dp=auto", "mesh.mp=1", "train.max_sequences_per_device=1", f"train.steps={steps}"]
        assert loop.train(tiny(tmp_path, *given, "evaluate.every=0", "checkpoint.resume=if_present")) == 0
    assert [line["mesh"] for line in lines(tmp_path)] == [[8, 1]] * 4 + [[2, 1]] * 4
    assert [line["loss"] for line in lines(tmp_path)] == pytest.approx(
        [line["loss"] for line in lines(uninterrupted)], rel=1e-6, abs=0
    )
    assert load(str(tmp_path / "run" / "config.yaml"), []).mesh.dp == "auto"


def test_evaluation_does_not_change_the_training(uninterrupted, tmp_path):
    assert loop.train(tiny(tmp_path, "evaluate.every=0", "checkpoint.every=0")) == 0
    assert values(tmp_path) == values(uninterrupted)
    assert state_at(tmp_path, STEPS) == state_at(uninterrupted, STEPS)
    assert [line["step"] for line in lines(tmp_path, "validation")] == [STEPS]
    assert [line["step"] for line in lines(uninterrupted, "validation")] == [4, STEPS]


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
