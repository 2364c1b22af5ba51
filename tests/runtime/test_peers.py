"""Several processes train what one trains, and each goes on from the other's checkpoint; process 0 alone speaks.  What
ends one ends all, soon, with the reason in their logs.

They find each other on this machine, by Slurm's variables or by --coordinator; each emulates its share of the devices.
"""

import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shmap_tp import train as command
from shmap_tp.runtime.exit_codes import LOST
from shmap_tp.training import loop as train
from shmap_tp.training.checkpoint import MANIFEST
from tests.helpers.run_fixtures import (
    FIRST,
    free_port,
    killed_at_the_end,
    lines,
    overrides,
    start,
    tiny,
    together,
    wait_for_step,
)

SECONDS = 120
"""What either may take, before both are killed."""
GIVEN = ["train.steps=6", "checkpoint.every=3", "evaluate.every=3", "train.check_replicas_every=2"]


def free_job() -> int:
    """A Slurm job whose port is free: JAX meets at 61440 + job % 4096."""
    for job in random.sample(range(4096), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", 61440 + job)):
                return job
    raise AssertionError("a hundred ports are taken")


@contextmanager
def slurm(*arguments: str) -> Iterator[list[subprocess.Popen]]:
    """main.py started as a Slurm job of two tasks; neither outlives the context."""
    job = {"JOB_ID": free_job(), "STEP_NODELIST": "localhost", "NTASKS": 2, "STEP_NUM_NODES": 1}
    tasks = [job | {"PROCID": number, "LOCALID": number} for number in range(2)]
    environments = [{f"SLURM_{name}": str(value) for name, value in task.items()} for task in tasks]
    given = ("--cfg", FIRST, *arguments, "mesh.processes=2")
    with killed_at_the_end(start(*given, JAX_PLATFORMS="cpu", **each) for each in environments) as processes:
        yield processes


def ended(processes: list[subprocess.Popen], code: int) -> str:
    """What process 0 has said, once all have ended with `code`; the others have said where they write."""
    said = [process.communicate(timeout=SECONDS) for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), said
    assert not any("Traceback" in err for _, err in said), said
    for number, (out, err) in enumerate(said[1:], start=1):
        assert out == "" and err.startswith(f"process {number} of {len(processes)} on "), (out, err)
        assert err.splitlines()[0].endswith(f"/run/logs/process-{number}.log"), err
    return said[0][0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """Steps 1 to 9 by one process with eight devices."""
    directory = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "machine_peak", lambda devices: None)
        assert train.train(tiny(directory, *GIVEN, "train.steps=9")) == 0
    return directory


def same_losses(directory: Path, expected: Path, steps: int) -> None:
    """The first `steps` lines are those steps, each once, with the losses of `expected`."""
    found, wanted = lines(directory)[:steps], lines(expected)[:steps]
    assert [line["step"] for line in found] == list(range(1, steps + 1))
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in wanted], rel=1e-6, abs=0)


def test_two_processes_train_what_one_does_and_one_goes_on(alone, tmp_path, monkeypatch):
    with together(2, *overrides(tmp_path, *GIVEN)) as processes:
        said = ended(processes, 0)
    assert said.count("step 6/6") == 1 and "done at step 6 of 6" in said
    same_losses(tmp_path, alone, 6)

    monkeypatch.setattr(train, "machine_peak", lambda devices: None)
    one = ["mesh.dp=1", "mesh.mp=8", "train.steps=9", "checkpoint.resume=must"]
    assert train.train(tiny(tmp_path, *GIVEN, *one)) == 0
    assert [line["mesh"] for line in lines(tmp_path)] == [[2, 4]] * 6 + [[1, 8]] * 3
    same_losses(tmp_path, alone, 9)


def test_two_processes_go_on_from_what_one_has_saved_and_stop_together(alone, tmp_path):
    """Only one of them is told to stop."""
    shutil.copytree(alone, tmp_path, dirs_exist_ok=True)
    for step in (6, 9):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
    with slurm(*overrides(tmp_path, *GIVEN, "train.steps=100000", "checkpoint.resume=must")) as processes:
        wait_for_step(processes[0], tmp_path, 10)
        processes[1].send_signal(signal.SIGTERM)
        said = ended(processes, 75)
    stopped = lines(tmp_path)[-1]["step"]
    assert "going on from step 3" in said and f"stopped and saved at step {stopped} of 100000" in said
    assert (tmp_path / "run" / "checkpoints" / str(stopped) / MANIFEST).exists()
    same_losses(tmp_path, alone, 9)


