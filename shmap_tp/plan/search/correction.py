"""Rank correlation of the formulas with compiled steps, and the correction of others by compiled ones."""

import math
from collections.abc import Sequence

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


SHARPNESS = 4.0
"""How much more a compiled candidate counts for each further choice that it shares with the one to correct."""
PRIOR = 4.0
"""Weight of the formulas themselves, as that of a compiled candidate that shares one choice."""


def corrected(value: float, candidate: Candidate, compiled: Sequence[tuple[Candidate, float]]) -> float:
    """`value` of the formulas times the mean ratio (compiled / formulas) of compiled candidates, alike ones most.

    The mean is geometric; the weights grow by SHARPNESS with each choice (field of Candidate) that is the same.
    """
    weights, total = PRIOR, 0.0
    for other, ratio in compiled:
        weight = SHARPNESS ** _shared(candidate, other)
        weights += weight
        total += weight * math.log(ratio)
    return value * math.exp(total / weights)


def _shared(a: Candidate, b: Candidate) -> int:
    """How many choices are the same."""
    return sum(x == y for x, y in zip(vars(a).values(), vars(b).values(), strict=True))
