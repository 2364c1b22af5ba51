"""Where the wall time of a run goes, across all its restarts: time.jsonl in the run directory.

Goodput is the share of the wall time, since the run was first started, that went to steps whose outcome the run still
has: neither skipped by the guard nor trained once more after a restart.

A line of time.jsonl is a span: cause, begin (seconds since 1970) and seconds; of steps also first and last (steps first
+ 1 to last) and how many of them were skipped; of a start the step it goes on from.  It is written when it ends; what a
kill left unwritten of steps is found from the times in metrics.jsonl.  All else that is not in the file was down time,
Python's own start included.
"""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import jax

from shmap_tp.runtime.files import write_lines, writing
from shmap_tp.training.metrics import read_metrics


class TimeCategory(StrEnum):
    """What wall time goes to, in the order of the table."""

    steps = "steps"
    skipped = "skipped"
    lost = "lost"
    start = "start"
    compile = "compile"
    data = "data"
    evaluation = "evaluation"
    checkpoint = "checkpoint"
    replicas = "replicas"
    profile = "profile"
    drawing = "drawing"
    down = "down"


WORDS = {
    TimeCategory.steps: "steps that count: goodput",
    TimeCategory.skipped: "steps skipped by the guard",
    TimeCategory.lost: "steps lost by a restart",
    TimeCategory.start: "start-up",
    TimeCategory.compile: "compiling the step",
    TimeCategory.data: "waiting for data",
    TimeCategory.evaluation: "evaluation",
    TimeCategory.checkpoint: "checkpoints",
    TimeCategory.replicas: "comparing copies",
    TimeCategory.profile: "writing the profile",
    TimeCategory.drawing: "drawing the loss curve",
    TimeCategory.down: "down between runs",
}


class TimeBreakdown:
    """Seconds by cause, of the lines of a time.jsonl as they are added."""

    def __init__(self) -> None:
        self.starts = 0
        self._seconds = dict.fromkeys(TimeCategory, 0.0)
        self._steps: list[tuple[int, float]] = []
        self.end: float | None = None
        """When the last line ended."""

    def add(self, line: dict[str, Any]) -> None:
        """Take the next line.  A start makes those steps lost that come after the one it goes on from."""
        cause, seconds, begin = TimeCategory(line["cause"]), line["seconds"], line["begin"]
        if cause == TimeCategory.start:
            self.starts += 1
            lost = sum((spent for last, spent in self._steps if last > line["first"]), 0.0)
            self._steps = [(last, spent) for last, spent in self._steps if last <= line["first"]]
            self._seconds[TimeCategory.steps] -= lost
            self._seconds[TimeCategory.lost] += lost
            self._seconds[TimeCategory.down] += max(0.0, begin - self.end) if self.end else 0.0
        if cause == TimeCategory.steps:
            skipped = seconds * line["skipped"] / max(1, line["last"] - line["first"])
            self._seconds[TimeCategory.skipped] += skipped
            seconds -= skipped
            self._steps.append((line["last"], seconds))
        self._seconds[cause] += seconds
        self.end = max(self.end or 0.0, begin + line["seconds"])

    def of(self, cause: TimeCategory) -> float:
        return self._seconds[cause]

    @property
    def total(self) -> float:
        """The wall time from the first line to the last."""
        return sum(self._seconds.values())

    def table(self) -> str:
        """What took a tenth of a second or more, as aligned lines."""
        rows = [
            (WORDS[cause], self.of(cause))
            for cause in TimeCategory
            if self.of(cause) >= 0.1 or cause == TimeCategory.steps
        ]
        rows.append((f"wall time, {self.starts} start{'s' if self.starts > 1 else ''}", self.total))
        return "\n".join(f"  {what:<28}{spent:>12,.1f} s {spent / self.total:>7.1%}" for what, spent in rows)


