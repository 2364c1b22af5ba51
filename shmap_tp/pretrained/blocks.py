"""Boxes of bounded size that together make up an array: parameters are read and written one box at a time."""

import itertools
import math
from collections.abc import Iterator, Sequence

BLOCK_BYTES = 128 * 2**20
"""About how much of a parameter a process reads or writes at a time.  Beside its shards it holds a few times as much:
in the file's order, in ours, and on its way to the devices."""

Block = tuple[tuple[int, ...], tuple[int, ...]]
"""(the first index, the size) along each dim."""


def blocks(shape: Sequence[int], itemsize: int, limit: int) -> Iterator[Block]:
    """Blocks of at most `limit` bytes, in row-major order.  The first dims are divided first: those are layers, or rows
    of a file."""
    block = list(shape)
    for dim, size in enumerate(shape):
        whole = math.prod(block) * itemsize
        if whole > limit:
            block[dim] = max(1, size * limit // whole)
    for first in itertools.product(*(range(0, size, step) for size, step in zip(shape, block, strict=True))):
        yield first, tuple(min(step, size - at) for at, step, size in zip(first, block, shape, strict=True))
