"""The search: compile candidates in the order of their formulas until time is up or nothing faster is expected.

Compiled steps correct the formulas of the others: the fastest one their time, the last one their memory, each by its
ratio compiled / formulas.  As long as nothing that was compiled fits, only candidates that surely fit are compiled: a
search that is cut short then has an answer.

Candidates are compiled in child processes, as many at a time as cores and memory allow.  A child process runs this
module.  It reads a request as JSON on stdin and writes a row as JSON on the last line of stdout:

    {"config": ..., "version": "v5e", "devices": 16, "topology": "4x4"}  ->  the row, or {"error": "..."}

A crash of the compiler, or the end of a child that took too much memory, ends no other compilation.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from shmap_tp.config.compose import from_values
from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.plan.predict import predict
from shmap_tp.plan.report import Row
from shmap_tp.plan.search.candidates import SURE, Candidate, Result
from shmap_tp.plan.targets import Target, find_target

# Compilations in child processes

MEMORY_PER_JOB = 5e9
"""Bytes that a compilation of a large step takes; 16b on 256 chips takes about 4 GB."""


@runtime_checkable
class Job(Protocol):
    """A compilation that has been started."""

    def poll(self) -> Result | None:
        """Its result, or None while it runs."""

    def stop(self) -> None:
        """End it without a result."""


class ChildProcess:
    """A `Job` of this module.  What the compiler writes to temporary files is removed with it, also if it is killed."""

    def __init__(self, estimated: Result, config: Config, target: Target):
        """`config` is what candidates are applied to."""
        self.estimated = estimated
        self.begin, self.files = time.monotonic(), tempfile.TemporaryDirectory()
        folder = Path(self.files.name)
        (folder / "in").write_text(request(estimated.candidate.apply(config), target))
        with (folder / "in").open() as given, (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shmap_tp.plan.search.compiling"], stdin=given, stdout=out, stderr=err,
                start_new_session=True,  # Ctrl-C is for the search, which keeps what was found
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": self.files.name},
            )  # fmt: skip

    def poll(self) -> Result | None:
        code = self.process.poll()
        if code is None:
            return None
        seconds, folder = time.monotonic() - self.begin, Path(self.files.name)
        out, err = ((folder / name).read_text(errors="replace") for name in ("out", "err"))
        self.files.cleanup()
        return ended(self.estimated, code, out, err, seconds)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.files.cleanup()


def ended(estimated: Result, code: int, out: str, err: str, seconds: float) -> Result:
    """The result of a child process that ended with this exit code, or was ended by a signal (a negative one)."""
    if code < 0:
        lacked_memory = code == -signal.SIGKILL
        error = f"killed by signal {-code}" + (" (out of memory?)" if lacked_memory else "")
        return replace(estimated, error=error, compile_seconds=seconds, lacked_memory=lacked_memory)
    if code:
        error = f"exit code {code}: {(err.strip().splitlines() or ['no message'])[-1]}"
        return replace(estimated, error=error, compile_seconds=seconds)
    made = json.loads(out.strip().splitlines()[-1])
    if "error" in made:
        return replace(estimated, error=made["error"], compile_seconds=seconds)
    return replace(estimated, row=Row(**made), compile_seconds=seconds)


def jobs_at_a_time() -> int:
    """One per core, as far as the free memory suffices; at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, int(_free_memory() / MEMORY_PER_JOB)))


