"""One run writes to a directory: that of the newest start, unless another one runs on this machine."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shmap_tp.errors import UserError
from shmap_tp.runtime import run_lock
from shmap_tp.runtime.exit_codes import before_exit
from shmap_tp.runtime.run_lock import DirectoryLock, Owner, lock_directories
from shmap_tp.training import loop
from shmap_tp.training.integrity import MANIFEST
from shmap_tp.training.metrics import Recorder
from tests.helpers.fresh_process import python
from tests.helpers.run_fixtures import checkpoint_steps, file_contents, make_runs_quick, tiny


@pytest.fixture(params=["local", "bucket"])
def directory(request, tmp_path) -> str:
    """An empty directory, on disk or in fsspec's stand-in for a bucket."""
    if request.param == "local":
        return str(tmp_path)
    MemoryFileSystem.store.clear()
    return "memory://bucket/run"


@pytest.fixture(autouse=True)
def short_wait(monkeypatch):
    monkeypatch.setattr(run_lock, "ENDING_SECONDS", 0.05)
    monkeypatch.setattr(run_lock, "POLL_SECONDS", 0.01)


def lock_of(directory: str, **owner: object) -> DirectoryLock:
    """A lock that belongs to this process, or to one that differs from it in `owner`."""
    made = DirectoryLock("run.dir", directory)
    made._owner = replace(made._owner, **owner)
    return made


def owns(lock: DirectoryLock) -> bool:
    try:
        lock.require()
    except UserError as error:
        assert "was taken over by" in str(error)
        return False
    return lock._number is not None


def test_a_second_run_on_the_same_machine_is_refused_and_named_until_the_first_has_released(directory):
    first, second = lock_of(directory), lock_of(directory)
    first.acquire()
    in_use = rf"run.dir=.* is in use: process {os.getpid()} on .* since 20.* UTC writes there"
    with pytest.raises(UserError, match=in_use):
        second.acquire()
    assert owns(first)
    first.release()
    second.acquire()
    second.release()
    assert second._numbers() == []


@pytest.mark.parametrize("pid", [2**22 + 1, os.getpid()], ids=["no such process", "its id was reused"])
def test_the_lock_of_a_process_that_has_ended_on_this_machine_is_taken_over_at_once(directory, pid, capsys):
    lock_of(directory, pid=pid, start=5).acquire()
    new = lock_of(directory)
    new.acquire()
    assert new._numbers() == [2] and not capsys.readouterr().out


def test_a_zombie_does_not_hold_its_lock():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0] != "Z":
            time.sleep(0.01)
        assert run_lock._start_of_process(process.pid) is None
    assert run_lock._start_of_process(os.getpid()) is not None


ELSEWHERE = {"host": "elsewhere", "machine": "another kernel"}


def test_the_newest_start_takes_over_from_another_machine_whose_run_then_finds_that_it_may_not_save(directory, capsys):
    old, new = lock_of(directory, **ELSEWHERE), lock_of(directory)
    old.acquire()
    assert owns(old)
    new.acquire()
    said = capsys.readouterr().out
    assert "is taken over from process" in said and "on elsewhere since" in said
    with pytest.raises(UserError, match=r"(?s)run\.dir=.* was taken over by process .*this one ends without saving"):
        old.require()
    old.release()
    assert new._numbers() == [2] and owns(new), "what it does not own is not removed"


def test_an_owner_that_was_cut_off_is_none_after_others_have_come_and_gone(directory):
    """The numbers begin anew, and the token differs."""
    old, *others = (lock_of(directory, machine=f"machine {i}") for i in range(3))
    old.acquire()
    for other in others:
        other.acquire()
        assert not owns(old) and owns(other)
        other.release()
        assert not owns(old), "nobody's"
    assert old._numbers() == []


def test_a_lock_file_without_an_owner_is_taken_over(directory):
    new = lock_of(directory)
    new._files.pipe_file(new._file(7), b"")
    new.acquire()
    assert new._numbers() == [8]


@pytest.mark.parametrize("stale", [False, True], ids=["no lock", "an owner that has ended"])
@pytest.mark.parametrize("machines", [1, 8])
def test_of_many_that_start_at_the_same_moment_exactly_one_is_the_owner(tmp_path, stale, machines):
    if stale:
        lock_of(str(tmp_path), pid=2**22 + 1).acquire()
    locks, barrier = [lock_of(str(tmp_path), token=str(i)) for i in range(8)], threading.Barrier(8)
    if machines > 1:
        for i, lock in enumerate(locks):
            lock._owner = replace(lock._owner, machine=f"machine {i}")

    def acquires(lock: DirectoryLock) -> bool:
        barrier.wait()
        with suppress(UserError):
            lock.acquire()
        return lock._number is not None

    with ThreadPoolExecutor(8) as threads:
        acquired = [*threads.map(acquires, locks)]
    assert machines > 1 or acquired.count(True) == 1
    assert [owns(lock) for lock in locks].count(True) == 1


