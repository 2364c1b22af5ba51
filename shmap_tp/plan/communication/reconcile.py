"""Compare the communication of a compiled module with the plan.

XLA may combine several arrays into one collective, reorder collectives, make them asynchronous, split a loop into
unrolled halves, or communicate arrays stacked, once after a loop, instead of one by one inside it.  What has to agree
is how many bytes are communicated over which axis by which operation.

XLA for CPU reduces bfloat16 in float32; there a module is compared with the plan for float32.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shmap_tp.plan.communication.from_hlo import CompiledCollective
from shmap_tp.plan.communication.ledger import Entry, Key, Operation, axis_size, key, tally, without_trivial_axes

SCALAR_BYTES = 8
"""Largest size of what counts as a scalar: a pair of float32."""

HEADINGS = {
    "merges": "combined",
    "stacked": "sent stacked after a loop",
    "concatenated": "sent as one array",
    "padding_exchanges": "added for padding",
    "shared": "CHEAPER",
    "summed": "COSTLIER",
    "unplanned": "NOT PLANNED",
    "missing": "MISSING",
}
"""Field -> how its lines begin when they are printed."""

MEANINGS = {
    "merges": "one collective carries several planned arrays (no fault)",
    "stacked": "the arrays of all iterations of a loop are sent in one collective, the same bytes (no fault)",
    "concatenated": "several small arrays are sent one after the other in one, the same bytes (no fault)",
    "padding_exchanges": "ppermutes that the compiler adds after padding a reduce-scatter (no fault)",
    "shared": "one collective for several uses of a gathered array, or for scalars that are added up (no fault)",
    "summed": (
        "an all-reduce in place of a reduce-scatter, or of an all-gather (a sum of zeros and each device's shard): the "
        "same result for twice the bytes on the links"
    ),
    "unplanned": "communication of the compiled module that is not in the plan",
    "missing": "communication of the plan that is not in the compiled module",
}
"""Field -> what its lines mean."""


@dataclass(frozen=True)
class Reconciliation:
    """The differences between a plan and a compiled module.

    All but `unplanned` and `missing` are choices of the compiler with the planned result.
    """

    merges: dict[str, list[str]]
    """Collectives that carry several arrays -> what was planned of the same operation, axis, dtype and size."""
    stacked: list[Entry]
    """Arrays communicated stacked, once after a loop, instead of one by one inside it: the same bytes."""
    concatenated: list[Entry]
    """Arrays that hold several planned ones, one after the other: the same bytes.  XLA for GPU does so."""
    padding_exchanges: list[Entry]
    """ppermutes that the compiler adds where it pads a reduce-scatter, for rows of the shards of other devices."""
    shared: list[Entry]
    """Planned collectives that the compiler saves: an array that is gathered for several uses is gathered once, and
    scalars whose sum alone is read are added up before they are reduced."""
    summed: list[Entry]
    """Planned reduce-scatters that are all-reduces, of which each device keeps its shard, and planned all-gathers that
    are all-reduces, to which each device contributes its shard, and zeros for the others.  XLA for TPU does so over all
    devices of some slices, and with small arrays."""
    unplanned: list[Entry]
    """Communication of the module that is not in the plan."""
    missing: list[Entry]
    """Communication of the plan that is not in the module, or not as often."""

    @property
    def balanced(self) -> bool:
        """Whether the same bytes are communicated as planned."""
        return not self.unplanned and not self.missing and not self.summed

    def __str__(self) -> str:
        lines = [
            f"{HEADINGS['merges']}: {name} carries some of: {', '.join(what)}" for name, what in self.merges.items()
        ]
        for field in list(HEADINGS)[1:]:
            lines += [
                f"{HEADINGS[field]}: {e.what}, {e.operation} over {e.axis}, {e.dtype}, {e.bytes} bytes x {e.count}"
                for e in getattr(self, field)
            ]
        return "\n".join(lines)

    @property
    def report(self) -> str:
        """Whether the module communicates as planned, the differences, and what their lines mean."""
        if self.unplanned or self.missing:
            verdict = "NOT as planned"
        elif self.summed:
            verdict = "the planned result at a higher cost; the lines below are choices of the compiler"
        elif not str(self):
            return "as planned"
        else:
            verdict = "as planned; the lines below are choices of the compiler with the same result"
        return f"{verdict}\n{self}\nmeaning of these lines:\n{self.legend}"

    @property
    def legend(self) -> str:
        """What the printed lines mean; only for the kinds that occur."""
        kinds = [field for field in HEADINGS if getattr(self, field)]
        return "\n".join(f"  {HEADINGS[field]:<26}{MEANINGS[field]}" for field in kinds)


def reconcile(planned: Iterable[Entry], found: Iterable[CompiledCollective], sizes: dict[str, int]) -> Reconciliation:
    """Compare `planned` with the collectives `found` in a module, on a mesh with these axis sizes."""
    planned, found = without_trivial_axes(planned, sizes), list(found)
    exchanges = _padding_exchanges(found, sizes)
    entries = [entry for collective in found for entry in collective.entries if entry not in exchanges]
    stacked, unplanned, missing = _match_stacked(tally(entries) - tally(planned), tally(planned) - tally(entries))
    concatenated, unplanned, missing = _match_concatenated(unplanned, missing)
    summed, unplanned, missing = _match_summed(unplanned, missing, sizes)
    shared, missing = _match_shared(planned, entries, missing)

    def carried(collective: CompiledCollective) -> list[str]:
        keys = [key(entry) for entry in collective.entries]
        keys = [each for one in keys for each in (one, *(other for other in _as_sums(one, sizes) if other in summed))]
        return list(dict.fromkeys(name for each in keys for name in _names(planned, each)))

    merges = {collective.name: carried(collective) for collective in found if len(collective.entries) > 1}
    return Reconciliation(
        merges,
        _select(entries, stacked),
        _select(entries, concatenated),
        _select(exchanges, tally(exchanges)),
        _select(planned, shared),
        _select(planned, summed),
        _select(entries, unplanned),
        _select(planned, missing),
    )


def _match_stacked(over: Counter[Key], under: Counter[Key]) -> tuple[Counter[Key], Counter[Key], Counter[Key]]:
    """(stacked arrays found in place of single ones, what remains of `over`, what remains of `under`)."""
    stacked, over, under = Counter(), over.copy(), under.copy()
    for stack in over:
        for single in under:
            depth, rest = divmod(stack[3], single[3])
            matches = depth > 1 and not rest and stack[:3] == single[:3]
            times = min(over[stack], under[single] // depth) if matches else 0
            stacked[stack] += times
            over[stack] -= times
            under[single] -= times * depth
    return +stacked, +over, +under


def _match_concatenated(over: Counter[Key], under: Counter[Key]) -> tuple[Counter[Key], Counter[Key], Counter[Key]]:
    """(arrays that hold all that is missing of their operation and dtype, what remains of `over`, of `under`).

    Fewer arrays hold the same bytes over each axis; one that is sent over two axes counts for both.
    """
    found, over, under = Counter(), over.copy(), under.copy()
    for kind in {(operation, dtype) for operation, _, dtype, _ in over}:
        whole, parts = (
            Counter({one: count for one, count in side.items() if (one[0], one[2]) == kind}) for side in (over, under)
        )
        if whole.total() < parts.total() and _bytes_by_axis(whole) == _bytes_by_axis(parts):
            found, over, under = found + whole, over - whole, under - parts
    return found, over, under


def _match_summed(
    over: Counter[Key], under: Counter[Key], sizes: dict[str, int]
) -> tuple[Counter[Key], Counter[Key], Counter[Key]]:
    """(what is missing where an all-reduce is found in its place, what remains of `over`, of `under`)."""
    summed, over, under = Counter(), over.copy(), under.copy()
    for whole in over:
        for planned in _as_sums(whole, sizes):
            times = min(over[whole], under[planned])
            summed[planned] += times
            over[whole] -= times
            under[planned] -= times
    return +summed, +over, +under


def _as_sums(whole: Key, sizes: dict[str, int]) -> list[Key]:
    """What an all-reduce may be in place of: a reduce-scatter of this array, or an all-gather to its size."""
    operation, axes, dtype, size = whole
    if operation != Operation.all_reduce or not set(axes.split()) <= set(sizes):
        return []
    shard, rest = divmod(size, axis_size(axes, sizes))
    return [(Operation.reduce_scatter, *whole[1:]), *([] if rest else [(Operation.all_gather, axes, dtype, shard)])]


def _match_shared(planned: list[Entry], found: list[Entry], under: Counter[Key]) -> tuple[Counter[Key], Counter[Key]]:
    """(collectives in whose place another of the same key serves, what remains of `under`)."""
    there, shared = tally(found), Counter()
    for one, count in under.items():
        operation, _, _, size = one
        uses = [entry for entry in planned if key(entry) == one]
        is_array = operation == Operation.all_gather and len(uses) > 1 and len({entry.what for entry in uses}) == 1
        if there[one] and (is_array or (operation == Operation.all_reduce and size <= SCALAR_BYTES)):
            shared[one] = count
    return shared, under - shared


def _bytes_by_axis(arrays: Counter[Key]) -> Counter[str]:
    found = Counter()
    for (_, axes, _, size), count in arrays.items():
        for axis in axes.split():
            found[axis] += size * count
    return found


def _select(entries: list[Entry], counts: Counter[Key]) -> list[Entry]:
    """One entry per key, with its count, named after all `entries` of that key."""
    first = {key(entry): entry for entry in reversed(entries)}
    return [replace(first[k], what=" or ".join(_names(entries, k)), count=count) for k, count in counts.items()]


def _names(entries: list[Entry], wanted: Key) -> list[str]:
    return list(dict.fromkeys(entry.what for entry in entries if key(entry) == wanted))


def _padding_exchanges(found: list[CompiledCollective], sizes: dict[str, int]) -> list[Entry]:
    """The ppermutes of each padded reduce-scatter: of n shards the last one starts (n - 1)/n of the padding too late.
    Where that is more than a shard, whole ones come from the devices before it and the rest from one further."""
    single = [collective.entries[0] for collective in found if len(collective.entries) == 1]
    exchanges = []
    for scatter in (collective for collective in found if collective.padding):
        (entry,) = scatter.entries
        n = axis_size(entry.axis, sizes)
        shard, late = (entry.bytes + scatter.padding) // n, scatter.padding * (n - 1) // n
        for size in [shard] * (late // shard) + [late % shard]:
            wanted = Operation.ppermute, entry.dtype, size, entry.count
            matching = (other for other in single if (other.operation, other.dtype, other.bytes, other.count) == wanted)
            within = (other for other in matching if set(other.axis.split()) <= set(entry.axis.split()))
            exchanges += [other for other in within if other not in exchanges][:1]
    return exchanges
