"""Calls in threads that never keep the process alive, unlike those of an executor, which are waited for at its exit."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

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
    answer = in_background(call)
    try:
        while not answer.done():
            wait([answer], 0.1)  # a signal may have reached another thread, and this one handles it
    except BaseException:
        wait([answer], INTERRUPTED_SECONDS)
        raise
    return answer.result()
