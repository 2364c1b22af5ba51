"""Threads in place of the processes of a run, for what they tell each other by the key-value store."""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from shmap_tp.runtime import agreement, distributed


class Store:
    """A stand-in for the key-value store of JAX's coordination service, and for what a process knows of the others."""

    def __init__(self, num_processes: int):
        self.num_processes, self.client = num_processes, self
        self.values: dict[str, str] = {}
        self.here = threading.local()

    @property
    def process_id(self) -> int:
        return self.here.process

    def key_value_set(self, key: str, value: str) -> None:
        assert self.values.setdefault(key, value) is value, key

    def key_value_delete(self, directory: str) -> None:
        for key in [key for key in self.values if key.startswith(directory)]:
            del self.values[key]

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        if key not in self.values:
            threading.Event().wait(0.01)
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: timed out")
        return self.values[key]


def in_processes(
    monkeypatch: pytest.MonkeyPatch, count: int, action: Callable[[int], object]
) -> list[BaseException | None]:
    """Call `action(process)` in `count` threads that are processes to the store; return what each raised."""
    store, raised = Store(count), [None] * count
    monkeypatch.setattr(agreement, "global_state", store)
    monkeypatch.setattr(distributed, "global_state", store)
    monkeypatch.setattr(agreement, "_calls", Counter())
    monkeypatch.setattr(agreement.time, "sleep", lambda seconds: None)

    def run(process: int) -> None:
        store.here.process = process
        try:
            action(process)
        except Exception as error:
            raised[process] = error

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(run, range(count), timeout=30))
    return raised
