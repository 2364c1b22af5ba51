"""Rows that this host has read, as an array on the devices: each process reads those of its own devices alone.

b sequences in one microbatch, T context.

The batches of the next steps are read in the background while the present step runs, where the data is in a bucket: a
request takes some hundred milliseconds there, however small it is.
"""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Generic, TypeVar

import jax
import numpy as np
from jaxtyping import Int32

from shmap_tp.runtime.workers import in_background

AHEAD = 4
"""Batches that are read beyond the present one, each in a thread of its own: requests may take up to four steps."""
T = TypeVar("T")


def host_shards(
    rows: Callable[[int, int], np.ndarray],
    sharding: jax.sharding.Sharding,
    shape: tuple[int, int, int],
    concurrently: bool = False,
) -> list[Int32[np.ndarray, "microbatches rows tokens"]]:
    """The rows of one step that each device of this process holds.  The batch has `shape` = [microbatches, b, T + 1],
    b sharded over dp, P(None, 'dp', None); `rows(first, last)` returns rows of it, [last - first, T + 1], and row r is
    in microbatch r // b at index r % b.

    A process reads only the rows of its own devices, each once even if several mp ranks hold it, and neighbours in one
    call of `rows`.  The calls are made one after the other, or `concurrently`, in threads.
    """
    held = [
        tuple(range(*part.indices(dim)) for part, dim in zip(index[:2], shape[:2], strict=True))
        for index in sharding.addressable_devices_indices_map(shape).values()
    ]
    numbers = {each: np.add.outer(np.array(each[0]) * shape[1], np.array(each[1])) for each in held}
    needed = np.unique(np.concatenate([one.ravel() for one in numbers.values()]))
    runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(needed, np.flatnonzero(np.diff(needed) > 1) + 1)]
    if concurrently and len(runs) > 1:
        parts = [call.result() for call in [in_background(partial(rows, *run)) for run in runs]]
    else:
        parts = [rows(*run) for run in runs]
    read = np.concatenate(parts) if len(parts) > 1 else parts[0]
    shards = {each: read[np.searchsorted(needed, one)] for each, one in numbers.items()}
    return [shards[each] for each in held]


def on_devices(
    shards: list[Int32[np.ndarray, "microbatches rows tokens"]],
    sharding: jax.sharding.Sharding,
    shape: tuple[int, int, int],
) -> Int32[jax.Array, "microbatches b tokens"]:
    """The array of `shape` that has these `host_shards`.

    The host-to-device transfer is explicit, so the caller may run under `transfer_guard("disallow")`.
    """
    devices = list(sharding.addressable_devices_indices_map(shape))
    return jax.make_array_from_single_device_arrays(shape, sharding, jax.device_put(shards, devices))


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
