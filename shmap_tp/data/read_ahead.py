"""Reads the batches of the next steps in the background while the present step runs.

A batch is a function of its number, so one that is read early is the one that would be read later.  It is for data that
is read from a bucket: a request takes some hundred milliseconds there, however small it is.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from shmap_tp.runtime.background import in_background

AHEAD = 4
"""Batches that are read beyond the present one, each in a thread of its own: requests may take up to four steps."""
T = TypeVar("T")


class ReadAhead(Generic[T]):
    """`read`, a function of 0 .. `count` - 1, that is called early for the numbers after the one that is asked for.

    An error of `read` is raised where its number is asked for, and nowhere if it never is.
    """

    def __init__(self, read: Callable[[int], T], count: int):
        self._read, self._count = read, count
        self._reading: dict[int, Future[T]] = {}

    def __call__(self, number: int) -> T:
        """`read(number)`, which was read already if the last call asked for a number just before."""
        wanted = [number, *range(number + 1, min(number + 1 + AHEAD, self._count))]
        self._reading = {each: self._reading.get(each) or self._begin(each) for each in wanted}
        return self._reading.pop(number).result()

    def _begin(self, number: int) -> Future[T]:
        return in_background(lambda: self._read(number))
