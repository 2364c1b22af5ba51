"""Time and cost of a run: tokens as they are given, days and dollars with the range of published runs."""

import argparse

import pytest

from shmap_tp.plan.report import CALIBRATIONS
from shmap_tp.plan.search.output import Cost, short_count, token_count


def test_tokens_are_given_as_people_write_them():
    assert [token_count(text) for text in ("100B", "1T", "1.5t", "20m", "1e11", "512")] == [
        1e11, 1e12, 1.5e12, 2e7, 1e11, 512,
    ]  # fmt: skip
    assert [short_count(number) for number in (1e11, 1.5e12, 512.0)] == ["100B", "1.5T", "512"]
    for text in ("lots", "B", "1e", "10 GB", "1KB", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="is no number of tokens; give one such as"):
            token_count(text)


def test_days_and_dollars_are_those_of_published_runs_with_their_range():
    """1,000 predicted days on 16 chips at 2 dollars an hour."""
    known = CALIBRATIONS["TPU v6 lite"]
    assert (known.constant, known.lowest, known.highest) == (1.12, 1.05, 1.18)
    cost = Cost(8.64e10, 2.0, 16, "TPU v6 lite")
    assert cost.text(1000.0) == (
        "1,120.0 days (1,050.0 to 1,180.0), 860,160 dollars (806,400 to 906,240), at 1.12 (1.05 to 1.18) times the step"
    )
    one_run = Cost(8.64e10, None, 16, "TPU v4").text(1000.0)
    assert one_run == "1,110.0 days, at 1.11 times the step"
    assert Cost(8.64e10, None, 8, "NVIDIA H200").text(1000.0) == "1,000.0 days, by the step as planned, not calibrated"
