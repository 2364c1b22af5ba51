"""Runs: an interrupted run equals an uninterrupted one; what can be resumed, and what is refused."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shmap_tp.config.compose import load
from shmap_tp.data.batches import Batches
from shmap_tp.errors import UserError
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.runtime.exit_codes import STOPPED
from shmap_tp.runtime.shutdown import StopRequest
from shmap_tp.training import loop, metrics
from shmap_tp.training.checkpoint import MANIFEST, Checkpoints
from shmap_tp.training.loss_plot import plot_losses
from shmap_tp.training.metrics import Meter, Recorder, read_metrics
from shmap_tp.training.step import State, build_step_functions
from tests.helpers.run_fixtures import (
    BATCH,
    CONTEXT,
    bits,
    checkpoint_steps,
    lines,
    run_uninterrupted,
    signal_during,
    state_at,
    tiny,
    values,
    write_tokens,
)

MESHES = [(1, 1), (8, 1), (4, 2), (2, 4), (1, 8)]
STEPS = 8  # of the tiny run, which evaluates at 4 and 8 and saves at 2, 4, 6 and 8


@pytest.fixture(autouse=True)
def no_peak(monkeypatch):
    """Do not measure the peak FLOP/s: it takes a second, and no test here uses it."""
    monkeypatch.setattr(loop, "machine_peak", lambda devices: None)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    """The tiny run from step 0 to 8; this directory has `run` and `data`."""
    return run_uninterrupted(tmp_path_factory)


@pytest.fixture
def copied(uninterrupted, tmp_path) -> Path:
    """A copy of the finished run, to be resumed or damaged."""
    return Path(shutil.copytree(uninterrupted, tmp_path / "copied"))


def snapshot(directory: Path) -> dict[str, bytes]:
    """The contents of every file below `directory`."""
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


# Interrupted equals uninterrupted


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "owner, name, when, stops_at",
    [
        (Batches, "training", lambda step: step == 4, 5),  # during step 5, which is finished and saved
        (Batches, "validation", lambda index: index == 1, 4),  # in the evaluation after step 4
        (Checkpoints, "save", lambda step, *_: step == 2, 2),  # while step 2 is being saved
        (
            Batches,
            "training",
            lambda step: step == 7,
            8,
        ),  # during the last step: the resumed run makes up for its evaluation
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
    before = snapshot(copied)
    with monkeypatch.context() as patch:
        signal_during(patch, Checkpoints, name, signal.SIGTERM, lambda *_: True)
        assert loop.train(tiny(copied, "checkpoint.resume=must")) == STOPPED
    assert snapshot(copied) == before
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
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole[: whole.index('"step": 7') + 30])
    assert loop.train(tiny(copied, "checkpoint.resume=must")) == 0
    assert state_at(copied, STEPS) == state_at(uninterrupted, STEPS)
    assert values(copied) == values(uninterrupted)
    assert values(copied, "validation") == values(uninterrupted, "validation")
    assert [line["segment"] for line in lines(copied)] == [0] * 4 + [1] * 4


def test_a_checkpoint_of_any_mesh_resumes_on_every_other_mesh(tmp_path):
    """All ordered pairs: the restored state is bitwise equal, and the losses that follow agree to 1e-6."""
    trained, more = 3, 3
    config = tiny(tmp_path, "checkpoint.keep=9")
    programs, steps = {}, {}
    for dp, mp in MESHES:
        here = tiny(tmp_path, f"mesh.dp={dp}", f"mesh.mp={mp}")
        programs[dp, mp] = build_step_functions(here, make_mesh(here.mesh, jax.devices()[: dp * mp]), jnp.float32)
        steps[dp, mp] = programs[dp, mp].step.lower(programs[dp, mp].shapes, programs[dp, mp].tokens).compile()

    def train_on(mesh: tuple[int, int], state: State, first: int, last: int) -> tuple[State, list[float]]:
        batches, losses = Batches(config, programs[mesh].tokens), []
        for step in range(first, last):
            state, measured = steps[mesh](state, batches.training(step))
            losses.append(float(measured["loss"]))
        return state, losses

    initial = programs[2, 4].init()
    with Checkpoints(config.checkpoint, print) as checkpoints:
        checkpoints.save(0, initial, {})
        checkpoints.wait()
        compared = 0
        for number, source in enumerate(MESHES, start=1):
            state, _ = train_on(source, checkpoints.restore(0, programs[source].shapes), 0, trained)
            saved = bits(state)
            checkpoints.save(number, state, {})
            checkpoints.wait()
            _, expected = train_on(source, state, trained, trained + more)
            for target in MESHES:
                restored = checkpoints.restore(number, programs[target].shapes)
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


# The contents of a run directory


def test_the_run_directory_has_the_documented_files(uninterrupted):
    run = uninterrupted / "run"
    files = {"config.yaml", "metrics.jsonl", "time.jsonl", "checkpoints", "loss.png"}
    assert {path.name for path in run.iterdir()} == files
    assert checkpoint_steps(uninterrupted) == [4, 6, 8]
    assert load(str(run / "config.yaml"), []) == tiny(uninterrupted)
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_each_line_of_metrics_has_the_documented_fields(uninterrupted):
    for line in map(json.loads, (uninterrupted / "run" / "metrics.jsonl").read_text().splitlines()):
        assert line["split"] in ("train", "validation") and line["mesh"] == [2, 4]
        assert type(line["step"]) is int and 1 <= line["step"] <= STEPS
        assert 3 < line["loss"] < 5
        if line["split"] == "train":
            assert line["tokens_per_second"] > 0 and line["grad_norm"] > 0 and 0 < line["goodput"] < 1
            assert line["skipped"] == line["skipped_in_a_row"] == 0 and "sequences" not in line
            assert line["tokens"] == line["step"] * BATCH * CONTEXT
    assert [line["step"] for line in lines(uninterrupted)] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines(uninterrupted, "validation")] == [4, 8]
    rates = [line["learning_rate"] for line in lines(uninterrupted)]
    assert rates[0] == 0 and max(rates) == rates[2] == pytest.approx(3e-3) and rates[3:] == sorted(rates[3:])[::-1]


def test_tensorboard_receives_the_same_values(tmp_path):
    """Read back record by record: length, 4 bytes of checksum, an event, 4 bytes of checksum."""
    from tensorboardX.proto.event_pb2 import Event

    (tmp_path / "run").mkdir()
    with Recorder(tiny(tmp_path, "log.tensorboard=true"), 0, enabled=True) as recorder:
        recorder.validation(4, 0.5)
    (file,) = (tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*")
    rest, events = file.read_bytes(), []
    while rest:
        end = 12 + int.from_bytes(rest[:8], "little")
        events.append(Event.FromString(rest[12:end]))
        rest = rest[end + 4 :]
    scalars = [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value]
    assert scalars == [(4, "validation/loss", 0.5)]


class LoginError(Exception):
    """Stands in for wandb.Error, since wandb need not be installed."""


def no_login(**_: object) -> None:
    raise LoginError("No API key configured. Use `wandb login` to log in.")


@pytest.mark.parametrize(
    "wandb, message",
    [(None, "needs wandb: pip install"), (SimpleNamespace(init=no_login, Error=LoginError), "No API key.*\n.*offline")],
    ids=["not installed", "not logged in"],
)
def test_an_error_of_wandb_is_reported(tmp_path, monkeypatch, wandb, message):
    (tmp_path / "run").mkdir()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(UserError, match=message):
        Recorder(tiny(tmp_path, "log.wandb=true"), 0, enabled=True)


def test_the_plot_shows_every_segment_and_mesh(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    parts = [(0, [2, 4], range(1, 4)), (1, [8, 1], range(4, 6)), (2, [2, 4], range(6, 8))]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"split": "train", "step": step, "loss": 4 - step / 10, "mesh": mesh, "segment": segment}) + "\n"
            for segment, mesh, steps in parts
            for step in steps
        )
    )
    plot_losses(tmp_path)
    axes = drawn[0].axes[0]
    curves = [line for line in axes.lines if line.get_linestyle() == "-" and len(line.get_xdata())]
    assert [list(line.get_xdata()) for line in curves] == [[1, 2, 3], [4, 5], [6, 7]]
    assert curves[0].get_color() == curves[2].get_color() != curves[1].get_color()
    assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--"] == [3, 5]
    assert {"mesh dp=2, mp=4", "mesh dp=8, mp=1"} <= {text.get_text() for text in axes.get_legend().get_texts()}


# Refused starts, which change nothing


def refused(directory: Path, *overrides: str) -> str:
    """The message with which this start is refused; asserts that the run in `directory` is unchanged."""
    before = snapshot(directory)
    with pytest.raises(UserError) as caught:
        loop.train(tiny(directory, *overrides))
    message = str(caught.value)
    assert len(message.splitlines()) <= 2, message
    assert snapshot(directory) == before
    return message


def test_a_new_run_in_the_directory_of_another_run_is_refused(copied):
    message = refused(copied)
    assert f"{copied}/run/checkpoints has checkpoints of this run up to step 8" in message
    assert "--resume" in message and "run.dir=" in message


@pytest.mark.parametrize("resume", ["never", "if_present"])
def test_metrics_of_a_run_with_checkpoints_elsewhere_are_not_deleted(copied, resume):
    elsewhere = copied / "elsewhere"
    elsewhere.mkdir()
    message = refused(copied, f"checkpoint.dir={elsewhere}", f"checkpoint.resume={resume}")
    assert (
        f"{copied}/run/metrics.jsonl has the metrics of a run up to step 8" in message
        and f"{elsewhere} has no checkpoint" in message
    )
    assert "checkpoint.dir=... with --resume" in message and "run.dir=" in message and "remove the file" in message


def test_a_run_killed_before_its_first_checkpoint_restarts_only_with_if_present(uninterrupted, tmp_path):
    assert loop.train(tiny(tmp_path, "train.steps=2")) == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
    assert f"{tmp_path}/run/metrics.jsonl has the metrics of a run up to step 2" in refused(tmp_path)
    saved = tmp_path / "run" / "config.yaml"
    saved.write_text(
        saved.read_text().replace("  offload: []\n", "")
    )  # as an earlier version without this key saved it
    assert loop.train(tiny(tmp_path, "checkpoint.resume=if_present")) == 0
    assert values(tmp_path) == values(uninterrupted)
    assert [line["segment"] for line in lines(tmp_path)] == [0] * STEPS


def test_resume_without_a_checkpoint_is_refused(tmp_path):
    write_tokens(tmp_path / "data")
    with pytest.raises(UserError, match=r"no checkpoint in .*/run/checkpoints; leave it out .* or name the run"):
        loop.train(tiny(tmp_path, "checkpoint.resume=must"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "override, was, now",
    [
        ("model.layers=3", "model.layers was 2", "is 3"),
        ("model.ffn=128", "model.ffn was 64", "is 128"),
        ("model.positions=rotary", "model.positions was alibi", "is rotary"),
        ("model.vocabulary=60", "token", "model.vocabulary=60"),  # refused because of the token ids
        ("model.tie_embeddings=true", "model.tie_embeddings was False", "is True"),
        ("model.context=8", "model.context was 16", "is 8"),
        ("train.batch=16", "train.batch was 8", "is 16"),
        ("run.seed=1", "run.seed was 0", "is 1"),
    ],
)
def test_another_model_batch_or_seed_is_refused_with_both_values(copied, override, was, now):
    message = refused(copied, "checkpoint.resume=must", override)
    assert was in message and now in message
    if "was" in was:
        assert f"checkpoint {copied}/run/checkpoints/8 is of another run" in message and "run.dir=" in message


@pytest.mark.parametrize("resume", ["must", "if_present"])
def test_other_data_is_refused_with_its_file_and_length(copied, resume):
    write_tokens(copied / "data", train=2999)
    message = refused(copied, f"checkpoint.resume={resume}")
    assert "data.dir (train.bin) was 3000 tokens of sha256" in message and "is 2999 tokens of sha256" in message
    write_tokens(copied / "data", seed=1)
    assert "data.dir (train.bin) was 3000 tokens of sha256" in refused(copied, f"checkpoint.resume={resume}")


def test_settings_that_do_not_change_the_result_may_change_on_resume(copied):
    free = ["model.name=other", "model.remat=full", "model.offload=[input]", "model.attention_chunk=8"]
    free += ["train.microbatches=2", "train.steps=9"]
    assert loop.train(tiny(copied, "checkpoint.resume=must", *free)) == 0


def test_a_damaged_checkpoint_is_skipped_and_its_steps_are_trained_again(uninterrupted, copied, capsys):
    where = copied / "run" / "checkpoints"
    (where / "6" / "_CHECKPOINT_METADATA").write_bytes(b"")
    data = max((where / "8").rglob("*"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1])
    assert loop.train(tiny(copied, "checkpoint.resume=must")) == 0
    message = capsys.readouterr().out
    assert f"{where}/8 is skipped: file {data.relative_to(where / '8')} is damaged" in message
    assert f"{where}/6 is skipped: file _CHECKPOINT_METADATA is damaged" in message
    assert "resuming from step 4" in message
    assert state_at(copied, STEPS) == state_at(uninterrupted, STEPS)
    assert values(copied) == values(uninterrupted)


def test_a_renamed_checkpoint_is_refused(copied):
    """Every file is intact, but the following steps would read other data."""
    where = copied / "run" / "checkpoints"
    (where / "6").rename(where / "10")
    message = refused(copied, "checkpoint.resume=must", "train.steps=12")
    assert message == f"checkpoint {where}/10 contains the state after step 6: rename the directory to that number"


@pytest.mark.parametrize("resume", ["must", "if_present"])
def test_a_run_without_an_intact_checkpoint_is_refused_with_their_steps(copied, capsys, resume):
    for manifest in (copied / "run" / "checkpoints").glob(f"*/{MANIFEST}"):
        manifest.unlink()
    message = refused(copied, f"checkpoint.resume={resume}")
    assert f"no checkpoint in {copied}/run/checkpoints is intact (found: 8, 6, 4)" in message and "run.dir=" in message
    listed = capsys.readouterr().out
    assert all(f"checkpoints/{step} is skipped: {MANIFEST} is missing" in listed for step in (8, 6, 4))


def test_resume_if_present_starts_resumes_and_survives_a_killed_first_save(uninterrupted, tmp_path):
    where = tmp_path / "run" / "checkpoints"
    assert (
        loop.train(tiny(tmp_path, "checkpoint.resume=if_present", "train.steps=2")) == 0
    )  # nothing to resume: it starts
    (where / "2" / MANIFEST).unlink()  # as if the first save had been killed before its hashes
    assert loop.train(tiny(tmp_path, "checkpoint.resume=if_present", "train.steps=4")) == 0  # so it starts again
    assert loop.train(tiny(tmp_path, "checkpoint.resume=if_present")) == 0  # and resumes
    assert values(tmp_path) == values(uninterrupted)
    assert [line["segment"] for line in lines(tmp_path)] == [0] * 4 + [1] * 4


# Parts of the loop


def test_the_first_signal_requests_a_stop_and_a_second_ctrl_c_interrupts():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with StopRequest() as stop:
        stop.training()
        assert not stop.asked()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_step_that_is_read_late_does_not_distort_the_rate(tmp_path, monkeypatch):
    """Steps of 1 s, every second one read only when the next is done too: the rate stays 1 step/s."""
    clock = iter([0.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 100.0, 101.0, 101.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    recorded: list[dict] = []
    meter = Meter(recorded.append, tokens_per_step=10, flops_per_token=1, peak=None)
    for step in range(1, 7):
        meter.record(step, {"loss": np.float32(1)})
    with meter.paused():
        pass  # until 100: belongs to no step
    meter.record(7, {"loss": np.float32(1)})
    with meter.paused():
        pass
    assert [line["step"] for line in recorded] == [1, 2, 3, 4, 5, 6, 7]
    seconds = [line["seconds_per_step"] for line in recorded]
    assert seconds == pytest.approx([2, 1, 4 / 3, 1, 6 / 5, 1, 1])
    assert [line["tokens_per_second"] for line in recorded] == pytest.approx([10 / s for s in seconds])


def test_lines_of_lost_steps_and_a_partial_line_are_removed_from_metrics(tmp_path):
    config = tiny(tmp_path)
    file = tmp_path / "run" / "metrics.jsonl"
    file.parent.mkdir()
    old = [{"split": "train", "step": step, "loss": 1.0, "mesh": [2, 4], "segment": 0} for step in (1, 2, 3)]
    file.write_text("".join(json.dumps(line) + "\n" for line in old) + '{"split": "train", "st')
    with Recorder(config, 2, enabled=True) as recorder:
        recorder.validation(2, 0.5)
    assert [line["step"] for line in read_metrics(file)] == [1, 2, 2]
    assert read_metrics(file)[-1] == {"split": "validation", "step": 2, "loss": 0.5, "mesh": [2, 4], "segment": 1}
    assert file.read_text().endswith("}\n")


def test_a_disabled_recorder_writes_nothing(tmp_path):
    config = tiny(tmp_path)
    with Recorder(config, 0, enabled=False) as recorder:
        recorder.validation(1, 0.5)
    assert not (tmp_path / "run").exists()
