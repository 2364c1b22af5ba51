"""The words of the ledger: what travels between devices, over which axis, how large, how often, in which direction.

`theory.theory` says it of a configuration, `wires.written` reads it from what was traced, `carried.carried` from what
was compiled, and `account.account` holds the last to any of the others.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

import jax.numpy as jnp

from shmap_tp.parallel.mesh import Groups


class Operation(StrEnum):
    """What an axis does with the arrays of its devices.  `bytes` of an entry are of what one device puts in."""

    all_reduce = "all-reduce"
    max = "max"
    all_gather = "all-gather"
    reduce_scatter = "reduce-scatter"
    ppermute = "ppermute"


class Direction(StrEnum):
    forward = "forward"
    recompute = "recompute"
    """The forward pass once more, by the backward pass that did not keep it."""
    backward = "backward"
    once = "once"
    """Outside the microbatches: once per step, however many there are."""


@dataclass(frozen=True)
class Entry:
    """One array that travels, `count` times in a step."""

    what: str
    operation: Operation
    axis: str
    """A mesh axis; two together, where they are one group, with a space between.  dp:16/2 where groups of 16 parts of
    dp meet, each the second after the one before."""
    dtype: str
    bytes: int
    """Of the array that one device puts in, each time.  Its links carry something else: in a ring of n devices each
    sends 2 (n - 1) / n of it for an all-reduce, (n - 1) / n for a reduce-scatter, n - 1 times it for an all-gather."""
    count: int
    direction: Direction

    @property
    def total(self) -> int:
        """Bytes per step."""
        return self.bytes * self.count


@dataclass(frozen=True)
class ArrayTraffic:
    """An array as one device holds it, and how often it travels in a step."""

    values: int
    dtype: str
    count: int

    def over(self, axis: str, what: str, operation: Operation, direction: Direction) -> Entry:
        size = self.values * jnp.dtype(self.dtype).itemsize
        return Entry(what, operation, axis, self.dtype, size, self.count, direction)


Key = tuple[Operation, str, str, int]
"""(operation, axis, dtype, bytes): what two collectives have in common that may stand for one another."""


def key(entry: Entry) -> Key:
    return entry.operation, entry.axis, entry.dtype, entry.bytes


def tally(entries: Iterable[Entry]) -> Counter[Key]:
    """How often each (operation, axis, dtype, bytes) runs in a step."""
    total = Counter()
    for entry in entries:
        total[key(entry)] += entry.count
    return +total


def group_name(axis: str, groups: Groups | None) -> str:
    """The name of an axis of which such groups meet, or all of it; of groups that are alike and evenly spread."""
    if groups is None:
        return axis
    apart = groups[0][1] - groups[0][0] if len(groups[0]) > 1 else 1
    return part_of(axis, len(groups[0]), apart)


def part_of(axis: str, count: int, apart: int) -> str:
    return f"{axis}:{count}/{apart}"


def size_of(axes: str, sizes: dict[str, int]) -> int:
    """How many devices meet over them, on a mesh of these sizes."""
    named = (axis.partition(":") for axis in axes.split())
    return math.prod(int(part.partition("/")[0]) if part else sizes[axis] for axis, _, part in named)


def without_trivial_axes(entries: Iterable[Entry], sizes: dict[str, int]) -> list[Entry]:
    """`entries` without what would only travel over an axis of one device.  `sizes` are those of the mesh."""
    kept = [(entry, " ".join(axis for axis in entry.axis.split() if size_of(axis, sizes) > 1)) for entry in entries]
    return [replace(entry, axis=axis) for entry, axis in kept if axis]


def table(entries: Iterable[Entry]) -> str:
    """The entries as lines to read, direction by direction, and below them the bytes of a step over each axis."""
    entries = list(entries)
    rows = [("direction", "what", "operation", "axis", "dtype", "bytes", "count", "per step")]
    for direction in Direction:
        for entry in (entry for entry in entries if entry.direction == direction):
            sizes = human(entry.bytes), str(entry.count), human(entry.total)
            rows.append((direction, entry.what, entry.operation, entry.axis, entry.dtype, *sizes))
    for axis in sorted({entry.axis for entry in entries}):
        total = [entry for entry in entries if entry.axis == axis]
        times, size = sum(entry.count for entry in total), sum(entry.total for entry in total)
        rows.append(("in all", "", "", axis, "", "", str(times), human(size)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(w) if i >= 5 else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    note = "bytes: of the array that one device puts in, not of what its links carry; an all-gather puts in one part"
    return "\n".join([*(line.rstrip() for line in lines), note])


def human(size: int) -> str:
    """1536 -> '1.5 KiB'."""
    unit = min((max(size, 1).bit_length() - 1) // 10, 4)
    return f"{size} B" if unit == 0 else f"{size / 1024**unit:.1f} {'KMGT'[unit - 1]}iB"
