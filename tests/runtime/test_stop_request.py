"""A run that is asked to stop saves once, if there is anything to save, and exits with 75."""

import os
import signal
import threading

import pytest

from shmap_tp.runtime import shutdown
from shmap_tp.runtime.exit_codes import STOPPED
from shmap_tp.runtime.shutdown import StopRequest
from shmap_tp.training import environment, loop, run
from shmap_tp.training.checkpoint import Checkpoints
from tests.helpers.run_fixtures import checkpoint_steps, make_runs_quick, state_at, tiny


@pytest.fixture(autouse=True)
def no_peak(monkeypatch):
    make_runs_quick(monkeypatch)


def sigterm_before(monkeypatch, where: object, name: str, *, time: int = 1) -> None:
    """Send SIGTERM to this process just before the `time`-th call of `where.name`."""
    calls, original = [], getattr(where, name)

    def wrapper(*args: object, **kwargs: object) -> object:
        calls.append(name)
        if len(calls) == time:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    monkeypatch.setattr(where, name, wrapper)


MOMENTS = "mesh_of_devices prepare_environment build_step_functions Batches restore_or_initialize kernel_name"


@pytest.mark.parametrize("name", MOMENTS.split())
def test_a_run_stopped_before_the_first_step_saves_nothing(tmp_path, monkeypatch, capsys, name):
    """`kernel_name` is called just before the step is compiled."""
    former = signal.getsignal(signal.SIGTERM)
    sigterm_before(monkeypatch, run if hasattr(run, name) else environment, name)
    assert loop.train(tiny(tmp_path)) == STOPPED
    assert "stopped before the first training step; there is nothing to save" in capsys.readouterr().out
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    assert signal.getsignal(signal.SIGTERM) is former


def test_ctrl_c_while_training_says_what_happens_and_a_second_one_ends_at_once(capfd):
    with StopRequest() as request:
        request.begin_training()
        os.kill(os.getpid(), signal.SIGINT)
        assert request.requested()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err.count("stopping: the step under way is finished and saved") == 1


@pytest.mark.parametrize("former", [signal.SIG_DFL, signal.SIG_IGN], ids=["handled", "ignored, as by nohup"])
def test_a_closed_terminal_stops_a_run_unless_that_is_ignored(former):
    before = signal.signal(signal.SIGHUP, former)
    try:
        with StopRequest() as request:
            request.begin_training()
            os.kill(os.getpid(), signal.SIGHUP)
            assert request.requested() == (former == signal.SIG_DFL)
        assert signal.getsignal(signal.SIGHUP) == former
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_compilation_that_cannot_be_interrupted_is_not_waited_for(monkeypatch):
    """A compiler keeps the main thread outside Python, where no handler runs: the listening thread ends the process."""
    exits, exited = [], threading.Event()
    monkeypatch.setattr(shutdown, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(shutdown, "exit_now", lambda code, message: (exits.append((code, message)), exited.set()))
    with StopRequest() as request:
        monkeypatch.setattr(request, "_handle", None)
        signal.signal(signal.SIGTERM, lambda *_: None)
        os.kill(os.getpid(), signal.SIGTERM)
        assert exited.wait(30)
    assert [code for code, _ in exits] == [STOPPED]


def test_a_second_sigterm_during_the_save_has_no_effect(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        sigterm_before(patch, StopRequest, "requested", time=4)
        sigterm_before(patch, Checkpoints, "save", time=2)
        sigterm_before(patch, Checkpoints, "wait", time=3)
        assert loop.train(tiny(tmp_path)) == STOPPED
    assert checkpoint_steps(tmp_path) == [2, 3] and state_at(tmp_path, 3)
    said = capsys.readouterr().out
    assert "stopped and saved at step 3 of 8" in said and f"--cfg {tmp_path}/run/config.yaml --resume" in said
