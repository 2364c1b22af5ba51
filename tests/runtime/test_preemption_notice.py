"""A preemption notice of the metadata server stops a run like a signal."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from shmap_tp.runtime.exit_codes import STOPPED
from shmap_tp.runtime.shutdown import watch_preemption
from shmap_tp.training import loop, run
from tests.helpers.run_fixtures import lines, make_runs_quick, tiny


@contextmanager
def metadata_server(values: dict[str, str]) -> Iterator[str]:
    """HOST:PORT of a server that answers with `values` like Google's metadata server."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            place, _, key = self.path.rpartition("/")
            is_valid = self.headers["Metadata-Flavor"] == "Google" and place == "/computeMetadata/v1/instance"
            self.send_response(200 if is_valid else 403)
            self.end_headers()
            self.wfile.write(f"{values[key]}\n".encode())

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
def test_a_preemption_notice_sets_the_stop_event(monkeypatch, capsys, key, value):
    values = {"preempted": "FALSE", "maintenance-event": "NONE"}
    with metadata_server(values) as server:
        monkeypatch.setenv("GCE_METADATA_HOST", server)
        stop_event = threading.Event()
        with watch_preemption(stop_event, interval_seconds=0.01):
            assert not stop_event.wait(0.2)
            values[key] = value
            assert stop_event.wait(10)
    assert f"({key} is {value})" in capsys.readouterr().out


def test_an_unreachable_metadata_server_is_reported_once_and_stops_nothing(monkeypatch, capsys):
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    stop_event = threading.Event()
    with watch_preemption(stop_event, interval_seconds=0.01):
        assert not stop_event.wait(0.2)
    assert capsys.readouterr().out.count("retrying") == 1


def test_the_metadata_server_is_not_polled_without_a_tpu(monkeypatch):
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    before = threading.active_count()
    with watch_preemption(threading.Event()):
        assert threading.active_count() == before


def test_a_preempted_run_saves_and_exits_with_stopped(tmp_path, monkeypatch):
    make_runs_quick(monkeypatch)
    values = {"preempted": "FALSE", "maintenance-event": "NONE"}
    with metadata_server(values) as server:
        monkeypatch.setenv("GCE_METADATA_HOST", server)
        monkeypatch.setattr(run, "watch_preemption", partial(watch_preemption, interval_seconds=0.01))
        due = loop._is_due

        def due_and_preempt(done: int, *rest: int) -> bool:
            values["preempted"] = "TRUE" if done else "FALSE"
            return due(done, *rest)

        monkeypatch.setattr(loop, "_is_due", due_and_preempt)
        assert loop.train(tiny(tmp_path, "train.steps=5000", "evaluate.every=0")) == STOPPED
    last = lines(tmp_path)[-1]["step"]
    assert 1 <= last < 5000 and (tmp_path / "run" / "checkpoints" / str(last)).exists()
