"""Collectives as traced: read from a jaxpr, with how often each of them runs.

`communication_in_jaxpr` reads them from any program, such as a whole step.  `model_communication` traces a model's own
modules, forward and backward, with a tensor-parallel mode whose calls have named scopes: nothing here knows a layer or
a mode.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.typing import DTypeLike

from shmap_tp.model.abstract_trace import trace_gradients
from shmap_tp.model.jaxprs import Visit, equations
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.tensor_parallel import TensorParallel
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


def communication_in_jaxpr(jaxpr: Any) -> list[Entry]:
    """Every collective of `jaxpr` and of the jaxprs inside it: one entry per array; `what` is its named scope.

    Raises ValueError for an unknown collective, or where it is unknown how often one runs: in a while loop or a branch.
    """
    return [entry for visit in _collectives(jaxpr) for entry in _arrays(visit, _direction(visit))]


def _collectives(jaxpr: Any) -> Iterator[Visit]:
    """The equations that communicate."""
    for visit in equations(jaxpr):
        if _axes(visit.equation.params) and visit.name not in WITHOUT_COMMUNICATION:
            yield visit


def _arrays(visit: Visit, direction: Direction) -> list[Entry]:
    """The arrays that a collective communicates.  Raises ValueError as above."""
    axes = _axes(visit.equation.params)
    if visit.name not in OPERATIONS:
        raise ValueError(f"unknown collective: {visit.equation}")
    axis = " ".join(axes)
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
    if not axes:
        return ()
    axes = axes if isinstance(axes, (tuple, list)) else (axes,)
    return tuple(axis for axis in axes if isinstance(axis, str))


def _direction(visit: Visit) -> Direction:
    """The pass of an equation in a program that computes its microbatches in a scan."""
    if visit.is_recomputed:
        return Direction.recompute
    if visit.is_backward:
        return Direction.backward
    return Direction.forward if visit.scans else Direction.once


# The modules of a model

CALLS = {"column_parallel": "column-parallel", "row_parallel": "row-parallel", "enter": "enter", "reduce": "reduce"}
"""The methods of a tensor-parallel mode that communicate, and what the ledger calls them."""
CALL = re.compile(f"tensor_parallel_({'|'.join(CALLS)})")
"""The named scope of a call."""
WITHOUT_NAME = {"rematted_computation", "checkpoint", "while", "body", "closed_call", ""}
"""Parts of a name stack that JAX adds."""
NAMES = {"blocks": "block", "mlp": "MLP"}
"""How named scopes of the model are printed, where not as they are."""
IN_A_LAYER = ", in a layer"
"""Ends the name of what a layer communicates by itself, or JAX for it: a replicated parameter that is applied to values
sharded over mp has a gradient that is summed over mp."""


def model_communication(
    shapes: Transformer,
    tp: TensorParallel,
    tokens: tuple[int, int],
    sizes: Mapping[str, int],
    dtype: DTypeLike,
    is_gathered: Any = None,
    is_trained: Any = None,
) -> list[Entry]:
    """Everything that a model communicates in one microbatch of tokens[B T] on a device, over any axis, from the
    embedding to the final norm and back, computing in `dtype`, on a mesh with these axis sizes.  Not part of it: what
    gathers parameters and reduces their gradients over token axes.

    `shapes` are the parameters, in the dtype in which layers are given them; `is_gathered` and `is_trained` as for
    `trace_gradients`.  Equal arrays of one part of the model are one entry.  Raises ValueError where it is unknown how
    often something runs.
    """
    counts: Counter[Entry] = Counter()
    about = {"is_gathered": is_gathered, "is_trained": is_trained}
    for visit in _collectives(trace_gradients(shapes, _with_scopes(tp), tokens, sizes=sizes, dtype=dtype, **about)):
        direction = Direction.recompute if visit.is_recomputed else Direction.forward
        for entry in _arrays(visit, Direction.backward if visit.is_backward else direction):
            counts[replace(entry, what=_what(visit.scope, entry.operation), count=0)] += entry.count
    return [replace(entry, count=count) for entry, count in counts.items()]


def _with_scopes(tp: TensorParallel) -> TensorParallel:
    """A copy of a mode, of a subclass whose calls are in named scopes, also those that the mode makes itself."""

    def with_scope(name: str) -> Callable:
        method = getattr(type(tp), name)

        def call(self: TensorParallel, *arguments: Any) -> Any:
            with jax.named_scope(f"tensor_parallel_{name}"):
                return method(self, *arguments)

        return call

    made = object.__new__(type("WithScopes", (type(tp),), {name: with_scope(name) for name in CALLS}))
    vars(made).update(vars(tp))
    return made


def _what(scope: str, operation: Operation) -> str:
    """The part of the model that communicates, by its innermost named scope, and the call.  In a product that is no
    ring, all but `enter` and `reduce` belongs to its layers."""
    call = (CALL.findall(scope) or [""])[-1]
    is_call = call in ("enter", "reduce") or (call and operation == Operation.ppermute)
    parts = re.sub(r"\w+\(|\)", "", scope).split("/")
    names = [part for part in parts if part not in WITHOUT_NAME and part.isidentifier() and not CALL.match(part)]
    part = NAMES.get(names[-1], names[-1]) if names else "model"
    return f"{part} {CALLS[call]}" if is_call else f"{part}{IN_A_LAYER}"
