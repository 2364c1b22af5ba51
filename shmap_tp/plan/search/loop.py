"""The search: compile the most promising candidate, learn from it, and go on until time is up.

Most promising is the candidate with the largest expected improvement on the fastest that was found, times the
probability that it fits (Gardner et al. 2014, "Bayesian optimization with inequality constraints", section 3.1,
https://proceedings.mlr.press/v32/gardner14.html).  As long as nothing that was compiled fits, only candidates that
surely fit are compiled: a search that is cut short then has an answer.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from statistics import NormalDist

import numpy as np

from shmap_tp.parallel.mesh import CP, EP, MP
from shmap_tp.plan.search.candidates import Candidate, Result
from shmap_tp.plan.search.jobs import Job

# What compiled candidates teach about the formulas' errors for others


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's rank correlation, from -1 to 1 (ties share their mean rank); nan for fewer than two values."""
    if len(xs) < 2:
        return float("nan")
    a, b = _ranks(xs), _ranks(ys)
    mean = (len(xs) - 1) / 2
    covariance = sum((p - mean) * (q - mean) for p, q in zip(a, b, strict=True))
    spread = (sum((p - mean) ** 2 for p in a) * sum((q - mean) ** 2 for q in b)) ** 0.5
    return covariance / spread if spread else float("nan")


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


@dataclass(frozen=True)
class Errors:
    """How far formulas are off, as standard deviations of the logarithm of (compiled / formulas).

    The error of a candidate is a Gaussian process (Rasmussen and Williams 2006, equations 2.25 and 2.26,
    https://gaussianprocess.org/gpml), a sum of independent parts (section 4.2.4): one is common to all candidates of a
    search, as that of the model and the device; one belongs to each choice, and is shared by the candidates that make
    it; and one is the candidate's own.
    """

    common: float
    choice: float
    own: float

    @property
    def total(self) -> float:
        return math.sqrt(self.common**2 + len(CHOICES) * self.choice**2 + self.own**2)

    def covariance(self, a: Candidate, b: Candidate) -> float:
        shared = sum(getattr(a, name) == getattr(b, name) for name in CHOICES)
        return self.common**2 + shared * self.choice**2 + (self.own**2 if a == b else 0.0)


CHOICES = tuple(field.name for field in fields(Candidate) if field.name not in (CP, EP, MP, "row_major"))
"""Of a candidate, each with an error of its own; dp, cp and mp are one.  What row_major changes is not the same for all
candidates, and belongs to each one's own error."""
NOISE = 0.01
"""Standard deviation of what two compilations of the same step may differ by."""


class Correction:
    """What compiled candidates teach about the errors of others."""

    def __init__(self, errors: Errors, compiled: Sequence[tuple[Candidate, float]]):
        """`compiled`: candidates, and compiled / formulas of each."""
        self._errors, self._known = errors, [candidate for candidate, _ in compiled]
        matrix = np.array([[errors.covariance(a, b) for b in self._known] for a in self._known])
        matrix = matrix.reshape(len(compiled), len(compiled)) + NOISE**2 * np.eye(len(compiled))
        self._inverse = np.linalg.inv(matrix)
        self._weights = self._inverse @ np.log([ratio for _, ratio in compiled])

    def of(self, candidate: Candidate) -> tuple[float, float]:
        """The expected logarithm of (compiled / formulas) of a candidate, and its standard deviation."""
        shared = np.array([self._errors.covariance(candidate, known) for known in self._known])
        variance = self._errors.total**2 - shared @ self._inverse @ shared
        return float(shared @ self._weights), math.sqrt(max(float(variance), 0.0))


# The search

WORTH_TRYING = 1.1
"""A candidate is compiled while it is expected to take less than this times the fastest that was found: after what the
compiled ones teach, the formulas are still several percent off."""
FITS = 1.03
"""A candidate is compiled if it is expected to need less than this times the memory."""
SURELY = 0.99
"""Probability of a candidate that surely fits: before anything is compiled, `candidates.SURE` of the memory or less."""
TIME_ERRORS, MEMORY_ERRORS = Errors(common=0.03, choice=0.025, own=0.03), Errors(common=0.03, choice=0.01, own=0.02)
"""Of the formulas: in all 7.9 % and 4.5 %, about what they are off on models that were left out of their fit."""
SMALLEST_DEVIATION = 0.01
WHILE_RUNNING = 1.1
"""While a candidate is compiled it is assumed to take this times what is expected of it, so that candidates that are
alike wait for what it teaches."""
POLL_SECONDS = 0.2

