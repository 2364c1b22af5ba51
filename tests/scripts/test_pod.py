"""scripts/pod.sh: every command as it reaches gcloud, every error in one or two lines.

A stand-in for gcloud records its arguments and answers from a list.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

SCRIPTS = ROOT / "scripts"
POD = str(SCRIPTS / "pod.sh")
STAND_IN = f"""#!{sys.executable} -S
import json, pathlib, shutil, sys
here = pathlib.Path(__file__).parent
if "scp" in sys.argv:
    source, target = sys.argv[5:7]
    (here / "mode").write_text(oct(pathlib.Path(source).parent.stat().st_mode & 0o777))
    shutil.copy(source, here / target)
with (here / "calls").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
answers = json.loads((here / "answers").read_text())
for i, (part, out, err, code) in enumerate(answers):
    if part in " ".join(sys.argv):
        if sum(one[0] == part for one in answers) > 1:
            del answers[i]  # the last answer of its kind is kept
            (here / "answers").write_text(json.dumps(answers))
        print(out, end="")
        print(err, end="", file=sys.stderr)
        sys.exit(code)
"""
COPY = "mkdir -p ~/shmap_tp && tar -xzf ~/shmap_tp.tar.gz -C ~/shmap_tp && rm ~/shmap_tp.tar.gz && "
COPY += "~/shmap_tp/scripts/on_host.sh prepare"
HOST = "~/shmap_tp/scripts/on_host.sh"
STATUS = f"if [ -x {HOST} ]; then {HOST} status; else echo never started, not set up; fi"


class Cloud:
    """A directory on PATH whose gcloud is the stand-in."""

    def __init__(self, directory: Path):
        self.directory = directory
        (directory / "gcloud").write_text(STAND_IN)
        (directory / "gcloud").chmod(0o755)
        self.answer()

    def answer(self, *answers: tuple[str, str, str, int]) -> None:
        """(part of the command, stdout, stderr, exit code): the first match answers; equal parts once each, in turn."""
        (self.directory / "answers").write_text(json.dumps(answers))

    def pod(
        self, *arguments: str, code: int = 0, path: str | None = None, script: str = POD
    ) -> subprocess.CompletedProcess:
        path = path or f"{self.directory}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "TMPDIR": str(self.directory)}
        done = subprocess.run([script, *arguments], env=environment, capture_output=True, text=True)
        assert done.returncode == code, done
        return done

    def calls(self) -> list[list[str]]:
        """All commands since the last call of this method, without `compute tpus`."""
        file = self.directory / "calls"
        found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        file.unlink(missing_ok=True)
        assert all(one[:2] == ["compute", "tpus"] for one in found)
        return [self.without_random_names(one[2:]) for one in found]

    def without_random_names(self, words: list[str]) -> list[str]:
        """`words` with {packed} in place of the archive, whose directory has a random name."""
        archive = re.compile(rf"{re.escape(str(self.directory))}/shmap_tp\.\w{{8}}/shmap_tp\.tar\.gz")
        return [archive.sub("{packed}", word) for word in words]


@pytest.fixture
def cloud(tmp_path) -> Cloud:
    return Cloud(tmp_path)


STEPS = {
    "create p --type v4-32": ["tpu-vm create p --accelerator-type=v4-32 --version=tpu-ubuntu2204-base"],
    "create p --type v5litepod-16 --spot --network big --zone z --project q": [
        "tpu-vm create p --accelerator-type=v5litepod-16 --version=v2-alpha-tpuv5-lite --spot --network=big "
        "--zone=z --project=q"
    ],
    "create p --type v9-8 --version w --preemptible": [
        "tpu-vm create p --accelerator-type=v9-8 --version=w --preemptible"
    ],
    "create p --type v6e-16 --queued --reserved": [
        "queued-resources create p --accelerator-type=v6e-16 --node-id=p --runtime-version=v2-alpha-tpuv6e --reserved"
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
        f"tpu-vm ssh p --worker=all '--command={HOST} start --cfg conf/config.yaml model=6_9b mesh.mp=8' --zone=z"
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
}


@pytest.mark.parametrize("given", STEPS)
def test_each_step_runs_these_gcloud_commands_and_a_dry_run_prints_them(cloud, given):
    expected = [shlex.split(line) for line in STEPS[given]]
    step, options = given.split(" -- ")[0].split(), given.split(" ")
    dry = cloud.pod(*step, "--dry-run", *options[len(step) :]).stdout.splitlines()
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
    assert received.stdout.decode().splitlines() == ["start", "--cfg", "conf/config.yaml", *given]


# What a dry run checks


def test_a_dry_run_checks_the_arguments_of_main_py(cloud):
    done = cloud.pod("run", "p", "--dry-run", "--", "mesh.mp=3", code=2)
    assert done.stderr.startswith("error: mesh.mp=3 does not divide heads=8") and not done.stdout
    given = ["--type", "v4-8", "--dry-run", "--", "--cfg", "conf/nowhere.yaml", "checkpoint.dir=gs://b"]
    assert "conf/nowhere.yaml: no such file" in cloud.pod("train", "p", *given, code=2).stderr
    given[-2:] = ["conf/recipes/llama3_8b_v5p-8.yaml", "checkpoint.dir=gs://b"]
    assert "dp=4 x mp=1 = 4 devices" in cloud.pod("train", "p", *given).stderr


def test_a_dry_run_without_the_packages_reports_that_nothing_was_checked(cloud, clone):
    script = str(clone / "scripts" / "pod.sh")
    done = cloud.pod("run", "p", "--dry-run", "--", "mesh.mp=3", script=script, path=f"{cloud.directory}:/usr/bin:/bin")
    assert "the arguments of main.py are not checked: no Python here has its packages" in done.stderr
    assert done.stdout.startswith("gcloud compute tpus tpu-vm ssh p")


# What setup copies


@pytest.fixture
def clone(tmp_path) -> Path:
    """An unpacked archive of a project: a few files, some of them private, and links to files outside of it."""
    clone, outside = tmp_path / "clone", tmp_path / "outside"
    for name in (
        "main.py",
        "conf/config.yaml",
        ".env",
        ".ssh/id",
        "conf/.env",
        "shmap_tp/__pycache__/x.pyc",
        "mine.yaml",
    ):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text("here")
    (clone / "data").mkdir()
    (clone / "data" / "train.bin").touch()
    outside.mkdir()
    (outside / "secret").write_text("outside")
    (clone / "conf" / "link.yaml").symlink_to(outside / "secret")
    (clone / "docs").symlink_to(outside)
    shutil.copytree(SCRIPTS, clone / "scripts")
    return clone


def copied(cloud: Cloud, clone: Path) -> set[str]:
    """The names in the archive that `pod.sh setup` sends, without those of the scripts."""
    cloud.pod("setup", "p", script=str(clone / "scripts" / "pod.sh"))
    with tarfile.open(cloud.directory / "p:shmap_tp.tar.gz") as archive:
        assert all(member.isfile() for member in archive if member.name != "conf/tracked_link.yaml")
        return {name for name in archive.getnames() if not name.startswith("scripts/")}


def git(clone: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", clone, *arguments], check=True, capture_output=True)


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_setup_copies_the_tracked_files_as_they_are_now(cloud, clone):
    (clone / "conf" / "tracked_link.yaml").symlink_to("/etc/hostname")
    (clone / "deleted.py").touch()
    git(clone, "init")
    git(clone, "add", "main.py", "deleted.py", "conf/config.yaml", "conf/tracked_link.yaml", "scripts")
    (clone / "main.py").write_text("changed")
    (clone / "deleted.py").unlink()
    assert copied(cloud, clone) == {"main.py", "conf/config.yaml", "conf/tracked_link.yaml"}
    with tarfile.open(cloud.directory / "p:shmap_tp.tar.gz") as archive:
        assert archive.extractfile("main.py").read() == b"changed"
        assert archive.getmember("conf/tracked_link.yaml").issym()


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_setup_names_files_that_it_does_not_copy(cloud, clone):
    git(clone, "init")
    git(clone, "add", "main.py", "conf", "scripts", ".env")
    output = cloud.pod("setup", "p", script=str(clone / "scripts" / "pod.sh")).stdout
    assert "not copied, because git does not track them" in output and "mine.yaml" in output


def test_setup_without_git_copies_the_projects_files_but_nothing_hidden_and_no_links(cloud, clone):
    assert copied(cloud, clone) == {"main.py", "conf/config.yaml"}


def test_the_archive_is_private_and_is_deleted(cloud, clone):
    before = {file.name for file in cloud.directory.iterdir()}
    copied(cloud, clone)
    assert (cloud.directory / "mode").read_text() == "0o700"
    made = {file.name for file in cloud.directory.iterdir()} - before
    assert made == {"calls", "mode", "p:shmap_tp.tar.gz"}, "everything else in the temporary directory was deleted"


def test_an_archive_of_the_same_name_that_someone_else_made_is_not_written(cloud, clone, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (cloud.directory / "shmap_tp-p.tar.gz").symlink_to(victim)
    copied(cloud, clone)
    assert victim.read_text() == "precious"


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


@pytest.mark.parametrize("given", MISTAKES)
def test_bad_input_is_explained_in_at_most_two_lines_without_calling_gcloud(cloud, given):
    output = cloud.pod(*given.split(), code=2).stderr
    assert output.startswith("error: ") and MISTAKES[given] in output and len(output.splitlines()) <= 2, output
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


@pytest.mark.parametrize(
    "error, step",
    [(error, "create p --type v4-8") for error in ERRORS]
    + [(next(iter(ERRORS)), step) for step in ("setup p", "run p --slices 2", "status p", "delete p")],
)
def test_an_error_of_gcloud_is_shown_and_explained(cloud, error, step):
    cloud.answer(("compute", "", error + "\n", 1))
    output = cloud.pod(*step.split(), code=1).stderr.splitlines()
    assert output[0] == error and any(line.startswith("error: ") and ERRORS[error] in line for line in output), output


def test_a_missing_gcloud_is_reported_with_its_download_page(cloud, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for tool in ("bash", "dirname", "mktemp", "rm", "env"):
        (bare / tool).symlink_to(shutil.which(tool))
    output = cloud.pod("status", "p", code=2, path=str(bare)).stderr
    assert output.startswith("error: gcloud is not installed; see https://cloud.google.com/sdk/docs/install")


# train: repeatedly, until main.py is done


def train(cloud: Cloud, *, hosts: list[str], states: list[str], code: int, more: list[tuple] = ()) -> tuple[str, list]:
    """(its output, its commands but `describe` and `scp`); `hosts` are the answers to `status`."""
    cloud.answer(
        *more,
        *[("on_host.sh status", answer, "", 0) for answer in hosts],
        *[("value(state)", f"{state}\n" if state else "", "", 0 if state else 1) for state in states],
    )
    given = ["--type", "v4-8", "--spot", "--poll", "0", "--", "checkpoint.dir=gs://b/c"]
    done = cloud.pod("train", "p", *given, code=code)
    words = []
    for verb, what, _, *rest in cloud.calls():
        host = [one.rpartition(HOST)[2].split()[0].rstrip(";") for one in rest if HOST in one]
        words += [] if what in ("describe", "scp") else host or [what]
        assert "start" not in host or any("checkpoint.resume=if_present" in one for one in rest)
        assert verb == "tpu-vm"
    return done.stdout + done.stderr, words


ONCE = ["prepare", "start", "status"]


def test_train_creates_missing_slices_and_ends_when_main_py_is_done(cloud):
    output, calls = train(cloud, hosts=["running 5\n", "ended 0\n"], states=["", "CREATING", "READY"], code=0)
    assert calls == ["create", *ONCE, "status"] and "p: main.py is done; give the slices back" in output


def test_train_resumes_after_a_stop_and_replaces_preempted_slices(cloud):
    output, calls = train(
        cloud,
        hosts=["running 5\nrunning 6\n", "ended 75\nended 75\n", "running 7\nrunning 8\n", "ended 0\nended 0\n"],
        states=["READY", "PREEMPTED", "", "READY"],
        code=0,
    )
    assert calls == [*ONCE, "status", "delete", "create", *ONCE, "status"]
    assert "stopped and saved, or preempted: resuming" in output


def test_train_detects_preempted_slices_when_no_host_answers(cloud):
    gone = [("on_host.sh status", "", "ssh: connect: timed out\n", 255)]
    output, calls = train(
        cloud, hosts=["ended 0\n"], states=["READY", "PREEMPTED", "PREEMPTED", "", "READY"], code=0, more=gone
    )
    assert calls == [*ONCE, "delete", "create", *ONCE] and "preempted" in output


def test_train_stops_when_main_py_refuses_its_input(cloud):
    """One host refuses; the others, which wait for it, are stopped."""
    output, calls = train(
        cloud,
        hosts=["running 5\nended 2\n", "ended 137\nended 2\n"],
        states=["READY"],
        code=2,
    )
    assert calls == [*ONCE, "stop", "status"] and "main.py refused its input" in output


def test_train_gives_up_after_five_failures_in_a_row(cloud):
    output, calls = train(cloud, hosts=["ended 1\n"], states=["READY"], code=1)
    assert (
        calls == ONCE * 5 and "failure 4 of 5" in output and output.rstrip().endswith("5 failures in a row; giving up")
    )


@pytest.mark.parametrize("script", sorted([*SCRIPTS.glob("*.sh"), *ROOT.glob("*.sh")]), ids=lambda file: file.name)
def test_shellcheck_reports_nothing(script):
    checker = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if not checker:
        pytest.skip("shellcheck is not installed: pip install -e '.[test]'")
    done = subprocess.run([checker, "-x", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
