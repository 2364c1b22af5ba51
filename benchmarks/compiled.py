"""What a compiled step holds, read from XLA: its collectives, how often they run, what they carry."""

import math
import re
from typing import NamedTuple

COLLECTIVE = re.compile(
    r" = (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\((.*)"
)


class Wires(NamedTuple):
    """Collectives of one device and step: how often any runs, and the MiB of its results."""

    times: int
    mib: float

    def __str__(self) -> str:
        return f"{self.times}, {self.mib:.1f} MiB"


def wires(text: str) -> tuple[Wires, Wires]:
    """(in loops, outside of loops) of a compiled HLO module; what has no other device to talk to is left out."""
    computations = _computations(text)
    entry = next(name for name in computations if name.startswith("ENTRY"))
    found: dict[bool, list[tuple[int, float]]] = {True: [], False: []}

    def visit(name: str, times: int, in_loop: bool) -> None:
        for line in computations[name]:
            match = COLLECTIVE.search(line)
            if match and _devices(match[3]) > 1:
                found[in_loop].append((times, times * _bytes(match[1]) / 2**20))
            for kind, called in re.findall(r"\b(body|calls|to_apply|branch_computations)=\{?%?([\w.\-]+)", line):
                trips = int(re.search(r'known_trip_count":\{"n":"(\d+)"', line)[1]) if kind == "body" else 1
                visit(called, times * trips, in_loop or kind == "body")

    visit(entry, 1, False)
    loops, outside = (Wires(sum(n for n, _ in each), sum(m for _, m in each)) for each in (found[True], found[False]))
    return loops, outside


def _computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation, by its name."""
    computations: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith(("ENTRY", "%")) and line.rstrip().endswith("{"):
            name = re.match(r"(?:ENTRY )?%?([\w.\-]+)", line)[1]
            lines = computations.setdefault(f"ENTRY {name}" if line.startswith("ENTRY") else name, [])
        elif computations:
            lines.append(line)
    return computations


def _bytes(shapes: str) -> int:
    """Of a shape, or a tuple of shapes, as HLO writes them; a type's name ends in its bits, pred has a byte."""
    arrays = re.findall(r"\b[a-z]+(\d*)\[([\d,]*)\]", shapes)
    return sum(int(bits or 8) // 8 * math.prod(int(n) for n in dims.split(",") if n) for bits, dims in arrays)


def _devices(operands: str) -> int:
    """How many devices talk to each other: the size of a replica group, in any of the three ways it is written."""
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", operands):
        sizes = dict(re.findall(r"('\w+')=(\d+)", match[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'\w+'", match[2]))
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", operands):
        return int(match[1])
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", operands):
        return len(match[1].split(","))
    assert "source_target_pairs=" in operands, f"replica groups in another form: {operands}"
    return 2
