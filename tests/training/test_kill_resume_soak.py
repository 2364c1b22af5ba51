"""Killed a few times at random moments, a run is the run that was not; `python tests/soak.py --kills 30` goes on."""

import pytest

from tests.helpers import kill_resume_soak as soak


@pytest.mark.slow
@pytest.mark.parametrize("given", [["--seed", "3"], ["--seed", "4", "--same-mesh"]], ids=" ".join)
def test_a_run_killed_three_times_is_the_run_that_was_not(given):
    soak.main(["--kills", "3", *given])
