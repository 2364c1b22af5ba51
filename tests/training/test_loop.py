"""A run: interrupted equals uninterrupted, on the same mesh to the bit; what may be continued, and what is refused."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
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
from shmap_tp.training import loop as train
from shmap_tp.training import metrics
from shmap_tp.training.checkpoint import MANIFEST, Checkpoints
from shmap_tp.training.loss_plot import plot_losses
from shmap_tp.training.metrics import Meter, Recorder, read_metrics
from shmap_tp.training.step import State, build_step_functions
from tests.helpers.run_fixtures import BATCH, CONTEXT, bits, lines, run_straight, state_at, tiny, values, write_tokens

MESHES = [(1, 1), (8, 1), (4, 2), (2, 4), (1, 8)]
STEPS = 8  # of the tiny run, which evaluates at 4 and 8 and saves at 2, 4, 6 and 8


@pytest.fixture(autouse=True)
def no_peak(monkeypatch):
    """Measuring the machine takes a second, and no test here looks at it."""
    monkeypatch.setattr(train, "machine_peak", lambda devices: None)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """The tiny run from step 0 to 8 without a break; `run` and `data` lie in this directory."""
    return run_straight(tmp_path_factory)


@pytest.fixture
def copied(straight, tmp_path) -> Path:
    """A copy of the finished run, to be continued or damaged."""
    return Path(shutil.copytree(straight, tmp_path / "copied"))


def checkpoints_of(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in (directory / "run" / "checkpoints").iterdir())


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def interrupt(monkeypatch, owner: type, name: str, number: int, when: Callable[..., bool]) -> None:
    """Send this process a signal in the middle of a method, the first time `when(arguments)` holds."""
    method, sent = getattr(owner, name), []

    def interrupted(self, *arguments):
        if not sent and when(*arguments):
            sent.append(number)
            os.kill(os.getpid(), number)
        return method(self, *arguments)

    monkeypatch.setattr(owner, name, interrupted)


# Interrupted equals uninterrupted


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "owner, name, when, stops_at",
    [
        (Batches, "training", lambda step: step == 4, 5),  # while step 5 is being made: it is finished and saved
        (Batches, "validation", lambda index: index == 1, 4),  # in the evaluation after step 4
        (Checkpoints, "save", lambda step, *_: step == 2, 2),  # while step 2 is being saved
        (Batches, "training", lambda step: step == 7, 8),  # while the last step is being made: its evaluation is owed
    ],
    ids=["in a step", "in an evaluation", "in a save", "in the last step"],
)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(
    straight, tmp_path, monkeypatch, capsys, number, owner, name, when, stops_at
):
    with monkeypatch.context() as patch:
        interrupt(patch, owner, name, number, when)
        assert train.train(tiny(tmp_path)) == STOPPED
    said = capsys.readouterr().out
    assert f"stopped and saved at step {stops_at} of {STEPS}" in said and "--resume" in said
    assert max(checkpoints_of(tmp_path)) == stops_at == lines(tmp_path)[-1]["step"]
    assert (tmp_path / "run" / "loss.png").stat().st_size > 1000
    assert train.train(tiny(tmp_path, "checkpoint.resume=must")) == 0
    assert f"going on from step {stops_at}" in capsys.readouterr().out
    assert state_at(tmp_path, STEPS) == state_at(straight, STEPS)
    assert values(tmp_path) == values(straight)
    assert values(tmp_path, "validation") == values(straight, "validation")


@pytest.mark.parametrize("name", ["newest_intact", "restore", "facts"])
def test_a_run_told_to_stop_before_it_goes_on_leaves_all_as_it_was(straight, copied, monkeypatch, name):
    shutil.rmtree(copied / "run" / "checkpoints" / "8")
    before = snapshot(copied)
    with monkeypatch.context() as patch:
        interrupt(patch, Checkpoints, name, signal.SIGTERM, lambda *_: True)
        assert train.train(tiny(copied, "checkpoint.resume=must")) == STOPPED
    assert snapshot(copied) == before
    assert train.train(tiny(copied, "checkpoint.resume=must")) == 0
    assert state_at(copied, STEPS) == state_at(straight, STEPS)
    assert values(copied) == values(straight)


def test_a_run_that_is_done_can_be_made_longer(straight, tmp_path):
    assert train.train(tiny(tmp_path, "train.steps=4")) == 0
    assert train.train(tiny(tmp_path, "checkpoint.resume=must")) == 0
    assert state_at(tmp_path, STEPS) == state_at(straight, STEPS)
    assert values(tmp_path) == values(straight)
    assert [line["segment"] for line in lines(tmp_path)] == [0] * 4 + [1] * 4


def test_a_run_that_died_goes_on_from_its_newest_complete_checkpoint(straight, copied):
    """As SIGKILL leaves it: steps after the checkpoint are in metrics.jsonl, its last line torn, a save half done."""
    run = copied / "run"
    shutil.rmtree(run / "checkpoints" / "8")
    shutil.copytree(run / "checkpoints" / "6", run / "checkpoints" / "8.orbax-checkpoint-tmp")
    (run / "checkpoints" / "6" / MANIFEST).unlink()  # killed between the files and their hashes
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole[: whole.index('"step": 7') + 30])
    assert train.train(tiny(copied, "checkpoint.resume=must")) == 0
    assert state_at(copied, STEPS) == state_at(straight, STEPS)
    assert values(copied) == values(straight)
    assert values(copied, "validation") == values(straight, "validation")
    assert [line["segment"] for line in lines(copied)] == [0] * 4 + [1] * 4


def test_one_mesh_goes_on_where_any_other_stopped(tmp_path):
    """All ordered pairs: the state is bitwise what was saved, and the losses that follow agree to 1e-6."""
    trained, more = 3, 3
    config = tiny(tmp_path, "checkpoint.keep=9")
    programs, steps = {}, {}
    for dp, mp in MESHES:
        here = tiny(tmp_path, f"mesh.dp={dp}", f"mesh.mp={mp}")
        programs[dp, mp] = build_step_functions(here, make_mesh(here.mesh, jax.devices()[: dp * mp]), jnp.float32)
        steps[dp, mp] = programs[dp, mp].step.lower(programs[dp, mp].shapes, programs[dp, mp].tokens).compile()

    def go_on(mesh: tuple[int, int], state: State, first: int, last: int) -> tuple[State, list[float]]:
        batches, losses = Batches(config, programs[mesh].tokens), []
        for step in range(first, last):
            state, measured = steps[mesh](state, batches.training(step))
            losses.append(float(measured["loss"]))
        return state, losses

    beginning = programs[2, 4].init()
    with Checkpoints(config.checkpoint, print) as checkpoints:
        checkpoints.save(0, beginning, {})
        checkpoints.wait()
        compared = 0
        for number, source in enumerate(MESHES, start=1):
            state, _ = go_on(source, checkpoints.restore(0, programs[source].shapes), 0, trained)
            saved = bits(state)
            checkpoints.save(number, state, {})
            checkpoints.wait()
            _, expected = go_on(source, state, trained, trained + more)
            for target in MESHES:
                restored = checkpoints.restore(number, programs[target].shapes)
                assert bits(restored) == saved, (source, target)
                _, losses = go_on(target, restored, trained, trained + more)
                assert losses == pytest.approx(expected, rel=1e-6, abs=0), (source, target)
                assert target != source or losses == expected
                compared += 1
            if number == 1:  # or else nothing would have been compared
                assert len(set(expected)) == more
    assert compared == 25


@pytest.mark.parametrize("override", ["mesh.dp=8 mesh.mp=1", "mesh.tensor_parallel=sequence"])
def test_a_run_goes_on_on_another_mesh_or_wire(straight, copied, override):
    run = copied / "run"
    for step in (6, 8):
        shutil.rmtree(run / "checkpoints" / str(step))
    assert train.train(tiny(copied, "checkpoint.resume=must", *override.split())) == 0
    assert [line["mesh"] for line in lines(copied)] == [[2, 4]] * 4 + [
        [2, 4] if "tensor_parallel" in override else [8, 1]
    ] * 4
    assert [line["loss"] for line in lines(copied)] == pytest.approx(
        [line["loss"] for line in lines(straight)], rel=1e-6
    )


def test_auto_goes_on_on_whatever_devices_are_left(straight, tmp_path, monkeypatch):
    """Two steps each on 8, 4, 2 devices and 1, by the same command; a device computes one window at a time."""
    every = jax.devices()
    for steps, devices in zip((2, 4, 6, 8), (8, 4, 2, 1), strict=True):
        monkeypatch.setattr(jax, "devices", lambda count=devices: every[:count])
        given = ["mesh.dp=auto", "mesh.mp=1", "train.max_sequences_per_device=1", f"train.steps={steps}"]
        assert train.train(tiny(tmp_path, *given, "evaluate.every=0", "checkpoint.resume=if_present")) == 0
    assert [line["mesh"] for line in lines(tmp_path)] == [[dp, 1] for dp in (8, 8, 4, 4, 2, 2, 1, 1)]
    assert [line["loss"] for line in lines(tmp_path)] == pytest.approx(
        [line["loss"] for line in lines(straight)], rel=1e-6, abs=0
    )
    assert load(str(tmp_path / "run" / "config.yaml"), []).mesh.dp == "auto"


def test_evaluating_changes_nothing_in_the_training(straight, tmp_path):
    for every in (0, 1):
        assert train.train(tiny(tmp_path / str(every), f"evaluate.every={every}", "checkpoint.every=0")) == 0
        assert values(tmp_path / str(every)) == values(straight)
        assert state_at(tmp_path / str(every), STEPS) == state_at(straight, STEPS)
    assert [line["step"] for line in lines(tmp_path / "0", "validation")] == [STEPS]
    assert [line["step"] for line in lines(tmp_path / "1", "validation")] == list(range(1, STEPS + 1))


# What a run directory holds


def test_the_run_directory_holds_what_others_script_against(straight):
    run = straight / "run"
    files = {"config.yaml", "metrics.jsonl", "time.jsonl", "checkpoints", "loss.png"}
    assert {path.name for path in run.iterdir()} == files
    assert checkpoints_of(straight) == [4, 6, 8]
    assert load(str(run / "config.yaml"), []) == tiny(straight)
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_each_line_of_metrics_holds_what_others_script_against(straight):
    for line in map(json.loads, (straight / "run" / "metrics.jsonl").read_text().splitlines()):
        assert line["split"] in ("train", "validation") and line["mesh"] == [2, 4]
        assert type(line["step"]) is int and 1 <= line["step"] <= STEPS
        assert 3 < line["loss"] < 5
        if line["split"] == "train":
            assert line["tokens_per_second"] > 0 and line["grad_norm"] > 0 and 0 < line["goodput"] < 1
            assert line["skipped"] == line["skipped_in_a_row"] == 0 and "windows" not in line
            assert line["tokens"] == line["step"] * BATCH * CONTEXT
    assert [line["step"] for line in lines(straight)] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines(straight, "validation")] == [4, 8]
    rates = [line["learning_rate"] for line in lines(straight)]
    assert rates[0] == 0 and max(rates) == rates[2] == pytest.approx(3e-3) and rates[3:] == sorted(rates[3:])[::-1]


def test_tensorboard_is_told_the_same(tmp_path):
    """Read back record by record: its length, 4 bytes of check, an event, 4 bytes of check."""
    from tensorboardX.proto.event_pb2 import Event

    (tmp_path / "run").mkdir()
    with Recorder(tiny(tmp_path, "log.tensorboard=true"), 0, speaks=True) as recorder:
        recorder.validation(4, 0.5)
    (file,) = (tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*")
    rest, events = file.read_bytes(), []
    while rest:
        end = 12 + int.from_bytes(rest[:8], "little")
        events.append(Event.FromString(rest[12:end]))
        rest = rest[end + 4 :]
    told = [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value]
    assert told == [(4, "validation/loss", 0.5)]


class LoginError(Exception):
    """What wandb.Error is here, where wandb need not be installed."""


def no_login(**_: object) -> None:
    raise LoginError("No API key configured. Use `wandb login` to log in.")


@pytest.mark.parametrize(
    "wandb, said",
    [(None, "needs wandb: pip install"), (SimpleNamespace(init=no_login, Error=LoginError), "No API key.*\n.*offline")],
    ids=["not installed", "not logged in"],
)
def test_wandb_that_cannot_begin_is_told(tmp_path, monkeypatch, wandb, said):
    (tmp_path / "run").mkdir()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(UserError, match=said):
        Recorder(tiny(tmp_path, "log.wandb=true"), 0, speaks=True)


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


# What is refused, and that a refused start changes nothing


def refused(directory: Path, *overrides: str) -> str:
    """What is said where this may not be started; the run in `directory` is left as it was."""
    before = snapshot(directory)
    with pytest.raises(UserError) as caught:
        train.train(tiny(directory, *overrides))
    said = str(caught.value)
    assert len(said.splitlines()) <= 2, said
    assert snapshot(directory) == before
    return said


def test_a_directory_that_holds_a_run_is_not_started_in(copied):
    said = refused(copied)
    assert f"{copied}/run/checkpoints holds this run up to step 8" in said
    assert "--resume" in said and "run.dir=" in said


@pytest.mark.parametrize("resume", ["never", "if_present"])
def test_the_metrics_of_a_run_whose_checkpoints_are_elsewhere_are_not_emptied(copied, resume):
    elsewhere = copied / "elsewhere"
    elsewhere.mkdir()
    said = refused(copied, f"checkpoint.dir={elsewhere}", f"checkpoint.resume={resume}")
    assert f"{copied}/run/metrics.jsonl holds a run up to step 8" in said and f"{elsewhere} has no checkpoint" in said
    assert "checkpoint.dir=... with --resume" in said and "run.dir=" in said and "remove the file" in said


def test_a_run_killed_before_its_first_checkpoint_begins_again_only_if_told_to(straight, tmp_path):
    assert train.train(tiny(tmp_path, "train.steps=2")) == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
    assert f"{tmp_path}/run/metrics.jsonl holds a run up to step 2" in refused(tmp_path)
    saved = tmp_path / "run" / "config.yaml"
    saved.write_text(saved.read_text().replace("  offload: []\n", ""))  # as a version saved it that knew no such key
    assert train.train(tiny(tmp_path, "checkpoint.resume=if_present")) == 0
    assert values(tmp_path) == values(straight)
    assert [line["segment"] for line in lines(tmp_path)] == [0] * STEPS


def test_resume_with_nothing_to_resume(tmp_path):
    write_tokens(tmp_path / "data")
    with pytest.raises(UserError, match=r"no checkpoint in .*/run/checkpoints; leave it out .* or name the run"):
        train.train(tiny(tmp_path, "checkpoint.resume=must"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "override, was, now",
    [
        ("model.layers=3", "model.layers was 2", "is 3"),
        ("model.ffn=128", "model.ffn was 64", "is 128"),
        ("model.positions=rotary", "model.positions was alibi", "is rotary"),
        ("model.vocabulary=60", "token", "model.vocabulary=60"),  # the tokens themselves exclude it
        ("model.tie_embeddings=true", "model.tie_embeddings was False", "is True"),
        ("model.context=8", "model.context was 16", "is 8"),
        ("train.batch=16", "train.batch was 8", "is 16"),
        ("run.seed=1", "run.seed was 0", "is 1"),
    ],
)
def test_another_model_batch_or_seed_is_refused_with_both_values(copied, override, was, now):
    said = refused(copied, "checkpoint.resume=must", override)
    assert was in said and now in said
    if "was" in was:
        assert f"checkpoint {copied}/run/checkpoints/8 is of another run" in said and "run.dir=" in said


@pytest.mark.parametrize("resume", ["must", "if_present"])
def test_other_data_is_refused_by_file_and_length(copied, resume):
    write_tokens(copied / "data", train=2999)
    said = refused(copied, f"checkpoint.resume={resume}")
    assert "data.dir (train.bin) was 3000 tokens of sha256" in said and "is 2999 tokens of sha256" in said
    write_tokens(copied / "data", seed=1)
    assert "data.dir (train.bin) was 3000 tokens of sha256" in refused(copied, f"checkpoint.resume={resume}")


def test_what_does_not_change_the_run_may_change(copied):
    free = ["model.name=other", "model.remat=full", "model.offload=[input]", "model.attention_chunk=8"]
    free += ["train.microbatches=2", "train.steps=9"]
    assert train.train(tiny(copied, "checkpoint.resume=must", *free)) == 0


def test_a_damaged_checkpoint_is_passed_over_and_its_steps_are_trained_again(straight, copied, capsys):
    where = copied / "run" / "checkpoints"
    (where / "6" / "_CHECKPOINT_METADATA").write_bytes(b"")
    data = max((where / "8").rglob("*"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1])
    assert train.train(tiny(copied, "checkpoint.resume=must")) == 0
    said = capsys.readouterr().out
    assert f"{where}/8 is passed over: file {data.relative_to(where / '8')} is not what was saved" in said
    assert f"{where}/6 is passed over: file _CHECKPOINT_METADATA is not what was saved" in said
    assert "going on from step 4" in said
    assert state_at(copied, STEPS) == state_at(straight, STEPS)
    assert values(copied) == values(straight)


def test_a_checkpoint_that_was_given_another_number_is_refused(copied):
    """Every file is as it was saved; but the steps that follow would be of other data."""
    where = copied / "run" / "checkpoints"
    (where / "6").rename(where / "10")
    said = refused(copied, "checkpoint.resume=must", "train.steps=12")
    assert said == f"checkpoint {where}/10 holds the state after step 6: give the directory that name back"


@pytest.mark.parametrize("resume", ["must", "if_present"])
def test_a_run_with_no_intact_checkpoint_is_refused_with_their_names(copied, capsys, resume):
    for manifest in (copied / "run" / "checkpoints").glob(f"*/{MANIFEST}"):
        manifest.unlink()
    said = refused(copied, f"checkpoint.resume={resume}")
    assert f"no checkpoint in {copied}/run/checkpoints is intact (there: 8, 6, 4)" in said and "run.dir=" in said
    listed = capsys.readouterr().out
    assert all(f"checkpoints/{step} is passed over: {MANIFEST} is missing" in listed for step in (8, 6, 4))


def test_resume_if_present_starts_goes_on_and_survives_a_killed_first_save(straight, tmp_path):
    where = tmp_path / "run" / "checkpoints"
    assert train.train(tiny(tmp_path, "checkpoint.resume=if_present", "train.steps=2")) == 0  # nothing there: it starts
    (where / "2" / MANIFEST).unlink()  # as if that first save had been killed before its hashes
    assert train.train(tiny(tmp_path, "checkpoint.resume=if_present", "train.steps=4")) == 0  # so it starts again
    assert train.train(tiny(tmp_path, "checkpoint.resume=if_present")) == 0  # and goes on
    assert values(tmp_path) == values(straight)
    assert [line["segment"] for line in lines(tmp_path)] == [0] * 4 + [1] * 4


# The parts


def test_the_first_signal_asks_and_a_second_ctrl_c_breaks_off():
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


def test_a_step_that_is_read_late_does_not_make_the_next_look_fast(tmp_path, monkeypatch):
    """Ten steps of 1 s, every second one read only when the next is done too: each still takes 1 s, never 0."""
    clock = iter([0.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 100.0, 101.0, 101.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    recorded: list[dict] = []
    meter = Meter(recorded.append, tokens_per_step=10, flops_per_token=1, peak=None)
    for step in range(1, 7):
        meter.hand(step, {"loss": np.float32(1)})
    with meter.paused():
        pass  # until 100: counts for no step
    meter.hand(7, {"loss": np.float32(1)})
    with meter.paused():
        pass
    assert [line["step"] for line in recorded] == [1, 2, 3, 4, 5, 6, 7]
    seconds = [line["seconds_per_step"] for line in recorded]
    assert seconds == pytest.approx([2, 1, 4 / 3, 1, 6 / 5, 1, 1])
    assert [line["tokens_per_second"] for line in recorded] == pytest.approx([10 / s for s in seconds])


def test_lines_of_lost_steps_and_a_torn_line_leave_metrics(tmp_path):
    config = tiny(tmp_path)
    file = tmp_path / "run" / "metrics.jsonl"
    file.parent.mkdir()
    old = [{"split": "train", "step": step, "loss": 1.0, "mesh": [2, 4], "segment": 0} for step in (1, 2, 3)]
    file.write_text("".join(json.dumps(line) + "\n" for line in old) + '{"split": "train", "st')
    with Recorder(config, 2, speaks=True) as recorder:
        recorder.validation(2, 0.5)
    assert [line["step"] for line in read_metrics(file)] == [1, 2, 2]
    assert read_metrics(file)[-1] == {"split": "validation", "step": 2, "loss": 0.5, "mesh": [2, 4], "segment": 1}
    assert file.read_text().endswith("}\n")


def test_a_silent_process_writes_nothing(tmp_path):
    config = tiny(tmp_path)
    with Recorder(config, 0, speaks=False) as recorder:
        recorder.validation(1, 0.5)
    assert not (tmp_path / "run").exists()
