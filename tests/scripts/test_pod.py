"""scripts/pod.sh: every command as it reaches gcloud, every error in one or two lines.

A stand-in for gcloud records its arguments and answers from a list.
"""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.gcloud_stand_in import HOST, SCRIPTS
from tests.helpers.paths import ROOT

COPY = "mkdir -p ~/shmap_tp && tar -xzf ~/shmap_tp.tar.gz -C ~/shmap_tp && rm ~/shmap_tp.tar.gz && "
COPY += "~/shmap_tp/scripts/on_host.sh prepare"
STATUS = f"if [ -x {HOST} ]; then {HOST} status; else echo never started, not set up; fi"


STEPS = {
    "create p --type v4-32": ["tpu-vm create p --accelerator-type=v4-32 --version=tpu-ubuntu2204-base"],
    "create p --type v5litepod-16 --preemptible --network big --zone z --project q": [
        "tpu-vm create p --accelerator-type=v5litepod-16 --version=v2-alpha-tpuv5-lite --preemptible --network=big "
        "--zone=z --project=q"
    ],
    "create p --type v9-8 --version w --reserved": ["tpu-vm create p --accelerator-type=v9-8 --version=w --reserved"],
    "create p --type v6e-16 --queued --spot": [
        "queued-resources create p --accelerator-type=v6e-16 --node-id=p --runtime-version=v2-alpha-tpuv6e --spot"
    ],
    "create p --type v5p-32 --slices 2 --zone z": [
        "queued-resources create p --accelerator-type=v5p-32 --node-count=2 --node-prefix=p "
        "--runtime-version=v2-alpha-tpuv5 --zone=z"
    ],
    "setup p --slices 2": [
        *[f"tpu-vm scp {{packed}} p-{i}:shmap_tp.tar.gz --worker=all" for i in range(2)],
        *[f"tpu-vm ssh p-{i} --worker=all '--command={COPY}'" for i in range(2)],
    ],
    "setup p --repository https://h/r.git": [
        "tpu-vm ssh p --worker=all '--command=if [ -d ~/shmap_tp/.git ]; then git -C ~/shmap_tp pull --ff-only; "
        f"else git clone https://h/r.git ~/shmap_tp; fi && {HOST} prepare'"
    ],
    "run p --zone z -- model=6_9b mesh.mp=8": [
        f"tpu-vm ssh p --worker=all '--command={HOST} start --cfg conf/base.yaml model=6_9b mesh.mp=8' --zone=z"
    ],
    "run p --slices 2 -- --cfg conf/recipes/2_8b_v2-32.yaml --resume": [
        f"tpu-vm ssh p-{i} --worker=all '--command={HOST} start --cfg conf/recipes/2_8b_v2-32.yaml --resume'"
        for i in range(2)
    ],
    "status p": [
        "tpu-vm describe p '--format=value(state)'",
        "tpu-vm describe p '--format=value(name.basename(),state,networkEndpoints.len())'",
        f"tpu-vm ssh p --worker=all '--command={STATUS}'",
    ],
    "status p --queued": [
        "queued-resources describe p '--format=value(state.state)'",
        "tpu-vm describe p '--format=value(name.basename(),state,networkEndpoints.len())'",
        f"tpu-vm ssh p --worker=all '--command={STATUS}'",
    ],
    "logs p --follow": [f"tpu-vm ssh p --worker=0 '--command={HOST} log --follow'"],
    "logs p --slices 3": [f"tpu-vm ssh p-0 --worker=0 '--command={HOST} log'"],
    "stop p --seconds 60": [f"tpu-vm ssh p --worker=all '--command={HOST} stop 60'"],
    "delete p": ["tpu-vm delete p --quiet"],
    "delete p --slices 2": ["queued-resources delete p --force --quiet"],
}  # fmt: skip


@pytest.mark.parametrize("given", STEPS)
def test_each_step_runs_these_gcloud_commands_and_a_dry_run_prints_them(cloud, given):
    expected = [shlex.split(line) for line in STEPS[given]]
    step, options = given.split(" -- ")[0].split(), given.split(" ")
    dry = cloud.pod(*step, "--dry-run", "--unchecked", *options[len(step) :]).stdout.splitlines()
    assert cloud.calls() == []
    words = [cloud.without_random_names(shlex.split(line)) for line in dry]
    assert words == [["gcloud", "compute", "tpus", *line] for line in expected]

    cloud.answer(("queued-resources describe", "ACTIVE\n", "", 0), ("value(state)", "READY\n", "", 0))
    cloud.pod(*options)
    assert sorted(cloud.calls()) == sorted(expected)  # those of several slices run at once


