"""The search: compile the candidate that is expected to be the fastest, learn from it, and go on until time is up."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shmap_tp.plan.search.correction import corrected, rank_correlation
from shmap_tp.plan.search.jobs import Job, Outcome
from shmap_tp.plan.search.prune import Estimated
from shmap_tp.plan.search.space import Candidate

WORTH_TRYING = 1.1
"""A candidate is compiled while it is expected to take less than this times the fastest that was found: after what the
compiled ones teach, the formulas are still several percent off."""
FITS = 1.03
"""A candidate is compiled if it is expected to need less than this times the memory."""
WHILE_RUNNING = 1.1
"""Ratio that is assumed of a candidate while it is compiled, so that its neighbours wait for what it teaches."""
POLL_SECONDS = 0.2

Start = Callable[[Candidate], Job]
Tell = Callable[[str], None]
Save = Callable[["Found"], None]


@dataclass(frozen=True)
class Found:
    """A candidate, what the formulas said, and how its compilation ended."""

    estimated: Estimated
    outcome: Outcome

    @property
    def fits(self) -> bool:
        return self.outcome.row is not None and self.outcome.row.fits

    @property
    def seconds(self) -> float:
        """Of a step; infinite where it does not fit or was not compiled."""
        return self.outcome.row.step_seconds if self.fits else float("inf")


@dataclass
class Search:
    """What is known so far.  `start` begins a compilation; `clock` and `sleep` are replaced in tests."""

    remaining: list[Estimated]
    limit_bytes: float
    start: Start
    tell: Tell
    jobs: int
    seconds: float
    """Of the whole search."""
    save: Save = lambda one: None
    """Is called with each compiled candidate."""
    progress: Tell = lambda line: None
    """Is called with the state of the search, again and again."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    found: list[Found] = field(default_factory=list)
    running: dict[Candidate, tuple[Estimated, Job]] = field(default_factory=dict)
    stopped: str = ""
    """Why the search ended."""

    def run(self) -> None:
        """Compile until the time is up or nothing better is expected.  KeyboardInterrupt ends it, and what was found
        stays in `found`."""
        self.deadline = self.clock() + self.seconds
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
            for _, job in self.running.values():
                job.stop()
            self.running.clear()
        self.stopped = self.stopped or "nothing faster is expected"

    def best(self) -> Found | None:
        """The fastest that fits."""
        return min((one for one in self.found if one.fits), key=lambda one: one.seconds, default=None)

    def expected_seconds(self, one: Estimated) -> float:
        """Of a step: the formulas, corrected by the compiled candidates."""
        return corrected(one.seconds, one.candidate, self._ratios())

    def _ratios(self) -> list[tuple[Candidate, float]]:
        return [(each.estimated.candidate, each.seconds / each.estimated.seconds) for each in self.found if each.fits]

    def expected_bytes(self, one: Estimated) -> float:
        """Peak memory, corrected in the same way; by those that do not fit, too."""
        rows = [(each.estimated, each.outcome.row) for each in self.found if each.outcome.row is not None]
        ratios = [(each.candidate, row.peak_bytes_per_device / each.peak_bytes) for each, row in rows]
        return corrected(one.peak_bytes, one.candidate, ratios)

    def next(self) -> Estimated | None:
        """The candidate that is expected to be the fastest of those that fit, if it is worth trying."""
        fitting = [one for one in self.remaining if self.expected_bytes(one) <= FITS * self.limit_bytes]
        ratios = [*self._ratios(), *((candidate, WHILE_RUNNING) for candidate in self.running)]
        chosen = min(fitting, key=lambda one: corrected(one.seconds, one.candidate, ratios), default=None)
        best = self.best()
        if chosen is None or (best and self.expected_seconds(chosen) > WORTH_TRYING * best.seconds):
            return None
        return chosen

    def correlation(self) -> float:
        """Rank correlation of the formulas' time with the compiled time."""
        fitting = [one for one in self.found if one.fits]
        return rank_correlation([one.estimated.seconds for one in fitting], [one.seconds for one in fitting])

    def _fill(self) -> bool:
        """Start compilations where there is room.  Whether any runs."""
        while len(self.running) < self.jobs and not self._too_late() and (chosen := self.next()):
            self.remaining.remove(chosen)
            self.running[chosen.candidate] = chosen, self.start(chosen.candidate)
            self.tell(f"compiling  {chosen.candidate}: expected {self.expected_seconds(chosen):.2f} s a step")
        return bool(self.running)

    def _too_late(self) -> bool:
        """Whether a compilation as long as the shortest so far would not end in time."""
        shortest = min((one.outcome.seconds for one in self.found if one.outcome.row), default=0.0)
        return bool(self.found) and self.deadline - self.clock() < shortest

    def _collect(self) -> None:
        for candidate, (estimated, job) in list(self.running.items()):
            outcome = job.poll()
            if outcome is not None:
                del self.running[candidate]
                self.found.append(Found(estimated, outcome))
                self.tell(self._line(self.found[-1]))
                self.save(self.found[-1])

    def _state(self) -> str:
        best = self.best()
        fastest = f"fastest {best.seconds:.3f} s" if best else "none fits yet"
        return f"{len(self.running)} compiling, {len(self.found)} compiled, {fastest}, {self._left()}"

    def _line(self, one: Found) -> str:
        return f"{one.outcome.seconds:6.0f} s    {one.estimated.candidate}: {verdict(one)}; {self._left()}"

    def _left(self) -> str:
        return f"{max(0.0, self.deadline - self.clock()) / 60:.0f} min left"


def verdict(one: Found) -> str:
    """How a compilation ended, in a few words."""
    row = one.outcome.row
    if row is None:
        return f"not compiled: {one.outcome.error}"
    memory = f"{row.peak_bytes_per_device / 2**30:.2f} of {row.limit_bytes_per_device / 2**30:.2f} GiB"
    if not row.fits:
        return f"does not fit: needs {memory}"
    return f"{row.step_seconds:.3f} s, {row.tokens_per_second:,.0f} tokens/s, MFU {row.mfu:.1%}, {memory}"
