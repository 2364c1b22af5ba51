"""The files of a run directory: metrics, TensorBoard and W&B; and the timing of steps."""

import json
from dataclasses import replace

import numpy as np
import pytest

from shmap_tp.config.compose import load
from shmap_tp.training import metrics
from shmap_tp.training.evaluation import Evaluation, mixed
from shmap_tp.training.metrics import Meter, Recorder, read_metrics
from tests.helpers.run_fixtures import BATCH, CONTEXT, STEPS, checkpoint_steps, lines, tiny

HALF = Evaluation(nats=0.5, targets=1.0, size=None)
MIX = {"a": 0.25, "b": 0.75}


def test_the_run_directory_has_the_documented_files(uninterrupted):
    run = uninterrupted / "run"
    files = {"config.yaml", "metrics.jsonl", "time.jsonl", "checkpoints", "report.html", "tokenizer.json"}
    assert {path.name for path in run.iterdir()} == files
    assert checkpoint_steps(uninterrupted) == [4, 6, 8]
    assert load(str(run / "config.yaml"), []) == tiny(uninterrupted)


def test_the_line_of_a_step_has_accuracies_and_what_experts_dropped(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    rates = {"learning_rate": 1e-3, "tokens_per_second": 10.0, "mfu": None, "seconds_per_step": 1}
    step = {"step": 1, "loss": 0.5} | rates
    with Recorder(tiny(tmp_path, "log.every=1"), 0, enabled=True) as recorder:
        recorder.train(step | {"reward_accuracy": 0.75})
        recorder.train(step | {"step": 2, "experts_dropped": 0.125})
        each = {"a": replace(HALF, experts_dropped=0.5), "b": replace(HALF, experts_dropped=0.0)}
        recorder.validation(2, mixed(each, MIX))
    printed = capsys.readouterr().out
    assert "validation loss 0.5000, dropped 12.5%" in printed
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["experts_dropped"] == 0.125
    assert "loss 0.5000  accuracy 0.750  lr 1.00e-03  10 tokens/s" in printed
    assert "loss 0.5000  dropped 12.5%  lr 1.00e-03  10 tokens/s" in printed


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
    assert rates[:2] == pytest.approx([1.5e-3, 3e-3]) and rates[1:] == sorted(rates[1:])[::-1]


def test_tensorboard_receives_the_same_values(tmp_path):
    """Read back record by record: length, 4 bytes of checksum, an event, 4 bytes of checksum."""
    from tensorboardX.proto.event_pb2 import Event

    (tmp_path / "run").mkdir()
    with Recorder(tiny(tmp_path, "log.tensorboard=true"), 0, enabled=True) as recorder:
        recorder.validation(4, HALF)
        recorder.samples(4, {"1+": "1=2"})
    (file,) = (tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*")
    rest, events = file.read_bytes(), []
    while rest:
        end = 12 + int.from_bytes(rest[:8], "little")
        events.append(Event.FromString(rest[12:end]))
        rest = rest[end + 4 :]
    scalars = [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value]
    assert scalars[0] == (4, "validation/loss", 0.5)
    assert scalars[1][:2] == (4, "sample/0/text_summary") and b"1+1=2" in file.read_bytes()


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


def test_the_first_step_has_a_line_and_no_silence_is_longer_than_thirty_seconds(tmp_path, capsys, monkeypatch):
    (tmp_path / "run").mkdir()
    now = [1000.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    step = {"loss": 0.5, "learning_rate": 1e-3, "tokens_per_second": 10.0, "mfu": None, "seconds_per_step": 20.0}
    with Recorder(tiny(tmp_path, "log.every=100", "train.steps=200"), 7, enabled=True) as recorder:
        for number in range(8, 12):
            now[0] += 20
            recorder.train(step | {"step": number, "seconds_per_step": 20.0})
        for number in range(12, 52):
            now[0] += 2
            recorder.train(step | {"step": number, "seconds_per_step": 2.0})
    printed = [int(line.split()[1].partition("/")[0]) for line in capsys.readouterr().out.splitlines()]
    assert printed == [8, 9, 10, 11, 26, 41]


def test_a_start_appends_and_lines_of_steps_that_it_trains_again_are_not_read(tmp_path):
    """Segment 0 did six steps; 1 went on from step 2 and was killed after 4; 2 goes on from 3, and has trained 4."""
    config, file = tiny(tmp_path), tmp_path / "run" / "metrics.jsonl"
    file.parent.mkdir()

    def line(segment: int, step: int, split: str = "train") -> dict:
        return {"split": split, "step": step, "loss": 1.0, "mesh": [2, 4], "segment": segment}

    earlier = [line(0, step) for step in range(1, 7)] + [line(0, 2, "validation"), line(0, 5, "validation")]
    earlier += [line(1, 3), line(1, 3, "validation"), line(1, 4)]
    before = "".join(json.dumps(line) + "\n" for line in earlier) + '{"split": "train", "st'
    file.write_text(before)
    kept = [(0, 1), (0, 2), (0, 2), (1, 3), (1, 3)]

    def read() -> list[tuple[int, int]]:
        return [(line["segment"], line["step"]) for line in read_metrics(file)][::-1]

    assert read() == [*kept, (1, 4)]
    with Recorder(config, 3, enabled=True) as recorder:
        assert recorder.has_validation
        assert read() == [*kept, (1, 4)], "nothing yet"
        rates = {"learning_rate": 0.1, "tokens_per_second": 1.0, "mfu": None, "seconds_per_step": 1}
        recorder.train(line(2, 4) | rates)
        recorder.validation(4, HALF)
    assert read() == [*kept, (2, 4), (2, 4)]
    assert file.read_text().startswith(before + "\n")
    with Recorder(config, 5, enabled=True) as recorder:
        assert not recorder.has_validation, "that of segment 0 is of a lost step"


def test_a_start_that_was_taken_for_lost_leaves_no_line_among_those_of_the_next_one(tmp_path):
    """Segment 1 goes on from step 2, while 0 trains its steps 3 and 4."""
    order, file = [(0, 1), (0, 2), (1, 3), (0, 3), (1, 4), (1, 5), (0, 4), (1, 6)], tmp_path / "metrics.jsonl"
    common = {"split": "train", "loss": 1.0, "mesh": [1, 1]}
    given = [common | {"segment": segment, "step": step} for segment, step in order]
    file.write_text("".join(json.dumps(line) + "\n" for line in given))
    assert [*read_metrics(file)][::-1] == [line for line in given if line["step"] < 3 or line["segment"]]


def test_a_disabled_recorder_writes_nothing(tmp_path, capsys):
    config = tiny(tmp_path)
    with Recorder(config, 0, enabled=False) as recorder:
        recorder.validation(1, HALF)
        recorder.samples(1, {"1+": "1=2"})
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "run").exists()
