"""Communication between slices (over the data-centre network, DCN), read from the compiled module of one slice.

XLA for TPU compiles a module per slice.  Data for other slices leaves through the hosts' network: one `send` per array,
whose attributes state the collective and which slices take part.  An all-reduce over all of dp is compiled into three:
within the slice, between slices, and within the slice again; only the middle one appears here, padded to whole tiles.
"""

import math
import re
from collections.abc import Collection, Iterable

from shmap_tp.parallel.mesh import DP_SLICE
from shmap_tp.plan.communication.from_hlo import DTYPES
from shmap_tp.plan.communication.ledger import Direction, Entry, Operation, format_bytes, tally
from shmap_tp.plan.hlo_parser import ARRAY, array_bytes, parse_hlo

KINDS = {
    "ALL_GATHER": Operation.all_gather,
    "REDUCE_SCATTER": Operation.reduce_scatter,
    "ALL_REDUCE": Operation.all_reduce,
}


def inter_slice_communication(text: str) -> list[Entry]:
    """Every array that is sent to other slices, over the dp ranks that correspond to one another in the slices.

    Raises ValueError where the collective is unknown, or how often it runs.
    """
    module, found = parse_hlo(text), []
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            target = re.search(r"_xla_megascale_target=\"?\{([\d,]+)\}", instruction.attributes)
            runs = module.runs[computation.name]
            if instruction.opcode != "send" or not target or runs == 0:
                continue
            kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
            if not kind or kind[1] not in KINDS or math.isnan(runs):
                raise ValueError(f"{instruction.name}: its collective, or how often it runs, is unknown")
            dtype, size = DTYPES[ARRAY.search(instruction.shape)[1]], array_bytes(instruction.shape)[0]
            direction = Direction.once if runs <= 1 else Direction.backward
            found.append(Entry(instruction.name, KINDS[kind[1]], DP_SLICE, dtype, size, int(runs), direction))
    return found


def compare_dcn(planned: Iterable[Entry], found: Collection[Entry]) -> str:
    """Whether the compiled communication between slices is as planned, in words.

    Only the total is given for all-reduces, because the compiler splits them freely.
    """
    sums = [entry for entry in found if entry.operation == Operation.all_reduce]
    others = tally(entry for entry in found if entry.operation != Operation.all_reduce)
    expected = tally(entry for entry in planned if entry.axis == DP_SLICE)
    verdict = "as planned" if others == expected else "differ from the plan"
    return f"{verdict}; all-reduces over all of dp: {format_bytes(sum(entry.total for entry in sums))}"
