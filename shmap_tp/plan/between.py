"""What a step says between slices, read from the module that one of them runs.

XLA for TPU compiles for one slice.  What goes to the others, hosts send over their network: a `send` for each array,
which says what becomes of it and which slices meet.  An all-reduce over all of dp is made of three: within the slice,
between slices, and within again; of that, too, only the middle one is here, padded to whole tiles.
"""

import re
from collections.abc import Iterable

from shmap_tp.mesh import DP
from shmap_tp.plan.carried import DTYPES
from shmap_tp.plan.ledger import Direction, Entry, Operation, human, part_of, tally
from shmap_tp.plan.module import ARRAY, parse

KINDS = {
    "ALL_GATHER": Operation.all_gather,
    "REDUCE_SCATTER": Operation.reduce_scatter,
    "ALL_REDUCE": Operation.all_reduce,
}


def between(text: str) -> list[Entry]:
    """Every array that leaves the slice, over the parts of dp that stand for one another in the slices.

    Raises ValueError where what becomes of it, or how often it does, cannot be read.
    """
    module, found = parse(text), []
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            target = re.search(r"_xla_megascale_target=\"?\{([\d,]+)\}", instruction.attributes)
            if instruction.opcode != "send" or not target:
                continue
            kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
            runs = module.runs[computation.name]
            if not kind or kind[1] not in KINDS or runs != int(runs):
                raise ValueError(f"{instruction.name}: what becomes of it, or how often, cannot be read")
            dtype, bits, dims = ARRAY.search(instruction.shape).groups()
            size = int(bits or 8) // 8
            for side in filter(None, dims.split(",")):
                size *= int(side)
            axis = part_of(DP, len(target[1].split(",")), 1)
            once = Direction.once if runs <= 1 else Direction.backward
            found += [Entry(instruction.name, KINDS[kind[1]], axis, DTYPES[dtype], size, int(runs), once)] * (runs > 0)
    return found


def crossing(planned: Iterable[Entry], found: Iterable[Entry]) -> str:
    """Whether what crosses is what was planned between slices, in words.  All-reduces, which the compiler cuts as it
    likes, are only added up."""
    sums = [entry for entry in found if entry.operation == Operation.all_reduce]
    others = tally(entry for entry in found if entry.operation != Operation.all_reduce)
    wanted = tally(entry for entry in planned if entry.axis in {entry.axis for entry in found})
    verdict = "as planned" if others == wanted else "NOT as planned"
    return f"{verdict}; of all-reduces over all of dp {human(sum(entry.total for entry in sums))}"
