"""A run killed at random moments equals one that was not; see tests/helpers/kill_resume_soak.py for longer soaks."""

import pytest

from tests.helpers import kill_resume_soak as soak


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--seed", "3"], ["--seed", "4", "--same-mesh"]], ids=" ".join)
def test_a_run_killed_three_times_equals_an_uninterrupted_run(arguments):
    soak.main(["--kills", "3", *arguments])
