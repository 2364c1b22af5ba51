"""Several processes train to the same losses as one, and continue each other's checkpoints.  If one process fails, all
exit soon with the reason; only process 0 prints.

The processes find each other on this machine by Slurm's variables or by --coordinator; each emulates some devices.
"""

import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shmap_tp import train as command
from shmap_tp.config.validate import validate_process_arguments
from shmap_tp.errors import LostProcessError, UserError
from shmap_tp.runtime import distributed
from shmap_tp.training import loop
from tests.helpers import run_fixtures as runs

GIVEN = ["checkpoint.every=3", "evaluate.every=3", "train.check_replicas_every=2"]
ENDLESS = ["mesh.dp=4", "mesh.mp=2", "train.steps=100000"]
"""On another mesh than a run of one process."""


def free_job() -> int:
    """A Slurm job number whose port is free: JAX's coordinator listens at 61440 + job % 4096."""
    for job in random.sample(range(4096), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", 61440 + job)):
                return job
    raise AssertionError("a hundred ports are in use")


@contextmanager
def slurm(*arguments: str) -> Iterator[list[subprocess.Popen]]:
    """main.py as a Slurm job of two tasks, which are killed at the end of the context."""
    job = {"JOB_ID": free_job(), "STEP_NODELIST": "localhost", "NTASKS": 2, "STEP_NUM_NODES": 1}
    tasks = [job | {"PROCID": number, "LOCALID": number} for number in range(2)]
    environments = [{f"SLURM_{name}": str(value) for name, value in task.items()} for task in tasks]
    given = ("--cfg", runs.FIRST, *arguments, "mesh.processes=2")
    with runs.killed_at_the_end(runs.start(*given, JAX_PLATFORMS="cpu", **each) for each in environments) as processes:
        yield processes


def ended(processes: list[subprocess.Popen], code: int) -> tuple[str, list[str]]:
    """Wait until all have exited with `code`, without a traceback: (what process 0 has printed, the stderr of each)."""
    output = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), output
    assert not any("Traceback" in err for _, err in output), output
    assert not any(out for out, _ in output[1:]), output
    return output[0][0], [err for _, err in output]


def train_alone(directory: Path, steps: int, resume: str = "never") -> None:
    """Train in this process, on its eight devices, until `steps` are done."""
    with pytest.MonkeyPatch.context() as patch:
        runs.make_runs_quick(patch)
        assert loop.train(runs.tiny(directory, *GIVEN, f"train.steps={steps}", f"checkpoint.resume={resume}")) == 0


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """Directory of a run of 3 steps by one process with eight devices."""
    directory = tmp_path_factory.mktemp("alone")
    train_alone(directory, 3)
    return directory


def assert_same_losses(directory: Path, expected: Path, steps: int) -> None:
    """The first `steps` lines of metrics are steps 1 to `steps`, each once, with the losses of run `expected`."""
    found, wanted = runs.lines(directory)[:steps], runs.lines(expected)[:steps]
    assert [line["step"] for line in found] == list(range(1, steps + 1))
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in wanted], rel=1e-6, abs=0)


def test_two_processes_continue_a_run_of_one_stop_together_and_are_continued_by_one(alone, tmp_path, capsys):
    """With the losses of one process; only one of them receives SIGTERM."""
    for name in ("straight", "several"):
        shutil.copytree(alone, tmp_path / name)
    several = tmp_path / "several"
    with slurm(*runs.overrides(several, *GIVEN, *ENDLESS, "checkpoint.resume=must")) as processes:
        runs.wait_for_step(processes[0], several, 6)
        processes[1].send_signal(signal.SIGTERM)
        output, (_, said) = ended(processes, 75)
    stopped = runs.lines(several)[-1]["step"]
    assert "resuming from step 3" in output and output.count("step 5/") == 1
    assert f"stopped and saved at step {stopped} of 100000" in output
    assert said.startswith("process 1 of 2 on ") and said.splitlines()[0].endswith("/run/logs/process-1.log")

    train_alone(several, stopped + 2, "must")
    assert f"resuming from step {stopped}" in capsys.readouterr().out
    train_alone(tmp_path / "straight", stopped + 2, "must")
    assert [line["mesh"] for line in runs.lines(several)] == [[2, 4]] * 3 + [[4, 2]] * (stopped - 3) + [[2, 4]] * 2
    assert_same_losses(several, tmp_path / "straight", stopped + 2)


