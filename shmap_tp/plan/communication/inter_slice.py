"""What a step says between slices, read from the module that one of them runs.

XLA for TPU compiles for one slice.  What goes to the others, hosts send over their network: a `send` for each array,
which says what becomes of it and which slices meet.  An all-reduce over all of dp is made of three: within the slice,
between slices, and within again; of that, too, only the middle one is here, padded to whole tiles.
"""

import math
import re
from collections.abc import Iterable

from shmap_tp.parallel.mesh import DP
from shmap_tp.plan.communication.from_hlo import DTYPES
from shmap_tp.plan.communication.ledger import Direction, Entry, Operation, human, part_of, tally
from shmap_tp.plan.hlo_parser import ARRAY, array_bytes, parse

KINDS = {
    "ALL_GATHER": Operation.all_gather,
    "REDUCE_SCATTER": Operation.reduce_scatter,
    "ALL_REDUCE": Operation.all_reduce,
}


def inter_slice_communication(text: str) -> list[Entry]:
    """Every array that leaves the slice, over the parts of dp that stand for one another in the slices.

    Raises ValueError where what becomes of it, or how often it does, cannot be read.
    """
    module, found = parse(text), []
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            target = re.search(r"_xla_megascale_target=\"?\{([\d,]+)\}", instruction.attributes)
            runs = module.runs[computation.name]
            if instruction.opcode != "send" or not target or runs == 0:
                continue
            kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
            if not kind or kind[1] not in KINDS or math.isnan(runs):
                raise ValueError(f"{instruction.name}: what becomes of it, or how often, cannot be read")
            dtype, size = DTYPES[ARRAY.search(instruction.shape)[1]], array_bytes(instruction.shape)[0]
            axis = part_of(DP, len(target[1].split(",")), 1)
            towards = Direction.once if runs <= 1 else Direction.backward
            found.append(Entry(instruction.name, KINDS[kind[1]], axis, dtype, size, int(runs), towards))
    return found


def compare_dcn(planned: Iterable[Entry], found: Iterable[Entry]) -> str:
    """Whether what crosses is what was planned between slices, in words.  All-reduces, which the compiler cuts as it
    likes, are only added up."""
    sums = [entry for entry in found if entry.operation == Operation.all_reduce]
    others = tally(entry for entry in found if entry.operation != Operation.all_reduce)
    wanted = tally(entry for entry in planned if entry.axis in {entry.axis for entry in found})
    verdict = "as planned" if others == wanted else "NOT as planned"
    return f"{verdict}; of all-reduces over all of dp {human(sum(entry.total for entry in sums))}"
