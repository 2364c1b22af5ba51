"""Collectives as compiled: read from the text of a module, with how often each of them runs.

XLA for CPU and for TPU; a collective may be synchronous, a -start and -done pair, carried along by several fusions, or
fused with a slice.

XLA for TPU compiles a module per slice.  Data for other slices leaves through the hosts' network (DCN): one `send` per
array, whose attributes state the collective and which slices take part.  An all-reduce over all of dp is compiled into
three: within the slice, between slices, and within the slice again; the middle one is padded to whole tiles.
"""

import math
import re
from collections.abc import Iterable
from itertools import combinations

import numpy as np
from jax import numpy as jnp

from shmap_tp.parallel.mesh import DP_SLICE
from shmap_tp.plan.hlo_parser import ARRAY, Computation, Instruction, Module, array_bytes, parse_hlo
from shmap_tp.plan.ledger import Direction, Entry, Operation

OPCODES = {
    "all-reduce": Operation.all_reduce,
    "all-gather": Operation.all_gather,
    "reduce-scatter": Operation.reduce_scatter,
    "collective-permute": Operation.ppermute,
    "all-to-all": Operation.all_to_all,
}

REDUCTIONS = {
    ("all-reduce", "add"): Operation.all_reduce,
    ("all-reduce", "maximum"): Operation.max,
    ("reduce-scatter", "add"): Operation.reduce_scatter,
}