def test_two_processes_start_as_one_and_the_kill_of_one_is_reported_by_the_other_which_exits(alone, tmp_path):
    given = [*ENDLESS, "evaluate.every=0", "checkpoint.every=0", "run.lost_timeout_seconds=10"]
    with runs.together(2, *runs.overrides(tmp_path, *given)) as (first, second):
        runs.wait_for_step(first, tmp_path, 3)
        second.kill()
        began = time.monotonic()
        _, err = first.communicate(timeout=60)
        assert time.monotonic() - began < 60
    assert first.returncode == LostProcessError.exit_code and "Traceback" not in err
    assert "error: process 1 is lost: no heartbeat for 10 s (run.lost_timeout_seconds)" in err
    assert_same_losses(tmp_path, alone, 3)


@pytest.mark.slow
def test_four_processes_continue_the_run_of_two_and_one_of_four_and_two_of_one(tmp_path):
    """Nine steps: three by 2 processes with 4 devices each, three by 4 with 2, two by 1 with 8, and the last by 2."""
    train_alone(tmp_path / "alone", 9)
    for processes, steps, mesh in [(2, 3, (2, 4)), (4, 6, (4, 2)), (1, 8, (1, 8)), (2, 9, (8, 1))]:
        on = [f"mesh.dp={mesh[0]}", f"mesh.mp={mesh[1]}", f"train.steps={steps}", "checkpoint.resume=if_present"]
        with runs.together(processes, *runs.overrides(tmp_path, *GIVEN, *on)) as started:
            assert f"done at step {steps} of {steps}" in ended(started, 0)[0]
    assert [line["mesh"] for line in runs.lines(tmp_path)] == [[2, 4]] * 3 + [[4, 2]] * 3 + [[1, 8]] * 2 + [[8, 1]]
    assert_same_losses(tmp_path, tmp_path / "alone", 9)


# If one process differs or fails, all exit


def test_processes_that_were_started_differently_name_the_keys_and_exit_before_a_device_is_used(tmp_path):
    """Other devices, steps and learning rate: they would hang, or train on silently.  Paths may differ."""
    (tmp_path / "copy").symlink_to(tmp_path / "data")
    other = ["mesh.dp=4", "train.steps=9", "optimizer.learning_rate=1e-4", f"data.dir={tmp_path / 'copy'}"]
    with runs.together(2, *runs.overrides(tmp_path), last=other) as processes:
        _, errors = ended(processes, 2)
    for text in errors:
        assert "mesh.dp is 2 on process 0, 4 on process 1; train.steps is 8 on process 0, 9 on process 1; " in text
        assert "optimizer.learning_rate is 0.003 on process 0, 0.0001 on process 1;\n" in text
        assert len(text.splitlines()) <= 3


def test_an_error_in_one_process_is_reported_by_all(tmp_path):
    """Only process 1 finds no data."""
    with runs.together(2, *runs.overrides(tmp_path), last=["data.dir=nowhere"]) as processes:
        _, errors = ended(processes, 2)
    assert errors[0].startswith("error: process 1 exited: nowhere/train.bin does not exist; prepare it with"), errors[0]
    for text in (errors[1], (tmp_path / "run" / "logs" / "process-1.log").read_text()):
        assert "error: nowhere/train.bin does not exist" in text and "Traceback" not in text, text


# How they find each other


def waiting(directory: Path, number: int, port: int, *given: str) -> subprocess.Popen:
    """Process `number` of two, whose other one is not there."""
    place = ["--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process-id", str(number)]
    return runs.start("--cfg", runs.FIRST, *runs.overrides(directory, *given), *place, JAX_PLATFORMS="cpu")


