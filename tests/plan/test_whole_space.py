"""The formulas never drop the candidate that would have won: three small searches whose every candidate is compiled."""

import pytest
from whole_space import CASES, ranks, recorded

from shmap_tp.plan.search.candidates import candidates

DONE = recorded()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_fastest_of_the_whole_space_is_kept(case):
    every = {" ".join(one.settings()) for one in candidates(case.config, case.target, case.fixed)}
    assert {words for name, words in DONE if name == case.name} == every, "run benchmarks/whole_space.py"
    found = ranks(case, DONE)
    assert found.place is not None and found.compiled > found.kept
