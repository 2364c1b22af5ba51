"""Collectives as traced: read from a jaxpr, with how often each of them runs."""

from typing import Any

from shmap_tp.model.jaxprs import Visit, equations
from shmap_tp.plan.communication.ledger import Direction, Entry, Operation, group_name

OPERATIONS = {
    "psum": Operation.all_reduce,
    "psum_invariant": Operation.all_reduce,
    "pmax": Operation.max,
    "all_gather": Operation.all_gather,
    "all_gather_invariant": Operation.all_gather,
    "reduce_scatter": Operation.reduce_scatter,
    "ppermute": Operation.ppermute,
}

WITHOUT_COMMUNICATION = {"pvary", "pcast", "axis_index"}
"""Primitives that name a mesh axis but communicate nothing."""


def communication_in_jaxpr(jaxpr: Any) -> list[Entry]:
    """Every collective of `jaxpr` and of the jaxprs inside it: one entry per array; `what` is its named scope.

    Raises ValueError for an unknown collective, or where it is unknown how often one runs: in a while loop or a branch.
    """
    return [entry for visit in equations(jaxpr) for entry in collective(visit, _direction(visit))]


def collective(visit: Visit, direction: Direction) -> list[Entry]:
    """The arrays that one equation communicates; none where it is no collective.  Raises ValueError as above."""
    params = visit.equation.params
    axes = _axes(params)
    if not axes or visit.name in WITHOUT_COMMUNICATION:
        return []
    if visit.name not in OPERATIONS:
        raise ValueError(f"unknown collective: {visit.equation}")
    axis = group_name(" ".join(axes), params.get("axis_index_groups"))
    operation = OPERATIONS[visit.name]
    if visit.loop:
        raise ValueError(f"it is unknown how often this runs: {operation} over {axis} in a {visit.loop}, {visit.scope}")
    arrays = [var.aval for var in visit.equation.invars]
    return [
        Entry(visit.scope, operation, axis, str(x.dtype), x.size * x.dtype.itemsize, visit.times, direction)
        for x in arrays
    ]


def _axes(params: dict[str, Any]) -> tuple[str, ...]:
    """The mesh axes of an equation; the `axes` of other primitives are integers, dims of an array."""
    axes = params.get("axes", params.get("axis_name", ()))
    axes = axes if isinstance(axes, (tuple, list)) else (axes,)
    return tuple(axis for axis in axes if isinstance(axis, str))


def _direction(visit: Visit) -> Direction:
    """The pass of an equation in a program that computes its microbatches in a scan."""
    if visit.is_recomputed:
        return Direction.recompute
    if visit.is_backward:
        return Direction.backward
    return Direction.forward if visit.scans else Direction.once
