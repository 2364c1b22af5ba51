"""Collectives as they were written: read from a jaxpr, with how often each of them runs."""

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


SILENT = {"pvary", "pcast", "axis_index"}
"""They name an axis and move nothing over it."""


def communication_in_jaxpr(jaxpr: Any) -> list[Entry]:
    """Every collective in `jaxpr` and in what it calls, one entry for each array that travels; `what` is its scope.

    Raises ValueError where a collective is not known here, or where how often it runs cannot be read: in a while loop,
    or in a branch.
    """
    return _written(jaxpr, "", 0, 1)


def _written(jaxpr: Any, scope: str, scans: int, times: int) -> list[Entry]:
    found = []
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        here = f"{scope}/{equation.source_info.name_stack}".strip("/")
        axes = _axes(params)
        if axes and name not in SILENT:
            if name not in OPERATIONS:
                raise ValueError(f"a collective that the ledger does not know: {equation}")
            axis = group_name(" ".join(axes), params.get("axis_index_groups"))
            found += [
                Entry(here, OPERATIONS[name], axis, str(x.dtype), x.size * x.dtype.itemsize, times, towards)
                for x, towards in ((var.aval, _direction(here, scans)) for var in equation.invars)
            ]
        inner = (scans + 1, times * params["length"]) if name == "scan" else (scans, times)
        below = [entry for body in bodies(params) for entry in _written(body, here, *inner)]
        if below and name in ("while", "cond"):
            raise ValueError(f"who knows how often: {below[0].operation} over {below[0].axis} in a {name}, {here}")
        found += below
    return found


def _axes(params: dict[str, Any]) -> tuple[str, ...]:
    """The mesh axes that an equation names; `axes` of other primitives are dims of an array."""
    axes = params.get("axes", params.get("axis_name", ()))
    axes = axes if isinstance(axes, (tuple, list)) else (axes,)
    return tuple(axis for axis in axes if isinstance(axis, str))


def _direction(scope: str, scans: int) -> Direction:
    """JAX writes into the scope of an equation that it is a transposed one, or computed again."""
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
