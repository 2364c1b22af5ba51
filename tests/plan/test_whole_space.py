"""The search finds the candidate that would have won: three small searches whose every candidate is compiled."""

import math
from dataclasses import dataclass, replace

import pytest
from formula_calibration import rank_correlation
from whole_space import CASES, ranks, recorded

from shmap_tp.plan.search.candidates import Result, candidates
from shmap_tp.plan.search.compiling import Search
from shmap_tp.plan.targets import machine_of
from tests.helpers.searching import RECORDED

DONE = recorded()


def test_rank_correlation():
    assert rank_correlation([1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]) == pytest.approx(1)
    assert rank_correlation([1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]) == pytest.approx(-1)
    assert rank_correlation([1.0, 2.0, 3.0], [1.0, 3.0, 2.0]) == pytest.approx(0.5)
    assert rank_correlation([1.0, 1.0, 2.0], [1.0, 1.0, 2.0]) == pytest.approx(1), "ties share their mean rank"
    assert math.isnan(rank_correlation([1.0], [1.0])) and math.isnan(rank_correlation([1.0, 1.0], [1.0, 2.0]))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_fastest_of_the_whole_space_is_kept(case):
    every = {" ".join(one.settings()) for one in candidates(case.config, case.target, case.fixed)}
    assert {words for name, words in DONE if name == case.name} == every, "run benchmarks/whole_space.py"
    found = ranks(case, DONE)
    assert found.place is not None and found.compiled > found.kept


@dataclass(frozen=True)
class Recorded:
    """A compilation whose result is recorded."""

    estimated: Result
    seconds: float

    def poll(self) -> Result:
        fits = self.seconds < float("inf")
        row = replace(RECORDED, fits=fits, step_seconds=self.seconds if fits else None, peak_bytes_per_device=1e9)
        return replace(self.estimated, row=row, compile_seconds=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "most"), [*zip(CASES, (5, 10, 3), strict=True)], ids=("meshes", "remat", "offload"))
def test_a_search_in_the_order_of_the_formulas_finds_the_fastest_of_the_whole_space(case, most):
    def start(one: Result) -> Recorded:
        return Recorded(one, DONE[case.name, " ".join(one.candidate.settings())])

    search = Search(case.kept(), machine_of(case.target).memory, start, lambda _: None, 1, 1e9, sleep=lambda _: None)
    search.run()
    assert search.best().seconds == min(seconds for (name, _), seconds in DONE.items() if name == case.name)
    assert len(search.found) <= most
