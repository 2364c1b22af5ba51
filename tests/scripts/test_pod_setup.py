"""pod.sh setup copies the files of the project and nothing else; a dry run checks the arguments of main.py."""

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.helpers.gcloud_stand_in import SCRIPTS, Cloud


def test_a_dry_run_checks_the_arguments_of_main_py(cloud):
    done = cloud.pod("run", "p", "--dry-run", "--", "mesh.mp=3", code=2)
    assert done.stderr.startswith("error: mesh.mp=3 does not divide heads=8") and not done.stdout


def test_nothing_is_rented_unchecked_unless_that_is_asked_for(cloud, clone):
    """Where no Python has the packages that check the arguments of main.py."""
    given = {"script": str(clone / "scripts" / "pod.sh"), "path": f"{cloud.directory}:/usr/bin:/bin"}
    create = ["create", "p", "--type", "v4-8"]
    error = cloud.pod(*create, "--", "mesh.mp=3", code=2, **given).stderr
    assert "pip install -e '.[gcs]'" in error and "--unchecked" in error and cloud.calls() == []
    cloud.pod(*create, "--unchecked", "--", "mesh.mp=3", **given)
    assert [call[:3] for call in cloud.calls()] == [["tpu-vm", "create", "p"]]


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
    create = ["create", "p", "--type", "v4-8", "--", "--cfg", "mine.yaml"]
    refused = cloud.pod(*create, script=str(clone / "scripts" / "pod.sh"), code=2).stderr
    assert "--cfg mine.yaml is not copied to the hosts" in refused and "git add mine.yaml" in refused


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
