"""The ring: a wire whose gathers and sums flow under the products that use and make what travels.

Collective matmul: Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep
Learning Models", section 5, both ways round, https://doi.org/10.1145/3567955.3567959

B batch, T time, D model width, F features, n devices of mp.  T/mp: dim T cut along mp.

Between regions the stream is cut along time, x[B T/mp D], as with SequenceParallel.  On device i, place o is the part
of time of device i + o, round the ring; half the places lie ahead, half behind: 0, -1, 1, -2, 2, ... n/2.

    into     x[B T/mp D]  --place o, from the neighbour that has it as o -+ 1-->  x_o  @ w[D F/mp]  ->  y_o[B T/mp F/mp]
    out_of   y_o[B T/mp F/mp]  @ w[F/mp D]  --added to what comes for the same device from farther, and passed on to the
             neighbour nearer to it-->  y[B T/mp D]

What one way waits for flows under the products of the other.  Each is the transpose of the other: the backward pass of
each is a ring like the other's forward pass.  They are written out, because JAX, which would derive the same, leaves
the products of a sum to be made at any time (`around`).  An MLP does not care in which order positions come: its parts
stay apart from `into` to `out_of`.  Attention does: `in_time` puts them in order, once.

What it costs: each weight is cast for n products instead of one, and its gradient is added up of n.  (The parts put
together for one product take longer: GPT-J's shape on v5e-256, (32, 8), predicted, 11.4 s a step instead of 10.8.)  So
it pays where the wires show and parts are large.  And XLA for TPU (libtpu 0.0.42) lets a ppermute flow only where it
sees memory to spare: of a program that fills 83 % of it every -done stands right behind its -start, and without the
options of `hardware.COMPILER_OPTIONS` of one that fills 72 %.

What one hop can hide at most is arithmetic.  A part of n tokens and width D takes n D 2 / rate seconds to the next
neighbour, while two parts, one from each side, are multiplied: 2 n D 2 F / peak, F being the features of a device.  So
a region hides its ring where F > peak / (2 rate): 3055 features of mp's share on a v4, 2550 on a v5p, 2190 on a v5e,
5100 on a v6e.  Attention and MLP side by side (a parallel block) are one region, and have the features of both.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from shmap_tp.parallel.collectives import mark_varying
from shmap_tp.parallel.mesh import MP
from shmap_tp.parallel.ring import Turn, places, scattered, wide
from shmap_tp.parallel.tensor_parallel import SUBLAYER_OUTPUT, Columns, Product, Rows, SequenceParallel

Parts = tuple[Float[Array, "B part ..."], ...]
"""Of every place, in the order of `places`."""

APART = SequenceParallel()
"""What enters and leaves where no product stands that could hide it."""


@dataclass(frozen=True)
class CollectiveMatmul:
    """SequenceParallel in steps of a part.  The embedding leaves and the head enters as there, by one collective: the
    one's rows are looked up, and the other's products are made chunk by chunk of positions (`loss`)."""

    def into(self, x_BTD: Float[Array, "B part D"], **regions: Columns) -> list[tuple[Product, ...]]:
        """x[B T/mp D] -> x @ w in parts, for every w: n - 1 ppermutes of x.  Backward: n - 1 ppermutes of dx."""
        columns = [Named(name, column) for name, columns in regions.items() for column in columns]
        found = iter(_into(x_BTD, columns))
        return [tuple(next(found) for _ in columns) for columns in regions.values()]

    def out_of(self, **regions: Rows) -> Float[Array, "B part D"]:
        """y, in parts -> this device's part of the sum over mp of all y @ w: n - 1 ppermutes of such a part.  Backward:
        n - 1 ppermutes of its gradient."""
        operands, rows = zip(*regions.values(), strict=True)
        named = [Named(name, row) for name, row in zip(regions, rows, strict=True)]
        return checkpoint_name(_out_of(list(operands), named), SUBLAYER_OUTPUT)

    def in_time(self, y: Product) -> Float[Array, "B T ..."]:
        return _in_time(y)

    def in_parts(self, y: Float[Array, "B T ..."]) -> Product:
        return _in_parts(y)

    def enter(self, x_BTD: Float[Array, "B part D"]) -> Float[Array, "B T D"]:
        return APART.enter(x_BTD)

    def leave(self, y_BTD: Float[Array, "B T D"]) -> Float[Array, "B part D"]:
        return APART.leave(y_BTD)

    def beside(self, w_TD: Float[Array, "T D"], time: int) -> Float[Array, "time D"]:
        return APART.beside(w_TD, time)

    def at_home(self, params: Any) -> Any:
        return APART.at_home(params)


def _passed(x: Array, by: int) -> Array:
    """x to the device that is `by` farther round the ring."""
    n = lax.axis_size(MP)
    return lax.ppermute(x, MP, [(i, (i + by) % n) for i in range(n)])


def _gathered(x_BTD: Float[Array, "B part D"]) -> Parts:
    """x of every place, the nearest first, each passed on as soon as it is there."""
    parts = {0: x_BTD}
    for place in places(lax.axis_size(MP))[1:]:
        way = 1 if place > 0 else -1
        parts[place] = _passed(parts[place - way], -way)
    return tuple(parts.values())


class Named(eqx.Module):
    """One of the columns or rows, x -> x @ w, in a scope of its region's name."""

    name: str = eqx.field(static=True)
    layer: Callable[[Array], Array]

    def __call__(self, x: Array) -> Array:
        with jax.named_scope(self.name):
            return self.layer(x)

    def back(self, x: Array, dy: Array) -> Array:
        """dx."""
        return jax.linear_transpose(self, x)(dy)[0]

    def gradient(self, parts: Parts, d_parts: Parts) -> "Named":
        """dw, added up of all parts."""
        found = [
            jax.linear_transpose(lambda layer, x=x: layer(x), self)(dy)[0] for x, dy in zip(parts, d_parts, strict=True)
        ]
        return jax.tree.map(lambda *dw: functools.reduce(operator.add, dw), *found)


