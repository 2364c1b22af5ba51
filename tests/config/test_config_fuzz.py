"""Configurations that are damaged at random."""

import pytest

from tests.helpers.config_fuzz import outcome


@pytest.mark.parametrize("first", range(0, 300, 10))
def test_a_damaged_configuration_is_loaded_or_refused_with_a_message(tmp_path, first):
    for seed in range(first, first + 10):
        outcome(seed, tmp_path)
