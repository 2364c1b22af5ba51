"""Collectives as traced: read from a jaxpr, with how often each of them runs."""

from typing import Any

import jax
from jax.extend import core

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
    return _collectives(jaxpr, scope="", scans=0, times=1)


def _collectives(jaxpr: Any, scope: str, scans: int, times: int) -> list[Entry]:
    """`scans`: how many scans `jaxpr` is nested in.  `times`: how often it runs."""
    found = []
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        here = f"{scope}/{equation.source_info.name_stack}".strip("/")
        axes = _axes(params)
        if axes and name not in WITHOUT_COMMUNICATION:
            if name not in OPERATIONS:
                raise ValueError(f"unknown collective: {equation}")
            axis = group_name(" ".join(axes), params.get("axis_index_groups"))
            direction = _direction(here, scans)
            found += [
                Entry(here, OPERATIONS[name], axis, str(x.dtype), x.size * x.dtype.itemsize, times, direction)
                for x in (var.aval for var in equation.invars)
            ]
        inner = (scans + 1, times * params["length"]) if name == "scan" else (scans, times)
        nested = [entry for body in bodies(params) for entry in _collectives(body, here, *inner)]
        if nested and name in ("while", "cond"):
            first = nested[0]
            raise ValueError(
                f"it is unknown how often this runs: {first.operation} over {first.axis} in a {name}, {here}"
            )
        found += nested
    return found


def _axes(params: dict[str, Any]) -> tuple[str, ...]:
    """The mesh axes of an equation; the `axes` of other primitives are integers, dims of an array."""
    axes = params.get("axes", params.get("axis_name", ()))
    axes = axes if isinstance(axes, (tuple, list)) else (axes,)
    return tuple(axis for axis in axes if isinstance(axis, str))


def _direction(scope: str, scans: int) -> Direction:
    """JAX marks transposed and rematerialised equations in their name stack."""
    if "rematted_computation" in scope:
        return Direction.recompute
    if "transpose(" in scope:
        return Direction.backward
    return Direction.forward if scans else Direction.once


def bodies(params: dict[str, Any]) -> list[core.Jaxpr]:
    """The jaxprs among the parameters of an equation."""
    kinds = (core.Jaxpr, core.ClosedJaxpr)
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, kinds))
    return [x.jaxpr if isinstance(x, core.ClosedJaxpr) else x for x in leaves if isinstance(x, kinds)]
