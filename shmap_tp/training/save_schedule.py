"""When a checkpoint is due: every N steps, or as often as loses least (checkpoint.every=auto).

Saving costs the seconds of each save; not saving costs what is trained again after a failure, half an interval in the
mean.  Young 1974, https://doi.org/10.1145/361147.361115, and Daly 2006, https://doi.org/10.1016/j.future.2004.11.016,
give the interval with the least sum.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from shmap_tp.config.schema import AUTO, Config
from shmap_tp.runtime.agreement import on_process_0
from shmap_tp.runtime.console import print_on_process_0
from shmap_tp.training.checkpoint import PATIENCE_SECONDS, Checkpoints
from shmap_tp.training.goodput import TimeBreakdown, TimeCategory
from shmap_tp.training.metrics import Meter

FIRST_STEPS = 10
"""Steps of a start after which `auto` knows the time of a step."""
ASSUMED_HOURS = 24.0
"""Without any restart so far, one failure is expected in so many hours besides those that the run has lasted."""
WORTH_SAYING = 1.2
"""An interval that changes by this factor or more is printed again."""


@dataclass(frozen=True)
class Costs:
    """Measured seconds, and the time between failures, from which an interval follows."""

    step: float
    save: float
    """What the steps wait for a save."""
    written: float
    """From the beginning of a save until the checkpoint is complete: the next one cannot begin before."""
    restart: float
    """Start-up and compilation of a start, in the mean."""
    between_failures: float


def best_interval(save: float, between_failures: float) -> float:
    """Seconds of training between two saves (Daly 2006, equation 37; for cheap saves Young's sqrt(2 save M))."""
    ratio = save / (2 * between_failures)
    if ratio >= 1:
        return between_failures
    return math.sqrt(2 * save * between_failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def best_steps(costs: Costs) -> int:
    """The number of steps between two saves: at least 1, and at least until the save before is complete."""
    seconds = max(best_interval(costs.save, costs.between_failures), costs.written)
    return max(1, math.ceil(seconds / costs.step))


def expected_loss(costs: Costs, steps: int) -> float:
    """The share of the time that saves, repeated steps and restarts are expected to take."""
    again = steps * costs.step / 2 + costs.written + costs.restart
    return costs.save / (steps * costs.step) + again / costs.between_failures


def hours_between_failures(given: float | None, past: TimeBreakdown) -> tuple[float, str]:
    """(the hours, where they are from): as configured, or those of the run so far, of which each later start counts as
    a failure, and one failure in `ASSUMED_HOURS` besides."""
    if given is not None:
        return given, "checkpoint.hours_between_failures"
    hours, failures = past.total / 3600, max(0, past.starts - 1)
    return (hours + ASSUMED_HOURS) / (failures + 1), (
        f"{failures} restarts in {hours:,.1f} h, and one assumed in {ASSUMED_HOURS:.0f} h"
    )


class SaveSchedule:
    """Tells the loop after each step whether a checkpoint is due, the same on all processes."""

    def __init__(self, config: Config, past: TimeBreakdown, meter: Meter, checkpoints: Checkpoints, first: int):
        """`past` is where the time of the run went so far, on process 0; `first` the step at which it starts."""
        self._config, self._past, self._meter, self._checkpoints = config.checkpoint, past, meter, checkpoints
        self._first = self._saved = first
        self._last = config.train.steps
        self._every: int | None = None if config.checkpoint.every == AUTO else int(config.checkpoint.every)
        self._seconds: float | None = None
        self._is_delayed = False

    def is_due(self, step: int) -> bool:
        """Whether to call `save`.  Must be called after each step."""
        if self._config.every == AUTO and step == self._first + FIRST_STEPS:
            self._choose()
        if step == self._last:
            return True
        if self._is_delayed:
            return not self._checkpoints.delays(step, 0.0)
        if self._config.every == AUTO:
            return self._every is not None and step >= self._saved + self._every
        return self._every > 0 and step % self._every == 0

    def save(self, step: int, begin_save: Callable[[], None], skipped_in_a_row: int) -> bool:
        """Call `begin_save`, and return whether: not while the save before is written, unless `step` is the last, and
        not after skipped steps, whose weights an earlier checkpoint has.  A delayed save stays due."""
        begin = time.monotonic()
        if not self._is_delayed and step < self._last and self._checkpoints.delays(step, PATIENCE_SECONDS):
            self._is_delayed = True
            print_on_process_0(f"the checkpoint of step {step} is delayed until the one before it is written")
            return False
        if skipped_in_a_row:
            return False
        self._is_delayed = False
        begin_save()
        self._saved, self._seconds = step, time.monotonic() - begin
        if self._config.every == AUTO and self._every is not None:
            self._choose()
        return True

    def _choose(self) -> None:
        """Compute the interval from what process 0 has measured; print it with its reason if it is another one."""
        every, why = on_process_0("checkpoint.every", self._chosen)
        if self._every is None or max(every, self._every) >= WORTH_SAYING * min(every, self._every):
            print_on_process_0(why)
        self._every = every

    def _chosen(self) -> tuple[int, str]:
        hours, source = hours_between_failures(self._config.hours_between_failures, self._past)
        step, past = self._meter.seconds_per_step, self._past
        save = step if self._seconds is None else self._seconds
        restart = (past.seconds(TimeCategory.start) + past.seconds(TimeCategory.compile)) / max(1, past.starts)
        costs = Costs(step, save, max(save, self._checkpoints.last_seconds), restart, 3600 * hours)
        every = best_steps(costs)
        return every, (
            f"checkpoint.every=auto: {every} steps ({every * step:,.0f} s), since a save stops the steps for "
            f"{save:.2g} s{'' if self._seconds else ' (assumed: a step)'}, and a failure is expected every "
            f"{hours:,.1f} h ({source}); expected loss {expected_loss(costs, every):.1%}"
        )