def test_a_late_claimant_yields_to_the_owner_that_came_before_it(directory):
    """Both saw the same owner; one took over, and another after it, before the late one made its file."""
    late, owner = lock_of(directory), lock_of(directory, token="newest")
    for number in (3, 4):
        owner._files.pipe_file(owner._file(number), json.dumps(asdict(owner._owner)).encode())
    late._files.rm_file(late._file(3))
    late.free_number = iter([3]).__next__
    with pytest.raises(StopIteration):  # it asks again, having removed its file
        late.acquire()
    assert late._numbers() == [4] and not owns(late)


def test_the_locks_of_both_directories_are_held_in_the_context_and_removed_after_it(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(run_lock, "make_directory", lambda key, directory: None)  # it does not know memory://
    directories = {"run.dir": str(tmp_path / "run"), "checkpoint.dir": "memory://bucket/checkpoints"}
    with lock_directories(directories):
        (file,) = (tmp_path / "run").iterdir()
        owner = json.loads(file.read_text())
        assert Owner(**owner).is_running() and owner["pid"] == os.getpid()
        assert lock_of(directories["checkpoint.dir"])._numbers() == [1]
    assert not list((tmp_path / "run").iterdir()) and not lock_of(directories["checkpoint.dir"])._numbers()
    assert not before_exit


def test_one_directory_under_two_keys_or_names_is_locked_once(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with lock_directories({"run.dir": str(tmp_path), "checkpoint.dir": str(tmp_path / "link")}):
        assert len(list(tmp_path.glob("*.lock"))) == 1


def test_a_context_that_is_refused_takes_over_nothing(tmp_path):
    directories = {"run.dir": str(tmp_path / "free"), "checkpoint.dir": str(tmp_path / "used")}
    (tmp_path / "used").mkdir(), (tmp_path / "free").mkdir()
    lock_of(str(tmp_path / "free"), **ELSEWHERE).acquire()
    owner = lock_of(str(tmp_path / "used"))
    owner.acquire()
    with pytest.raises(UserError, match=r"checkpoint.dir=.*/used is in use"), lock_directories(directories):
        pass
    assert lock_of(str(tmp_path / "free"))._numbers() == owner._numbers() == [1]


def test_an_unknown_kind_of_storage_is_refused():
    with pytest.raises(UserError, match=r"checkpoint\.dir=foo://x is no storage that is known"):  # noqa: SIM117
        with lock_directories({"checkpoint.dir": "foo://x"}):
            pass


def test_a_lock_is_released_by_a_process_that_ends_without_unwinding(tmp_path):
    done = python(
        f"""
        from shmap_tp.runtime.exit_codes import exit_now
        from shmap_tp.runtime.run_lock import lock_directories
        with lock_directories({{"run.dir": {str(tmp_path)!r}}}):
            exit_now(75, "stopped")
        """
    )
    assert done.returncode == 75 and not list(tmp_path.iterdir())


def test_a_second_start_of_a_run_is_refused_and_changes_nothing(tmp_path):
    """In particular it does not remove the unfinished save of the first."""
    saving = tmp_path / "run" / "checkpoints" / "4.orbax-checkpoint-tmp"
    saving.mkdir(parents=True)
    only_checkpoints = tiny(tmp_path, f"run.dir={tmp_path / 'another'}", f"checkpoint.dir={saving.parent}")
    for config in (tiny(tmp_path), only_checkpoints):
        with lock_directories({"run.dir": str(tmp_path / "run"), "checkpoint.dir": str(saving.parent)}):
            before = file_contents(tmp_path / "run")
            with pytest.raises(UserError, match=f"is in use: process {os.getpid()} on"):
                loop.train(config)
            assert file_contents(tmp_path / "run") == before and saving.is_dir()


def test_a_run_that_was_taken_over_ends_at_its_next_save_and_the_newest_start_goes_on(tmp_path, monkeypatch, capsys):
    """As a pod that was preempted, and cut off before it ended."""
    make_runs_quick(monkeypatch)
    other, train = lock_of(str(tmp_path / "run"), **ELSEWHERE), Recorder.train
    saved = tmp_path / "run" / "checkpoints" / "4" / MANIFEST

    def taken_over(self: Recorder, line: dict) -> None:
        train(self, line)
        if line["step"] == 5 and other._number is None:
            while not saved.exists():
                time.sleep(0.01)
            monkeypatch.setattr(run_lock, "_machine", lambda: "machine of the old run")
            other._owner = replace(other._owner, start=5)
            other.acquire()

    monkeypatch.setattr(Recorder, "train", taken_over)
    with pytest.raises(UserError, match=r"was taken over by process .* on elsewhere"):
        loop.train(tiny(tmp_path))
    assert checkpoint_steps(tmp_path) == [2, 4]
    assert loop.train(tiny(tmp_path, "checkpoint.resume=must")) == 0
    assert "resuming from step 4" in capsys.readouterr().out and checkpoint_steps(tmp_path)[-1] == 8
