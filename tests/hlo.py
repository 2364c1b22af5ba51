"""Collectives, read from a jaxpr (what was written) and from compiled HLO (what runs)."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import Mesh

KINDS = {
    "psum_invariant": "all_reduce",
    "psum": "all_reduce",
    "pmax": "max",
    "pmin": "min",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ppermute": "ppermute",
}


@dataclass(frozen=True)
class Wire:
    """One collective of a jaxpr: what it does, over which axes, how many values of each device and of which dtype,
    inside how many scans, and how often it runs."""

    kind: str
    axes: tuple[str, ...]
    size: int
    dtype: str
    scans: int
    times: int


def wires(jaxpr: Any, scans: int = 0, times: int = 1) -> list[Wire]:
    """Every collective in `jaxpr` and in what it calls, one for each array that travels."""
    found = []
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name in KINDS:
            axes = params.get("axes", params.get("axis_name"))
            axes = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
            arrays = [var.aval for var in equation.invars]
            found += [Wire(KINDS[name], axes, x.size, str(x.dtype), scans, times) for x in arrays]
        inner = (scans + 1, times * params["length"]) if name == "scan" else (scans, times)
        assert name != "while" or not any(wires(body) for body in bodies(params)), "who knows how often"
        for body in bodies(params):
            found += wires(body, *inner)
    return found


def bodies(params: dict[str, Any]) -> list[core.Jaxpr]:
    """The jaxprs among the parameters of an equation."""
    kinds = (core.Jaxpr, core.ClosedJaxpr)
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, kinds))
    return [x.jaxpr if isinstance(x, core.ClosedJaxpr) else x for x in leaves if isinstance(x, kinds)]


def counted(found: list[Wire]) -> Counter[tuple[str, tuple[str, ...]]]:
    """How often each kind of collective runs over each set of axes."""
    total = Counter()
    for wire in found:
        total[wire.kind, wire.axes] += wire.times
    return total


def equations(jaxpr: Any) -> int:
    return len(jaxpr.eqns) + sum(equations(body) for equation in jaxpr.eqns for body in bodies(equation.params))


@dataclass(frozen=True)
class AllReduce:
    """One all-reduce of compiled HLO: over which axis, the sizes of the arrays it carries, whether inside a loop.

    Not their dtypes: on a CPU XLA sums bfloat16 in float32."""

    axis: str
    sizes: tuple[int, ...]
    in_loop: bool


def all_reduces(text: str, mesh: Mesh) -> list[AllReduce]:
    """Every all-reduce instruction of an HLO module over one axis of `mesh`."""
    groups = {axis: _groups(mesh, i) for i, axis in enumerate(mesh.axis_names)}
    found, entry = [], False
    for line in text.splitlines():
        if line.startswith(("ENTRY", "%")) and line.rstrip().endswith("{"):
            entry = line.startswith("ENTRY")
        match = re.match(r"\s*(?:ROOT )?%?\S+ = (.+?) all-reduce(?:-start)?\(", line)
        if match:
            shapes = re.findall(r"\b[a-z]+\d+\[([\d,]*)\]", match[1])
            sizes = tuple(int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes)
            found.append(AllReduce(_axis(line, groups), sizes, in_loop=not entry))
    return found


def _groups(mesh: Mesh, axis: int) -> set[frozenset[int]]:
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    return {frozenset(group.tolist()) for group in np.moveaxis(ids, axis, -1).reshape(-1, ids.shape[axis])}


def _axis(line: str, groups: dict[str, set[frozenset[int]]]) -> str:
    """jax 0.10 lists the groups; from 0.11 on they are named by the axis of the mesh."""
    named = re.search(r"replica_groups=mesh\[[^\]]*\] ?\{'(\w+)'\}", line)
    if named:
        return named[1]
    listed = re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line)
    assert listed, f"replica groups in another form: {line}"
    ids = {frozenset(int(n) for n in group.split(",")) for group in re.findall(r"\{([\d,]+)\}", listed[1])}
    return next(axis for axis, wanted in groups.items() if ids == wanted)
