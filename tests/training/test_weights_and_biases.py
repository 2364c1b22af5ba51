"""Logging to Weights & Biases: checked before anything is compiled, one W&B run through all restarts.

A stand-in for the module, since wandb need not be installed.
"""

import sys
from types import SimpleNamespace

import pytest

from shmap_tp.errors import UserError
from shmap_tp.training import loop
from shmap_tp.training.metrics import WeightsAndBiasesWriter
from tests.helpers.run_fixtures import tiny


class WandbError(Exception):
    """Stands in for wandb.Error."""


class Wandb:
    """The part of the module that a run uses."""

    Error = WandbError

    def __init__(self, *, key: bool = True):
        self.key, self.runs, self.logins, self.logged = key, [], 0, []

    def Settings(self, project: str) -> None:
        if "/" in project:
            raise WandbError(f"Invalid project name {project!r}: cannot contain characters '/'")

    def login(self, verify: bool) -> bool:
        self.logins += 1
        if not self.key:
            raise WandbError("No API key configured. Use `wandb login` to log in.")
        return True

    def init(self, **settings):
        self.runs.append(settings)
        return SimpleNamespace(define_metric=lambda *_, **__: None, log=self.logged.append)

    def Table(self, columns: list[str], data: list) -> list[dict]:
        return [dict(zip(columns, row, strict=True)) for row in data]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("WANDB_MODE", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def nothing_is_built(monkeypatch):
    """A run ends where it would build its programs."""

    class Built(Exception):
        pass

    def build(*arguments):
        raise Built

    monkeypatch.setattr("shmap_tp.training.run.build_step_functions", build)
    return Built


MISTAKES = {
    "not installed": (None, "log.wandb_project=p", "log.wandb=true needs wandb: pip install"),
    "no project": (Wandb(), "log.wandb_project=a/b", "Invalid project name 'a/b'.*\ncorrect log.wandb_project"),
    "not logged in": (Wandb(key=False), "log.wandb_project=p", "No API key configured.*\n.*WANDB_MODE=offline"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_wandb_lacks_is_reported_before_anything_is_built(tmp_path, monkeypatch, nothing_is_built, mistake):
    module, project, message = MISTAKES[mistake]
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(UserError, match=message):
        loop.train(tiny(tmp_path, "log.wandb=true", project))


def test_a_login_that_is_lost_between_is_reported(tmp_path, monkeypatch):
    def no_login(**_: object) -> None:
        raise WandbError("No API key configured. Use `wandb login` to log in.")

    module = Wandb()
    module.init = no_login
    (tmp_path / "run").mkdir()
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(UserError, match=r"No API key.*\n.*offline"):
        WeightsAndBiasesWriter(tiny(tmp_path, "log.wandb=true"))


def test_a_run_goes_on_where_nothing_is_lacking_and_offline_without_a_login(tmp_path, monkeypatch, nothing_is_built):
    for module, given in [(None, "log.wandb=false"), (Wandb(), "log.wandb=true"), (Wandb(key=False), "log.wandb=true")]:
        if module is not None and not module.key:
            monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setitem(sys.modules, "wandb", module)
        with pytest.raises(nothing_is_built):
            loop.train(tiny(tmp_path, given))
    assert not module.logins


def test_a_restarted_run_continues_its_wandb_run(tmp_path, monkeypatch):
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("one", "one", "other"):
        (tmp_path / name / "run").mkdir(parents=True, exist_ok=True)
        WeightsAndBiasesWriter(tiny(tmp_path / name))
    first, again, other = (settings["id"] for settings in module.runs)
    assert first == again != other and (tmp_path / "one" / "run" / "wandb_id").read_text() == f"{first}\n"
    assert {settings["resume"] for settings in module.runs} == {"allow"}


def test_samples_are_logged_as_a_table(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", module := Wandb())
    (tmp_path / "run").mkdir()
    WeightsAndBiasesWriter(tiny(tmp_path)).write_samples(3, {"a": "b"})
    assert module.logged == [{"samples": [{"prompt": "a", "text": "b"}], "step": 3}]


def test_the_id_of_the_wandb_run_can_be_given(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    monkeypatch.setitem(sys.modules, "wandb", module := Wandb())
    WeightsAndBiasesWriter(tiny(tmp_path))
    assert module.runs[0]["id"] == "mine" and not (tmp_path / "run").exists()
