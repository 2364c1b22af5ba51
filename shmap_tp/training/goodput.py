"""Goodput: where the wall time of a run goes, across all its restarts, in time.jsonl of the run directory.

Goodput is the fraction of the wall time since the first start of the run that was spent on steps that count: steps that
were neither skipped as bad steps nor repeated after a restart.

A line of time.jsonl is a time span: cause (a TimeCategory), begin (seconds since 1970) and seconds.  Lines of steps
also have first and last (steps first + 1 to last) and the number skipped; lines of start have the step that the run
resumes from, and of a new run new=true: no line before it counts.  A line is written when its span ends.
After a kill, the unwritten span of steps is reconstructed from the times in metrics.jsonl.  Time that is in no line is
down time, including the start of Python itself.

Where the time of a step goes is in a profile of chosen steps (`Profile`).
"""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from typing import Any

import jax

from shmap_tp.config.schema import Config
from shmap_tp.errors import StorageError
from shmap_tp.runtime.console import print_on_process_0
from shmap_tp.runtime.files import NUMBER, appending, having, read_lines, read_lines_backwards, writing
from shmap_tp.training.metrics import is_metric

TIME = "time.jsonl"


LABELS = {
    "steps": "steps that count: goodput",
    "skipped": "skipped steps",
    "lost": "steps lost by a restart",
    "start": "start-up",
    "compile": "compiling the step",
    "data": "waiting for data",
    "evaluation": "evaluation",
    "samples": "samples of text",
    "checkpoint": "checkpoints",
    "replicas": "comparing replicas, replays",
    "profile": "writing the profile",
    "drawing": "writing the report",
    "down": "down between runs",
}
TimeCategory = StrEnum("TimeCategory", [*LABELS])
"""Categories of wall time, in the order of the table."""


class TimeBreakdown:
    """Seconds per category, accumulated over the lines of a time.jsonl."""

    def __init__(self) -> None:
        self.starts = 0
        self._seconds = dict.fromkeys(TimeCategory, 0.0)
        self._steps: list[tuple[int, float]] = []
        self.end: float | None = None
        """When the last span ended, in seconds since 1970."""

    def add(self, line: dict[str, Any]) -> None:
        """Add the next line.  A start moves the steps after the one that it resumes from to the category `lost`; the
        start of a new run forgets all before."""
        if line.get("new"):
            TimeBreakdown.__init__(self)
        category, seconds, begin = TimeCategory(line["cause"]), line["seconds"], line["begin"]
        if category == TimeCategory.start:
            self.starts += 1
            lost = sum((duration for last, duration in self._steps if last > line["first"]), 0.0)
            self._steps = [(last, duration) for last, duration in self._steps if last <= line["first"]]
            self._seconds[TimeCategory.steps] -= lost
            self._seconds[TimeCategory.lost] += lost
            self._seconds[TimeCategory.down] += max(0.0, begin - self.end) if self.end else 0.0
        if category == TimeCategory.steps:
            skipped = seconds * line["skipped"] / max(1, line["last"] - line["first"])
            self._seconds[TimeCategory.skipped] += skipped
            seconds -= skipped
            self._steps.append((line["last"], seconds))
        self._seconds[category] += seconds
        self.end = max(self.end or 0.0, begin + line["seconds"])

    def seconds(self, category: TimeCategory) -> float:
        return self._seconds[category]

    @property
    def total(self) -> float:
        """Wall time from the beginning of the first span to the end of the last."""
        return sum(self._seconds.values())

    def table(self) -> str:
        """The categories of a tenth of a second or more, as aligned lines."""
        rows = [
            (LABELS[category], self.seconds(category))
            for category in TimeCategory
            if self.seconds(category) >= 0.1 or category == TimeCategory.steps
        ]
        rows.append((f"wall time, {self.starts} start{'s' if self.starts > 1 else ''}", self.total))
        return "\n".join(f"  {label:<28}{seconds:>12,.1f} s {seconds / self.total:>7.1%}" for label, seconds in rows)


