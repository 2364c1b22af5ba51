"""Work beside this thread: calls in threads that never keep the process alive, unlike those of an executor, which are
waited for at its exit; and a function of many items in several processes, with results in the order of the items."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from shmap_tp.errors import LostProcessError

T = TypeVar("T")
INTERRUPTED_SECONDS = 5.0
"""How long an interrupt waits for a call to end: a process that ends while files are read may crash."""


def in_background(call: Callable[[], T]) -> Future[T]:
    """Make `call` in a thread of its own; the result is what it returns or raises."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


def interruptible(call: Callable[[], T]) -> T:
    """What `call` returns or raises; an interrupt of this thread is raised.

    It runs in a thread of its own, since Orbax takes any exception for an error of what it reads, and goes on after
    some: a Ctrl-C had no effect.
    """
    return result_of(in_background(call))


def result_of(answer: Future[T]) -> T:
    """The result of a call in the background, or its error; an interrupt of this thread is raised."""
    try:
        while not answer.done():
            wait([answer], 0.1)  # a signal may have reached another thread, and this one handles it
    except BaseException:
        wait([answer], INTERRUPTED_SECONDS)
        raise
    return answer.result()


T, R = TypeVar("T"), TypeVar("R")
_AHEAD = 2
"""Items per process that are under way, or wait for those before them."""


def in_order(work: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """`work` of each item, in their order, in `workers` processes; in this one if that is 1.

    `work` is pickled once for each process, the items and the results one by one.  The processes end when this iterator
    is closed, and when this process ends, however it ends.  An error of `work` is raised here, at its place;
    LostProcessError if a process ends by itself, as for lack of memory.
    """
    if workers == 1:
        yield from map(work, items)
        return
    resource_tracker.ensure_running()  # else the first process starts it, and it unblocks the signals
    before, results = multiprocessing.active_children(), deque[Future[R]]()
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin, (work,))  # no copies of threads
    try:
        for item in items:
            with _signals_for_this_process():
                results.append(pool.submit(_call, item))
            if len(results) == _AHEAD * workers:
                yield results.popleft().result()
        while results:
            yield results.popleft().result()
    except BrokenProcessPool:
        raise LostProcessError("a process was killed, perhaps for lack of memory; use fewer: --workers N") from None
    finally:
        for process in {*multiprocessing.active_children()} - {*before}:
            process.kill()
        pool.shutdown(cancel_futures=True)


@contextmanager
def _signals_for_this_process() -> Iterator[None]:
    """Context whose new processes and threads get no Ctrl-C, SIGTERM or SIGHUP: this process ends them."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


_work: Callable[[Any], Any]
"""What a process that `in_order` started does with each item."""


def _call(item: Any) -> Any:
    return _work(item)


def _begin(work: Callable[[Any], Any]) -> None:
    """In a new process: take `work`, and end with the process that started this one."""
    global _work
    _work = work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of a library would compete with the other processes

    def end() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
