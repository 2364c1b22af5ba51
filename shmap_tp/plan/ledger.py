"""The communication ledger: which arrays are communicated, over which mesh axis, their size, how often, in which pass.

`communication_in_jaxpr` reads the entries from a traced program, such as a whole step, `compiled_communication.py` from
the compiled one, and `comparison` shows the bytes of both: XLA may combine several arrays into one collective, reorder
collectives, make them asynchronous, unroll a loop, or send arrays stacked, once after a loop, but the bytes of an
operation over an axis stay the same.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from shmap_tp.model.tracing import Visit, equations
from shmap_tp.runtime.console import fitted_table, wrap_lines


class Operation(StrEnum):
    """A collective operation."""

    all_reduce = "all-reduce"
    max = "max"
    all_gather = "all-gather"
    reduce_scatter = "reduce-scatter"
    all_to_all = "all-to-all"
    ppermute = "ppermute"


class Direction(StrEnum):
    """The pass that a collective belongs to."""

    forward = "forward"
    recompute = "recompute"
    """Recomputation of the forward pass within the backward pass (rematerialisation)."""
    backward = "backward"
    once = "once"
    """Once per step, outside the microbatches."""


@dataclass(frozen=True)
class Entry:
    """One array that is communicated `count` times per step."""

    what: str
    operation: Operation
    axis: str
    """A mesh axis, or several that form one group, separated by spaces."""
    dtype: str
    bytes: int
    """Size of one device's operand.  The bytes on its links differ: in a ring of n devices each sends 2 (n - 1) / n of
    the operand for an all-reduce, (n - 1) / n for a reduce-scatter, and n - 1 times the operand for an all-gather."""
    count: int
    direction: Direction

    @property
    def total(self) -> int:
        """Bytes per step."""
        return self.bytes * self.count


def axis_size(axes: str, sizes: dict[str, int]) -> int:
    """Devices in a group over `axes` (as in `Entry.axis`), on a mesh with these axis sizes."""
    return math.prod(sizes[axis] for axis in axes.split())


def without_trivial_axes(entries: Iterable[Entry], sizes: dict[str, int]) -> list[Entry]:
    """`entries` without axes of size 1; an entry over such axes alone is dropped.  `sizes` are those of the mesh."""
    named = [(entry, " ".join(axis for axis in entry.axis.split() if axis_size(axis, sizes) > 1)) for entry in entries]
    return [replace(entry, axis=axis) for entry, axis in named if axis]


def table(entries: Iterable[Entry], total: str = "per step") -> str:
    """The entries as an aligned table, ordered by direction, followed by the bytes over each axis.  `total` is what the
    column of count x bytes is called.  On a narrow terminal there is no dtype, or no count."""
    entries, figures = list(entries), ("bytes", "count", total)
    rows = [("direction", "what", "operation", "axis", "dtype", *figures)]
    for direction in Direction:
        for entry in (entry for entry in entries if entry.direction == direction):
            sizes = format_bytes(entry.bytes), str(entry.count), format_bytes(entry.total)
            rows.append((direction, entry.what, entry.operation, entry.axis, entry.dtype, *sizes))
    for axis in sorted({entry.axis for entry in entries}):
        over_axis = [entry for entry in entries if entry.axis == axis]
        count, size = sum(entry.count for entry in over_axis), sum(entry.total for entry in over_axis)
        rows.append(("total", "", "", axis, "", "", str(count), format_bytes(size)))
    note = "bytes: the operand of one device, not the bytes on its links; for an all-gather one shard"
    return f"{fitted_table(rows, ['dtype', 'count'], right=figures, wrap='what', least=24)}\n{wrap_lines(note)}"


NO_FAULT = (
    "no fault where the compiler gathers once what is used twice, adds scalars up before it reduces them, sends an "
    "all-reduce in place of a reduce-scatter, of an all-gather or of two over one axis each, or shifts padded shards "
    "by ppermutes"
)


def bytes_by_operation(entries: Iterable[Entry]) -> Counter[tuple[Operation, str]]:
    """Bytes by (operation, axis)."""
    total: Counter[tuple[Operation, str]] = Counter()
    for entry in entries:
        total[entry.operation, entry.axis] += entry.total
    return total


def comparison(traced: Iterable[Entry], compiled: Iterable[Entry]) -> str:
    """Whether a compiled program communicates the bytes of the traced one, and both as a table."""
    before, after = bytes_by_operation(traced), bytes_by_operation(compiled)
    rows = [("operation", "axis", "traced", "compiled", "more")]
    for operation, axis in sorted(before.keys() | after.keys()):
        sizes = before[operation, axis], after[operation, axis]
        more = sizes[1] - sizes[0]
        difference = f"{'-' if more < 0 else ''}{format_bytes(abs(more))}" if more else ""
        rows.append((operation, axis, *map(format_bytes, sizes), difference))
    listed = fitted_table(rows, right=rows[0][2:], wrap="axis", least=8)
    return f"as traced\n{listed}" if before == after else f"not all as traced; {NO_FAULT}\n{listed}"


def format_bytes(size: int) -> str:
    """1536 -> '1.5 KiB'."""
    unit = min((max(size, 1).bit_length() - 1) // 10, 4)
    return f"{size} B" if unit == 0 else f"{size / 1024**unit:.1f} {'KMGT'[unit - 1]}iB"


# What a traced program communicates, with how often each collective runs

OPERATIONS = {
    "psum": Operation.all_reduce,
    "psum_invariant": Operation.all_reduce,
    "pmax": Operation.max,
    "all_gather": Operation.all_gather,
    "all_gather_invariant": Operation.all_gather,
    "reduce_scatter": Operation.reduce_scatter,
    "all_to_all": Operation.all_to_all,
    "ppermute": Operation.ppermute,
}

NAMES = {"blocks": "block", "mlp": "MLP", "cross_entropy": "loss", "dp_gradient_reduction": "gradients"}
"""How named scopes are printed, where not as they are."""


def communication_in_jaxpr(jaxpr: Any) -> list[Entry]:
    """Every collective of `jaxpr` and of the jaxprs inside it; equal arrays of one part of the model are one entry.

    Raises ValueError for an unknown collective, or where it is unknown how often one runs: in a while loop or a branch.
    """
    counts: Counter[Entry] = Counter()
    for visit in equations(jaxpr):
        if visit.axes:
            for entry in _arrays(visit):
                counts[replace(entry, count=0)] += entry.count
    return [replace(entry, count=count) for entry, count in counts.items()]


def _arrays(visit: Visit) -> list[Entry]:
    """The arrays that a collective communicates.  Raises ValueError as above."""
    if visit.name not in OPERATIONS:
        raise ValueError(f"unknown collective: {visit.equation}")
    operation, axis = OPERATIONS[visit.name], " ".join(visit.axes)
    if visit.loop:
        raise ValueError(f"it is unknown how often this runs: {operation} over {axis} in a {visit.loop}, {visit.scope}")
    what, direction = NAMES.get(visit.part, visit.part), _direction(visit)
    arrays = [var.aval for var in visit.equation.invars]
    return [
        Entry(what, operation, axis, str(x.dtype), x.size * x.dtype.itemsize, visit.times, direction) for x in arrays
    ]


def _direction(visit: Visit) -> Direction:
    """The pass that an equation belongs to: what is neither in a loop nor differentiated runs once."""
    if visit.is_recomputed:
        return Direction.recompute
    if visit.is_backward:
        return Direction.backward
    return Direction.forward if visit.scans or "jvp(" in visit.scope else Direction.once