class WallClock:
    """Assigns all time of this process, from construction on, to one category after another.

    Use as a context.  Only a process that calls `open` with a directory writes time.jsonl.
    """

    def __init__(self, now: Callable[[], float] = time.time):
        self.breakdown = TimeBreakdown()
        self._now, self._stream = now, None
        self._category, self._begin = TimeCategory.start, now()
        self._first = self._done = self._skipped = 0
        self._is_new = False
        self._waited = 0.0
        self._step_end: Future[float] | None = None
        self._background = ThreadPoolExecutor(1, "goodput")

    def open(self, directory: Path | None, first: int, *, new_run: bool) -> None:
        """End the start-up of a run in `directory` that resumes from step `first`, or starts as a `new_run`."""
        self._first, self._done, self._is_new = first, first, new_run
        if directory:
            self._file, unwritten = directory / TIME, None
            if not new_run:
                self.breakdown, unwritten = read_breakdown(directory)
            with writing(self._file):
                self._stream = appending(self._file)
                if unwritten:
                    self._stream.write(json.dumps(unwritten) + "\n")
        self.switch_to(TimeCategory.compile)

    def switch_to(self, category: TimeCategory) -> None:
        """Write the span that ends now, and assign time to `category` from now on."""
        if self._category == TimeCategory.steps and self._done == self._first and not self._waited:
            self._category = category  # no step was taken: only a moment between two other categories
            return
        now = self._now()
        duration = now - self._begin
        if self._waited:
            self._write({"cause": TimeCategory.data, "begin": self._begin, "seconds": self._waited})
        line = {"cause": self._category, "begin": self._begin + self._waited, "seconds": duration - self._waited}
        if self._category == TimeCategory.start:
            line |= {"first": self._first} | ({"new": True} if self._is_new else {})
        if self._category == TimeCategory.steps:
            line |= {"first": self._first, "last": self._done, "skipped": self._skipped}
        self._write(line)
        self._category, self._begin = category, now
        self._first, self._skipped, self._waited = self._done, 0, 0.0

    @contextmanager
    def on(self, category: TimeCategory) -> Iterator[None]:
        """Assign the time inside the context to `category`."""
        previous = self._category
        self.switch_to(category)
        yield
        self.switch_to(previous)

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """A context for fetching a batch.  Only the part after the end of the step in flight counts as waiting."""
        begin = self._now()
        yield
        if self._step_end is None or self._step_end.done():
            idle_since = self._step_end.result() if self._step_end else begin
            self._waited += self._now() - max(begin, idle_since)

    def dispatched(self, outputs: Any) -> None:
        """Note, in a background thread, when the step that computes `outputs` ends."""
        self._step_end = self._background.submit(lambda: (jax.block_until_ready(outputs), self._now())[1])

    def step_fields(self, line: dict[str, Any]) -> dict[str, Any]:
        """What to add to the metrics of a step that has ended: its time, and the goodput so far."""
        self._done = line["step"]
        self._skipped += line["skipped_in_a_row"] > 0
        now = self._now()
        taken = 1 - self._skipped / max(1, self._done - self._first)
        steps = self.breakdown.seconds(TimeCategory.steps) + (now - self._begin - self._waited) * taken
        goodput = steps / max(self.breakdown.total + now - self._begin, 1e-9)
        return {"time": datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds"), "goodput": goodput}

    def __enter__(self) -> "WallClock":
        return self

    def __exit__(self, *exception: object) -> None:
        self._background.shutdown()
        if self._stream:
            with writing(self._file):  # it writes what a full disk has refused before
                self._stream.close()

    def _write(self, line: dict[str, Any]) -> None:
        self.breakdown.add(line)
        if self._stream:
            with writing(self._file):
                self._stream.write(json.dumps(line) + "\n")


def read_breakdown(directory: Path) -> tuple[TimeBreakdown, dict[str, Any] | None]:
    """(the time of a run so far, the span in it that no line of time.jsonl has: of the steps since the last line)."""
    breakdown = TimeBreakdown()
    for line in read_lines(directory / TIME, _is_span):
        breakdown.add(line)
    span = _unwritten_steps(directory / "metrics.jsonl", breakdown.end) if breakdown.end else None
    if span:
        breakdown.add(span)
    return breakdown, span


_SPAN = having(cause=str, begin=NUMBER, seconds=NUMBER)
_MORE = {"start": having(first=int), "steps": having(first=int, last=int, skipped=int)}
"""What the lines of two categories have besides."""


def _is_span(line: dict[str, Any]) -> bool:
    """Whether an object is a line of time.jsonl."""
    return _SPAN(line) and line["cause"] in LABELS and _MORE.get(line["cause"], _SPAN)(line)


def _unwritten_steps(metrics: Path, end: float) -> dict[str, Any] | None:
    """A line for the steps that ended after `end`: they are in metrics.jsonl but not in time.jsonl."""
    lines = read_lines_backwards(metrics, is_metric)
    timed = ((at, line) for line in lines if (at := _end_of_step(line)) is not None)
    after = [*takewhile(lambda each: each[0] > end, timed)]
    if not after:
        return None
    (last_end, last), (_, first) = after[0], after[-1]
    skipped = sum(bool(line.get("skipped_in_a_row")) for _, line in after)
    steps = {"first": first["step"] - 1, "last": last["step"], "skipped": skipped}
    return {"cause": TimeCategory.steps, "begin": end, "seconds": last_end - end} | steps


def _end_of_step(line: dict[str, Any]) -> float | None:
    """When the step of a line of metrics.jsonl ended, in seconds since 1970; None if the line does not say."""
    try:
        return datetime.fromisoformat(line["time"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return None


# A profile of chosen steps


class Profile:
    """Profiles a range of steps, for XProf or TensorBoard: what each device executes when, by scope name.  Use as a
    context around the loop: leaving it writes an unfinished profile.

    A profile that cannot be written does not end the training: the error is printed, and remains in `error`.
    """

    error: StorageError | None = None
    """Why the profile could not be written."""

    def __init__(self, config: Config, done: int, pause: Callable[[], AbstractContextManager[None]]):
        """train.profile is [first, last], counted from 1, or None for no profile; there is none either, and a line that
        says so, if the first of them is among the `done` steps before this process.  No step is in flight in `pause()`.
        """
        steps = config.train.profile
        if steps and steps[0] <= done:
            print_on_process_0(
                f"no profile: train.profile={steps} is before step {done + 1}, the first of this process"
            )
            steps = None
        self._first, self._last = steps or (None, None)
        self._directory, self._pause = Path(config.run.dir) / "profile", pause
        self._running = False

    @contextmanager
    def annotate(self, step: int) -> Iterator[None]:
        """A context for the dispatch of `step`: starts the profile before the first profiled step and stops it after
        the last one, each time with no step in flight."""
        if step == self._first:
            with self._pause(), self._writing():
                jax.profiler.start_trace(str(self._directory))
                self._running = True
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield
        if step == self._last:
            self._stop()

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._running:
            self._running = False
            with self._pause(), self._writing():
                jax.profiler.stop_trace()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A context that keeps the error of writing.  XLA reports a full disk as a JaxRuntimeError."""
        try:
            with writing(f"profile {self._directory}"):
                try:
                    yield
                except jax.errors.JaxRuntimeError as error:
                    raise OSError(str(error).splitlines()[0]) from error
        except StorageError as error:
            self.error = error
            print(f"{str(error).splitlines()[0]} the training goes on", flush=True)