# The custom gradients of these two stand for no cast and no sum: what goes in and comes out varies over mp, and every
# gradient's type is checked


@jax.custom_vjp
def _into(x_BTD: Array, columns: list[Named]) -> list[Parts]:
    """The products of every part, for each of the columns."""
    return _into_forward(x_BTD, columns)[0]


def _into_forward(x_BTD: Array, columns: list[Named]) -> tuple[list[Parts], tuple[Parts, list[Named]]]:
    parts = _gathered(x_BTD)
    made = [[column(part) for column in columns] for part in parts]
    return list(zip(*made, strict=True)), (parts, columns)


def _into_backward(kept: tuple[Parts, list[Named]], dy: list[Parts]) -> tuple[Array, list[Named]]:
    parts, columns = kept
    back = [[partial(column.back, part) for column in columns] for part in parts]
    dw = [column.gradient(parts, d_parts) for column, d_parts in zip(columns, dy, strict=True)]
    return _scattered_sum(back, dy), dw


_into.defvjp(_into_forward, _into_backward)


@jax.custom_vjp
def _out_of(operands: list[Parts], rows: list[Named]) -> Array:
    """This device's part of the sum over mp of all operands @ rows."""
    return _out_of_forward(operands, rows)[0]


def _out_of_forward(operands: list[Parts], rows: list[Named]) -> tuple[Array, tuple[list[Parts], list[Named]]]:
    # together: an MLP is ready before attention is, and would be multiplied before the ring
    together = lax.optimization_barrier(operands)
    return _scattered_sum([rows] * len(operands[0]), together), (operands, rows)


def _out_of_backward(kept: tuple[list[Parts], list[Named]], dy: Array) -> tuple[list[Parts], list[Named]]:
    operands, rows = kept
    # dy sets out when what is computed again is there: of two rings at a time XLA lets too little flow (60B on a v5p,
    # (4, 16), full remat, predicted: 41.4 s a step, 4.2 % of it exposed, instead of 40.5 and 1.7)
    dy, operands = lax.optimization_barrier((dy, operands))
    d_parts, each = _gathered(dy), list(zip(rows, operands, strict=True))
    back = [tuple(row.back(y, d) for y, d in zip(parts, d_parts, strict=True)) for row, parts in each]
    return back, [row.gradient(parts, d_parts) for row, parts in each]


_out_of.defvjp(_out_of_forward, _out_of_backward)


def _scattered_sum(multiply: list[list[Callable[[Array], Array]]], operands: list[Parts]) -> Array:
    """This device's part of the sum over mp of all products, multiply[place][i](operands[i][place]).

    Of several products of a place the first waits for what comes, and adds up as it is made; the others flow under its
    hop.  Where there is but one, it flows.  The first stands between two hops, so it had better be small: attention's,
    where there is an MLP beside it.
    """
    order = places(len(multiply))

    def owed(turn: Turn) -> Array:
        i = order.index(turn.place)
        (last, y), *before = zip(multiply[i], [parts[i] for parts in operands], strict=True)
        if not before:
            return last(turn.under(y))
        flowing = functools.reduce(operator.add, [each(turn.under(x)) for each, x in before])
        y = turn.after(y) if turn.place else turn.under(y)  # at place 0 all flows under what comes last
        return wide(last(y)) + wide(lax.optimization_barrier(flowing))  # XLA is to add to the last, not to these

    return scattered(owed, len(order), jax.tree.leaves(operands)[0].dtype, _passed)


# Between parts and time, each the other's gradient: JAX's own would clear and add what is only put elsewhere


def _starts(parts: int, size: int) -> list[Array]:
    return [(lax.axis_index(MP) + place) % parts * size for place in places(parts)]


def _put_in_time(parts: Parts) -> Float[Array, "B T ..."]:
    (batch, size, *features), n = parts[0].shape, len(parts)
    y = mark_varying(lax.empty((batch, n * size, *features), parts[0].dtype), MP)  # all of it is written
    for start, part in zip(_starts(n, size), parts, strict=True):
        y = lax.dynamic_update_slice_in_dim(y, part, start, axis=1)
    return y


def _cut_in_parts(y: Float[Array, "B T ..."]) -> Parts:
    n = lax.axis_size(MP)
    size = y.shape[1] // n
    return tuple(lax.dynamic_slice_in_dim(y, start, size, axis=1) for start in _starts(n, size))


_in_time, _in_parts = jax.custom_vjp(_put_in_time), jax.custom_vjp(_cut_in_parts)


_in_time.defvjp(lambda parts: (_put_in_time(parts), None), lambda _, dy: (_cut_in_parts(dy),))


_in_parts.defvjp(lambda y: (_cut_in_parts(y), None), lambda _, d_parts: (_put_in_time(d_parts),))