def test_arguments_reach_main_py_unchanged(cloud):
    """Through this shell, gcloud and the shell of the host."""
    given = ['run.name=it\'s $HOME; a "b" *', "mesh.tile=[2,2,4,1]", "x=a\\b", ""]
    cloud.pod("run", "p", "--", *given)
    ((*_, command),) = cloud.calls()
    received = subprocess.run(
        ["bash", "-c", command.removeprefix("--command=").replace(HOST, "printf '%s\\n'")], capture_output=True
    )
    assert received.stdout.decode().splitlines() == ["start", "--cfg", "conf/base.yaml", *given]


MISTAKES = {
    "start p": "start is not a step; use one of create, setup,",
    "run": "name the pod, as in pod.sh run my-pod",
    "run P_1": "P_1: a name has lower-case letters",
    "create p": "give --type, such as v4-32",
    "create p --type": "--type needs a value",
    "create p --type v9-1": "--type v9-1: its software version is not known; give --version",
    "create p --type v4-8 --spot --reserved": "--spot and --reserved: choose one",
    "create p --type v4-8 --queued --preemptible": "cannot be --preemptible; use --spot",
    "create p --type v4-8 --slices none": "--slices none: give a number of slices, 1 or more",
    "stop p --seconds soon": "--seconds soon: give a number",
    "stop p -- model=6_9b": "pod.sh stop takes no arguments of main.py",
    "run p model=6_9b": "model=6_9b is not an option of pod.sh; arguments of main.py come after --",
    "train p --type v4-8": "give checkpoint.dir=gs://BUCKET/...",
    "train p --type v4-8 -- --resume checkpoint.dir=gs://b": "train resumes automatically; leave --resume out",
}


def test_bad_input_is_explained_in_at_most_two_lines_without_calling_gcloud(cloud, tmp_path):
    for given, words in MISTAKES.items():
        output = cloud.pod(*given.split(), code=2).stderr
        assert output.startswith("error: ") and words in output and len(output.splitlines()) <= 2, output
    bare = tmp_path / "bare"
    bare.mkdir()
    for tool in ("bash", "dirname", "mktemp", "rm", "env"):
        (bare / tool).symlink_to(shutil.which(tool))
    output = cloud.pod("status", "p", code=2, path=str(bare)).stderr
    assert output.startswith("error: gcloud is not installed; see https://cloud.google.com/sdk/docs/install")
    assert cloud.calls() == []


ERRORS = {
    "ERROR: NOT_FOUND: 'projects/q/p' was not found": "there is no p; see gcloud compute tpus tpu-vm list",
    "ERROR: ALREADY_EXISTS: p": "p exists already; continue with: pod.sh setup p",
    "ERROR: Quota limit 'TPUV4sPodPerProject' has been exceeded": "the quota is too small; request more",
    "ERROR: There is no more capacity in the zone": "no capacity in this zone now; wait with --queued",
    "ERROR: PERMISSION_DENIED: Cloud TPU API has not been used": "gcloud services enable tpu.googleapis.com",
    "bash: line 1: /x/scripts/on_host.sh: No such file or directory": "p is not set up; run first: pod.sh setup p",
    "ERROR: the moon": "failed (above)",
}


def test_an_error_of_gcloud_is_shown_and_explained(cloud):
    missing = next(iter(ERRORS))
    steps = [(missing, step) for step in ("setup p --repository https://h/r.git", "run p --slices 2", "status p")]
    steps += [(missing, "delete p"), *((error, "create p --type v4-8") for error in ERRORS)]
    for error, step in steps:
        cloud.answer(("compute", "", error + "\n", 1))
        output = cloud.pod(*step.split(), code=1).stderr.splitlines()
        explained = any(line.startswith("error: ") and ERRORS[error] in line for line in output)
        assert output[0] == error and explained, output


def test_shellcheck_reports_nothing():
    checker = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if not checker:
        pytest.skip("shellcheck is not installed: pip install -e '.[test]'")
    scripts = [*SCRIPTS.glob("*.sh"), *ROOT.glob("*.sh")]
    done = subprocess.run([checker, "-x", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert len(scripts) > 5 and done.returncode == 0, done.stdout
