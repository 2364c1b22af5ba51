"""A sweep: every combination once, none twice, the impossible and the too large among the rows, sorted."""

import csv
import json
from argparse import Namespace

import pytest
import sweep

from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import GIB

RATES = {"4x2": 300.0, "2x4": 500.0}


def arguments(out, *overrides: str) -> Namespace:
    return Namespace(
        version="v5e", topology=None, slices=1, emulate=None, steps=1, out=str(out), overrides=list(overrides)
    )


@pytest.fixture
def ran(monkeypatch) -> list[dict]:
    """Settings that were run, where a row costs nothing: 4x2 and 2x4 fit, 1x8 is too large, 3x2 cannot be cut."""
    settings = []

    def run(setting: dict, _: Namespace) -> dict:
        settings.append(setting)
        sweep.configuration(setting)
        rate = RATES.get(setting["mesh"])
        return {
            "kind": "predicted", "fits": rate is not None, "tokens_per_second": rate, "mfu": rate and rate / 1000,
            "peak_bytes_per_device": 20 * GIB, "limit_bytes_per_device": 15.75 * GIB, "dp": 1, "mp": 1,
        }  # fmt: skip

    def careful(setting: dict, given: Namespace) -> dict:
        try:
            return run(setting, given)
        except UserError as error:
            return {"kind": "impossible", "fits": False, "error": str(error)}

    monkeypatch.setattr(sweep, "run", careful)
    return settings


def test_a_grid_is_every_combination_and_brackets_hold_a_value_together():
    points = sweep.grid(["mesh.tile=[2,2,1,1],[4,1,1,1]", "train.batch=8,16", "model=test"])
    assert len(points) == 4 and points[0] == {"mesh.tile": "[2,2,1,1]", "train.batch": "8", "model": "test"}
    assert {point["mesh.tile"] for point in points} == {"[2,2,1,1]", "[4,1,1,1]"}
    with pytest.raises(UserError, match="'batch' is not key=value"):
        sweep.grid(["batch"])


def test_mesh_stands_for_dp_and_mp():
    config = sweep.configuration({"model": "test", "mesh": "2x4", "train.batch": "16"})
    assert (config.mesh.dp, config.mesh.mp, config.train.batch) == (2, 4, 16)
    with pytest.raises(UserError, match="mesh=8 is not dp x mp"):
        sweep.configuration({"model": "test", "mesh": "8"})


def test_rows_are_sorted_and_what_does_not_fit_is_among_them(ran, tmp_path, capsys):
    sweep.main(arguments(tmp_path / "out", "model=test", "mesh=4x2,1x8,3x2,2x4", "train.batch=16"))
    rows = json.loads((tmp_path / "out" / "rows.json").read_text())
    assert [row["setting"]["mesh"] for row in rows] == ["2x4", "4x2", "1x8", "3x2"]
    assert "does not fit: needs 20.00 of 15.75 GiB a device" in capsys.readouterr().out
    assert "mesh.dp=3 does not divide" in rows[-1]["error"]
    with (tmp_path / "out" / "rows.csv").open() as file:
        assert [line["setting"] for line in csv.DictReader(file)] == ["mesh=2x4", "mesh=4x2", "mesh=1x8", "mesh=3x2"]
    assert (tmp_path / "out" / "sweep.png").stat().st_size > 1000


def test_a_sweep_goes_on_where_it_stopped(ran, tmp_path):
    sweep.main(arguments(tmp_path, "model=test", "mesh=4x2", "train.batch=16"))
    sweep.main(arguments(tmp_path, "model=test", "mesh=4x2,2x4", "train.batch=16"))
    assert [setting["mesh"] for setting in ran] == ["4x2", "2x4"]
    other = arguments(tmp_path, "model=test", "mesh=4x2", "train.batch=16")
    other.version = "v4"
    with pytest.raises(UserError, match="holds rows of another slice"):
        sweep.main(other)