Start = Callable[[Result], Job]
Tell = Callable[[str], None]
Save = Callable[[Result], None]


@dataclass
class Search:
    """What is known so far.  `start` begins a compilation; `clock` and `sleep` are replaced in tests."""

    remaining: list[Result]
    """Those that were not compiled."""
    limit_bytes: float
    start: Start
    tell: Tell
    jobs: int
    seconds: float
    """Of the search, where a compiled candidate fits."""
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
    """Those whose compilation has ended."""
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

    def _time_correction(self, *more: tuple[Candidate, float]) -> Correction:
        ratios = [(each.candidate, each.seconds / each.estimate.seconds) for each in self._fitting()]
        return Correction(TIME_ERRORS, [*ratios, *more])

    def _memory_correction(self) -> Correction:
        """By those that do not fit, too."""
        compiled = [each for each in self.found if each.row is not None]
        ratios = [(each.candidate, each.peak_bytes / each.estimate.peak_bytes) for each in compiled]
        return Correction(MEMORY_ERRORS, ratios)

    def expected_seconds(self, one: Result) -> float:
        """Of a step: the formulas, corrected by the compiled candidates."""
        return one.seconds * math.exp(self._time_correction().of(one.candidate)[0])

    def answer(self) -> Result | None:
        """The fastest compiled one that fits; without one, the fastest by formulas of those that surely fit."""
        fits = self._may_fit()
        surely = [
            one for one in self.remaining if one.fits_in(self.limit_bytes) and fits.get(one.candidate, 0) >= SURELY
        ]
        return self.best() or min(surely, key=lambda one: (one.seconds, one.peak_bytes), default=None)

    def _may_fit(self) -> dict[Candidate, float]:
        """Those that are expected to fit, or nearly, with the probability that each does."""
        taught, fits = self._memory_correction(), {}
        for one in self.remaining:
            log, deviation = taught.of(one.candidate)
            room = math.log(self.limit_bytes / one.peak_bytes) - log
            if room >= -math.log(FITS):
                fits[one.candidate] = NormalDist().cdf(room / max(deviation, SMALLEST_DEVIATION))
        return fits

    def next(self) -> Result | None:
        """The most promising candidate of those that may fit and are worth trying; while nothing that was compiled
        fits, of those that surely fit, or else the one that most probably does."""
        time_taught, fits = self._time_correction(), self._may_fit()
        fitting = [one for one in self.remaining if one.candidate in fits]
        if not self._fitting():
            surely = [one for one in fitting if fits[one.candidate] >= SURELY]
            fitting = surely or sorted(fitting, key=lambda one: fits[one.candidate])[-1:]
        seconds = {one.candidate: one.seconds * math.exp(time_taught.of(one.candidate)[0]) for one in fitting}
        best = self.best()
        fastest = best.seconds if best else min(seconds.values(), default=0.0)
        running = [(one, WHILE_RUNNING * math.exp(time_taught.of(one)[0])) for one in self.running]
        with_running = self._time_correction(*running)

        def promise(one: Result) -> float:
            log, deviation = with_running.of(one.candidate)
            improvement = math.log(fastest / one.seconds) - log
            return fits[one.candidate] * expected_improvement(improvement, max(deviation, SMALLEST_DEVIATION))

        worth = [one for one in fitting if seconds[one.candidate] <= WORTH_TRYING * fastest]
        return max(worth, key=promise, default=None)

    def correlation(self) -> float:
        """Rank correlation of the formulas' time with the compiled time."""
        fitting = self._fitting()
        return rank_correlation([one.estimate.seconds for one in fitting], [one.seconds for one in fitting])

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


def expected_improvement(mean: float, deviation: float) -> float:
    """The mean of max(0, x) of a normal x (Jones et al. 1998, https://doi.org/10.1023/A:1008306431147, equation 15)."""
    standard, ratio = NormalDist(), mean / deviation
    return mean * standard.cdf(ratio) + deviation * standard.pdf(ratio)


def verdict(one: Result) -> str:
    """How a compilation ended, in a few words."""
    row = one.row
    if row is None:
        return f"not compiled: {one.error}"
    memory = f"{row.peak_bytes_per_device / 2**30:.2f} of {row.limit_bytes_per_device / 2**30:.2f} GiB"
    if not row.fits:
        return f"does not fit: needs {memory}"
    return f"{row.step_seconds:.3f} s, {row.tokens_per_second:,.0f} tokens/s, MFU {row.mfu:.1%}, {memory}"
