"""Nothing that a run did not write is deleted, and no checkpoint is lost because it could not be read."""

import errno
import os
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from etils import epath
from orbax.checkpoint import v1 as ocp

from shmap_tp.errors import StorageError, UserError
from shmap_tp.runtime.files import writing
from shmap_tp.training import checkpoint, integrity
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.checkpoint_files import checkpoint_steps, read_facts
from shmap_tp.training.integrity import MANIFEST, find_faults
from tests.helpers.checkpoint_fixtures import FACTS, checkpoint_config, files, random_state
from tests.helpers.fresh_process import ctrl_c_of_a_terminal
from tests.helpers.run_fixtures import file_contents


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE])
def test_a_file_that_cannot_be_read_ends_the_run_and_changes_nothing(pair_copy, messages, monkeypatch, number):
    def unreadable(file: object) -> str:
        raise OSError(number, os.strerror(number))

    before = file_contents(pair_copy)
    monkeypatch.setattr(integrity, "file_hash", unreadable)
    refused = pytest.raises(StorageError, match=f"cannot be read: {os.strerror(number)}; nothing was changed")
    with Checkpoints(checkpoint_config(pair_copy), messages.append) as checkpoints, refused as error:
        checkpoints.newest_intact()
    assert len(str(error.value).splitlines()) <= 2
    assert file_contents(pair_copy) == before and messages == []


def test_a_newest_checkpoint_directory_that_cannot_be_read_is_not_taken_for_none(pair_copy, monkeypatch):
    """An older one would be resumed, and every save of that step would fail."""

    def refusing(path: str, real: Any = os.listdir) -> list[str]:
        if Path(path).name == "2":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path)

    monkeypatch.setattr(os, "listdir", refusing)  # by root every directory can be read
    with pytest.raises(StorageError, match=r"checkpoint .*/2 cannot be read: Permission denied; nothing was changed"):
        checkpoint_steps(epath.Path(pair_copy))


@pytest.mark.parametrize(
    "error, advice",
    [
        (OSError(errno.ENOSPC, "No space left on device"), "all complete checkpoints are intact;\nfree some space"),
        (ValueError("NOT_FOUND [os_error_code='2']"), "No such file or directory; its directory was removed"),
        (ValueError("Destination x/2 already exists."), "this run did not write what is there;\nmove it elsewhere"),
        (PermissionError(errno.EACCES, "Permission denied"), "all complete checkpoints are intact;\ncorrect that"),
    ],
    ids=["a full disk", "a removed directory", "a name that is taken", "no permission"],
)
def test_the_way_out_of_a_failed_save_depends_on_its_cause(error, advice):
    with pytest.raises(StorageError) as raised, writing("checkpoint x/2"):
        raise error
    assert advice in str(raised.value)


@ctrl_c_of_a_terminal()
def test_ctrl_c_while_metadata_are_read_is_not_swallowed(pair_copy, monkeypatch):
    """As Orbax swallows it (v1 `_get_checkpointables_metadata`): any exception means that there are none."""

    def reading(directory: epath.Path, real: Any = ocp.checkpointables_metadata) -> Any:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except BaseException:
            return real(directory)
        return real(directory)

    monkeypatch.setattr(ocp, "checkpointables_metadata", reading)
    with pytest.raises(KeyboardInterrupt):
        read_facts(epath.Path(pair_copy / "2"))


