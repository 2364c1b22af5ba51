"""pod.sh setup copies the files of the project and nothing else; the arguments of main.py are checked first."""

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.helpers.gcloud_stand_in import SCRIPTS, Cloud

PYTHON = """#!/bin/bash
[[ $1 == -c ]] || { echo "$@" >>"${0%/*}/checked"; echo error: no >&2; exit 2; }
"""


def test_nothing_is_rented_and_no_command_is_printed_unchecked_unless_that_is_asked_for(cloud, clone):
    given = {"script": str(clone / "scripts" / "pod.sh"), "path": f"{cloud.directory}:/usr/bin:/bin"}
    steps = ["create p --type v4-8", "run p --dry-run", "train p --type v4-8 --slices 2"]
    arguments = ["--cfg", "main.py", "checkpoint.dir=gs://b/c"]
    for step in steps:  # where no Python has the packages that check the arguments of main.py
        error = cloud.pod(*step.split(), "--", *arguments, code=2, **given).stderr
        assert "pip install -e '.[gcs]'" in error and "--unchecked" in error
    (cloud.directory / "python3").write_text(PYTHON)
    (cloud.directory / "python3").chmod(0o755)
    for step in steps:
        done = cloud.pod(*step.split(), "--", *arguments, code=2, **given)
        assert done.stderr.endswith("error: no\n") and not done.stdout
    assert cloud.calls() == []
    kinds = [" --type v4-8", "", " --type 2xv4-8"]
    checked = [f"main.py --check{kind} {' '.join(arguments)}" for kind in kinds]
    checked[2] += " checkpoint.resume=if_present"
    assert (cloud.directory / "checked").read_text().splitlines() == checked
    cloud.pod(*steps[0].split(), "--unchecked", "--", "mesh.mp=3", **given)
    assert [call[:3] for call in cloud.calls()] == [["tpu-vm", "create", "p"]]


@pytest.fixture
def clone(tmp_path) -> Path:
    """An unpacked archive of a project: a few files, some of them private, and links to files outside of it."""
    clone, outside = tmp_path / "clone", tmp_path / "outside"
    names = ["main.py", "conf/base.yaml", ".env", ".ssh/id", "conf/.env", "shmap_tp/__pycache__/x.pyc", "mine.yaml"]
    for name in names:
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
    git(clone, "add", "main.py", "deleted.py", "conf/base.yaml", "conf/tracked_link.yaml", "scripts")
    (clone / "main.py").write_text("changed")
    (clone / "deleted.py").unlink()
    assert copied(cloud, clone) == {"main.py", "conf/base.yaml", "conf/tracked_link.yaml"}
    with tarfile.open(cloud.directory / "p:shmap_tp.tar.gz") as archive:
        assert archive.extractfile("main.py").read() == b"changed"
        assert archive.getmember("conf/tracked_link.yaml").issym()


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_setup_names_files_that_it_does_not_copy(cloud, clone):
    git(clone, "init")
    git(clone, "add", "main.py", "conf", "scripts", ".env")
    output = cloud.pod("setup", "p", script=str(clone / "scripts" / "pod.sh")).stdout
    assert "not copied, because git does not track them" in output and "mine.yaml" in output
    create = ["create", "p", "--type", "v4-8", "--", "--cfg", "mine.yaml"]
    refused = cloud.pod(*create, script=str(clone / "scripts" / "pod.sh"), code=2).stderr
    assert "--cfg mine.yaml is not copied to the hosts" in refused and "git add mine.yaml" in refused


def test_setup_without_git_copies_the_projects_files_but_nothing_hidden_and_no_links(cloud, clone, tmp_path):
    """Its archive is private and deleted, and one of that name that someone else made is not written."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (cloud.directory / "shmap_tp-p.tar.gz").symlink_to(victim)
    before = {file.name for file in cloud.directory.iterdir()}
    assert copied(cloud, clone) == {"main.py", "conf/base.yaml"}
    assert (cloud.directory / "mode").read_text() == "0o700" and victim.read_text() == "precious"
    made = {file.name for file in cloud.directory.iterdir()} - before
    assert made == {"calls", "mode", "p:shmap_tp.tar.gz"}, "everything else in the temporary directory was deleted"
