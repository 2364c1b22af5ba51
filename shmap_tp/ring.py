"""The ring: a wire whose gathers and sums flow under the products that use and make what travels.

Collective matmul: Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep
Learning Models", section 5, both ways round, https://doi.org/10.1145/3567955.3567959

B batch, T time, D model width, F features, n devices of mp.  T/mp: dim T cut along mp.

Between regions the stream is cut along time, x[B T/mp D], as with SequenceParallel.  On device i, place o is the part
of time of device i + o, round the ring; half the places lie ahead, half behind: 0, -1, 1, -2, 2, ... n/2.

    into     x[B T/mp D]  --place o, from the neighbour that has it as o -+ 1-->  x_o  @ w[D F/mp]  ->  y_o[B T/mp F/mp]
    out_of   y_o[B T/mp F/mp]  @ w[F/mp D]  --added to what comes for the same device from farther, and passed on to the
             neighbour nearer to it-->  y[B T/mp D]

Nothing waits for a product but the next sum, and nothing for a part but its own products; what one way waits for flows
under the products of the other.  Each is the transpose of the other, so JAX derives both backward passes, which are
rings, too.  An MLP does not care in which order positions come: its parts stay apart from `into` to `out_of`.
Attention does: `in_time` puts them in order, once.

What it costs: each weight is cast for n products instead of one, and its gradient is added up of n.  So it pays where
the wires show and parts are large.  And XLA for TPU (libtpu 0.0.42) lets a ppermute flow only where it sees memory to
spare: of a program that fills 86 % of it every -done stands right behind its -start, and without the options of
`hardware.COMPILER_OPTIONS` of one that fills 72 %.

What one hop can hide at most is arithmetic.  A part of n tokens and width D takes n D 2 / rate seconds to the next
neighbour, while two parts, one from each side, are multiplied: 2 n D 2 F / peak, F being the features of a device.  So
a region hides its ring where F > peak / (2 rate): 3055 features of mp's share on a v4, 2550 on a v5p, 2190 on a v5e.
Attention and MLP side by side (a parallel block) are one region, and have the features of both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from shmap_tp.collectives import LEFT, Columns, Product, Rows, SequenceParallel, owed_by, products_of, vary
from shmap_tp.mesh import MP

Parts = tuple[Float[Array, "B part ..."], ...]
"""Of every place, in the order of `places`."""

After = Callable[[Array], Array]
"""x -> x, there no sooner than what it is to be added to."""

APART = SequenceParallel()
"""What enters and leaves where no product stands that could hide it."""


@dataclass(frozen=True)
class Ring:
    """SequenceParallel in steps of a part.  The embedding leaves and the head enters as there, by one collective: the
    one's rows are looked up, and the other's products are made chunk by chunk of positions (`loss`)."""

    def into(self, x_BTD: Float[Array, "B part D"], **regions: Columns) -> list[tuple[Product, ...]]:
        """x[B T/mp D] -> x @ w in parts, for every w: n - 1 ppermutes of x.  Backward: n - 1 ppermutes of dx."""
        found = [products_of(part_BTD, regions) for part_BTD in _gathered(x_BTD)]
        return jax.tree.map(lambda *parts: parts, *found)

    def out_of(self, **regions: Rows) -> Float[Array, "B part D"]:
        """y, in parts -> this device's part of the sum over mp of all y @ w: n - 1 ppermutes of such a part.  Backward:
        n - 1 ppermutes of its gradient."""
        order = places(lax.axis_size(MP))
        dtype = jax.tree.leaves([parts for parts, _ in regions.values()])[0].dtype

        def owed(place: int, _: After) -> Array:  # waiting, a remat policy would have to go round the ring again
            i = order.index(place)
            return owed_by({name: (parts[i], rows) for name, (parts, rows) in regions.items()})

        return checkpoint_name(scattered(owed, len(order), dtype, _passed), LEFT)

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


def places(n: int) -> list[int]:
    """Of n devices the nearest first: 0, -1, 1, -2, 2 ... n/2."""
    return sorted(range(-((n - 1) // 2), n // 2 + 1), key=abs)


def _passed(x: Array, by: int) -> Array:
    """x to the device that is `by` farther round the ring."""
    n = lax.axis_size(MP)
    return lax.ppermute(x, MP, [(i, (i + by) % n) for i in range(n)])


def _gathered(x_BTD: Float[Array, "B part D"]) -> Parts:
    """x of every place, the nearest first, each passed on as soon as it is there.  Its gradients are added up as
    `scattered` adds: the casts are for their sake."""
    order, parts = places(lax.axis_size(MP)), {0: _wide(x_BTD)}
    for place in order[1:]:
        way = 1 if place > 0 else -1
        parts[place] = _wide(_passed(parts[place - way].astype(x_BTD.dtype), -way))
    return tuple(parts[place].astype(x_BTD.dtype) for place in order)


def scattered(
    owed: Callable[[int, After], Array], n: int, dtype: DTypeLike, passed: Callable[[Array, int], Array]
) -> Array:
    """The sum of what all n devices of a ring owe to this one, each place added up on its way here, the farthest first.

    `owed(place, after)` makes what is owed to a place, of operands one of which it may take through `after`: that is
    there no sooner than what has come for the same place, so that XLA adds the two as it makes the one.  Left free, it
    makes them all and adds later, from memory.  `passed(x, by)`, in `dtype`, is x to the device `by` farther.
    """
    came: dict[int, list[Array]] = {place: [] for place in places(n)}
    for place in reversed(came):
        last = None if place else -1  # what comes here last flows under what is owed here
        total = _wide(owed(place, partial(_after, came[place][:last])))
        for arrived in came[place]:
            total += _wide(arrived)
        if place:
            way = 1 if place > 0 else -1
            came[place - way].append(passed(total.astype(dtype), way))
    return total.astype(dtype)


def _after(arrived: list[Array], x: Array) -> Array:
    """x, there no sooner than what has arrived.  Where x is read again by a backward pass, so is all that arrived."""
    return lax.optimization_barrier((arrived, x))[1] if arrived else x


def _wide(x: Array) -> Array:
    """In float32 or wider.  So is added what comes round the ring, which travels in its own dtype: it rounds less, and
    takes a v5e two thirds of the time of a sum in bfloat16, by the compiler's estimate (libtpu 0.0.42)."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


# Between parts and time, each the other's gradient: JAX's own would clear and add what is only put elsewhere


def _starts(parts: int, size: int) -> list[Array]:
    return [(lax.axis_index(MP) + place) % parts * size for place in places(parts)]


def _put_in_time(parts: Parts) -> Float[Array, "B T ..."]:
    (batch, size, *features), n = parts[0].shape, len(parts)
    y = vary(lax.empty((batch, n * size, *features), parts[0].dtype), MP)  # all of it is written
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
