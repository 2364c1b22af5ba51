"""Processes that differ are named with the key and both values, whoever of them it is."""

import json
from hashlib import sha256

import jax
import pytest

from shmap_tp.config.compose import load
from shmap_tp.errors import LostProcessError, StorageError, UserError
from shmap_tp.runtime import agreement
from shmap_tp.training import loop
from tests.helpers.in_processes import in_processes
from tests.helpers.model_fixtures import config
from tests.helpers.run_fixtures import FIRST, tiny


def test_equal_processes_agree(monkeypatch):
    assert in_processes(monkeypatch, 3, lambda _: agreement.require_agreement("facts", {"a": 1})) == [None] * 3


@pytest.mark.parametrize(
    "facts, message",
    [
        ([{"a": 1}, {"a": 1}, {"a": 2}], "a is 1 on processes 0, 1, 2 on process 2;"),
        ([{"a": "x"}, {"a": None}, {}], "a is x on process 0, null on processes 1, 2;"),
        ([{c: 1 for c in "abcde"}, {c: 2 for c in "abcde"}], "c is 1 on process 0, 2 on process 1 (and 2 more);"),
        ([{"a": 1}] * 5 + [{"a": 2}], "a is 1 on processes 0, 1, 2, ... (5 in all), 2 on process 5;"),
    ],
)
def test_a_difference_is_named_in_all_processes(monkeypatch, facts, message):
    raised = in_processes(monkeypatch, len(facts), lambda each: agreement.require_agreement("facts", facts[each], 30))
    assert all(type(error) is UserError for error in raised) and len({str(error) for error in raised}) == 1
    assert message in str(raised[0])


def test_a_process_that_does_not_report_is_named_in_the_others(monkeypatch):
    def report(process: int) -> None:
        if process < 2:
            agreement.require_agreement("facts", {}, 1)

    monkeypatch.setattr(agreement, "READ_SECONDS", 0.1)
    first, second, _ = in_processes(monkeypatch, 3, report)
    assert type(first) is type(second) is LostProcessError and str(first) == str(second)
    assert str(first).startswith("process 2 joined, but did not report its facts within 1 s")


def test_an_action_of_process_0_is_done_once_and_its_error_is_raised_in_all(monkeypatch):
    done = []
    raised = in_processes(monkeypatch, 3, lambda each: agreement.on_process_0("name", lambda: done.append(each)))
    assert raised == [None] * 3 and done == [0]

    def fail() -> None:
        raise StorageError("the disk is full")

    raised = in_processes(monkeypatch, 3, lambda each: agreement.on_process_0("name", fail))
    assert [(str(error), error.exit_code) for error in raised] == [("the disk is full", 2)] * 3


def test_only_values_that_may_differ_between_hosts_are_left_out_of_the_comparison():
    facts, paths = agreement.launch_facts(config()), ["data.dir=a", "run.compilation_cache=b", "log.every=7"]
    assert agreement.launch_facts(config(*paths)) == facts == json.loads(json.dumps(facts))
    for changed in ("train.batch=64", "guard.window=64", "mesh.mp=2", "checkpoint.dir=a", "run.seed=1"):
        assert agreement.launch_facts(config(changed)) != facts
    mixed = ["data.dir=null", "data.source=null", "data.sources={a:{dir:a,weight:0.5},b:{dir:b,weight:0.5}}"]
    facts_of_sources = agreement.launch_facts(load(FIRST, mixed))
    assert agreement.launch_facts(load(FIRST, [*mixed, "data.sources={a:{dir:c}}"])) == facts_of_sources
    weights = "data.sources={a:{weight:0.4},b:{weight:0.6}}"
    assert agreement.launch_facts(load(FIRST, [*mixed, weights])) != facts_of_sources
    assert facts["the version of jax"] == jax.__version__
    assert len(facts["the source code of shmap_tp (sha256)"]) == 12


def test_the_data_of_all_processes_are_compared_before_the_first_step(tmp_path, monkeypatch):
    def compare(name: str, facts: dict[str, str]) -> None:
        content = (tmp_path / "data" / "train.bin").read_bytes()
        assert facts["train.bin"] == f"3000 tokens of sha256 {sha256(content).hexdigest()[:12]}"
        raise UserError(f"other {name}")

    monkeypatch.setattr("shmap_tp.training.run.require_agreement", compare)
    with pytest.raises(UserError, match="other data"):
        loop.train(tiny(tmp_path))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
