"""Told to stop, at whatever a run is: it saves once where there is anything to save, and exits with 75."""

import os
import signal
import threading
from pathlib import Path

import pytest

from shmap_tp.runtime import shutdown as stop
from shmap_tp.runtime.exit_codes import STOPPED
from shmap_tp.runtime.shutdown import StopRequest
from shmap_tp.training import loop
from tests.helpers.run_fixtures import lines, run_uninterrupted, state_at, tiny, values


@pytest.fixture(autouse=True)
def no_peak(monkeypatch):
    monkeypatch.setattr(loop, "machine_peak", lambda devices: None)


def tell(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def before(monkeypatch, where: object, name: str, *, time: int = 1) -> None:
    """SIGTERM just before the `time`-th call of `name`."""
    called, original = [], getattr(where, name)

    def told(*given: object, **named: object) -> object:
        called.append(name)
        if len(called) == time:
            tell()
        return original(*given, **named)

    monkeypatch.setattr(where, name, told)


@pytest.mark.parametrize(
    "name", ["make_mesh", "prepare_environment", "build_step_functions", "Batches", "restore_or_initialize", "named"]
)
def test_before_the_first_step_it_ends_with_nothing_saved(tmp_path, monkeypatch, capsys, name):
    """`named` is called as the step is about to be compiled."""
    former = signal.getsignal(signal.SIGTERM)
    before(monkeypatch, loop, name)
    assert loop.train(tiny(tmp_path)) == STOPPED
    assert "told to stop before a step was trained; there is nothing to save" in capsys.readouterr().out
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    assert signal.getsignal(signal.SIGTERM) is former


def test_what_does_not_listen_is_not_waited_for(monkeypatch):
    """A compiler holds the main thread outside of Python, where no handler runs: the listening thread ends the run."""
    left, busy = [], threading.Event()
    monkeypatch.setattr(stop, "GRACE", 0.05)
    monkeypatch.setattr(stop, "leave", lambda code, said: (left.append((code, said)), busy.set()))
    with StopRequest() as request:
        monkeypatch.setattr(request, "_heed", None)
        signal.signal(signal.SIGTERM, lambda *_: None)
        tell()
        assert busy.wait(30)
    assert [code for code, _ in left] == [STOPPED]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    return run_uninterrupted(tmp_path_factory)


@pytest.mark.parametrize("asking, step", [(6, 4), (12, 8)])
def test_an_evaluation_is_broken_off_and_made_up_for(straight, tmp_path, monkeypatch, capsys, asking, step):
    """Asked before each step and batch: four steps, then two batches at step 4; the run is told before the second."""
    with monkeypatch.context() as patch:
        before(patch, StopRequest, "asked", time=asking)
        assert loop.train(tiny(tmp_path)) == STOPPED
    assert f"stopped and saved at step {step} of 8" in capsys.readouterr().out
    assert [line["step"] for line in lines(tmp_path, "validation")] == [4][: step // 8]
    assert loop.train(tiny(tmp_path, "checkpoint.resume=must")) == 0
    for split in ("train", "validation"):
        assert values(tmp_path, split) == values(straight, split)
    assert state_at(tmp_path, 8) == state_at(straight, 8)


def test_a_second_sigterm_while_it_saves_changes_nothing(straight, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        before(patch, StopRequest, "asked", time=4)
        before(patch, loop.Checkpoints, "save", time=2)
        before(patch, loop.Checkpoints, "wait", time=3)
        assert loop.train(tiny(tmp_path)) == STOPPED
    saved = sorted(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == [2, 3]
    assert loop.train(tiny(tmp_path, "checkpoint.resume=must")) == 0
    assert state_at(tmp_path, 8) == state_at(straight, 8) and values(tmp_path) == values(straight)
