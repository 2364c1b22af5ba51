"""The training loop: an interrupted run equals an uninterrupted one, on any mesh."""

import os
import shutil
import signal

import jax
import jax.numpy as jnp
import pytest

from shmap_tp.config.compose import load
from shmap_tp.data.batches import Batches
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.runtime.exit_codes import STOPPED
from shmap_tp.runtime.shutdown import StopRequest
from shmap_tp.training import loop
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.checkpoint_files import MANIFEST
from shmap_tp.training.step import State, build_step_functions
from tests.helpers.run_fixtures import (
    STEPS,
    bits,
    checkpoint_steps,
    file_contents,
    lines,
    signal_during,
    state_at,
    tiny,
    values,
)

MESHES = [(1, 1), (8, 1), (4, 2), (2, 4), (1, 8)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "owner, name, when, stops_at",
    [
        (Batches, "training", lambda step: step == 4, 5),  # during step 5, which is finished and saved
        (Batches, "validation", lambda index: index == 1, 4),  # in the evaluation after step 4
        (Checkpoints, "save", lambda step, *_: step == 2, 2),  # while step 2 is being saved
        (Batches, "training", lambda step: step == 7, 8),  # during the last step, before its evaluation
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
def test_a_stop_during_resume_changes_nothing(uninterrupted, copied, monkeypatch, name):
    shutil.rmtree(copied / "run" / "checkpoints" / "8")
    before = file_contents(copied)
    with monkeypatch.context() as patch:
        signal_during(patch, Checkpoints, name, signal.SIGTERM, lambda *_: True)
        assert loop.train(tiny(copied, "checkpoint.resume=must")) == STOPPED
    assert file_contents(copied) == before
    assert loop.train(tiny(copied, "checkpoint.resume=must")) == 0
    assert state_at(copied, STEPS) == state_at(uninterrupted, STEPS)
    assert values(copied) == values(uninterrupted)


def test_a_finished_run_can_be_extended(uninterrupted, tmp_path):
    assert loop.train(tiny(tmp_path, "train.steps=4")) == 0
    assert loop.train(tiny(tmp_path, "checkpoint.resume=must")) == 0
    assert state_at(tmp_path, STEPS) == state_at(uninterrupted, STEPS)
    assert values(tmp_path) == values(uninterrupted)
    assert [line["segment"] for line in lines(tmp_path)] == [0] * 4 + [1] * 4


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


def test_a_checkpoint_of_any_mesh_resumes_on_every_other_mesh(tmp_path):
    """All ordered pairs: the restored state is bitwise equal, and the losses that follow agree to 1e-6."""
    trained, more = 3, 3
    config = tiny(tmp_path, "checkpoint.keep=9")
    functions, steps = {}, {}
    for dp, mp in MESHES:
        here = tiny(tmp_path, f"mesh.dp={dp}", f"mesh.mp={mp}")
        functions[dp, mp] = build_step_functions(here, make_mesh(here.mesh, jax.devices()[: dp * mp]), jnp.float32)
        steps[dp, mp] = functions[dp, mp].step.lower(functions[dp, mp].shapes, functions[dp, mp].tokens).compile()

    def train_on(mesh: tuple[int, int], state: State, first: int, last: int) -> tuple[State, list[float]]:
        batches, losses = Batches(config, functions[mesh].tokens), []
        for step in range(first, last):
            state, measured = steps[mesh](state, batches.training(step))
            losses.append(float(measured["loss"]))
        return state, losses

    initial = functions[2, 4].init()
    with Checkpoints(config.checkpoint, print) as checkpoints:
        checkpoints.save(0, initial, {})
        checkpoints.wait()
        compared = 0
        for number, source in enumerate(MESHES, start=1):
            state, _ = train_on(source, checkpoints.restore(0, functions[source].shapes), 0, trained)
            saved = bits(state)
            checkpoints.save(number, state, {})
            checkpoints.wait()
            _, expected = train_on(source, state, trained, trained + more)
            for target in MESHES:
                restored = checkpoints.restore(number, functions[target].shapes)
                assert bits(restored) == saved, (source, target)
                _, losses = train_on(target, restored, trained, trained + more)
                assert losses == pytest.approx(expected, rel=1e-6, abs=0), (source, target)
                assert target != source or losses == expected
                compared += 1
            if number == 1:  # otherwise the comparison would be empty
                assert len(set(expected)) == more
    assert compared == 25


@pytest.mark.parametrize("override", ["mesh.dp=8 mesh.mp=1", "mesh.tensor_parallel=sequence"])
def test_a_run_resumes_on_another_mesh_or_tensor_parallel_mode(uninterrupted, copied, override):
    run = copied / "run"
    for step in (6, 8):
        shutil.rmtree(run / "checkpoints" / str(step))
    assert loop.train(tiny(copied, "checkpoint.resume=must", *override.split())) == 0
    assert [line["mesh"] for line in lines(copied)] == [[2, 4]] * 4 + [
        [2, 4] if "tensor_parallel" in override else [8, 1]
    ] * 4
    assert [line["loss"] for line in lines(copied)] == pytest.approx(
        [line["loss"] for line in lines(uninterrupted)], rel=1e-6
    )


def test_dp_auto_resumes_on_the_remaining_devices(uninterrupted, tmp_path, monkeypatch):
    """Two steps each on 8, 4, 2 and 1 devices, with the same command; a device computes one sequence at a time."""
    every = jax.devices()
    for steps, devices in zip((2, 4, 6, 8), (8, 4, 2, 1), strict=True):
        monkeypatch.setattr(jax, "devices", lambda count=devices: every[:count])
        given = ["mesh.dp=auto", "mesh.mp=1", "train.max_sequences_per_device=1", f"train.steps={steps}"]
        assert loop.train(tiny(tmp_path, *given, "evaluate.every=0", "checkpoint.resume=if_present")) == 0
    assert [line["mesh"] for line in lines(tmp_path)] == [[dp, 1] for dp in (8, 8, 4, 4, 2, 2, 1, 1)]
    assert [line["loss"] for line in lines(tmp_path)] == pytest.approx(
        [line["loss"] for line in lines(uninterrupted)], rel=1e-6, abs=0
    )
    assert load(str(tmp_path / "run" / "config.yaml"), []).mesh.dp == "auto"


def test_evaluation_does_not_change_the_training(uninterrupted, tmp_path):
    for every in (0, 1):
        assert loop.train(tiny(tmp_path / str(every), f"evaluate.every={every}", "checkpoint.every=0")) == 0
        assert values(tmp_path / str(every)) == values(uninterrupted)
        assert state_at(tmp_path / str(every), STEPS) == state_at(uninterrupted, STEPS)
    assert [line["step"] for line in lines(tmp_path / "0", "validation")] == [STEPS]
    assert [line["step"] for line in lines(tmp_path / "1", "validation")] == list(range(1, STEPS + 1))


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
