"""The constants that the planner prints are those of the published runs, and a run that was left out is near them."""

import pytest
from calibration import DIFFERS, TABLE, comparable, constant_without, constants
from result_format import read_rows

from shmap_tp.plan.report import CALIBRATIONS, format_calibration

ROWS = read_rows("published")


def test_the_constants_are_those_of_the_recorded_runs():
    assert constants(ROWS) == CALIBRATIONS


def test_every_run_that_differs_is_a_row_of_the_table():
    assert DIFFERS.keys() <= {row.name for row in TABLE}


@pytest.mark.parametrize("row", comparable(ROWS), ids=lambda row: row["published"]["name"])
def test_the_constant_of_the_other_models_is_within_15_percent(row):
    others = constant_without(row, ROWS)
    if others is None:
        pytest.skip("the only model on this TPU version")
    assert others / row["published"]["ratio"] == pytest.approx(1, abs=0.15)


def test_a_prediction_is_printed_with_the_range_of_published_runs():
    line = format_calibration("TPU v5 lite", 2.0)
    assert line.startswith("8 published runs on TPU v5 lite took 1.18 to 1.30 times the predicted step")
    assert "one published run" in format_calibration("TPU v2", 2.0)
    assert format_calibration("NVIDIA H100", 2.0).startswith("not calibrated")
