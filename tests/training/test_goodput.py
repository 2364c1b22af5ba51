"""Wall time by cause: all of it goes somewhere, across restarts, and a kill loses no step's."""

import json
from pathlib import Path
from threading import Event

import pytest

from shmap_tp.training.goodput import TimeCategory, WallClock
from shmap_tp.training.metrics import read_metrics


class Now:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


class Outputs:
    """What a step makes, there once it `ends`."""

    def __init__(self) -> None:
        self.ends = Event()

    def block_until_ready(self) -> None:
        assert self.ends.wait(60)


@pytest.fixture
def now() -> Now:
    return Now()


def initial_bad_step_state(now: Now, directory: Path | None, first: int = 0, *, anew: bool = False) -> WallClock:
    """The clock of a run that took 3 s to start and 5 s to compile, about to train on from step `first`."""
    clock = WallClock(now)
    now.seconds += 3
    clock.open(directory, first, anew=anew)
    now.seconds += 5
    clock.turn(TimeCategory.steps)
    return clock


def train(clock: WallClock, now: Now, steps: range, seconds: float, skipped: tuple[int, ...] = ()) -> list[float]:
    """Steps of `seconds` each, told to metrics.jsonl where there is a file.  The goodput that each is told."""
    told = []
    for step in steps:
        now.seconds += seconds
        line = {"step": step, "skipped_in_a_row": int(step in skipped)}
        told.append(line | clock.of(line))
    if clock._stream:
        with (clock._file.parent / "metrics.jsonl").open("a") as metrics:
            metrics.write("".join(json.dumps(line) + "\n" for line in told))
    return [line["goodput"] for line in told]


def seconds(clock: WallClock) -> dict[str, float]:
    """By cause, what is not 0, once all that went by is written."""
    clock.turn(TimeCategory.drawing)
    found = {str(cause): clock.spent.of(cause) for cause in TimeCategory if clock.spent.of(cause)}
    assert sum(found.values()) == pytest.approx(clock.spent.total)
    return found


def test_all_of_the_time_goes_somewhere(now, tmp_path):
    with initial_bad_step_state(now, tmp_path) as clock:
        assert train(clock, now, range(1, 5), 1.0) == pytest.approx([1 / 9, 2 / 10, 3 / 11, 4 / 12])
        with clock.on(TimeCategory.evaluation):
            now.seconds += 4
        with clock.on(TimeCategory.checkpoint):
            now.seconds += 2
        assert train(clock, now, range(5, 7), 1.0)[-1] == pytest.approx(6 / 20)
        found = seconds(clock)
    assert found == {"steps": 6, "start": 3, "compile": 5, "evaluation": 4, "checkpoint": 2}
    assert now.seconds - 1000 == sum(found.values())
    table = clock.spent.table().splitlines()
    assert table[0].split() == ["steps", "that", "count:", "goodput", "6.0", "s", "30.0%"]
    assert table[-1].split() == ["wall", "time,", "1", "start", "20.0", "s", "100.0%"] and len(table) == 6


def test_a_skipped_step_does_not_count(now, tmp_path):
    with initial_bad_step_state(now, tmp_path) as clock:
        assert train(clock, now, range(1, 5), 1.0, skipped=(2, 3))[-1] == pytest.approx(2 / 12)
        assert seconds(clock) == {"steps": 2, "skipped": 2, "start": 3, "compile": 5}


def test_a_restart_loses_the_steps_after_its_checkpoint_and_the_time_until_it(now, tmp_path):
    """Killed in step 8, six seconds after the end of step 7; a save after step 4, from which the next goes on."""
    file = tmp_path / "time.jsonl"
    with initial_bad_step_state(now, tmp_path) as first:
        train(first, now, range(1, 5), 1.0)
        with first.on(TimeCategory.checkpoint):
            now.seconds += 2
        train(first, now, range(5, 8), 10.0, skipped=(6,))
    assert [line["cause"] for line in read_metrics(file)] == ["start", "compile", "steps", "checkpoint"]
    now.seconds += 6
    file.write_text(file.read_text() + '{"cause": "eval')
    now.seconds += 100
    with initial_bad_step_state(now, tmp_path, first=4) as second:
        assert train(second, now, range(5, 6), 5.0)[-1] == pytest.approx(9 / (now.seconds - 1000))
        found = seconds(second)
    expected = {"steps": 9, "skipped": 10, "lost": 20, "start": 6, "compile": 10, "checkpoint": 2, "down": 106}
    assert found == pytest.approx(expected)
    assert second.spent.total == pytest.approx(now.seconds - 1000) and second.spent.starts == 2
    now.seconds += 50
    with initial_bad_step_state(now, tmp_path, first=0) as third:  # that checkpoint was damaged: from the beginning
        more = {"steps": 0, "lost": 29, "start": 9, "compile": 15, "down": 156}
        assert {"steps": 0} | seconds(third) == pytest.approx(expected | more)
    with initial_bad_step_state(now, tmp_path, anew=True) as another:
        assert seconds(another) == {"start": 3, "compile": 5} and len(read_metrics(file)) == 2


@pytest.mark.parametrize("step_ends, waited", [(None, 0), (3, 1), (0, 4)], ids=["later", "meanwhile", "before"])
def test_only_what_the_step_before_does_not_hide_of_a_fetch_was_waited_for(now, tmp_path, step_ends, waited):
    """A batch takes 4 s to fetch; the step under way ends 3 s after that begins, at once, or not before it is over."""
    outputs = Outputs()
    with initial_bad_step_state(now, tmp_path) as clock:
        clock.dispatched(outputs)
        with clock.fetching():
            now.seconds += step_ends or 0
            if step_ends is not None:
                outputs.ends.set()
                clock._step_ends.result()  # its end is noted beside the loop
            now.seconds += 4 - (step_ends or 0)
        found = seconds(clock)
        outputs.ends.set()
    assert found.get("data", 0) == waited and found.get("steps", 0) + waited in (0, 4)


def test_a_first_batch_is_waited_for(now, tmp_path):
    with initial_bad_step_state(now, tmp_path) as clock:
        with clock.fetching():
            now.seconds += 4
        train(clock, now, range(1, 2), 1.0)
        assert seconds(clock) == {"steps": 1, "data": 4, "start": 3, "compile": 5}


def test_a_process_without_a_directory_writes_nothing(now, tmp_path):
    with initial_bad_step_state(now, None) as clock:
        assert train(clock, now, range(1, 3), 1.0)[-1] == pytest.approx(2 / 10)
    assert not list(tmp_path.iterdir())
