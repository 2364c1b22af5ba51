"""Collectives as they were compiled: read from a module's text, with how often each of them runs.

XLA for CPU and for TPU: synchronous, -start and -done, carried along by fusions, or fused with a slice.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from jax import numpy as jnp

from shmap_tp.plan.communication.ledger import Direction, Entry, Operation, part_of
from shmap_tp.plan.hlo_parser import Computation, Instruction, Module, parse

OPCODES = {
    "all-reduce": Operation.all_reduce,
    "all-gather": Operation.all_gather,
    "reduce-scatter": Operation.reduce_scatter,
    "collective-permute": Operation.ppermute,
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


@dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled module."""

    name: str
    entries: tuple[Entry, ...]
    """The arrays it carries; `what` is the instruction's name."""
    padding: int = 0
    """Bytes that the compiler appends to what goes into a reduce-scatter, so that the parts come out in whole tiles."""


def communication_in_hlo(text: str, sizes: dict[str, int]) -> list[Collective]:
    """Every collective of the module over more than one device, on a mesh of these axis sizes.

    Raises ValueError where one is of a kind that is not known here, or where how often it runs cannot be read.
    """
    module = parse(text)
    found = [
        _read(module, computation, instruction, sizes)
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if _counts(computation, instruction)
    ]
    return [collective for collective in found if collective is not None]


def _counts(computation: Computation, instruction: Instruction) -> bool:
    """Whether it is a collective, and if XLA for TPU has it carried along by several fusions, the start of it."""
    if not re.search("replica_groups=|source_target_pairs=", instruction.attributes):
        return False
    rest = computation.instructions.values()
    is_part = "chain_id=" in instruction.attributes
    return not is_part or any('custom_call_target="AsyncCollectiveStart"' in other.attributes for other in rest)


def _read(
    module: Module, computation: Computation, instruction: Instruction, sizes: dict[str, int]
) -> Collective | None:
    """None where every device is alone, or where it never runs."""
    axis, runs = _axis(instruction.attributes, sizes), module.runs[computation.name]
    if not axis or runs == 0:
        return None
    if math.isnan(runs):
        raise ValueError(f"who knows how often {instruction.name} runs, in {computation.name}")
    operation, dtype = _operation(module, instruction)
    arrays, padding = _arrays(computation, instruction.operands, dtype), 0
    if computation.name.startswith("all-reduce-scatter"):  # on TPU: an all-reduce of which each device keeps its part
        inputs = [other.name for other in computation.instructions.values() if other.opcode == "parameter"]
        padded, operation, arrays = arrays, Operation.reduce_scatter, _arrays(computation, inputs, dtype)
        padding = sum(size for _, size in padded) - sum(size for _, size in arrays)
    towards = _direction(instruction.attributes, looped=runs > 1)
    entries = (Entry(instruction.name, operation, axis, dtype, size, int(runs), towards) for dtype, size in arrays)
    return Collective(instruction.name, tuple(entries), padding)


def _operation(module: Module, instruction: Instruction) -> tuple[Operation, str | None]:
    """(what it does, the dtype it reduces in).

    On TPU what goes in may be narrower than the sum that comes out: a conversion that stood before it.
    """
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in OPCODES:
        raise ValueError(f"a collective that the ledger does not know: {instruction.opcode}, {instruction.name}")
    called = dict(instruction.called)
    if "to_apply" not in called:
        return OPCODES[opcode], None
    result = module.computations[called["to_apply"]].root
    operation = REDUCTIONS.get((opcode, result.opcode))
    if operation is None:
        raise ValueError(f"a collective that the ledger does not know: {opcode} by {result.opcode}, {instruction.name}")
    return operation, DTYPES[result.shape.split("[")[0]]


def _arrays(computation: Computation, names: Iterable[str], dtype: str | None) -> list[tuple[str, int]]:
    """(dtype, bytes) of each array that these values hold, in `dtype` if there is one."""
    shapes = [computation.instructions[name].shape for name in names]
    found = [
        (dtype or DTYPES[own], math.prod(int(n) for n in dims.split(",") if n))
        for shape in shapes
        for own, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape)
    ]
    return [(dtype, values * jnp.dtype(dtype).itemsize) for dtype, values in found]


