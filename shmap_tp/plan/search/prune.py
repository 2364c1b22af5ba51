"""Which candidates the formulas keep, with a margin for their error."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from shmap_tp.config.schema import Config
from shmap_tp.plan.search.formulas import Estimate, estimates
from shmap_tp.plan.search.machine import machine_of
from shmap_tp.plan.search.space import Candidate
from shmap_tp.plan.targets import Target

MEMORY_MARGIN = 1.2
"""A candidate is dropped if the formulas say that it needs more than this times the memory: on models that were left
out of the fit they say 0.86 to 1.13 times the compiled peak."""
SURE = 0.9
"""A candidate surely fits if the formulas say that it needs less than this times the memory."""
TIME_MARGIN = 1.5
"""A candidate is dropped if the formulas say that it takes more than this times the fastest that surely fits."""


@dataclass(frozen=True)
class Estimated:
    """A candidate and what the formulas say of it."""

    candidate: Candidate
    estimate: Estimate

    @property
    def seconds(self) -> float:
        return self.estimate.seconds

    @property
    def peak_bytes(self) -> float:
        return self.estimate.peak_bytes


@dataclass(frozen=True)
class Pruned:
    """What is left, fastest first, and how many were dropped for which reason."""

    kept: list[Estimated]
    dropped: Counter
    least_memory: Estimated
    """The candidate that needs least, of all."""

    @property
    def total(self) -> int:
        return len(self.kept) + self.dropped.total()


def prune(config: Config, target: Target, choices: list[Candidate]) -> Pruned:
    """Estimate every candidate, and drop those that cannot win."""
    groups: dict[Candidate, list[Candidate]] = {}
    for one in choices:
        groups.setdefault(replace(one, offload=()), []).append(one)
    every = []
    for base, group in groups.items():
        made = estimates(base.apply(config), target, [one.offload for one in group])
        every += [Estimated(one, found) for one, found in zip(group, made, strict=True)]
    machine = machine_of(target)
    return pruned(every, machine.memory, machine.host_memory)


def pruned(every: list[Estimated], limit: float, host_limit: float) -> Pruned:
    """Drop what does not fit, what another offload improves in both memory and time, and what is too slow."""
    dropped: Counter = Counter()
    small = [one for one in every if one.peak_bytes <= MEMORY_MARGIN * limit and one.estimate.host_bytes <= host_limit]
    dropped["too large"] = len(every) - len(small)
    useful = _without_dominated_offloads(small)
    dropped["another offload is better"] = len(small) - len(useful)
    surely = [one.seconds for one in useful if one.peak_bytes <= SURE * limit]
    fastest = min(surely, default=float("inf"))
    kept = sorted((one for one in useful if one.seconds <= TIME_MARGIN * fastest), key=lambda one: one.seconds)
    dropped["too slow"] = len(useful) - len(kept)
    return Pruned(kept, dropped, min(every, key=lambda one: one.peak_bytes))


def _without_dominated_offloads(every: list[Estimated]) -> list[Estimated]:
    """Without the candidates that another, which differs in model.offload only, beats in both memory and time."""
    groups: dict[Candidate, list[Estimated]] = {}
    for one in every:
        groups.setdefault(replace(one.candidate, offload=()), []).append(one)
    return [one for group in groups.values() for one in pareto_front(group)]


Sized = TypeVar("Sized")
"""Something with `seconds` and `peak_bytes`."""


def pareto_front(every: Iterable[Sized]) -> list[Sized]:
    """Those that no other equals or beats in both memory and time, fastest first."""
    front: list[Sized] = []
    for one in sorted(every, key=lambda one: (one.seconds, one.peak_bytes)):
        if not front or one.peak_bytes < front[-1].peak_bytes:
            front.append(one)
    return front
