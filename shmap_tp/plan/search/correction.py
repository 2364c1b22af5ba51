"""Rank correlation of the formulas with compiled steps, and the correction of others by compiled ones."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from shmap_tp.parallel.mesh import MP
from shmap_tp.plan.search.space import Candidate


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


CHOICES = tuple(field.name for field in fields(Candidate) if field.name != MP)
"""Of a candidate, each with an error of its own; dp and mp are one."""
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