def test_a_join_timeout_ends_a_process_and_names_the_address_and_the_likely_reason(tmp_path, monkeypatch):
    late = waiting(tmp_path, 1, port := runs.free_port(), "run.join_timeout_seconds=2")
    with runs.killed_at_the_end([late]) as (process,):
        _, err = process.communicate(timeout=60)
    assert process.returncode == LostProcessError.exit_code
    _, message = err.splitlines()[:2]
    assert message.startswith("error: process 1 of 2 waited 2 s (run.join_timeout_seconds) for the others: nothing lis")
    assert f"127.0.0.1 port {port}" in message and len(err.splitlines()) <= 3, err
    with socket.create_server(("127.0.0.1", port)):
        reason = distributed._why_not_joined(f"127.0.0.1:{port}", 0, 2)
    assert f"127.0.0.1 port {port}, but not all 2 processes joined" in reason and reason.count("\n") == 1


def test_a_process_that_waits_for_the_others_stops_at_once_and_listens_only_at_its_address(tmp_path):
    with runs.killed_at_the_end([waiting(tmp_path, 0, port := runs.free_port())]) as (process,):
        assert not reaches_beyond(port, process), f"port {port} is open at another address than 127.0.0.1"
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - began < 4
    assert process.returncode == 75 and "stopped before the first training step" in err and "Traceback" not in err


def reaches_beyond(port: int, process: subprocess.Popen) -> bool:
    """Wait until `port` is open at 127.0.0.1; whether it is also open at 127.0.0.2."""
    while process.poll() is None:
        with socket.socket() as probe, socket.socket() as other:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return other.connect_ex(("127.0.0.2", port)) == 0
        time.sleep(0.1)
    raise AssertionError(process.communicate())


BAD_ADDRESSES = [
    "", "here", "here:", ":1234", "here:0", "here:65536", "here:99999", "here:+1", "here: 1", "here:٣٣٣٣", "hére:1",
    "a b:1", "::1:1234", "[::1]", "[::1]:0", "[here]:1234", "-x:1234",
]  # fmt: skip


def test_an_address_of_process_0_that_jax_would_not_understand_is_refused():
    """With some of them it crashes."""
    for address in BAD_ADDRESSES:
        message = re.escape(f"--coordinator {address!r} is not HOST:PORT")
        with pytest.raises(UserError, match=f"^{message}[^\n]*$"):
            validate_process_arguments(address, 0, 2)
    for address in ("here:1", "10.0.0.2:65535", "host-1.example.org:8476", "[::1]:8476", "a_b.c.:1"):
        validate_process_arguments(address, 0, 2)


BAD_ARGUMENTS = {
    "--coordinator here:1234": "must be given together; add --process-id I",
    "--process-id 1": "must be given together; add --coordinator HOST:PORT",
    "--coordinator here:1234 --process-id 0": "mesh.processes=1; add --processes N",
    "--coordinator here:1 --process-id 2 --processes 2": "--process-id 2 is out of range for --processes 2; use 0 to 1",
    "--coordinator here --process-id 1 --processes 2": "--coordinator 'here' is not HOST:PORT",
    "--processes 0": "mesh.processes=0 must be 1 or more",
}


@pytest.mark.parametrize("given", BAD_ARGUMENTS)
def test_bad_process_arguments_are_explained(capsys, given):
    assert command.main(["--cfg", runs.FIRST, *given.split()]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and BAD_ARGUMENTS[given] in message and len(message.splitlines()) == 1


@pytest.mark.parametrize(
    "found, address, listening",
    [
        (["127.0.0.1"], "127.0.0.1:80", "127.0.0.1:80"),
        (["::1", "127.0.0.1"], "localhost:80", "localhost:80"),
        (["fd00::2"], "[fd00::2]:80", "[fd00::2]:80"),
        (["10.0.0.2"], "pod-0:80", "pod-0:80"),
        (["127.0.1.1"], "pod-0:80", "[::]:80"),
    ],
)
def test_process_0_listens_only_where_the_others_reach_it(monkeypatch, found, address, listening):
    """A name that is a loopback address here is another address elsewhere."""
    answer = [(0, 0, 0, "", (each, 80)) for each in found]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    assert distributed._bind_address(address) == listening
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "0.0.0.0:80")
    assert distributed._bind_address(address) == "0.0.0.0:80"


def test_a_host_name_of_process_0_that_cannot_be_resolved_is_reported(monkeypatch):
    def fail(*_, **__):
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(UserError, match=r"--coordinator nowhere:80: nowhere cannot be resolved"):
        distributed._bind_address("nowhere:80")
