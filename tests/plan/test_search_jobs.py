"""The compilations of a search in child processes: how they end, what they answer, and what they leave."""

import json
import time
from pathlib import Path

import pytest

from shmap_tp.plan.search import compiling
from shmap_tp.plan.search.compiling import answer, ended, request
from shmap_tp.plan.targets import find_target
from tests.helpers.searching import RECORDED, config, made

ESTIMATED = made(1, 1.0, 1)


def test_the_end_of_a_child_process_is_explained():
    assert ended(ESTIMATED, -9, "", "", 1.0).error == "killed by signal 9 (out of memory?)"
    assert ended(ESTIMATED, 1, "", "Traceback\nValueError: x\n", 1.0).error == "exit code 1: ValueError: x"
    assert ended(ESTIMATED, 0, 'noise\n{"error": "mesh.dp=3"}\n', "", 1.0).error == "mesh.dp=3"
    assert ended(ESTIMATED, 0, json.dumps(RECORDED.to_json()), "", 1.0).row == RECORDED


def test_a_child_process_that_is_stopped_leaves_no_temporary_files(monkeypatch):
    """It is killed, so that it cannot remove the compiler's dumps itself."""
    writes = "import pathlib, tempfile, time; pathlib.Path(tempfile.mkdtemp(), 'dump').touch(); time.sleep(60)"
    start = compiling.subprocess.Popen
    monkeypatch.setattr(
        compiling.subprocess, "Popen", lambda command, **given: start([command[0], "-c", writes], **given)
    )
    job = compiling.ChildProcess(ESTIMATED, config(), find_target("v5e", 4, None, 1))
    folder = Path(job.files.name)
    end = time.monotonic() + 10
    while not list(folder.rglob("dump")):
        assert time.monotonic() < end, "the dump is elsewhere"
        time.sleep(0.01)
    job.stop()
    assert not folder.exists()


def test_a_child_process_compiles_the_candidate():
    pytest.importorskip("libtpu")
    target = find_target("v5e", 4, None, 1)
    found = answer(request(config("mesh.dp=4", "train.microbatches=2"), target))
    assert (found["dp"], found["mp"], found["microbatches"], found["kind"]) == (4, 1, 2, "predicted")
    assert "needs 2 devices, this machine has 4" in answer(request(config("mesh.dp=2"), target))["error"]
