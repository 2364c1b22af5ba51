"""Steps are replayed: the loss and gradients of a microbatch are computed twice from the same bits, and compared.

A device that computes wrongly now and then leaves no trace: the loss stays finite, and where weights are sharded (FSDP,
tensor parallelism) there is no replica to compare with.  Between two collectives, however, a device computes alone.  So
of two runs of one program on the same bits, the first collective in program order whose operand or result differs tells
the device: all that any device had received before was the same in both.

    shards of the state, rows           --fingerprint-->  the first columns of table[devices places]
    operands, results of collectives    --fingerprint-->  the next ones, in program order
    loss and reduced gradients          --fingerprint-->  the last ones

One compiled program is called twice, so that the compiler cannot merge the two computations.  Its microbatch is the
first of the step; the second call reads the rows of that anew.

Cost    in N steps the loss and gradients of two microbatches and their communication, a pass over the state and over
        what is communicated, 4 bytes a place and device; and the devices wait for the host.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import Mesh, get_abstract_mesh
from jaxtyping import Array, UInt32

from shmap_tp.errors import HardwareError
from shmap_tp.model.tracing import Visit, bodies, equations
from shmap_tp.parallel.collectives import mark_varying
from shmap_tp.parallel.partitioning import leaves_by_path
from shmap_tp.training.integrity import device_name, fingerprint, of_all_devices

Watched = tuple[list[Any], list[str], Array]
"""(results, what each fingerprint is of, fingerprints[places]) of a part of a program."""


class Fingerprints(eqx.Module):
    """The fingerprints of this device, or outside of shard_map of all, in program order."""

    table: UInt32[Array, "devices places"]
    places: tuple[str, ...] = eqx.field(static=True)
    """What each is of."""


def watched(function: Callable[..., Any], **arguments: Any) -> Fingerprints:
    """The fingerprints of function(**arguments), within shard_map: of this device's shards of the arguments, of what
    each collective receives and returns, and of the results.  Communication: that of the function."""
    leaves, tree = jax.tree.flatten(arguments)
    program, shapes = jax.make_jaxpr(lambda *x: function(**jax.tree.unflatten(tree, x)), return_shape=True)(*leaves)
    results, places, within = _watch(program.jaxpr, program.consts, leaves, "")
    found = leaves_by_path(jax.tree.unflatten(jax.tree.structure(shapes), results))
    given = leaves_by_path(arguments)
    table = jnp.concatenate([_fingerprints(given.values()), within, _fingerprints(found.values())])
    return Fingerprints(table[None], (*given, *places, *found))


def _fingerprints(arrays: Any) -> Array:
    """One for each, [arrays], typed as varying over all axes."""
    each = mark_varying([fingerprint(x) for x in arrays], get_abstract_mesh().axis_names)
    return jnp.stack(each) if each else mark_varying(jnp.zeros(0, jnp.uint32), get_abstract_mesh().axis_names)


def _watch(jaxpr: core.Jaxpr, constants: list[Any], arguments: list[Any], scope: str) -> Watched:
    """Evaluates a jaxpr that stands within the named scopes `scope`."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))
    places, found = [], [_fingerprints([])]

    def read(atoms: list[Any]) -> list[Any]:
        return [atom.val if isinstance(atom, core.Literal) else values[atom] for atom in atoms]

    for equation in jaxpr.eqns:
        results, more, fingerprints = _watch_equation(equation, read(equation.invars), scope)
        values.update(zip(equation.outvars, results, strict=True))
        places += more
        found.append(fingerprints)
    return read(jaxpr.outvars), places, jnp.concatenate(found)


def _watch_equation(equation: core.JaxprEqn, operands: list[Any], scope: str) -> Watched:
    visit, params, primitive = Visit(equation, scope, 0, 1, None), equation.params, equation.primitive
    inside = any(each.axes for body in bodies(params) for each in equations(body))
    if inside and visit.name == "scan":
        return _watch_scan(equation, operands, visit.scope)
    if inside and "jaxpr" in params:  # of jit and of jax.checkpoint
        body = params["jaxpr"]
        body, constants = (body.jaxpr, body.consts) if isinstance(body, core.ClosedJaxpr) else (body, [])
        return _watch(body, constants, [lax.optimization_barrier(x) for x in operands], visit.scope)
    is_watched = inside or visit.axes
    if is_watched:  # so that XLA computes once what the fingerprint and the collective read
        operands = [lax.optimization_barrier(x) for x in operands]
    results = primitive.bind(*operands, **primitive.get_bind_params(params))
    results = results if primitive.multiple_results else [results]
    if not is_watched:
        return results, [], _fingerprints([])
    name, direction = visit.name.removesuffix("_invariant"), " (backward)" if visit.is_backward else ""
    what = f"{name} over {' '.join(visit.axes)} in {visit.part}{direction}"
    places = [
        f"{of} of {what}, {x.dtype}{list(x.shape)}"
        for of, arrays in (("operand", operands), ("result", results))
        for x in arrays
    ]
    return results, places, _fingerprints([*operands, *results])


def _watch_scan(equation: core.JaxprEqn, operands: list[Any], scope: str) -> Watched:
    params, body = equation.params, equation.params["jaxpr"]
    places: list[str] = []
    # what is not stacked along the iterations is constant or carried; the parameters that count these depend on jax
    pairs = (equation.invars, body.jaxpr.invars), (equation.outvars, body.jaxpr.outvars)
    carried, returned = (sum(x.aval.ndim == one.aval.ndim for x, one in zip(*each, strict=True)) for each in pairs)
    consts = carried - returned

    def iteration(carry: list[Any], x: list[Any]) -> tuple[list[Any], tuple[list[Any], Array]]:
        results, places[:], found = _watch(body.jaxpr, body.consts, [*operands[:consts], *carry, *x], scope)
        return results[:returned], (results[returned:], found)

    carry, (stacked, found) = lax.scan(
        iteration, operands[consts:carried], operands[carried:], params["length"], params["reverse"], params["unroll"]
    )
    order = range(params["length"])[:: -1 if params["reverse"] else 1]
    words = [f"{place}, iteration {i}" for i in order for place in places]
    return [*carry, *stacked], words, jnp.ravel(found[jnp.array(order)])


class Replay:
    """Calls a program that returns `Fingerprints` twice, and compares them."""

    def __init__(self, program: Callable[..., Fingerprints], mesh: Mesh):
        self._program, self._mesh = program, mesh

    def check(self, state: Any, rows: tuple, rows_again: Callable[[], tuple], step: int) -> None:
        """Raise `HardwareError`, the same on every process, if two computations of the loss and gradients of the first
        microbatch of `step` from `state` differ.  `rows` are what the step reads; `rows_again` reads them anew."""
        first = self._program(state, *rows)
        tables = [of_all_devices(first.table), of_all_devices(self._program(state, *rows_again()).table)]
        differs = tables[0] != tables[1]
        if not differs.any():
            return
        places = [first.places[column] for column in np.flatnonzero(differs.any(axis=0))]
        rows_that_differ = np.flatnonzero(differs[:, first.places.index(places[0])])
        devices = ", ".join(device_name(self._mesh, row) for row in rows_that_differ.tolist())
        gradients = [place for place in places[1:] if place.startswith("gradients/")]
        then = f"; then {gradients[0]}{f' and {len(gradients) - 1} more' * (len(gradients) > 1)}" if gradients else ""
        raise HardwareError(
            f"before step {step} two computations from the same bits differ, first on {devices}: {places[0]}{then};\n"
            f"resume from the newest checkpoint without that device: checkpoint.resume=must"
        )
