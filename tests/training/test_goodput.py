"""Goodput: all wall time belongs to one category, across restarts and kills; a profile contains exactly the requested
steps, and the scope names of the source."""

import gzip
import json
import signal
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import jax
import pytest

from shmap_tp.data.batches import Batches
from shmap_tp.errors import StorageError
from shmap_tp.runtime.exit_codes import STOPPED
from shmap_tp.training import loop
from shmap_tp.training.goodput import TimeCategory, WallClock
from tests.helpers.run_fixtures import checkpoint_steps, lines, signal_during, tiny


class Now:
    """A clock that advances only when a test changes `seconds`."""

    seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def now() -> Now:
    return Now()


def started_clock(now: Now, directory: Path | None, first: int = 0, *, new_run: bool = False) -> WallClock:
    """The clock of a run that took 3 s to start and 5 s to compile, about to train from step `first`."""
    clock = WallClock(now)
    now.seconds += 3
    clock.open(directory, first, new_run=new_run)
    now.seconds += 5
    clock.switch_to(TimeCategory.steps)
    return clock


def train(clock: WallClock, now: Now, steps: range, seconds: float, skipped: tuple[int, ...] = ()) -> list[float]:
    """Take steps of `seconds` each, written to metrics.jsonl if there is a file; return the goodput after each."""
    written = []
    for step in steps:
        now.seconds += seconds
        line = {"step": step, "split": "train", "loss": 1.0, "mesh": [1, 1], "segment": 0}
        line["skipped_in_a_row"] = int(step in skipped)
        written.append(line | clock.step_fields(line))
    if clock._stream:
        with (clock._file.parent / "metrics.jsonl").open("a") as metrics:
            metrics.write("".join(json.dumps(line) + "\n" for line in written))
    return [line["goodput"] for line in written]


def seconds(clock: WallClock) -> dict[str, float]:
    """Seconds by category, without those that are 0, after the current span is written."""
    clock.switch_to(TimeCategory.drawing)
    found = {str(one): clock.breakdown.seconds(one) for one in TimeCategory if clock.breakdown.seconds(one)}
    assert sum(found.values()) == pytest.approx(clock.breakdown.total)
    return found


def test_all_wall_time_is_accounted_for(now, tmp_path):
    with started_clock(now, tmp_path) as clock:
        assert train(clock, now, range(1, 5), 1.0) == pytest.approx([1 / 9, 2 / 10, 3 / 11, 4 / 12])
        for category, took in [(TimeCategory.evaluation, 4), (TimeCategory.checkpoint, 2)]:
            with clock.on(category):
                now.seconds += took
        assert train(clock, now, range(5, 7), 1.0)[-1] == pytest.approx(6 / 20)
        found = seconds(clock)
    assert found == {"steps": 6, "start": 3, "compile": 5, "evaluation": 4, "checkpoint": 2}
    assert now.seconds - 1000 == sum(found.values())
    table = clock.breakdown.table().splitlines()
    assert table[0].split() == ["steps", "that", "count:", "goodput", "6.0", "s", "30.0%"]
    assert table[-1].split() == ["wall", "time,", "1", "start", "20.0", "s", "100.0%"] and len(table) == 6


@pytest.mark.parametrize("written", [True, False])
def test_a_skipped_step_does_not_count_as_goodput_and_without_a_directory_nothing_is_written(now, tmp_path, written):
    with started_clock(now, tmp_path if written else None) as clock:
        assert train(clock, now, range(1, 5), 1.0, skipped=(2, 3))[-1] == pytest.approx(2 / 12)
        if written:
            assert seconds(clock) == {"steps": 2, "skipped": 2, "start": 3, "compile": 5}
    assert bool([*tmp_path.iterdir()]) == written


def test_a_restart_loses_the_steps_after_its_checkpoint_and_the_down_time(now, tmp_path):
    """Killed in step 8, six seconds after the end of step 7; the next start resumes from a checkpoint after step 4."""
    file = tmp_path / "time.jsonl"
    with started_clock(now, tmp_path) as first:
        train(first, now, range(1, 5), 1.0)
        with first.on(TimeCategory.checkpoint):
            now.seconds += 2
        train(first, now, range(5, 8), 10.0, skipped=(6,))
    causes = [json.loads(line)["cause"] for line in file.read_text().splitlines()]
    assert causes == ["start", "compile", "steps", "checkpoint"]
    now.seconds += 6
    file.write_text(file.read_text() + '{"cause": "eval')
    now.seconds += 100
    with started_clock(now, tmp_path, first=4) as second:
        assert train(second, now, range(5, 6), 5.0)[-1] == pytest.approx(9 / (now.seconds - 1000))
        found = seconds(second)
    expected = {"steps": 9, "skipped": 10, "lost": 20, "start": 6, "compile": 10, "checkpoint": 2, "down": 106}
    assert found == pytest.approx(expected)
    assert second.breakdown.total == pytest.approx(now.seconds - 1000) and second.breakdown.starts == 2
    now.seconds += 50
    with started_clock(now, tmp_path, first=0) as third:  # that checkpoint was damaged: start from step 0
        more = {"steps": 0, "lost": 29, "start": 9, "compile": 15, "down": 156}
        assert {"steps": 0} | seconds(third) == pytest.approx(expected | more)
    with started_clock(now, tmp_path, new_run=True) as another:
        assert seconds(another) == {"start": 3, "compile": 5}
    with started_clock(now, tmp_path, first=0) as resumed:
        assert seconds(resumed) == {"start": 6, "compile": 10}, "what another run did before is not counted"


