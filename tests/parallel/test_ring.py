"""Sums round a ring are made in turn: which product waits for which hop, read from the trace.

What they are, parity says (test_layers); what travels, the ledger (test_ledger).  That it pays only a compiler for TPU
can tell (benchmarks/RESULTS.md).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from shmap_tp.parallel.mesh import MP
from shmap_tp.parallel.tensor_parallel import CollectiveMatmul
from shmap_tp.plan.communication.from_jaxpr import bodies
from tests.helpers.model_fixtures import mesh

Waits = tuple[int, int]
"""Of a product: (products, ppermutes) that it cannot be made before."""


def on_mp(function: Callable) -> Callable:
    return jax.shard_map(function, mesh=mesh((1, 8)), in_specs=P(MP), out_specs=P(MP))


def waits(function: Callable, *arguments: jax.Array) -> list[Waits]:
    """Of every product of `function` on one of 8 devices of mp, in the order of the trace."""
    found: list[Waits] = []
    closed = jax.make_jaxpr(on_mp(function))(*arguments)
    _follow(closed.jaxpr, [frozenset()] * len(arguments), found)
    return found


def _follow(jaxpr: Any, before: list[frozenset], found: list[Waits]) -> list[frozenset]:
    """What each result of `jaxpr` depends on, of what each argument does."""
    known = dict(zip(jaxpr.invars, before, strict=True))

    def depends(x: Any) -> frozenset:
        return known.get(x, frozenset()) if isinstance(x, type(jaxpr.invars[0])) else frozenset()

    for equation in jaxpr.eqns:
        of, name = [depends(x) for x in equation.invars], equation.primitive.name
        everything = frozenset().union(*of)
        if name == "dot_general":
            found.append(tuple(sum(kind == each for kind, _ in everything) for each in ("dot_general", "ppermute")))
        if name in ("dot_general", "ppermute"):
            everything |= {(name, id(equation))}
        inside = bodies(equation.params)
        results = _follow(inside[0], of, found) if len(inside) == 1 else [everything] * len(equation.outvars)
        known |= dict(zip(equation.outvars, results, strict=True))
    return [depends(x) for x in jaxpr.outvars]


def readers(jaxpr: Any) -> list[set[str]]:
    """Of every product the operations that read it."""
    products = [equation.outvars[0] for equation in jaxpr.eqns if equation.primitive.name == "dot_general"]
    here = [{each.primitive.name for each in jaxpr.eqns if y in each.invars} for y in products]
    return here + [names for each in jaxpr.eqns for body in bodies(each.params) for names in readers(body)]


def times(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.dot_general(x, w, (((2,), (0,)), ((), ())))


X, W = jnp.ones((8, 4, 16)), jnp.ones((8 * 16, 16))


def left(x: jax.Array, *weights: jax.Array) -> jax.Array:
    return CollectiveMatmul().out_of(**{f"region {i}": ((x,) * 8, Partial(times, w)) for i, w in enumerate(weights)})


def entered(x: jax.Array, *weights: jax.Array) -> jax.Array:
    regions = CollectiveMatmul().into(x, **{f"region {i}": (Partial(times, w),) for i, w in enumerate(weights)})
    return sum(part for region in regions for parts in region for part in parts)


def back(function: Callable) -> Callable:
    return lambda x, *weights: jax.vjp(lambda x: function(x, *weights), x)[1](x)[0]


TURNS = [(0, 0), (1, 0), (0, 0), (2, 1), (1, 0), (3, 2), (2, 1), (7, 5)]
"""Of places 4, 3, -3, 2, -2, 1, -1, 0, one product each: made when what comes for its place from farther has been, and
not waiting for it to come, as (products, ppermutes) would be (1, 1) at place 3."""


def test_the_products_of_a_sum_flow_under_their_hops():
    assert waits(left, X, W) == TURNS
    assert waits(back(entered), X, W)[-8:] == TURNS


def test_of_two_products_one_adds_up_what_has_come():
    twice = [(2 * products, hops) for products, hops in TURNS]
    come = [(products, hops + (0 < products < 14)) for products, hops in twice]
    for made in waits(left, X, W, W), waits(back(entered), X, W, W)[-16:]:
        assert (made[::2], made[1::2]) == (twice, come)


def test_what_flows_is_made_before_it_is_added():
    """XLA would add up in the product that flows, which would then wait as well."""
    read_by = readers(jax.make_jaxpr(on_mp(left))(X, W, W).jaxpr)
    flowing = [names == {"optimization_barrier"} for names in read_by]
    assert flowing == [True, False] * 8


def test_a_region_is_not_left_before_all_of_it_is_ready():
    """An MLP's products would be made before attention's, with no hop to flow under."""

    def left_late(x: jax.Array, w: jax.Array) -> jax.Array:
        late = times(w, x)
        return CollectiveMatmul().out_of(attention=((late,) * 8, Partial(times, w)), mlp=((x,) * 8, Partial(times, w)))

    assert [products for products, _ in waits(left_late, X, W)].count(0) == 1


def test_a_region_is_gone_back_into_when_all_of_it_is_there():
    """Its gradient would travel beside what travels for what is computed again."""

    def back_into(x: jax.Array, w: jax.Array) -> jax.Array:
        again = times(w, x)
        return jax.vjp(lambda y: CollectiveMatmul().out_of(region=((y,) * 8, Partial(times, w))), again)[1](x)[0]

    found = [products for products, _ in waits(back_into, X, W)]
    assert len(found) == 1 + 8 + 2 * 8 and found.count(0) == 1
