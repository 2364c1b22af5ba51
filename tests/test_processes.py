"""Two processes train what one trains, and each goes on from the other's checkpoint; process 0 alone speaks.

They find each other by Slurm's variables, on this machine; each emulates four of the (2, 4) mesh's devices.
"""

import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny import FIRST, lines, overrides, start, tiny, wait_for_step

from shmap_tp import train
from shmap_tp.checkpoint import MANIFEST

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
def two(*arguments: str) -> Iterator[list[subprocess.Popen]]:
    """main.py started as a Slurm job of two tasks; neither outlives the context."""
    slurm = {"JOB_ID": free_job(), "STEP_NODELIST": "localhost", "NTASKS": 2, "STEP_NUM_NODES": 1}
    tasks = [slurm | {"PROCID": number, "LOCALID": number} for number in range(2)]
    environments = [{f"SLURM_{name}": str(value) for name, value in task.items()} for task in tasks]
    given = ("--cfg", FIRST, *arguments, "mesh.processes=2")
    first, second = (start(*given, JAX_PLATFORMS="cpu", **environment) for environment in environments)
    with first, second:
        try:
            yield [first, second]
        finally:
            first.kill()
            second.kill()


def ended(processes: list[subprocess.Popen], code: int) -> str:
    """What process 0 has said, once both have ended with `code`; the other has said nothing.

    Gloo, which carries the collectives between CPU processes, names its ranks on every process.
    """
    said = [process.communicate(timeout=SECONDS) for process in processes]
    assert [process.returncode for process in processes] == [code, code], said
    assert not any("Traceback" in err for _, err in said), said
    own = ["".join(line for line in out.splitlines(True) if not line.startswith("[Gloo]")) for out, _ in said]
    assert own[1] == "", own[1]
    return own[0]


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
    with two(*overrides(tmp_path, *GIVEN)) as processes:
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
    with two(*overrides(tmp_path, *GIVEN, "train.steps=100000", "checkpoint.resume=must")) as processes:
        wait_for_step(processes[0], tmp_path, 10)
        processes[1].send_signal(signal.SIGTERM)
        said = ended(processes, 75)
    stopped = lines(tmp_path)[-1]["step"]
    assert "going on from step 3" in said and f"stopped and saved at step {stopped} of 100000" in said
    assert (tmp_path / "run" / "checkpoints" / str(stopped) / MANIFEST).exists()
    same_losses(tmp_path, alone, 9)
