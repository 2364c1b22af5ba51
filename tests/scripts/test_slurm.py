"""scripts/slurm.sh: what srun is asked to start, and what becomes of each exit code.  Slurm itself is played."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.commands import ROOT

SCRIPT = ROOT / "scripts" / "slurm.sh"


@pytest.fixture
def clone(tmp_path) -> Iterator[Path]:
    """A clone to submit from, and srun and scontrol beside it, which write down what they are asked."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to("/bin/true")
    (tmp_path / "main.py").touch()
    (tmp_path / "bin").mkdir()
    for name, ends in [("srun", 'until [ -f end ]; do sleep 0.02; done\nexit "$(cat end)"'), ("scontrol", "")]:
        tool = tmp_path / "bin" / name
        tool.write_text(f"#!/bin/bash\nprintf '%s\\n' {name} \"$@\" >>asked\n{ends}\n")
        tool.chmod(0o755)
    yield tmp_path
    (tmp_path / "end").write_text("0")  # of a srun that is left


def submit(clone: Path, *arguments: str, **environment: str) -> subprocess.Popen:
    slurm = {"SLURM_NTASKS": "16", "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(clone)}
    path = {"PATH": f"{clone}/bin:{os.environ['PATH']}"}
    return subprocess.Popen(
        [SCRIPT, *arguments],
        cwd="/",
        env=os.environ | path | slurm | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(clone: Path, job: subprocess.Popen, code: int) -> tuple[str, str]:
    """Let srun exit with `code`; what the job has said."""
    (clone / "end.new").write_text(str(code))
    (clone / "end.new").rename(clone / "end")
    return job.communicate(timeout=30)


@pytest.mark.parametrize("code", [0, 1, 2, 75, 137])
def test_only_what_was_stopped_and_saved_goes_back_into_the_queue(clone, code):
    job = submit(clone, "model=6_9b", "run.name=it's big")
    end(clone, job, code)
    assert job.returncode == code
    srun = ["srun", "--kill-on-bad-exit=0", "--wait=600", ".venv/bin/python", "main.py", "--cfg", "conf/config.yaml"]
    given = ["model=6_9b", "run.name=it's big", "checkpoint.resume=if_present", "mesh.processes=16"]
    requeued = ["scontrol", "requeue", "7"] if code == 75 else []
    assert (clone / "asked").read_text().splitlines() == [*srun, *given, *requeued]


def test_it_waits_for_the_save_when_it_is_told_to_stop(clone):
    job = submit(clone, "--cfg", "mine.yaml", "--resume")
    while not (clone / "asked").exists():
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    ready, _, _ = select.select([job.stdout], [], [], 30)
    assert ready and job.poll() is None
    said, _ = end(clone, job, 75)
    assert job.returncode == 75
    assert said.startswith("told to stop: waiting for main.py to save\n") and "job 7 goes back into the queue" in said
    asked = (clone / "asked").read_text().splitlines()
    assert asked[5:] == ["--cfg", "mine.yaml", "--resume", "mesh.processes=16", "scontrol", "requeue", "7"]


@pytest.mark.parametrize(
    "missing, environment, said",
    [
        ("main.py", {}, "has no main.py; call sbatch in the clone"),
        (".venv/bin/python", {}, "has no .venv; run ./prepareGPUVM.sh"),
        ("end", {"SLURM_NTASKS": ""}, "this is for Slurm: sbatch"),
    ],
)
def test_what_is_missing_is_told_in_a_line(clone, missing, environment, said):
    (clone / missing).unlink(missing_ok=True)
    job = submit(clone, **environment)
    _, err = job.communicate(timeout=30)
    assert job.returncode == 2 and err.startswith("error: ") and said in err and len(err.splitlines()) == 1
    assert not (clone / "asked").exists()
