"""What a model asks of its tensor-parallel mode, found by tracing its modules: nothing here knows a layer.

The forward and backward pass of the model are traced with a mode that records its calls (`Recording`).  In the traced
program each call is found in the passes in which it runs: forward, again where rematerialisation repeats it, backward.
The rules of `analytic.py` say what a call communicates in each pass.

A layer may also communicate over mp by itself, or JAX may for it: a replicated parameter that is applied to values
sharded over mp has a gradient that is summed over mp.  Such collectives are returned as they are traced.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from shmap_tp.model.abstract_trace import trace_gradients
from shmap_tp.model.jaxprs import Visit, equations
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.collectives import varying_axes
from shmap_tp.parallel.mesh import MP, abstract_mesh
from shmap_tp.parallel.tensor_parallel import Activation, Linear, TensorParallel
from shmap_tp.plan.communication.from_jaxpr import collective
from shmap_tp.plan.communication.ledger import Direction, Entry

MARK = re.compile(r"tensor_parallel_call_(\d+)")
"""The named scope of the n-th recorded call."""

WITHOUT_NAME = {"rematted_computation", "checkpoint", "while", "body", "closed_call", ""}
"""Parts of a name stack that JAX adds."""
NAMES = {"blocks": "block", "mlp": "MLP"}
"""How named scopes of the model are printed, where not as they are."""

IN_A_LAYER = ", in a layer"
"""Ends the name of what a layer communicates by itself."""


@dataclass(frozen=True)
class Call:
    """A call of a tensor-parallel mode."""

    method: str
    """column_parallel, row_parallel, enter or reduce."""
    values: int
    """The size of x[B T D], all of its positions, on one device."""
    dtype: str


@dataclass(frozen=True)
class TracedCall:
    """A call in one pass of the traced program."""

    call: Call
    what: str
    """The part of the model that makes it, such as attention."""
    direction: Direction
    count: int


@dataclass(frozen=True)
class Recording:
    """A tensor-parallel mode that computes like `mode`, and records its calls.

    `mode` must make its products of `enter` and `reduce`, as AllReduce and SequenceParallel do.
    """

    mode: TensorParallel
    calls: list[Call] = field(default_factory=list)
    product: str | None = None
    """The method that `enter` or `reduce` is called for, where the model does not call them itself."""

    def column_parallel(self, x_BTD: Float[Array, "B _ D"], *layers: Linear) -> tuple[Activation, ...]:
        return type(self.mode).column_parallel(replace(self, product="column_parallel"), x_BTD, *layers)

    def row_parallel(self, *products: tuple[Activation, Linear]) -> Float[Array, "B _ D"]:
        return type(self.mode).row_parallel(replace(self, product="row_parallel"), *products)

    def enter(self, x_BTD: Float[Array, "B _ D"]) -> Float[Array, "B T D"]:
        entered_BTD = self._in_scope_of_its_own(self.mode.enter, x_BTD)
        self.calls.append(Call(self.product or "enter", entered_BTD.size, entered_BTD.dtype.name))
        return entered_BTD

    def reduce(self, y_BTD: Float[Array, "B T D"]) -> Float[Array, "B _ D"]:
        reduced_BTD = self._in_scope_of_its_own(self.mode.reduce, y_BTD)
        self.calls.append(Call(self.product or "reduce", y_BTD.size, y_BTD.dtype.name))
        return reduced_BTD

    def concat_time(self, y: Activation) -> Float[Array, "B T ..."]:
        return self.mode.concat_time(y)

    def split_time(self, y: Float[Array, "B T ..."]) -> Activation:
        return self.mode.split_time(y)

    def local_positions(self, w_TD: Float[Array, "T D"], time: int) -> Float[Array, "time D"]:
        return self.mode.local_positions(w_TD, time)

    def mark_varying(self, params: Any) -> Any:
        return self.mode.mark_varying(params)

    def _in_scope_of_its_own(self, method: Callable[[Array], Array], x: Array) -> Array:
        with jax.named_scope(f"tensor_parallel_call_{len(self.calls)}"):
            return method(x)


def model_calls(
    shapes: Transformer, mode: TensorParallel, tokens: tuple[int, int], mp: int, dtype: DTypeLike
) -> tuple[list[TracedCall], list[Entry]]:
    """(the calls of a model's modules in each pass, what layers communicate over mp by themselves), for one microbatch
    of tokens[B T] on a device, computing in `dtype`.

    `shapes` are the parameters, in the dtype in which layers are given them.  Raises ValueError where it is unknown how
    often something runs.
    """
    recording = Recording(mode)
    jaxpr = trace_gradients(shapes, recording, tokens, mp=mp, dtype=dtype)
    calls: dict[tuple[int, Direction], TracedCall] = {}
    own: list[Entry] = []
    for visit in equations(jaxpr):
        direction, what = _direction(visit), _name(visit.scope)
        if found := MARK.search(visit.scope):
            number = int(found[1])
            if visit.loop:
                raise ValueError(f"it is unknown how often a {visit.loop} in {what} runs")
            calls[number, direction] = TracedCall(recording.calls[number], what, direction, visit.times)
            continue
        own += _over_mp(visit, what)
    return list(calls.values()), own


def traced_communication(
    shapes: Transformer, tp: TensorParallel, tokens: tuple[int, int], mp: int, dtype: DTypeLike
) -> list[Entry]:
    """Everything that a model communicates over mp in a microbatch, as it is traced: for modes that have no rule."""
    found = equations(trace_gradients(shapes, tp, tokens, mp=mp, dtype=dtype))
    return [entry for visit in found for entry in _over_mp(visit, _name(visit.scope))]


def gradients_are_partial(tp: TensorParallel) -> bool:
    """Whether in this mode the gradients of parameters replicated over mp are partial sums until the end of a step."""

    def varies(w: Array) -> Array:
        found.append(MP in varying_axes(tp.mark_varying(w)))
        return w

    found: list[bool] = []
    mesh = abstract_mesh(1, 1)
    jax.make_jaxpr(jax.shard_map(varies, mesh=mesh, in_specs=P(), out_specs=P()))(jnp.zeros(()))
    return found[0]


def _over_mp(visit: Visit, what: str) -> list[Entry]:
    """What an equation communicates over mp."""
    entries = collective(visit, _direction(visit))
    return [replace(entry, what=f"{what}{IN_A_LAYER}") for entry in entries if entry.axis == MP]


def _direction(visit: Visit) -> Direction:
    if visit.is_recomputed:
        return Direction.recompute
    return Direction.backward if visit.is_backward else Direction.forward


def _name(scope: str) -> str:
    """The innermost named scope of the model."""
    parts = re.sub(r"\w+\(|\)", "", MARK.split(scope)[0]).split("/")
    names = [part for part in parts if part not in WITHOUT_NAME and part.isidentifier()]
    return NAMES.get(names[-1], names[-1]) if names else "model"