@pytest.mark.parametrize(("step_ends", "waited"), [(None, 0), (3, 1), (0, 4)], ids=["later", "meanwhile", "before"])
def test_only_the_part_of_a_fetch_after_the_end_of_the_step_counts_as_waiting(now, tmp_path, step_ends, waited):
    """A batch takes 4 s to fetch; the step in flight ends 3 s into the fetch, at its beginning, or after its end."""
    ends = Event()
    with started_clock(now, tmp_path) as clock:
        clock.dispatched(SimpleNamespace(block_until_ready=lambda: ends.wait(60)))
        with clock.fetching():
            now.seconds += step_ends or 0
            if step_ends is not None:
                ends.set()
                clock._step_end.result()  # set by the background thread
            now.seconds += 4 - (step_ends or 0)
        found = seconds(clock)
        ends.set()
    assert found.get("data", 0) == waited and found.get("steps", 0) + waited in (0, 4)


def test_the_fetch_of_the_first_batch_counts_as_waiting(now, tmp_path):
    with started_clock(now, tmp_path) as clock:
        with clock.fetching():
            now.seconds += 4
        train(clock, now, range(1, 2), 1.0)
        assert seconds(clock) == {"steps": 1, "data": 4, "start": 3, "compile": 5}


DEVICES = 8


def traced(run: Path) -> tuple[list[int], bytes]:
    """(step numbers in the only profile of a run, its bytes); asserts that each step ran on every device."""
    (directory,) = (run / "profile" / "plugins" / "profile").iterdir()
    (file,), (trace,) = directory.glob("*.trace.json.gz"), directory.glob("*.xplane.pb")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    steps = [int(event["args"]["step_num"]) for event in events if event.get("name") == "train"]
    operations = [event for event in events if event.get("args", {}).get("hlo_module") == "jit_step"]
    once = {event["name"] for event in operations if event["name"].startswith("psum_invariant")}
    times = {name: sum(event["name"] == name for event in operations) for name in once}
    assert once and min(times.values()) == len(steps) * DEVICES, times
    return steps, trace.read_bytes()


def test_a_profile_interrupted_by_a_stop_is_written_and_not_restarted(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        signal_during(patch, Batches, "training", signal.SIGTERM, lambda step: step == 3)
        assert loop.train(tiny(tmp_path, "train.profile=[3,5]", "evaluate.every=0")) == STOPPED
    assert traced(tmp_path / "run")[0] == [3, 4]
    assert loop.train(tiny(tmp_path, "train.profile=[3,5]", "evaluate.every=0", "checkpoint.resume=must")) == 0
    said = "no profile: train.profile=[3, 5] is before step 5, the first of this process"
    assert said in capsys.readouterr().out
    assert traced(tmp_path / "run")[0] == [3, 4] and len(lines(tmp_path)) == 8


@pytest.mark.parametrize("name", ["start_trace", "stop_trace"])
def test_a_profile_has_whole_steps_and_scope_names_and_a_full_disk_loses_no_step(tmp_path, monkeypatch, capsys, name):
    """XLA reports a full disk as a JaxRuntimeError.  All steps are trained and saved, then the run ends with 2."""
    original = getattr(jax.profiler, name)

    def full(*arguments: str) -> None:
        if name == "stop_trace":
            original()
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: vm.xplane.pb; No space left on device")

    monkeypatch.setattr(jax.profiler, name, full)
    refused = pytest.raises(StorageError, match=r"profile .*/run/profile could not be written: .*No space left")
    with refused as error:
        loop.train(tiny(tmp_path, "train.profile=[3,5]", "evaluate.every=0", "checkpoint.every=0"))
    assert error.value.exit_code == 2 and len(str(error.value).splitlines()) == 2
    assert "No space left" in capsys.readouterr().out
    assert len(lines(tmp_path)) == 8 and checkpoint_steps(tmp_path) == [8]
    if name == "stop_trace":  # the profile was written before it failed
        steps, trace = traced(tmp_path / "run")
        assert steps == [3, 4, 5]
        assert all(scope + b"/" in trace for scope in (b"attention", b"mlp", b"dp_gradient_reduction", b"update"))
        spans = [json.loads(line) for line in (tmp_path / "run" / "time.jsonl").read_text().splitlines()]
        assert [span["cause"] for span in spans].count("profile") == 2  # before the first and after the last
