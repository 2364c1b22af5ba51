"""A function of many items, computed in several processes, with results in the order of the items."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from shmap_tp.errors import LostProcessError, ShmapTpError

T, R = TypeVar("T"), TypeVar("R")
_AHEAD = 2
"""Items per process that are under way, or wait for those before them."""
_STOPS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def in_order(work: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """`work` of each item, in their order, in `workers` processes; in this one if that is 1.

    `work`, the items and the results are pickled.  The processes end when this iterator is closed, and when this
    process ends, however it ends.  An error of `work` is raised here, at its place; LostProcessError if a process ends
    by itself, as for lack of memory.
    """
    if workers == 1:
        yield from map(work, items)
        return
    with _processes(work, workers) as processes:
        numbered, idle, busy = enumerate(items), list(processes), dict[Connection, int]()
        results, given, taken, more = dict[int, tuple[bool, Any]](), 0, 0, True
        while more or busy or results:
            while more and idle and given < taken + _AHEAD * workers:
                if more := (pair := next(numbered, None)) is not None:
                    given, connection = pair[0] + 1, idle.pop()
                    busy[connection] = pair[0]
                    with _losses(processes[connection]):
                        connection.send(pair[1])
            if taken in results:
                works, result = results.pop(taken)
                if not works:
                    raise result
                taken += 1
                yield result
                continue
            for connection in wait(list(busy)) if busy else ():
                with _losses(processes[connection]):
                    results[busy.pop(connection)] = connection.recv()
                idle.append(connection)


@contextmanager
def _processes(work: Callable[[T], R], count: int) -> Iterator[dict[Connection, SpawnProcess]]:
    """Processes that `_serve`, by the connection to each.  They are new ones, not copies: this one may have threads."""
    context, processes = multiprocessing.get_context("spawn"), dict[Connection, SpawnProcess]()
    resource_tracker.ensure_running()  # else the first process starts it, and it unblocks the signals
    try:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)  # Ctrl-C is for this process, which ends the others
        try:
            for _ in range(count):
                here, there = context.Pipe()
                processes[here] = context.Process(target=_serve, args=(there, work), daemon=True)
                processes[here].start()
                there.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield processes
    finally:
        for process in processes.values():
            with suppress(ValueError, AttributeError):  # it was not started
                process.kill()
        for connection, process in processes.items():
            connection.close()
            with suppress(ValueError, AssertionError):
                process.join()


@contextmanager
def _losses(process: SpawnProcess) -> Iterator[None]:
    """Context that talks to a process.  Raises LostProcessError if it has ended."""
    try:
        yield
    except (EOFError, OSError):
        process.join()
        code = process.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        raise LostProcessError(
            f"a process of --workers {how}{', perhaps for lack of memory' * (code == -9)}; use fewer: --workers N"
        ) from None


def _serve(connection: Connection, work: Callable[[T], R]) -> None:
    """Answer each item with (True, what `work` returns) or (False, the error), until the other end is closed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of a library would compete with the other processes
    with suppress(EOFError, OSError):
        while True:
            item = connection.recv()
            try:
                answer = True, work(item)
            except ShmapTpError as error:
                answer = False, error
            except Exception:
                answer = False, RuntimeError(f"in a process of --workers:\n{traceback.format_exc()}")
            connection.send(answer)
