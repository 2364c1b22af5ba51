"""Exactly one run writes to a directory; the lock of a run that has ended is taken over, and nothing else is."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shmap_tp.errors import UserError
from shmap_tp.runtime import run_lock
from shmap_tp.runtime.exit_codes import before_exit
from shmap_tp.runtime.run_lock import DirectoryLock, Owner, lock_directories
from shmap_tp.training import loop
from tests.helpers.fresh_process import python
from tests.helpers.run_fixtures import file_contents, tiny


@pytest.fixture(params=["local", "bucket"])
def directory(request, tmp_path) -> str:
    """An empty directory, on disk or in fsspec's stand-in for a bucket."""
    if request.param == "local":
        return str(tmp_path)
    MemoryFileSystem.store.clear()
    return "memory://bucket/run"


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The time of time.monotonic() in the lock, as the only item of a list."""
    now = [1000.0]
    monkeypatch.setattr(run_lock.time, "monotonic", lambda: now[0])
    return now


def lock_of(directory: str, **owner: object) -> DirectoryLock:
    """A lock that belongs to this process, or to one that differs from it in `owner`."""
    made = DirectoryLock("run.dir", directory)
    made._owner = replace(made._owner, **owner)
    return made


def test_a_second_run_on_the_same_machine_is_refused_and_named_until_the_first_has_released(directory, clock):
    first, second = lock_of(directory), lock_of(directory)
    assert first.try_to_acquire() and not second.try_to_acquire()
    clock[0] += run_lock.ENDING_SECONDS + 1
    in_use = rf"run.dir=.* is in use: process {os.getpid()} on .* since 20.* UTC writes there"
    with pytest.raises(UserError, match=in_use):
        second.try_to_acquire()
    first.release()
    assert second.try_to_acquire()
    second.release()
    assert second._numbers() == []


@pytest.mark.parametrize("pid", [2**22 + 1, os.getpid()], ids=["no such process", "its id was reused"])
def test_the_lock_of_a_process_that_has_ended_on_this_machine_is_taken_over_at_once(directory, clock, pid):
    assert lock_of(directory, pid=pid, start=5).try_to_acquire()
    new = lock_of(directory)
    assert new.try_to_acquire() and new._numbers() == [2]


def test_a_zombie_does_not_hold_its_lock():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0] != "Z":
            time.sleep(0.01)
        assert run_lock._start_of_process(process.pid) is None
    assert run_lock._start_of_process(os.getpid()) is not None


@pytest.fixture
def elsewhere(directory, clock, capsys) -> tuple[DirectoryLock, DirectoryLock]:
    """(the lock as a process of another machine has acquired it, as a process here tries to for the first time)."""
    other, new = lock_of(directory, host="elsewhere", machine="another kernel"), lock_of(directory)
    assert other.try_to_acquire() and not new.try_to_acquire()
    return other, new


def test_a_lock_of_another_machine_is_taken_over_only_if_it_is_not_renewed_for_a_minute(elsewhere, clock, capsys):
    other, new = elsewhere
    assert "on elsewhere since" in (said := capsys.readouterr().out) and "waiting up to 60 s" in said
    clock[0] += 59
    assert not new.try_to_acquire() and capsys.readouterr().out == ""
    clock[0] += 2
    assert new.try_to_acquire()
    with pytest.raises(UserError, match=r"was taken over by process .*had not renewed its lock for more than 60 s"):
        other.renew()
    other.release()
    assert new._numbers() == [2]  # what it does not own is not removed


def test_a_lock_of_another_machine_that_is_renewed_is_respected(elsewhere, clock):
    other, new = elsewhere
    other.renew()
    clock[0] += 10
    with pytest.raises(UserError, match=r"is in use: process .* on elsewhere"):
        new.try_to_acquire()


def test_a_lock_that_is_being_rewritten_counts_neither_as_lost_nor_as_renewed(elsewhere, clock):
    other, new = elsewhere
    content = other._files.cat_file(other._file(1))
    other._files.pipe_file(other._file(1), b"")
    assert not new.try_to_acquire()
    other._files.pipe_file(other._file(1), content)
    clock[0] += 59
    assert not new.try_to_acquire()
    clock[0] += 2
    assert new.try_to_acquire()


def test_a_lock_file_without_an_owner_is_taken_over_after_a_minute(directory, clock):
    new = lock_of(directory)
    new._files.pipe_file(new._file(7), b"")
    assert not new.try_to_acquire()
    clock[0] += 61
    assert new.try_to_acquire() and new._numbers() == [8]


def test_a_renewal_restores_a_lock_file_that_somebody_removed_unless_it_is_late(directory, clock):
    first = lock_of(directory)
    assert first.try_to_acquire()
    first._remove(1)
    clock[0] += 10
    first.renew()
    assert first._read(1) == (first._owner, 1)
    first._remove(1)
    clock[0] += 61  # suspended: another run may have come and gone
    with pytest.raises(UserError, match="taken over by another process"):
        first.renew()


@pytest.mark.parametrize("stale", [False, True], ids=["no lock", "a lost owner"])
def test_of_many_that_start_at_the_same_moment_exactly_one_acquires_the_lock(tmp_path, stale):
    if stale:
        assert lock_of(str(tmp_path), pid=2**22 + 1).try_to_acquire()
    locks, barrier = [lock_of(str(tmp_path)) for _ in range(8)], threading.Barrier(8)

    def acquires(lock: DirectoryLock) -> bool:
        barrier.wait()
        return any(lock.try_to_acquire() for _ in range(20))

    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(acquires, locks)].count(True) == 1


def test_a_late_claimant_yields_to_the_owner_that_came_before_it(directory):
    """Both saw the same lost owner; one took over, and another after it, before the late one made its file."""
    late, owner = lock_of(directory), lock_of(directory)
    owner._files.pipe_file(owner._file(3), owner._content())
    late._newest = iter([1, 3]).__next__
    late._owner_is_lost = lambda number: True
    assert not late.try_to_acquire() and late._numbers() == [3]


def test_the_locks_of_both_directories_are_held_in_the_context_and_removed_after_it(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(run_lock, "make_directory", lambda key, directory: None)  # it does not know memory://
    directories = {"run.dir": str(tmp_path / "run"), "checkpoint.dir": "memory://bucket/checkpoints"}
    with lock_directories(directories, None):
        (file,) = (tmp_path / "run").iterdir()
        owner = json.loads(file.read_text())["owner"]
        assert Owner(**owner).is_running() and owner["pid"] == os.getpid()
        assert lock_of(directories["checkpoint.dir"])._numbers() == [1]
    assert not list((tmp_path / "run").iterdir()) and not lock_of(directories["checkpoint.dir"])._numbers()
    assert not before_exit


def test_one_directory_under_two_keys_or_names_is_locked_once(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with lock_directories({"run.dir": str(tmp_path), "checkpoint.dir": str(tmp_path / "link")}, None):
        assert len(list(tmp_path.glob("*.lock"))) == 1


def test_a_context_that_is_refused_releases_what_it_has_acquired(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "ENDING_SECONDS", 0.1)
    directories = {"run.dir": str(tmp_path / "free"), "checkpoint.dir": str(tmp_path / "used")}
    (tmp_path / "used").mkdir()
    owner = lock_of(str(tmp_path / "used"))
    assert owner.try_to_acquire()
    with pytest.raises(UserError, match=r"checkpoint.dir=.*/used is in use"), lock_directories(directories, None):
        pass
    assert not list((tmp_path / "free").iterdir()) and owner._numbers() == [1]


def test_an_unknown_kind_of_storage_is_refused():
    with pytest.raises(UserError, match=r"checkpoint\.dir=foo://x is no storage that is known"):  # noqa: SIM117
        with lock_directories({"checkpoint.dir": "foo://x"}, None):
            pass


def test_a_lock_is_released_by_a_process_that_ends_without_unwinding(tmp_path):
    done = python(
        f"""
        from shmap_tp.runtime.exit_codes import exit_now
        from shmap_tp.runtime.run_lock import lock_directories
        with lock_directories({{"run.dir": {str(tmp_path)!r}}}, None):
            exit_now(75, "stopped")
        """
    )
    assert done.returncode == 75 and not list(tmp_path.iterdir())


def test_a_second_start_of_a_run_is_refused_and_changes_nothing(tmp_path, monkeypatch):
    """In particular it does not remove the unfinished save of the first."""
    monkeypatch.setattr(run_lock, "ENDING_SECONDS", 0.1)
    saving = tmp_path / "run" / "checkpoints" / "4.orbax-checkpoint-tmp"
    saving.mkdir(parents=True)
    only_checkpoints = tiny(tmp_path, f"run.dir={tmp_path / 'another'}", f"checkpoint.dir={saving.parent}")
    for config in (tiny(tmp_path), only_checkpoints):
        with lock_directories({"run.dir": str(tmp_path / "run"), "checkpoint.dir": str(saving.parent)}, None):
            before = file_contents(tmp_path / "run")
            with pytest.raises(UserError, match=f"is in use: process {os.getpid()} on"):
                loop.train(config)
            assert file_contents(tmp_path / "run") == before and saving.is_dir()
