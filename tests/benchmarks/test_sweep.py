"""A sweep runs every combination once, and lists invalid settings and those that do not fit among the sorted rows."""

import csv
import json
from argparse import Namespace
from types import SimpleNamespace

import pytest
import sweep

from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import GIB

NO_ROW = SimpleNamespace(row=SimpleNamespace(to_json=dict))
RATES = {"4x2": 300.0, "2x4": 500.0}


def arguments(out, *overrides: str) -> Namespace:
    return Namespace(
        version="v5e", topology=None, slices=1, emulate=None, steps=1, out=str(out), overrides=list(overrides)
    )


@pytest.fixture
def settings_run(monkeypatch) -> list[dict]:
    """The settings that were run, with `run` faked: 4x2 and 2x4 fit, 1x8 does not, 3x2 is invalid."""
    settings = []

    def run(setting: dict, _: Namespace) -> dict:
        settings.append(setting)
        sweep.configuration(setting)
        rate = RATES.get(setting["mesh"])
        return {
            "kind": "predicted", "fits": rate is not None, "tokens_per_second": rate, "mfu": rate and rate / 1000,
            "peak_bytes_per_device": 20 * GIB, "limit_bytes_per_device": 15.75 * GIB, "dp": 1, "mp": 1,
        }  # fmt: skip

    def run_or_report(setting: dict, given: Namespace) -> dict:
        try:
            return run(setting, given)
        except UserError as error:
            return {"kind": "impossible", "fits": False, "error": str(error)}

    monkeypatch.setattr(sweep, "run", run_or_report)
    return settings


def test_a_grid_is_every_combination_and_brackets_enclose_one_value():
    points = sweep.grid(["mesh.tile=[2,2,1,1],[4,1,1,1]", "train.batch=8,16", "model=test"])
    assert len(points) == 4 and points[0] == {"mesh.tile": "[2,2,1,1]", "train.batch": "8", "model": "test"}
    assert {point["mesh.tile"] for point in points} == {"[2,2,1,1]", "[4,1,1,1]"}
    with pytest.raises(UserError, match="'batch' is not key=value"):
        sweep.grid(["batch"])


def test_mesh_sets_dp_and_mp():
    config = sweep.configuration({"model": "test", "mesh": "2x4", "train.batch": "16"})
    assert (config.mesh.dp, config.mesh.mp, config.train.batch) == (2, 4, 16)
    with pytest.raises(UserError, match="mesh=8 is not of the form DPxMP"):
        sweep.configuration({"model": "test", "mesh": "8"})


def test_slices_are_those_of_the_mesh_and_of_the_target(monkeypatch, tmp_path):
    predicted = []
    monkeypatch.setattr(sweep, "slice_is_attached", lambda config, version: False)
    monkeypatch.setattr(
        sweep, "predict", lambda config, target: predicted.append((config.mesh.slices, target.slices)) or NO_ROW
    )
    given = arguments(tmp_path)
    given.slices = 2
    for more in ({}, {"mesh.slices": "4"}):
        sweep.run({"model": "test", "mesh": "32x1", "train.batch": "32", "train.microbatches": "1"} | more, given)
    assert predicted == [(2, 2), (4, 4)]


def test_rows_are_sorted_and_include_settings_that_do_not_fit(settings_run, tmp_path, capsys):
    sweep.main(arguments(tmp_path / "out", "model=test", "mesh=4x2,1x8,3x2,2x4", "train.batch=16"))
    rows = json.loads((tmp_path / "out" / "rows.json").read_text())
    assert [row["setting"]["mesh"] for row in rows] == ["2x4", "4x2", "1x8", "3x2"]
    assert "does not fit: needs 20.00 of 15.75 GiB per device" in capsys.readouterr().out
    assert "mesh.dp=3 does not divide" in rows[-1]["error"]
    with (tmp_path / "out" / "rows.csv").open() as file:
        assert [line["setting"] for line in csv.DictReader(file)] == ["mesh=2x4", "mesh=4x2", "mesh=1x8", "mesh=3x2"]
    assert (tmp_path / "out" / "sweep.png").stat().st_size > 1000


def test_a_restarted_sweep_skips_finished_rows(settings_run, tmp_path):
    sweep.main(arguments(tmp_path, "model=test", "mesh=4x2", "train.batch=16"))
    sweep.main(arguments(tmp_path, "model=test", "mesh=4x2,2x4", "train.batch=16"))
    assert [setting["mesh"] for setting in settings_run] == ["4x2", "2x4"]
    other = arguments(tmp_path, "model=test", "mesh=4x2", "train.batch=16")
    other.version = "v4"
    with pytest.raises(UserError, match="contains rows of another slice"):
        sweep.main(other)