def test_a_damaged_checkpoint_is_renamed_and_keeps_its_files(pair_copy, messages):
    victim = max(files(pair_copy / "2"), key=lambda file: file.stat().st_size)
    victim.write_bytes(b"x" + victim.read_bytes()[1:])
    before = file_contents(pair_copy / "2")
    with Checkpoints(checkpoint_config(pair_copy), messages.append) as checkpoints:
        checkpoints.set_aside_after(checkpoints.newest_intact())
        assert checkpoints.steps() == [1]
        shutil.copytree(pair_copy / "1", pair_copy / "2")
        checkpoints.set_aside_after(1)
    assert file_contents(pair_copy / "2.damaged-1") == before
    assert file_contents(pair_copy / "2.damaged-2") == file_contents(pair_copy / "1")
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
    before = file_contents(elsewhere)
    with Checkpoints(checkpoint_config(pair_copy, keep=2), messages.append) as checkpoints:
        assert checkpoints.steps() == [2, 1]
        for step in (3, 4, 5):
            checkpoints.save(step, random_state(functions(2, 4), step), FACTS)
        checkpoints.wait()
    assert file_contents(elsewhere) == before and (elsewhere / MANIFEST).exists()


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device", "link to nothing"])
@pytest.mark.parametrize("place", ["state/x", MANIFEST])
def test_what_cannot_be_read_to_an_end_is_a_fault(pair_copy, messages, monkeypatch, kind, place):
    """Reading a FIFO waits for a writer for ever."""
    made = pair_copy / "2" / place
    made.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(made)
    elif kind == "socket":
        monkeypatch.chdir(made.parent)  # the path of a socket has at most 107 bytes
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(made.name)
    else:
        made.symlink_to("/dev/zero" if kind == "device" else "nowhere")
    assert place in find_faults(epath.Path(pair_copy / "2"))[0]
    with Checkpoints(checkpoint_config(pair_copy), messages.append) as checkpoints:
        assert checkpoints.newest_intact() == 1


def test_a_save_that_cannot_create_its_directories_leaves_no_thread_waiting(functions, tmp_path, messages):
    """Orbax's threads would wait for the directories for 300 s, and the process for them."""
    before = set(threading.enumerate())
    directory = tmp_path / "checkpoints"
    with (
        pytest.raises(StorageError, match="checkpoints/1 could not be written: Not a directory"),
        Checkpoints(checkpoint_config(directory), messages.append) as checkpoints,
    ):
        directory.rmdir()
        directory.write_text("")
        checkpoints.save(1, random_state(functions(2, 4), 1), FACTS)
    waiting = [thread for thread in set(threading.enumerate()) - before if not thread.daemon]
    for thread in waiting:
        thread.join(0 if thread.name.startswith("asyncio") else 5)
    left = [thread.name for thread in waiting if thread.is_alive() and not thread.name.startswith("asyncio")]
    assert not left


@pytest.mark.parametrize("when", range(4))
def test_a_save_that_another_run_overtakes_saves_and_deletes_nothing(pair_copy, messages, functions, when):
    """Between any two things that it does; the other run can then save the same step."""
    state, asked = random_state(functions(2, 4), 3), []

    def require_owner() -> None:
        asked.append(sorted(path.parent.name for path in pair_copy.glob(f"*/{MANIFEST}")))
        if len(asked) > when:
            raise UserError("taken over")

    def save() -> None:
        with Checkpoints(checkpoint_config(pair_copy, keep=1), messages.append, require_owner) as checkpoints:
            checkpoints.save(3, state, FACTS)

    if when == 3:
        save()
        assert asked == [["1", "2"], ["1", "2"], ["1", "2", "3"]] and checkpoint_steps(epath.Path(pair_copy)) == [3]
        return
    with pytest.raises(UserError, match="taken over"):
        save()
    found = sorted(path.parent.name for path in pair_copy.glob(f"*/{MANIFEST}"))
    assert found == (["1", "2", "3"] if when == 2 else ["1", "2"])
    with Checkpoints(checkpoint_config(pair_copy), messages.append) as other:
        other.save(3, random_state(functions(2, 4), 4), FACTS)
        other.wait()
        assert other.newest_intact() == 3
    assert (pair_copy / "3.damaged-1").is_dir() == (when > 0), "what the first one has written is kept"


def test_a_run_whose_unfinished_save_another_start_has_removed_says_that_it_was_taken_over(
    pair_copy, messages, functions, monkeypatch
):
    def require_owner() -> None:
        if not list(pair_copy.glob("3*")):
            raise UserError("taken over")

    def removed(directory: epath.Path) -> None:
        shutil.rmtree(directory)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr(checkpoint, "hashes", removed)
    with Checkpoints(checkpoint_config(pair_copy), messages.append, require_owner) as checkpoints:
        checkpoints._require_owner = lambda: None
        checkpoints.save(3, random_state(functions(2, 4), 3), FACTS)
        checkpoints._require_owner = require_owner
        with pytest.raises(UserError, match="taken over"):
            checkpoints.wait()
