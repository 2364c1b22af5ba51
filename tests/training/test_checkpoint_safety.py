"""Nothing that a run did not write is deleted, and no checkpoint is lost because it could not be read."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from shmap_tp.errors import StorageError
from shmap_tp.training import checkpoint_files
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.checkpoint_files import MANIFEST
from tests.helpers.checkpoint_fixtures import FACTS, checkpoint_config, files, random_state


def contents(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in files(directory)}


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE])
def test_a_file_that_cannot_be_read_ends_the_run_and_changes_nothing(pair_copy, messages, monkeypatch, number):
    def unreadable(file: object) -> str:
        raise OSError(number, os.strerror(number))

    before = contents(pair_copy)
    monkeypatch.setattr(checkpoint_files, "_sha256", unreadable)
    refused = pytest.raises(StorageError, match=f"cannot be read: {os.strerror(number)}; nothing was changed")
    with Checkpoints(checkpoint_config(pair_copy), messages.append) as checkpoints, refused as error:
        checkpoints.newest_intact()
    assert len(str(error.value).splitlines()) <= 2
    assert contents(pair_copy) == before and messages == []


def test_a_damaged_checkpoint_is_renamed_and_keeps_its_files(pair_copy, messages):
    victim = max(files(pair_copy / "2"), key=lambda file: file.stat().st_size)
    victim.write_bytes(b"x" + victim.read_bytes()[1:])
    before = contents(pair_copy / "2")
    with Checkpoints(checkpoint_config(pair_copy), messages.append) as checkpoints:
        checkpoints.set_aside_after(checkpoints.newest_intact())
        assert checkpoints.steps() == [1]
        shutil.copytree(pair_copy / "1", pair_copy / "2")
        checkpoints.set_aside_after(1)
    assert contents(pair_copy / "2.damaged-1") == before
    assert contents(pair_copy / "2.damaged-2") == contents(pair_copy / "1")
    assert "2.damaged-1" in messages[1]


def test_names_that_are_no_checkpoints_of_this_program_are_left_alone(pair_copy, messages, functions):
    """A directory of the user's, a file, a number with leading zeros, digits of another script."""
    for name in ("2024", "007", "\u0663\u0663"):
        (pair_copy / name).mkdir()
        (pair_copy / name / "notes.txt").write_text("mine")
    (pair_copy / "3").write_text("mine")
    with Checkpoints(checkpoint_config(pair_copy, keep=2), messages.append) as checkpoints:
        assert checkpoints.steps() == [2, 1] and checkpoints.newest_intact() == 2
        checkpoints.set_aside_after(0)
        for step in (4, 5, 6):
            checkpoints.save(step, random_state(functions(2, 4), step), FACTS)
        checkpoints.wait()
        assert checkpoints.steps() == [6, 5]
    for name in ("2024", "007", "\u0663\u0663"):
        assert (pair_copy / name / "notes.txt").read_text() == "mine"
    assert (pair_copy / "3").read_text() == "mine"


def test_a_link_to_a_checkpoint_elsewhere_is_read_and_never_deleted(pair_copy, tmp_path_factory, messages, functions):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "1"
    (pair_copy / "1").rename(elsewhere)
    (pair_copy / "1").symlink_to(elsewhere)
    before = contents(elsewhere)
    with Checkpoints(checkpoint_config(pair_copy, keep=2), messages.append) as checkpoints:
        assert checkpoints.steps() == [2, 1]
        for step in (3, 4, 5):
            checkpoints.save(step, random_state(functions(2, 4), step), FACTS)
        checkpoints.wait()
    assert contents(elsewhere) == before and (elsewhere / MANIFEST).exists()
