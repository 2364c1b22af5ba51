"""What became of a plan in a compiled module: every array planned is carried, and every array carried was planned.

XLA carries several arrays in one collective, in any order, now or while something else runs, in the halves of an
unrolled loop, or stacked up once after a loop instead of one by one in it.  What has to agree is which bytes travel
over which axis by which operation.

XLA on CPU sums bfloat16 in float32: there the plan to hold a module to is that of float32.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shmap_tp.plan.communication.from_hlo import Collective
from shmap_tp.plan.communication.ledger import Entry, Key, Operation, key, size_of, tally, without_trivial_axes


@dataclass(frozen=True)
class Reconciliation:
    """What became of a plan.  The first three are the compiler's own ways of carrying it out, and no fault."""

    merges: dict[str, list[str]]
    """Collectives that carry more than one array, and what was planned of the same size, operation and axis."""
    moved: list[Entry]
    """Arrays that travel stacked up, once after a loop, instead of one by one in it: the same bytes."""
    borders: list[Entry]
    """What the compiler adds where it pads a reduce-scatter: a ppermute of what then crosses the border of a part."""
    unplanned: list[Entry]
    """What the module says beyond the plan."""
    missing: list[Entry]
    """What was planned and is not there, or not as often."""

    @property
    def balanced(self) -> bool:
        return not self.unplanned and not self.missing

    def __str__(self) -> str:
        lines = [f"{name} carries together some of: {', '.join(what)}" for name, what in self.merges.items()]
        for heading, entries in vars(self).items():
            if heading != "merges":
                lines += [
                    f"{heading}: {e.what}, {e.operation} {e.axis} {e.dtype} {e.bytes} x {e.count}" for e in entries
                ]
        return "\n".join(lines)


def reconcile(planned: Iterable[Entry], found: Iterable[Collective], sizes: dict[str, int]) -> Reconciliation:
    """`planned` held to the collectives `found` in a module, on a mesh of these axis sizes."""
    planned, found = without_trivial_axes(planned, sizes), list(found)
    borders = _borders(found, sizes)
    entries = [entry for collective in found for entry in collective.entries if entry not in borders]
    moved, unplanned, missing = _moved(tally(entries) - tally(planned), tally(planned) - tally(entries))
    merges = {
        collective.name: list(
            dict.fromkeys(name for entry in collective.entries for name in _names(planned, key(entry)))
        )
        for collective in found
        if len(collective.entries) > 1
    }
    return Reconciliation(merges, _among(entries, moved), borders, _among(entries, unplanned), _among(planned, missing))


def _moved(over: Counter[Key], under: Counter[Key]) -> tuple[Counter[Key], Counter[Key], Counter[Key]]:
    """(stacks found instead of single arrays, what is left of `over`, what is left of `under`)."""
    moved, over, under = Counter(), over.copy(), under.copy()
    for stack in over:
        for single in under:
            depth, rest = divmod(stack[3], single[3])
            times = (
                min(over[stack], under[single] // depth) if depth > 1 and not rest and stack[:3] == single[:3] else 0
            )
            moved[stack] += times
            over[stack] -= times
            under[single] -= times * depth
    return +moved, +over, +under


def _among(entries: list[Entry], counts: Counter[Key]) -> list[Entry]:
    """One entry for each key, with its count, named after all of `entries` that it may be."""
    first = {key(entry): entry for entry in reversed(entries)}
    return [replace(first[k], what=" or ".join(_names(entries, k)), count=count) for k, count in counts.items()]


def _names(entries: list[Entry], wanted: Key) -> list[str]:
    return list(dict.fromkeys(entry.what for entry in entries if key(entry) == wanted))


def _borders(found: list[Collective], sizes: dict[str, int]) -> list[Entry]:
    """For each padded reduce-scatter its ppermute: of n parts, the last begins (n - 1)/n of the padding too late."""
    single = [collective.entries[0] for collective in found if len(collective.entries) == 1]
    borders = []
    for scatter in (collective for collective in found if collective.padding):
        (entry,) = scatter.entries
        n = size_of(entry.axis, sizes)
        wanted = Operation.ppermute, entry.axis, entry.dtype, scatter.padding * (n - 1) // n
        alike = [other for other in single if key(other) == wanted and other.count == entry.count]
        borders += [other for other in alike if other not in borders][:1]
    return borders
