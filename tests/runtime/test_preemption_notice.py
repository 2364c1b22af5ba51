"""A machine that is to be taken away says so, and the run stops as if it had been told to."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from shmap_tp.runtime.exit_codes import STOPPED
from shmap_tp.runtime.shutdown import watch_preemption
from shmap_tp.training import loop
from tests.helpers.run_fixtures import lines, tiny


@contextmanager
def metadata_server(values: dict[str, str]) -> Iterator[str]:
    """A stand-in that answers as Google's does; HOST:PORT of it."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers["Metadata-Flavor"] == "Google" and self.path.startswith(
                "/computeMetadata/v1/instance/"
            )
            self.send_response(200 if known else 403)
            self.end_headers()
            self.wfile.write(f"{values[self.path.rsplit('/', 1)[1]]}\n".encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("key", "value"), [("preempted", "TRUE"), ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")]
)
def test_a_notice_is_heeded_when_it_comes(monkeypatch, capsys, key, value):
    values = {"preempted": "FALSE", "maintenance-event": "NONE"}
    with metadata_server(values) as server:
        monkeypatch.setenv("GCE_METADATA_HOST", server)
        told = threading.Event()
        with watch_preemption(told, pause=0.01):
            assert not told.wait(0.2)
            values[key] = value
            assert told.wait(10)
    assert f"({key} is {value})" in capsys.readouterr().out


def test_a_server_that_is_gone_is_told_once_and_stops_nothing(monkeypatch, capsys):
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    told = threading.Event()
    with watch_preemption(told, pause=0.01):
        assert not told.wait(0.2)
    assert capsys.readouterr().out.count("asking on") == 1


def test_without_a_tpu_nobody_is_asked(monkeypatch):
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    before = threading.active_count()
    with watch_preemption(threading.Event()):
        assert threading.active_count() == before


def test_a_run_on_such_a_machine_saves_and_says_that_it_was_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "machine_peak", lambda devices: None)
    values = {"preempted": "FALSE", "maintenance-event": "NONE"}
    with metadata_server(values) as server:
        monkeypatch.setenv("GCE_METADATA_HOST", server)
        monkeypatch.setattr(loop, "heeded", lambda told: watch_preemption(told, pause=0.01))
        due = loop._is_due

        def preempted(done: int, *rest: int) -> bool:
            values["preempted"] = "TRUE" if done else "FALSE"
            return due(done, *rest)

        monkeypatch.setattr(loop, "_is_due", preempted)
        assert (
            loop.train(tiny(tmp_path, "train.steps=5000", "evaluate.every=0", "optimizer.decay_steps=5000")) == STOPPED
        )
    last = lines(tmp_path)[-1]["step"]
    assert 1 <= last < 5000 and (tmp_path / "run" / "checkpoints" / str(last)).exists()
