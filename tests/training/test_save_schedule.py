"""The interval between checkpoints that loses least, and that all processes save at the same steps."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from shmap_tp.training import save_schedule
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.goodput import TimeBreakdown
from shmap_tp.training.metrics import Meter
from shmap_tp.training.save_schedule import (
    Costs,
    SaveSchedule,
    best_interval,
    best_steps,
    expected_loss,
    hours_between_failures,
)
from tests.helpers.run_fixtures import tiny

COSTS = Costs(step=2.0, save=1.0, written=5.0, restart=60.0, between_failures=3600.0)
PAST = TimeBreakdown()


@pytest.mark.parametrize(
    "save, between, expected",
    [
        (0.1, 86400.0, 131.4),  # sqrt(2 * 0.1 * 86400) = 131.45
        (60.0, 3600.0, 617.9),  # sqrt(2 * 60 * 3600) = 657.3, times 1 + 0.0304 + 0.0009, less 60: 617.9
        (10000.0, 3600.0, 3600.0),  # a save that takes over two intervals between failures
    ],
)
def test_the_interval_is_that_of_young_and_daly(save, between, expected):
    assert best_interval(save, between) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    "change, steps",
    [
        ({}, 43),  # 84.9 s
        ({"save": 0.0}, 3),  # at least until the save before is complete
        ({"written": 200.0}, 100),
        ({"step": 500.0}, 1),
        ({"between_failures": 360000.0}, 424),
    ],
)
def test_steps_between_saves_follow_from_the_costs(change, steps):
    assert best_steps(replace(COSTS, **change)) == steps


def test_no_other_number_of_steps_is_expected_to_lose_less():
    best = best_steps(COSTS)
    losses = {steps: expected_loss(COSTS, steps) for steps in range(1, 500)}
    assert min(losses, key=losses.get) == pytest.approx(best, abs=1)
    assert losses[best] == pytest.approx(1 / 86 + (43 + 5 + 60) / 3600)


def test_the_time_between_failures_is_learnt_from_the_starts_of_the_run():
    past = TimeBreakdown()
    assert hours_between_failures(3.5, past) == (3.5, "checkpoint.hours_between_failures")
    for begin in (0.0, 7200.0, 14400.0):
        past.add({"cause": "start", "begin": begin, "seconds": 3600.0, "first": 0})
    assert hours_between_failures(None, past)[0] == pytest.approx((5 + 24) / 3)


def test_auto_saves_at_the_steps_of_process_0_and_prints_a_new_interval_with_its_reason(tmp_path, monkeypatch, capsys):
    """Process 1 has measured other seconds; what process 0 has found stands for both."""
    config, agreed = tiny(tmp_path, "checkpoint.every=auto", "train.steps=100"), []

    def saves(process: int, step_seconds: float, cost: float) -> list[int]:
        answers = iter(agreed)

        def on_process_0(name, action):
            if process:
                return next(answers)
            agreed.append(action())
            return agreed[-1]

        monkeypatch.setattr(save_schedule, "on_process_0", on_process_0)
        now = iter(itertools.count(0.0, cost))
        monkeypatch.setattr(save_schedule, "time", SimpleNamespace(monotonic=lambda: next(now)))
        meter = Meter(print, 1, 0, None)
        meter.seconds_per_step = step_seconds
        with Checkpoints(config.checkpoint, print) as checkpoints:
            schedule = SaveSchedule(config, PAST, meter, checkpoints, 0)
            return [step for step in range(1, 101) if schedule.is_due(step) and schedule.save(step, lambda: None, 0)]

    first = math.ceil(best_interval(40.0, 86400.0) / 40)
    then = math.ceil(best_interval(0.5, 86400.0) / 40)
    expected = [*range(first, 100, then), 100]
    assert saves(0, 40.0, 0.5) == expected
    assert saves(1, 1.0, 30.0) == expected
    printed = capsys.readouterr().out
    assert f"checkpoint.every=auto: {first} steps" in printed and f"checkpoint.every=auto: {then} steps" in printed
    assert "a save stops the steps for 0.5 s, and a failure is expected every 24.0 h (0 restarts in 0.0 h" in printed


def test_a_delayed_save_is_not_lost_while_steps_are_skipped(tmp_path, monkeypatch, capsys):
    """The save of step 4 waits until the one before is written, by step 6, and steps 5 to 8 are skipped."""
    config = tiny(tmp_path, "checkpoint.every=4", "train.steps=100")
    monkeypatch.setattr(Checkpoints, "delays", lambda self, step, patience: step < 6)
    with Checkpoints(config.checkpoint, print) as checkpoints:
        schedule = SaveSchedule(config, PAST, Meter(print, 1, 0, None), checkpoints, 0)
        in_a_row = dict(zip(range(5, 9), range(1, 5), strict=True))
        due = (step for step in range(1, 12) if schedule.is_due(step))
        assert [step for step in due if schedule.save(step, lambda: None, in_a_row.get(step, 0))] == [9]
    assert capsys.readouterr().out.count("the checkpoint of step 4 is delayed") == 1
