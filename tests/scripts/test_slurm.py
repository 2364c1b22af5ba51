"""scripts/slurm.sh: the srun command, and what happens for each exit code.  srun and scontrol are stand-ins."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

SCRIPT = ROOT / "scripts" / "slurm.sh"


@pytest.fixture
def clone(tmp_path) -> Iterator[Path]:
    """A clone to submit from, with stand-ins for srun and scontrol that record their arguments."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to("/bin/true")
    (tmp_path / "main.py").touch()
    (tmp_path / "bin").mkdir()
    for name, ends in [("srun", 'until [ -f end ]; do sleep 0.02; done\nexit "$(cat end)"'), ("scontrol", "")]:
        tool = tmp_path / "bin" / name
        tool.write_text(f"#!/bin/bash\nprintf '%s\\n' {name} \"$@\" >>calls\n{ends}\n")
        tool.chmod(0o755)
    yield tmp_path
    (tmp_path / "end").write_text("0")  # ends an srun that is still running


def submit(clone: Path, *arguments: str, **environment: str) -> subprocess.Popen:
    slurm = {"SLURM_NTASKS": "16", "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(clone)}
    path = {"PATH": f"{clone}/bin:{os.environ['PATH']}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([SCRIPT, *arguments], cwd="/", env=os.environ | path | slurm | environment, **pipes)


def end(clone: Path, job: subprocess.Popen, code: int) -> tuple[str, str]:
    """Let srun exit with `code`; returns (stdout, stderr) of the job."""
    (clone / "end.new").write_text(str(code))
    (clone / "end.new").rename(clone / "end")
    return job.communicate(timeout=30)


@pytest.mark.parametrize("code", [0, 1, 2, 75, 137])
def test_only_a_job_that_stopped_and_saved_is_requeued(clone, code):
    job = submit(clone, "model=6_9b", "run.name=it's big")
    end(clone, job, code)
    assert job.returncode == code
    srun = ["srun", "--ntasks=16", "--kill-on-bad-exit=0", "--wait=600", ".venv/bin/python", "main.py"]
    srun += ["--cfg", "conf/base.yaml"]
    given = ["model=6_9b", "run.name=it's big", "checkpoint.resume=if_present", "mesh.processes=16"]
    requeued = ["scontrol", "requeue", "7"] if code == 75 else []
    assert (clone / "calls").read_text().splitlines() == [*srun, *given, *requeued]


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_job_with_a_range_of_nodes_has_a_process_for_each_gpu_of_those_that_were_given(clone, nodes):
    job = submit(clone, SLURM_NTASKS="8", SLURM_NTASKS_PER_NODE="8", SLURM_JOB_NUM_NODES=str(nodes))
    end(clone, job, 0)
    calls = (clone / "calls").read_text().splitlines()
    assert f"--ntasks={8 * nodes}" in calls and calls[-1] == f"mesh.processes={8 * nodes}"


def test_the_script_waits_for_the_save_after_sigterm(clone):
    job = submit(clone, "--cfg", "mine.yaml", "--resume")
    while not (clone / "calls").exists():
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    ready, _, _ = select.select([job.stdout], [], [], 30)
    assert ready and job.poll() is None
    output, _ = end(clone, job, 75)
    assert job.returncode == 75
    assert output.startswith("stop requested: waiting for main.py to save\n") and "requeueing job 7" in output
    calls = (clone / "calls").read_text().splitlines()
    assert calls[6:] == ["--cfg", "mine.yaml", "--resume", "mesh.processes=16", "scontrol", "requeue", "7"]


def test_a_missing_prerequisite_is_named_in_one_line(clone):
    for missing, environment, message in [
        ("end", {"SLURM_NTASKS": ""}, "this is for Slurm: sbatch"),
        (".venv/bin/python", {}, "has no .venv; run ./prepareGPUVM.sh"),
        ("main.py", {}, "has no main.py; run sbatch in the clone"),
    ]:
        (clone / missing).unlink(missing_ok=True)
        job = submit(clone, **environment)
        _, err = job.communicate(timeout=30)
        assert job.returncode == 2 and err.startswith("error: ") and message in err and len(err.splitlines()) == 1
        assert not (clone / "calls").exists()
