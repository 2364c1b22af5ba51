"""Which devices talk to each other in a collective, in the three ways that HLO writes it.

    replica_groups={{0,1},{2,3}}              every group
    replica_groups=[2,2]<=[2,2]T(1,0)         2 groups of 2: the numbers 0..3 as [2,2], transposed, then cut
    replica_groups=mesh['dp'=2,'mp'=2]{'mp'}  along an axis of a named mesh in row-major order (jax 0.11 and later)

Numbers are places in the program's device assignment: the mesh's devices, row by row.
"""

import re

import numpy as np

from shmap_tp.plan.hlo import Instruction

_LISTED = re.compile(r"replica_groups=\{(\{[\d,{} ]*\})?\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=@?\w*mesh[\[<]([^\]>]*)[\]>] ?\{([^}]*)\}")


def replica_groups(instruction: Instruction, devices: int) -> list[list[int]]:
    """The groups of a collective, each in its order.  Raises ValueError where they are written in another way."""
    text = instruction.attributes
    if found := _IOTA.search(text):
        shape, ids, order = (_numbers(part) for part in found.groups())
        numbers = np.arange(np.prod(ids)).reshape(ids)
        return numbers.transpose(order or range(len(ids))).reshape(shape).tolist()
    if found := _MESH.search(text):
        axes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        along = re.findall(r"'(\w+)'", found[2])
        numbers = np.arange(devices).reshape([int(size) for size in axes.values()])
        moved = [list(axes).index(axis) for axis in along]
        size = int(np.prod([int(axes[axis]) for axis in along]))
        return np.moveaxis(numbers, moved, range(-len(moved), 0)).reshape(-1, size).tolist()
    if found := _LISTED.search(text):
        listed = [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", found[1] or "")]
        return listed or [list(range(devices))]
    raise ValueError(f"{instruction.name}: replica groups in another form: {text[:200]}")


def source_target_pairs(instruction: Instruction) -> list[tuple[int, int]]:
    """(from, to) of a collective-permute."""
    found = re.search(r"source_target_pairs=\{(.*?)\}\}", instruction.attributes)
    return [tuple(_numbers(pair)) for pair in re.findall(r"\{?(\d+,\d+)", found[1])] if found else []


def _numbers(text: str | None) -> list[int]:
    return [int(n) for n in text.split(",") if n] if text else []
