"""Rank correlation of the formulas with compiled steps, and the correction of others by compiled ones."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
    https://gaussianprocess.org/gpml): one part is common to all candidates of a search, as that of the model and the
    device, and one is its own, more alike the more choices two candidates share.
    """

    common: float
    own: float

    @property
    def total(self) -> float:
        return math.hypot(self.common, self.own)

    def covariance(self, a: Candidate, b: Candidate) -> float:
        return self.common**2 + self.own**2 * ALIKE ** _differences(a, b)


ALIKE = 0.3
"""What each choice in which two candidates differ leaves of the covariance of their own errors: 0.38 where remat and
microbatches differ, 0.14 where the mesh does, by the whole spaces of benchmarks/whole_space.py."""
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


def _differences(a: Candidate, b: Candidate) -> int:
    """How many choices differ."""
    return sum(x != y for x, y in zip(vars(a).values(), vars(b).values(), strict=True))
