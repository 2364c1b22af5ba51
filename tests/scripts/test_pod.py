"""scripts/pod.sh: every command as it reaches gcloud, every refusal in a line or two.

A stand-in for gcloud writes down what it is asked and answers by a list.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shmap_tp.config.compose import load
from shmap_tp.training import verification as verify
from tests.helpers.commands import ROOT
from tests.helpers.run_fixtures import FIRST

SCRIPTS = ROOT / "scripts"
POD = str(SCRIPTS / "pod.sh")
STAND_IN = f"""#!{sys.executable} -S
import json, pathlib, sys
here = pathlib.Path(__file__).parent
with (here / "asked").open("a") as asked:
    asked.write(json.dumps(sys.argv[1:]) + "\\n")
answers = json.loads((here / "answers").read_text())
for i, (part, out, err, code) in enumerate(answers):
    if part in " ".join(sys.argv):
        if sum(one[0] == part for one in answers) > 1:
            del answers[i]  # the last of its kind stays
            (here / "answers").write_text(json.dumps(answers))
        print(out, end="")
        print(err, end="", file=sys.stderr)
        sys.exit(code)
"""
COPY = "mkdir -p ~/shmap_tp && tar -xzf ~/shmap_tp.tar.gz -C ~/shmap_tp && ~/shmap_tp/scripts/on_host.sh prepare"
HOST = "~/shmap_tp/scripts/on_host.sh"


class Cloud:
    """A PATH on which gcloud is the stand-in."""

    def __init__(self, directory: Path):
        self.directory = directory
        (directory / "gcloud").write_text(STAND_IN)
        (directory / "gcloud").chmod(0o755)
        self.answer()

    def answer(self, *answers: tuple[str, str, str, int]) -> None:
        """(part of the command, stdout, stderr, exit code): the first that fits; of equal parts each once, in turn."""
        (self.directory / "answers").write_text(json.dumps(answers))

    def pod(self, *arguments: str, code: int = 0, path: str | None = None) -> subprocess.CompletedProcess:
        path = path or f"{self.directory}:{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "TMPDIR": str(self.directory)}
        done = subprocess.run([POD, *arguments], env=environment, capture_output=True, text=True)
        assert done.returncode == code, done
        return done

    def asked(self) -> list[list[str]]:
        """Every command since the last time, without `compute tpus`."""
        file = self.directory / "asked"
        found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        file.unlink(missing_ok=True)
        assert all(one[:2] == ["compute", "tpus"] for one in found)
        return [one[2:] for one in found]


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
    "run p --slices 2 -- --cfg mine.yaml --resume": [
        f"tpu-vm ssh p-{i} --worker=all '--command={HOST} start --cfg mine.yaml --resume'" for i in range(2)
    ],
    "status p": [
        "tpu-vm describe p '--format=value(state)'",
        "tpu-vm describe p '--format=value(name.basename(),state,networkEndpoints.len())'",
        f"tpu-vm ssh p --worker=all '--command={HOST} status'",
    ],
    "status p --queued": [
        "queued-resources describe p '--format=value(state.state)'",
        "tpu-vm describe p '--format=value(name.basename(),state,networkEndpoints.len())'",
        f"tpu-vm ssh p --worker=all '--command={HOST} status'",
    ],
    "logs p --follow": [f"tpu-vm ssh p --worker=0 '--command={HOST} log --follow'"],
    "logs p --slices 3": [f"tpu-vm ssh p-0 --worker=0 '--command={HOST} log'"],
    "stop p --seconds 60": [f"tpu-vm ssh p --worker=all '--command={HOST} stop 60'"],
    "delete p": ["tpu-vm delete p --quiet"],
    "delete p --slices 2": ["queued-resources delete p --force --quiet"],
}


@pytest.mark.parametrize("given", STEPS)
def test_each_step_asks_gcloud_for_this_and_a_dry_run_prints_it(cloud, given):
    packed = f"{cloud.directory}/shmap_tp-p.tar.gz"
    expected = [shlex.split(line.replace("{packed}", packed)) for line in STEPS[given]]
    step, options = given.split(" -- ")[0].split(), given.split(" ")
    dry = cloud.pod(*step, "--dry-run", *options[len(step) :]).stdout.splitlines()
    assert cloud.asked() == []
    assert [shlex.split(line) for line in dry] == [["gcloud", "compute", "tpus", *line] for line in expected]

    cloud.answer(("queued-resources describe", "ACTIVE\n", "", 0), ("value(state)", "READY\n", "", 0))
    cloud.pod(*options)
    assert sorted(cloud.asked()) == sorted(expected)  # those of several slices at once


def test_arguments_reach_main_py_as_they_were_given(cloud):
    """Through this shell, gcloud and the shell of the host."""
    given = ['run.name=it\'s $HOME; a "b" *', "mesh.tile=[2,2,4,1]", "x=a\\b", ""]
    cloud.pod("run", "p", "--", *given)
    ((*_, command),) = cloud.asked()
    heard = subprocess.run(
        ["bash", "-c", command.removeprefix("--command=").replace(HOST, "printf '%s\\n'")], capture_output=True
    )
    assert heard.stdout.decode().splitlines() == ["start", "--cfg", "conf/config.yaml", *given]


def test_what_is_copied_is_what_git_knows_of_here(cloud):
    cloud.pod("setup", "packed-p")
    packed = cloud.directory / "shmap_tp-packed-p.tar.gz"
    names = subprocess.run(["tar", "-tzf", packed], capture_output=True, text=True, check=True).stdout.split()
    assert {"main.py", "prepareTPUVM.sh", "scripts/on_host.sh", "conf/config.yaml"} <= set(names)
    assert not [name for name in names if name.startswith((".git/", ".cache", ".venv"))]


MISTAKES = {
    "start p": "start is no step; use one of create, setup,",
    "run": "name the pod, as in pod.sh run my-pod",
    "run P_1": "P_1: a name is of lower-case letters",
    "create p": "give --type, such as v4-32",
    "create p --type": "--type needs a value",
    "create p --type v9-1": "--type v9-1: its software is not known here; give --version",
    "create p --type v4-8 --spot --reserved": "--spot and --reserved: choose one",
    "create p --type v4-8 --queued --preemptible": "cannot be --preemptible; use --spot",
    "create p --type v4-8 --slices none": "--slices none: give how many, 1 or more",
    "stop p --seconds soon": "--seconds soon: give a number",
    "stop p -- model=6_9b": "pod.sh stop takes no arguments of main.py",
    "run p model=6_9b": "model=6_9b is no option of pod.sh; those of main.py come after --",
    "train p --type v4-8": "give checkpoint.dir=gs://BUCKET/...",
    "train p --type v4-8 -- --resume checkpoint.dir=gs://b": "train goes on by itself; leave --resume out",
}


@pytest.mark.parametrize("given", MISTAKES)
def test_a_mistake_costs_a_line_and_asks_nothing_of_gcloud(cloud, given):
    said = cloud.pod(*given.split(), code=2).stderr
    assert said.startswith("error: ") and MISTAKES[given] in said and len(said.splitlines()) <= 2, said
    assert cloud.asked() == []


REFUSALS = {
    "ERROR: NOT_FOUND: 'projects/q/p' was not found": "there is no p here; see gcloud compute tpus tpu-vm list",
    "ERROR: ALREADY_EXISTS: p": "p is there already; go on with: pod.sh setup p",
    "ERROR: Quota limit 'TPUV4sPodPerProject' has been exceeded": "the quota is too small; ask for more",
    "ERROR: There is no more capacity in the zone": "this zone has none to spare now; wait for one with --queued",
    "ERROR: PERMISSION_DENIED: Cloud TPU API has not been used": "gcloud services enable tpu.googleapis.com",
    "ERROR: the moon": "failed (above)",
}


@pytest.mark.parametrize(
    "refused, step",
    [(refused, "create p --type v4-8") for refused in REFUSALS]
    + [(next(iter(REFUSALS)), step) for step in ("setup p", "run p --slices 2", "status p", "delete p")],
)
def test_what_gcloud_refuses_is_shown_and_explained(cloud, refused, step):
    cloud.answer(("compute", "", refused + "\n", 1))
    said = cloud.pod(*step.split(), code=1).stderr.splitlines()
    assert said[0] == refused and any(line.startswith("error: ") and REFUSALS[refused] in line for line in said), said


def test_without_gcloud_it_says_where_to_get_it(cloud, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for tool in ("bash", "dirname", "mktemp", "rm", "env"):
        (bare / tool).symlink_to(shutil.which(tool))
    said = cloud.pod("status", "p", code=2, path=str(bare)).stderr
    assert said.startswith("error: gcloud is not installed; see https://cloud.google.com/sdk/docs/install")


# The guide


def commands() -> list[list[str]]:
    """What docs/pods.md has people type, each as words."""
    blocks = (ROOT / "docs" / "pods.md").read_text().split("```")[1::2]
    lines = "".join(block.partition("\n")[2] for block in blocks).replace("\\\n", "").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith(("scripts/", "sbatch", "python"))]


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words)[:60])
def test_what_the_guide_has_people_type_is_accepted(cloud, words):
    if words[0] == "scripts/pod.sh":
        before = words.index("--") if "--" in words else len(words)
        cloud.pod(*words[1:before], "--dry-run", *words[before:])
        load(FIRST, words[before + 1 :])
    elif words[0] == "sbatch":
        load(FIRST, [word for word in words[words.index("scripts/slurm.sh") + 1 :]])
    elif words[2] == "shmap_tp.verify":
        verify.parser().parse_args(words[3:])
    else:
        assert words[2] == "shmap_tp.plan"
    assert cloud.asked() == []


# train: again and again, until main.py is done


def train(cloud: Cloud, *, hosts: list[str], states: list[str], code: int, more: list[tuple] = ()) -> tuple[str, list]:
    """What it says, and what it asks beside `describe` and `scp`, in words; `hosts` are the answers to `status`."""
    cloud.answer(
        *more,
        *[("on_host.sh status", said, "", 0) for said in hosts],
        *[("value(state)", f"{state}\n" if state else "", "", 0 if state else 1) for state in states],
    )
    given = ["--type", "v4-8", "--spot", "--poll", "0", "--", "checkpoint.dir=gs://b/c"]
    done = cloud.pod("train", "p", *given, code=code)
    words = []
    for verb, what, _, *rest in cloud.asked():
        host = [one.split(HOST)[1].split()[0] for one in rest if HOST in one]
        words += [] if what in ("describe", "scp") else host or [what]
        assert "start" not in host or any("checkpoint.resume=if_present" in one for one in rest)
        assert verb == "tpu-vm"
    return done.stdout + done.stderr, words


ONCE = ["prepare", "start", "status"]


def test_train_makes_what_is_not_there_and_ends_when_main_py_is_done(cloud):
    said, asked = train(cloud, hosts=["running 5\n", "ended 0\n"], states=["", "CREATING", "READY"], code=0)
    assert asked == ["create", *ONCE, "status"] and "p: main.py is done; give the slices back" in said


def test_train_goes_on_after_a_stop_and_makes_new_slices_where_they_were_taken_away(cloud):
    said, asked = train(
        cloud,
        hosts=["running 5\nrunning 6\n", "ended 75\nended 75\n", "running 7\nrunning 8\n", "ended 0\nended 0\n"],
        states=["READY", "PREEMPTED", "", "READY"],
        code=0,
    )
    assert asked == [*ONCE, "status", "delete", "create", *ONCE, "status"]
    assert "stopped and saved, or taken away: going on" in said


def test_train_sees_that_the_slices_are_gone_where_no_host_answers(cloud):
    gone = [("on_host.sh status", "", "ssh: connect: timed out\n", 255)]
    said, asked = train(
        cloud, hosts=["ended 0\n"], states=["READY", "PREEMPTED", "PREEMPTED", "", "READY"], code=0, more=gone
    )
    assert asked == [*ONCE, "delete", "create", *ONCE] and "taken away" in said


def test_train_stops_where_main_py_refuses_its_input(cloud):
    """On one host; the others wait for it, and are ended."""
    said, asked = train(
        cloud,
        hosts=["running 5\nended 2\n", "ended 137\nended 2\n"],
        states=["READY"],
        code=2,
    )
    assert asked == [*ONCE, "stop", "status"] and "main.py refused its input" in said


def test_train_gives_up_after_five_failures_in_a_row(cloud):
    said, asked = train(cloud, hosts=["ended 1\n"], states=["READY"], code=1)
    assert asked == ONCE * 5 and "failure 4 of 5" in said and said.rstrip().endswith("5 failures in a row; giving up")


@pytest.mark.parametrize("script", sorted([*SCRIPTS.glob("*.sh"), *ROOT.glob("*.sh")]), ids=lambda file: file.name)
def test_shellcheck_has_nothing_to_say(script):
    checker = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if not checker:
        pytest.skip("shellcheck is not installed: pip install -e '.[test]'")
    done = subprocess.run([checker, "-x", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
