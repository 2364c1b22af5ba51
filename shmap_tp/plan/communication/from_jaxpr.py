"""Collectives as traced: read from the jaxpr of any program, such as a whole step, with how often each of them runs."""

import re
from collections import Counter
from dataclasses import replace
from typing import Any

from shmap_tp.model.tracing import Visit, equations
from shmap_tp.plan.communication.ledger import Direction, Entry, Operation

OPERATIONS = {
    "psum": Operation.all_reduce,
    "psum_invariant": Operation.all_reduce,
    "pmax": Operation.max,
    "all_gather": Operation.all_gather,
    "all_gather_invariant": Operation.all_gather,
    "reduce_scatter": Operation.reduce_scatter,
    "all_to_all": Operation.all_to_all,
    "ppermute": Operation.ppermute,
}

WITHOUT_COMMUNICATION = {"pvary", "pcast", "axis_index"}
"""Primitives that name a mesh axis but communicate nothing."""


NAMES = {"blocks": "block", "mlp": "MLP", "cross_entropy": "loss", "dp_gradient_reduction": "gradients"}
"""How named scopes are printed, where not as they are."""
WITHOUT_NAME = {"rematted_computation", "checkpoint", "while", "body", "closed_call", ""}
"""Parts of a name stack that JAX adds."""


def communication_in_jaxpr(jaxpr: Any) -> list[Entry]:
    """Every collective of `jaxpr` and of the jaxprs inside it; equal arrays of one part of the model are one entry.

    Raises ValueError for an unknown collective, or where it is unknown how often one runs: in a while loop or a branch.
    """
    counts: Counter[Entry] = Counter()
    for visit in equations(jaxpr):
        if _axes(visit.equation.params) and visit.name not in WITHOUT_COMMUNICATION:
            for entry in _arrays(visit):
                counts[replace(entry, count=0)] += entry.count
    return [replace(entry, count=count) for entry, count in counts.items()]


def _arrays(visit: Visit) -> list[Entry]:
    """The arrays that a collective communicates.  Raises ValueError as above."""
    if visit.name not in OPERATIONS:
        raise ValueError(f"unknown collective: {visit.equation}")
    operation, axis = OPERATIONS[visit.name], " ".join(_axes(visit.equation.params))
    if visit.loop:
        raise ValueError(f"it is unknown how often this runs: {operation} over {axis} in a {visit.loop}, {visit.scope}")
    what, direction = _part(visit.scope), _direction(visit)
    arrays = [var.aval for var in visit.equation.invars]
    return [
        Entry(what, operation, axis, str(x.dtype), x.size * x.dtype.itemsize, visit.times, direction) for x in arrays
    ]


def _part(scope: str) -> str:
    """The part of the program that communicates, by its innermost named scope."""
    names = [name for name in re.sub(r"\w+\(|\)", "", scope).split("/") if name not in WITHOUT_NAME]
    return NAMES.get(names[-1], names[-1]) if names else "step"


def _axes(params: dict[str, Any]) -> tuple[str, ...]:
    """The mesh axes of an equation; the `axes` of other primitives are integers, dims of an array."""
    axes = params.get("axes", params.get("axis_name", ()))
    if not axes:
        return ()
    axes = axes if isinstance(axes, (tuple, list)) else (axes,)
    return tuple(axis for axis in axes if isinstance(axis, str))


def _direction(visit: Visit) -> Direction:
    """The pass that an equation belongs to: what is neither in a loop nor differentiated runs once."""
    if visit.is_recomputed:
        return Direction.recompute
    if visit.is_backward:
        return Direction.backward
    return Direction.forward if visit.scans or "jvp(" in visit.scope else Direction.once