def _direction(attributes: str, *, looped: bool) -> Direction:
    """By what JAX writes into the name of an instruction."""
    if "rematted_computation" in attributes:
        return Direction.recompute
    if "transpose(" in attributes:
        return Direction.backward
    return Direction.forward if looped else Direction.once


# Which axis


def _axis(attributes: str, sizes: dict[str, int]) -> str:
    """The axes, or the part of one, over which these devices talk, "" where each is alone; the groups as written if
    they are neither.

    Devices are numbered by their place in the mesh, whatever their ids.
    """
    larger = [axis for axis in sizes if sizes[axis] > 1]
    choices = [axes for count in range(len(larger) + 1) for axes in combinations(larger, count)]
    pairs = re.search(r"source_target_pairs=\{([\d,{}]*)\}", attributes)
    if pairs:
        met = _listed(pairs[1])
        fits = [axes for axes in choices if all(any(pair <= group for group in _groups(sizes, axes)) for pair in met)]
    else:
        met = replica_groups(attributes, math.prod(sizes.values()))
        fits = [axes for axes in choices if _groups(sizes, axes) == met]
        fits = fits or [(name,) for name, within in _parts(sizes) if _groups(within, (name,)) == met]
    return " ".join(fits[0]) if fits else str(sorted(sorted(group) for group in met))


def _parts(sizes: dict[str, int]) -> Iterator[tuple[str, dict[str, int]]]:
    """(its name, the sizes of the mesh with that axis cut so) of every part of an axis (`ledger.part_of`)."""
    for cut, size in sizes.items():
        whole = [(count, apart) for count in range(2, size) for apart in range(1, size) if size % (count * apart) == 0]
        for count, apart in whole:
            name = part_of(cut, count, apart)
            inner = {f"{cut} outside": size // count // apart, name: count, f"{cut} inside": apart}
            yield name, {key: n for axis in sizes for key, n in (inner if axis == cut else {axis: sizes[axis]}).items()}


def _groups(sizes: dict[str, int], axes: tuple[str, ...]) -> set[frozenset[int]]:
    """Which devices meet over `axes`, taken together."""
    places = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    last = [list(sizes).index(axis) for axis in axes]
    moved = np.moveaxis(places, last, range(-len(last), 0))
    return {frozenset(group) for group in moved.reshape(-1, math.prod(sizes[axis] for axis in axes)).tolist()}


def replica_groups(attributes: str, devices: int) -> set[frozenset[int]]:
    """{{0,1},{2,3}} lists them; [4,2]<=[2,4]T(1,0) numbers a [2, 4] grid, transposes it, cuts it into 4 rows;
    mesh['a'=2,'b'=4] {'b'} names axes of a grid, whose places may be numbered otherwise: device_ids=([4,2]T(1,0))."""
    named = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{('\w+'(?:,'\w+')*)\}",
        attributes,
    )
    if named:
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        groups = _groups(sizes, tuple(axis for axis in sizes if f"'{axis}'" in named[4]))
        ids = _numbered(named[2], named[3]).reshape(-1) if named[2] else np.arange(devices)
        return {frozenset(int(ids[index]) for index in group) for group in groups}
    rows = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if rows:
        places = _numbered(rows[2], rows[3]).reshape([int(n) for n in rows[1].split(",")])
        return {frozenset(group) for group in places.tolist()}
    listed = re.search(r"replica_groups=\{([\d,{}]*)\}", attributes)
    if not listed:
        raise ValueError(f"replica groups in another form: {attributes[:120]}")
    return _listed(listed[1]) or {frozenset(range(devices))}


def _numbered(grid: str, order: str | None) -> np.ndarray:
    """0, 1, 2 ... as a grid of these sides, its dims put into that order."""
    sides = [int(n) for n in grid.split(",")]
    places = np.arange(math.prod(sides)).reshape(sides)
    return places.transpose([int(n) for n in order.split(",")]) if order else places


def _listed(text: str) -> set[frozenset[int]]:
    return {frozenset(int(n) for n in group.split(",")) for group in re.findall(r"\{([\d,]+)\}", text)}