@pytest.mark.slow
def test_four_processes_go_on_from_two_and_one_from_four_and_two_from_one(alone, tmp_path):
    """Nine steps: three by 2 processes with 4 devices each, three by 4 with 2, two by 1 with 8, and the last by 2."""
    for processes, steps, mesh in [(2, 3, (2, 4)), (4, 6, (4, 2)), (1, 8, (1, 8)), (2, 9, (8, 1))]:
        on = [f"mesh.dp={mesh[0]}", f"mesh.mp={mesh[1]}", f"train.steps={steps}", "checkpoint.resume=if_present"]
        with together(processes, *overrides(tmp_path, *GIVEN, *on)) as started:
            ended(started, 0)
    assert [line["mesh"] for line in lines(tmp_path)] == [[2, 4]] * 3 + [[4, 2]] * 3 + [[1, 8]] * 2 + [[8, 1]]
    same_losses(tmp_path, alone, 9)


# What ends one ends all


def test_where_one_is_killed_the_others_end_and_say_who_it_was(tmp_path):
    endless = overrides(
        tmp_path, "train.steps=100000", "evaluate.every=0", "checkpoint.every=0", "run.lost_timeout_seconds=10"
    )
    with together(2, *endless) as (first, second):
        wait_for_step(first, tmp_path, 3)
        second.kill()
        began = time.monotonic()
        _, err = first.communicate(timeout=60)
        assert time.monotonic() - began < 60
    assert first.returncode == LOST
    assert "error: process 1 is lost, silent for 10 s (run.lost_timeout_seconds)" in err and "Traceback" not in err


def test_what_goes_wrong_in_one_is_said_by_all(tmp_path):
    """Process 1 alone finds no data."""
    with together(2, *overrides(tmp_path), last=["data.dir=nowhere"]) as processes:
        said = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert said[0].startswith("error: process 1 ended: nowhere/train.bin is not there; prepare it with"), said[0]
    for text in (said[1], (tmp_path / "run" / "logs" / "process-1.log").read_text()):
        assert "error: nowhere/train.bin is not there" in text and "Traceback" not in text, text


@pytest.mark.parametrize("number", [0, 1])
def test_one_whose_others_are_not_there_says_where_it_waited(tmp_path, number):
    port = free_port()
    place = ["--coordinator", f"localhost:{port}", "--processes", "2", "--process-id", str(number)]
    process = start("--cfg", FIRST, *overrides(tmp_path, "run.join_timeout_seconds=2"), *place, JAX_PLATFORMS="cpu")
    _, err = process.communicate(timeout=60)
    assert process.returncode == LOST
    said = err.splitlines()[number:]
    assert said[0].startswith(f"error: process {number} of 2, after 2 s (run.join_timeout_seconds): "), err
    assert f"localhost port {port}" in said[0] and len(said) <= 2, err
    assert ("but not all 2 processes came", "nothing listens at")[number] in said[0]


PLACES = {
    ("--coordinator", "here:1234"): "go together; give --process-id I, too",
    ("--process-id", "1"): "go together; give --coordinator HOST:PORT, too",
    ("--coordinator", "here:1234", "--process-id", "0"): "mesh.processes=1; give --processes N, too",
    ("--coordinator", "here", "--process-id", "0", "--processes", "2"): "--coordinator here is not HOST:PORT",
    ("--coordinator", "here:99999", "--process-id", "0", "--processes", "2"): "here:99999 is not HOST:PORT",
    (
        "--coordinator",
        "here:1",
        "--process-id",
        "2",
        "--processes",
        "2",
    ): "--process-id 2 of --processes 2: they are 0 to",
    ("--processes", "0"): "mesh.processes=0 is too small",
}


@pytest.mark.parametrize("given", PLACES, ids=" ".join)
def test_a_place_that_is_none_is_explained(monkeypatch, capsys, given):
    monkeypatch.setattr(sys, "argv", ["main.py", "--cfg", FIRST, *given])
    assert command.main() == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and PLACES[given] in said and len(said.splitlines()) == 1
