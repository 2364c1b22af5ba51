"""Configurations that are damaged at random."""

import pytest

from tests.helpers.config_fuzz import outcome


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 400), marks=pytest.mark.slow)], ids=len)
def test_a_damaged_configuration_is_loaded_or_refused_with_a_message(tmp_path, seeds):
    for seed in seeds:
        outcome(seed, tmp_path)
