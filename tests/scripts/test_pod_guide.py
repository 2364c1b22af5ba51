"""docs/pods.md from beginning to end: its commands in order, with directories of this machine as the hosts.

The stand-in for gcloud keeps the slices, copies files to their hosts and runs commands there.  On a host, pip and the
test of the devices do nothing.  main.py of the copied tree ends, on the first host after --check with the type of the
slice: it looks at its mesh, its data and its buckets, which have the data sets that the guide has copied there.  The
same run is checked once; that pod.sh checks it here, too, is tested in test_pod_setup.py and test_pod_train.py.
"""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.buckets import bucket_environment, write_data_set
from tests.helpers.documents import ROOT, Block, blocks

GUIDE = [block for block in blocks(ROOT / "docs" / "pods.md") if "scripts/pod.sh" in block.text]

DATA_SETS = [("openwebtext", 50257, 9 * 10**9), ("fineweb", 50277, 99 * 10**9), ("fineweb_llama2", 32000, 109 * 10**9)]
"""Name, vocabulary and tokens."""

GCLOUD = f"""#!{sys.executable} -S
import os, pathlib, shutil, subprocess, sys
cloud = pathlib.Path(__file__).parents[1] / "cloud"
_, _, _, verb, what, *rest = sys.argv
name, options = rest[1 if what == "scp" else 0].partition(":")[0], dict(one.partition("=")[::2] for one in rest[1:])
if verb == "queued-resources" and what in ("create", "delete", "describe"):
    name = options.get("--node-prefix", name)
slices = sorted(each for each in cloud.iterdir() if each.name == name or each.name.startswith(name + "-"))
if what == "create":
    count = int(options.get("--node-count", 0))
    for each in [f"{{name}}-{{i}}" for i in range(count)] or [options.get("--node-id", name)]:
        for worker in ("0", "1"):
            (cloud / each / worker).mkdir(parents=True)
            kind = (f"{{count}}x" if count else "") + options["--accelerator-type"]
            (cloud / each / worker / "type").write_text(kind)
elif not slices:
    sys.exit("ERROR: NOT_FOUND: " + name)
elif what == "delete":
    [shutil.rmtree(each) for each in slices]
elif options.get("--format") == "value(networkEndpoints.len())":
    print({{"v5litepod-16": 4}}[(slices[0] / "0" / "type").read_text()])
elif what == "describe":
    print("ACTIVE" if verb == "queued-resources" else "READY")
elif what == "scp":
    for host in (cloud / name).iterdir():
        shutil.copy(rest[0], host / rest[1].partition(":")[2])
elif what == "ssh":
    worker = options["--worker"]
    command = options["--command"].replace(" log --follow", " log")
    for host in sorted((cloud / name).iterdir()):
        if worker in ("all", host.name):
            code = subprocess.run(["bash", "-c", command], env=os.environ | {{"HOME": str(host)}}).returncode
            if code:
                sys.exit(code)
"""
PYTHON = f"""#!/bin/bash
case "$1" in
-c) ;;
--version) echo Python 3.13 ;;
-m) [[ $2 != venv ]] || (mkdir -p "$3/bin" && cp "$0" "$3/bin/python") ;;
-) cat >/dev/null && echo "the sum is correct" ;;
main.py)
    [[ $2 != --check && $HOME != */1 ]] || exit 0
    given="$(<~/type) ${{*:2}}"
    checked=$TPU_LOCK-$(md5sum <<<"${{given/ checkpoint.resume=if_present/}}" | cut -c -32)
    [[ ! -e $checked ]] || {{ echo checked before && exit; }}
    {sys.executable} main.py --check --type "$(<~/type)" "${{@:2}}" && touch "$checked"
    ;;
esac
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Path:
    """A directory with the stand-ins in `bin` and the slices in `cloud`."""
    machine = tmp_path_factory.mktemp("machine")
    (machine / "bin").mkdir()
    (machine / "cloud").mkdir()
    for name, text in [("gcloud", GCLOUD), ("python3.13", PYTHON), ("python3", PYTHON)]:
        (machine / "bin" / name).write_text(text)
        (machine / "bin" / name).chmod(0o755)
    (machine / "bin/python").symlink_to(sys.executable)
    for name, vocabulary, tokens in DATA_SETS:
        write_data_set(machine / "buckets/my-bucket" / name, vocabulary=vocabulary, train=tokens)
    return machine


@pytest.fixture(scope="module")
def environment(machine) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))}
    path = f"{machine / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PATH": path, "JAX_PLATFORMS": "cpu", "TPU_LOCK": str(machine / "lock")}
    return inherited | own | bucket_environment(machine)


def pod_commands(block: Block) -> list[list[str]]:
    lines = block.text.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("scripts/pod.sh")]


@pytest.mark.parametrize("block", GUIDE, ids=lambda block: block.place)
def test_the_commands_of_the_guide_work_in_their_order(block, machine, environment):
    for words in pod_commands(block):
        given = [*words[:3], "--poll", "0", *words[3:]] if words[1] == "train" else words
        done = subprocess.run(given, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{shlex.join(words)}:\n{done.stdout}\n{done.stderr}"
        if words[1] in ("run", "train") and "--dry-run" not in words:
            check_run(machine)
        if words[1] == "train":
            assert f"{words[2]}: main.py is done" in done.stdout
        if words[1] == "stop":
            assert "ended 0" in done.stdout


def check_run(machine: Path) -> None:
    """main.py ends on every host that is there, and would train."""
    hosts = list((machine / "cloud").glob("*/*/shmap_tp"))
    assert hosts
    end = time.monotonic() + 60
    while not all((host / ".pod" / "ended").exists() for host in hosts) and time.monotonic() < end:
        time.sleep(0.05)
    for host in hosts:
        log = (host / ".pod" / "log").read_text()
        assert (host / ".pod" / "ended").read_text() == "0\n", log
        assert host.parent.name == "1" or "The run can start on" in log or log.endswith("checked before\n"), log