class WallClock:
    """Gives the time of this process to one cause after the other, from its own making on.

    Use as a context.  Only the process that is given a file by `open` writes one.
    """

    def __init__(self, now: Callable[[], float] = time.time):
        self.spent = TimeBreakdown()
        self._now, self._stream = now, None
        self._cause, self._begin = TimeCategory.start, now()
        self._first = self._done = self._skipped = 0
        self._waited = 0.0
        self._step_ends: Future[float] | None = None
        self._background = ThreadPoolExecutor(1, "goodput")

    def open(self, directory: Path | None, first: int, *, anew: bool) -> None:
        """End the start-up of a run in `directory` that goes on from step `first`, or is begun `anew`."""
        self._first = self._done = first
        if directory:
            self._file = directory / "time.jsonl"
            before = [] if anew else read_metrics(self._file)
            for line in before:
                self.spent.add(line)
            if before and (left := _unwritten(read_metrics(directory / "metrics.jsonl"), self.spent.end)):
                self.spent.add(left)
                before.append(left)
            write_lines(self._file, before)
            self._stream = self._file.open("a", buffering=1)
        self.turn(TimeCategory.compile)

    def turn(self, cause: TimeCategory) -> None:
        """From now on time goes to `cause`; what it went to until now is written."""
        if self._cause == TimeCategory.steps and self._done == self._first and not self._waited:
            self._cause = cause  # no step was taken: a moment between two causes
            return
        now = self._now()
        whole = now - self._begin
        if self._waited:
            self._write({"cause": TimeCategory.data, "begin": self._begin, "seconds": self._waited})
        line = {"cause": self._cause, "begin": self._begin + self._waited, "seconds": whole - self._waited}
        if self._cause == TimeCategory.start:
            line |= {"first": self._first}
        if self._cause == TimeCategory.steps:
            line |= {"first": self._first, "last": self._done, "skipped": self._skipped}
        self._write(line)
        self._cause, self._begin = cause, now
        self._first, self._skipped, self._waited = self._done, 0, 0.0

    @contextmanager
    def on(self, cause: TimeCategory) -> Iterator[None]:
        """What is done inside is for `cause`."""
        before = self._cause
        self.turn(cause)
        yield
        self.turn(before)

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """A batch is fetched inside.  Only what that takes beyond the end of the step under way was waited for."""
        begin = self._now()
        yield
        if self._step_ends is None or self._step_ends.done():
            idle = self._step_ends.result() if self._step_ends else begin
            self._waited += self._now() - max(begin, idle)

    def dispatched(self, outputs: Any) -> None:
        """A step is under way that makes `outputs`: its end is noted beside the loop, which does not wait for it."""
        self._step_ends = self._background.submit(lambda: (jax.block_until_ready(outputs), self._now())[1])

    def of(self, line: dict[str, Any]) -> dict[str, Any]:
        """What there is to add to the metrics of a step that has ended: when, and the goodput so far."""
        self._done = line["step"]
        self._skipped += line["skipped_in_a_row"] > 0
        now = self._now()
        taken = 1 - self._skipped / max(1, self._done - self._first)
        steps = self.spent.of(TimeCategory.steps) + (now - self._begin - self._waited) * taken
        goodput = steps / max(self.spent.total + now - self._begin, 1e-9)
        return {"time": datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds"), "goodput": goodput}

    def __enter__(self) -> "Clock":
        return self

    def __exit__(self, *exception: object) -> None:
        self._background.shutdown()
        if self._stream:
            self._stream.close()

    def _write(self, line: dict[str, Any]) -> None:
        self.spent.add(line)
        if self._stream:
            with writing(self._file):
                self._stream.write(json.dumps(line) + "\n")


def _unwritten(metrics: list[dict[str, Any]], end: float) -> dict[str, Any] | None:
    """The steps that ended after `end`, of which metrics.jsonl tells and time.jsonl does not."""
    ended = [(datetime.fromisoformat(line["time"]).timestamp(), line) for line in metrics if "time" in line]
    later = [(time, line) for time, line in ended if time > end]
    if not later:
        return None
    steps = {"first": later[0][1]["step"] - 1, "last": later[-1][1]["step"]}
    skipped = sum(line["skipped_in_a_row"] > 0 for _, line in later)
    return {"cause": TimeCategory.steps, "begin": end, "seconds": later[-1][0] - end} | steps | {"skipped": skipped}