def _free_memory() -> float:
    """Bytes that new processes can use; infinite where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    found = dict(line.split(":", 1) for line in lines)
    return 1024.0 * int(found["MemAvailable"].split()[0])


def request(config: Config, target: Target) -> str:
    """What the child process reads."""
    place = {"version": target.version, "devices": target.devices, "topology": getattr(target, "topology", None)}
    return json.dumps(place | {"config": asdict(config)})


def answer(text: str) -> dict:
    """The row of a request, or its error."""
    given = json.loads(text)
    try:
        config = from_values(given["config"], "the configuration of a candidate")
        target = find_target(given["version"], given["devices"], given["topology"], config.mesh.slices)
        return predict(config, target).row.to_json()
    except UserError as error:
        return {"error": str(error).splitlines()[0]}


# The search

WORTH_TRYING = 1.1
"""A candidate is compiled while it is expected to take less than this times the fastest that was found: the formulas
are several percent off."""
FITS = 1.03
"""A candidate is compiled if it is expected to need less than this times the memory."""
POLL_SECONDS = 0.2

Start = Callable[[Result], Job]
Tell = Callable[[str], None]
Save = Callable[[Result], None]


@dataclass
class Search:
    """What is known so far.  `start` begins a compilation; `clock` and `sleep` are replaced in tests."""

    remaining: list[Result]
    """The candidates that were not compiled."""
    limit_bytes: float
    start: Start
    tell: Tell
    jobs: int
    seconds: float
    """Seconds of the search, where a compiled candidate fits."""
    longest: float = 0.0
    """Seconds of the search as long as none does, if that is more."""
    save: Save = lambda one: None
    """Is called with each compiled candidate."""
    siblings: Callable[[Result], list[Result]] = lambda one: []
    """What is tried only beside the fastest: candidates that the formulas cannot tell from it."""
    progress: Tell = lambda line: None
    """Is called with the state of the search, again and again."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    found: list[Result] = field(default_factory=list)
    """The candidates whose compilation has ended."""
    running: dict[Candidate, tuple[Result, Job]] = field(default_factory=dict)
    stopped: str = ""
    """Why the search ended."""

    def run(self) -> None:
        """Compile until the time is up or nothing better is expected.  KeyboardInterrupt ends it.  What was found is in
        `found`; a candidate whose compilation is ended is in `remaining` again."""
        self.begin = self.clock()
        try:
            while self._fill() or self.running:
                self._collect()
                self.progress(self._state())
                if self.clock() >= self.deadline:
                    self.stopped = "the time is up"
                    break
                self.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            self.stopped = "stopped"
            raise
        finally:
            for estimated, job in self.running.values():
                job.stop()
                self.remaining.append(estimated)
            self.running.clear()
        if not self.stopped:
            expected = "nothing faster is expected" if self._fitting() else "nothing else is expected to fit"
            self.stopped = "too little time for another" if self.next() else expected

    @property
    def deadline(self) -> float:
        return self.begin + (self.seconds if self._fitting() else max(self.seconds, self.longest))

    def _fitting(self) -> list[Result]:
        """The compiled candidates that fit."""
        return [one for one in self.found if one.fits_in(self.limit_bytes)]

    def best(self) -> Result | None:
        """The fastest that fits."""
        return min(self._fitting(), key=lambda one: one.seconds, default=None)

    def _time_ratio(self) -> float:
        """Compiled / formulas of the fastest step; 1 without one."""
        best = self.best()
        return best.seconds / best.estimate.seconds if best else 1.0

    def _memory_ratio(self) -> float:
        """The same of the peak of the last compiled step, whether it fits or not."""
        last = [one for one in self.found if one.row is not None][-1:]
        return last[0].peak_bytes / last[0].estimate.peak_bytes if last else 1.0

    def expected_seconds(self, one: Result) -> float:
        """Seconds of a step by the formulas, corrected by the fastest compiled one."""
        return one.seconds * self._time_ratio()

    def _within(self, part: float) -> list[Result]:
        """The candidates that are not compiled yet and should need at most this part of the memory."""
        ratio = self._memory_ratio()
        return [one for one in self.remaining if one.peak_bytes * ratio <= part * self.limit_bytes]

    def answer(self) -> Result | None:
        """The fastest compiled candidate that fits; without one, the fastest by formulas that surely fits."""
        surely = [one for one in self._within(SURE) if one.fits_in(self.limit_bytes)]
        return self.best() or min(surely, key=_order, default=None)

    def next(self) -> Result | None:
        """The fastest candidate by formulas that may fit, if it is worth trying.  While no compiled candidate fits, the
        fastest that surely fits, or else the smallest."""
        best = self.best()
        if best is None:
            smallest = min(self._within(FITS), key=lambda one: one.peak_bytes, default=None)
            return min(self._within(SURE), key=_order, default=smallest)
        first = min(self._within(FITS), key=_order, default=None)
        return first if first and self.expected_seconds(first) <= WORTH_TRYING * best.seconds else None

    def _fill(self) -> bool:
        """Start compilations where there is room.  Whether any runs."""
        while len(self.running) < self.jobs and not self._too_late() and (chosen := self.next()):
            self.remaining.remove(chosen)
            self.running[chosen.candidate] = chosen, self.start(chosen)
            self.tell(f"compiling  {chosen.candidate}: expected {self.expected_seconds(chosen):.3g} s a step")
        return bool(self.running)

    def _too_late(self) -> bool:
        """Whether the time is up, or a compilation as long as the shortest so far would not end in time."""
        shortest = min((one.compile_seconds for one in self.found if one.row), default=0.0)
        return self.deadline - self.clock() <= shortest

    def _collect(self) -> None:
        for candidate, (estimated, job) in list(self.running.items()):
            one = job.poll()
            if one is not None:
                del self.running[candidate]
                self.tell(self._line(one))
                if one.lacked_memory and self.jobs > 1:  # it may have enough where fewer run beside it
                    self.jobs -= 1
                    self.remaining.append(estimated)
                    self.tell(f"from here on {self.jobs} at a time; this one is compiled again")
                    continue
                self.found.append(one)
                self.save(one)
                if one is self.best():
                    known = {each.candidate for each in (*self.found, *self.remaining)} | self.running.keys()
                    self.remaining += [more for more in self.siblings(one) if more.candidate not in known]

    def _state(self) -> str:
        best = self.best()
        fastest = f"fastest {best.seconds:.3f} s" if best else "none fits yet"
        return f"{len(self.running)} compiling, {len(self.found)} compiled, {fastest}, {self._left()}"

    def _line(self, one: Result) -> str:
        return f"{one.compile_seconds:6.0f} s    {one.candidate}: {verdict(one)}; {self._left()}"

    def _left(self) -> str:
        return f"{max(0.0, self.deadline - self.clock()) / 60:.0f} min left"


def _order(one: Result) -> tuple[float, float]:
    """Fastest by formulas first; among equally fast ones, the smallest first."""
    return one.seconds, one.peak_bytes


def verdict(one: Result) -> str:
    """How a compilation ended, in a few words."""
    row = one.row
    if row is None:
        return f"not compiled: {one.error}"
    memory = f"{row.peak_bytes_per_device / 2**30:.2f} of {row.limit_bytes_per_device / 2**30:.2f} GiB"
    if not row.fits:
        return f"does not fit: needs {memory}"
    return f"{row.step_seconds:.3f} s, {row.tokens_per_second:,.0f} tokens/s, MFU {row.mfu:.1%}, {memory}"


if __name__ == "__main__":
    print(json.dumps(answer(sys.stdin.read())))