DTYPES = {"bf16": "bfloat16", "pred": "bool", "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}
DTYPES |= {
    f"{short}{bits}": f"{name}{bits}" for short, name in (("s", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)
}
DTYPES |= {f"f{bits}": f"float{bits}" for bits in (16, 32, 64)}


def communication_in_hlo(text: str, sizes: dict[str, int]) -> list[Entry]:
    """The arrays of every collective over more than one device in a module, for a mesh with these axis sizes; `what` is
    the name of the instruction.  The padding of a reduce-scatter, whose shards XLA makes whole tiles, does not count.

    Raises ValueError for an unknown kind of collective, or where it is unknown how often one runs.
    """
    module = parse_hlo(text)
    return [
        entry
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if _is_collective(computation, instruction)
        for entry in _read_collective(module, computation, instruction, sizes)
    ]


def _is_collective(computation: Computation, instruction: Instruction) -> bool:
    """Where XLA for TPU has several fusions carry one collective along, only the one in the starting fusion counts."""
    if not re.search("replica_groups=|source_target_pairs=", instruction.attributes):
        return False
    is_carried = "chain_id=" in instruction.attributes
    starts = 'custom_call_target="AsyncCollectiveStart"'
    return not is_carried or any(starts in other.attributes for other in computation.instructions.values())


def _read_collective(
    module: Module, computation: Computation, instruction: Instruction, sizes: dict[str, int]
) -> list[Entry]:
    """The arrays of one; none if every device is in a group of its own, or if the instruction never runs."""
    axis, runs = axis_of_groups(instruction.attributes, sizes), module.runs[computation.name]
    if not axis or runs == 0:
        return []
    if math.isnan(runs):
        raise ValueError(f"it is unknown how often {instruction.name} runs, in {computation.name}")
    operation, dtype = _operation(module, instruction)
    names = instruction.operands
    if computation.name.startswith("all-reduce-scatter"):  # TPU: an all-reduce of which each device keeps its shard
        names = [other.name for other in computation.instructions.values() if other.opcode == "parameter"]
        operation = Operation.reduce_scatter
    direction = _direction(instruction.attributes, in_loop=runs > 1)
    arrays = _arrays(computation, names, dtype)
    return [Entry(instruction.name, operation, axis, dtype, size, int(runs), direction) for dtype, size in arrays]


def _operation(module: Module, instruction: Instruction) -> tuple[Operation, str | None]:
    """(operation, the dtype that it reduces in; None if it does not reduce).

    On TPU the operand may be narrower than the result, where a conversion before the collective was fused into it.
    """
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in OPCODES:
        raise ValueError(f"unknown collective: {instruction.opcode}, {instruction.name}")
    called = dict(instruction.called)
    if "to_apply" not in called:
        return OPCODES[opcode], None
    result = module.computations[called["to_apply"]].root
    operation = REDUCTIONS.get((opcode, result.opcode))
    if operation is None:
        raise ValueError(f"unknown collective: {opcode} by {result.opcode}, {instruction.name}")
    return operation, DTYPES[result.shape.split("[")[0]]


def _arrays(computation: Computation, names: Iterable[str], dtype: str | None) -> list[tuple[str, int]]:
    """(dtype, bytes) of each array of these values, converted to `dtype` if one is given."""
    shapes = [computation.instructions[name].shape for name in names]
    found = [
        (dtype or DTYPES[own], math.prod(int(n) for n in dims.split(",") if n))
        for shape in shapes
        for own, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape)
    ]
    return [(dtype, values * jnp.dtype(dtype).itemsize) for dtype, values in found]


def _direction(attributes: str, *, in_loop: bool) -> Direction:
    """The pass that a collective belongs to, from the op_name that JAX attaches."""
    if "rematted_computation" in attributes:
        return Direction.recompute
    if "transpose(" in attributes:
        return Direction.backward
    return Direction.forward if in_loop else Direction.once


def axis_of_groups(attributes: str, sizes: dict[str, int]) -> str:
    """The mesh axes over which a collective communicates.

    "" if every device is in a group of its own; the groups as a list if they match no axis.  Devices are numbered by
    their position in the mesh, whatever their ids.
    """
    larger = [axis for axis in sizes if sizes[axis] > 1]
    choices = [axes for count in range(len(larger) + 1) for axes in combinations(larger, count)]
    pairs = re.search(r"source_target_pairs=\{([\d,{}]*)\}", attributes)
    if pairs:
        groups = _parse_groups(pairs[1])
        fits = [
            axes for axes in choices if all(any(pair <= group for group in _groups(sizes, axes)) for pair in groups)
        ]
    else:
        groups = replica_groups(attributes, math.prod(sizes.values()))
        fits = [axes for axes in choices if _groups(sizes, axes) == groups]
    return " ".join(fits[0]) if fits else str(sorted(sorted(group) for group in groups))


def _groups(sizes: dict[str, int], axes: tuple[str, ...]) -> set[frozenset[int]]:
    """The groups of devices that communicate over `axes`, taken together."""
    devices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    last = [list(sizes).index(axis) for axis in axes]
    moved = np.moveaxis(devices, last, range(-len(last), 0))
    return {frozenset(group) for group in moved.reshape(-1, math.prod(sizes[axis] for axis in axes)).tolist()}


def replica_groups(attributes: str, devices: int) -> set[frozenset[int]]:
    """The replica groups of a collective, in any of XLA's notations.

    {{0,1},{2,3}} lists them.  [4,2]<=[2,4]T(1,0) numbers a [2, 4] grid, transposes it, and cuts it into 4 groups of 2.
    mesh['a'=2,'b'=4] {'b'} names axes of a grid, whose positions may be renumbered: device_ids=([4,2]T(1,0)).
    """
    named = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{('\w+'(?:,'\w+')*)\}",
        attributes,
    )
    if named:
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        groups = _groups(sizes, tuple(axis for axis in sizes if f"'{axis}'" in named[4]))
        ids = _numbered_grid(named[2], named[3]).reshape(-1) if named[2] else np.arange(devices)
        return {frozenset(int(ids[index]) for index in group) for group in groups}
    rows = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if rows:
        grid = _numbered_grid(rows[2], rows[3]).reshape([int(n) for n in rows[1].split(",")])
        return {frozenset(group) for group in grid.tolist()}
    listed = re.search(r"replica_groups=\{([\d,{}]*)\}", attributes)
    if not listed:
        raise ValueError(f"unknown notation of replica groups: {attributes[:120]}")
    return _parse_groups(listed[1]) or {frozenset(range(devices))}


def _numbered_grid(sides: str, order: str | None) -> np.ndarray:
    """0, 1, 2 ... as a grid with these sides, transposed to this order."""
    shape = [int(n) for n in sides.split(",")]
    grid = np.arange(math.prod(shape)).reshape(shape)
    return grid.transpose([int(n) for n in order.split(",")]) if order else grid


def _parse_groups(text: str) -> set[frozenset[int]]:
    return {frozenset(int(n) for n in group.split(",")) for group in re.findall(r"\{([\d,]+)\}", text)}


# Between slices

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
