"""Work in several processes: its order, its errors, and that no process is left."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from shmap_tp.errors import LostProcessError, UserError
from shmap_tp.runtime.workers import in_order
from tests.helpers.paths import ROOT


def slower_first(number: int) -> tuple[int, int]:
    if number == 13:
        raise UserError("13 is refused")
    if number == 99:
        raise KeyError("a defect")
    if number == 666:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05 if number % 4 == 0 else 0.0)
    return number, os.getpid()


def beside_another(directory: Path, number: int) -> tuple[int, int]:
    """`slower_first`; items 0 and 1 end once both have begun, however late a process starts (at most a minute)."""
    (directory / str(number)).touch()
    end = time.monotonic() + 60
    while number < 2 and len([*directory.iterdir()]) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    return slower_first(number)


class Loaded:
    """Says how often it was unpickled in this process: a tokenizer of 128,000 ids takes a second."""

    times = 0

    def __setstate__(self, state: object) -> None:
        Loaded.times += 1

    def __getstate__(self) -> object:
        return "state"

    def __call__(self, number: int) -> tuple[int, int]:
        return number, self.times


def test_the_work_is_sent_to_each_process_once():
    assert [*in_order(Loaded(), range(12), 2)] == [(number, 1) for number in range(12)]


def test_results_come_in_the_order_of_the_items_and_errors_at_their_place(tmp_path):
    found, work = [], partial(beside_another, tmp_path)
    with pytest.raises(UserError, match=r"^13 is refused$"):
        for number, process in in_order(work, iter([*range(12), 13, *range(20, 30)]), 2):
            found.append((number, process))
    assert [number for number, _ in found] == [*range(12)]
    assert len({process for _, process in found} - {os.getpid()}) == 2
    assert multiprocessing.active_children() == []


def test_a_process_that_dies_is_an_error_and_a_defect_keeps_its_traceback():
    with pytest.raises(LostProcessError, match="was killed, perhaps for lack of memory; use fewer: --workers N"):
        list(in_order(slower_first, [1, 666, *range(100, 120)], 2))
    with pytest.raises(KeyError, match="a defect") as raised:
        list(in_order(slower_first, [99], 2))
    assert "in slower_first" in str(raised.value.__cause__)
    assert multiprocessing.active_children() == []


def test_processes_end_when_their_results_are_no_longer_wanted():
    with closing(in_order(time.sleep, iter(lambda: 0.01, None), 2)) as results:
        next(results)
        assert len(multiprocessing.active_children()) == 2
    assert multiprocessing.active_children() == []


def test_one_process_is_this_one():
    assert [*in_order(slower_first, range(3), 1)] == [(number, os.getpid()) for number in range(3)]


def test_processes_end_with_the_one_that_started_them(tmp_path):
    (script := tmp_path / "start.py").write_text(
        """
from shmap_tp.runtime.workers import in_order
if __name__ == "__main__":
    for process in in_order(eval, iter(lambda: "__import__('os').getpid()", None), 2):
        print(process, flush=True)
"""
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as process:
        workers = {int(process.stdout.readline()) for _ in range(50)}
        process.kill()
        process.stdout.close()
    end = time.monotonic() + 10
    while running := [worker for worker in workers if Path(f"/proc/{worker}").exists()]:
        assert time.monotonic() < end, running
        time.sleep(0.02)
