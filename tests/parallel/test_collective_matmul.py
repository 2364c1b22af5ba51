"""The schedule of sums that are reduced in a ring: which matmul waits for which hop, read from the traced program.

test_layers compares the values, test_communication the collectives.  Whether the overlap pays, only a compiler for TPU
can tell (benchmarks/RESULTS.md).
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from shmap_tp.model.tracing import bodies
from shmap_tp.parallel.mesh import MP
from shmap_tp.parallel.tensor_parallel import CollectiveMatmul
from tests.helpers.model_fixtures import mesh

Dependencies = tuple[int, int]
"""How many (other matmuls, ppermutes) must finish before a matmul can start."""


def on_mp(function: Callable) -> Callable:
    return jax.shard_map(function, mesh=mesh((1, 8)), in_specs=P(MP), out_specs=P(MP))


def matmul_dependencies(function: Callable, *arguments: jax.Array) -> list[Dependencies]:
    """The dependencies of every matmul of `function` on one of 8 devices of mp, in the order of the trace."""
    found: list[Dependencies] = []
    closed = jax.make_jaxpr(on_mp(function))(*arguments)
    _follow(closed.jaxpr, [frozenset()] * len(arguments), found)
    return found


def _follow(jaxpr: Any, of_arguments: list[frozenset], found: list[Dependencies]) -> list[frozenset]:
    """The matmuls and ppermutes that each result of `jaxpr` depends on, given those of each argument."""
    known = dict(zip(jaxpr.invars, of_arguments, strict=True))

    def dependencies(x: Any) -> frozenset:
        return known.get(x, frozenset()) if isinstance(x, type(jaxpr.invars[0])) else frozenset()

    for equation in jaxpr.eqns:
        of_operands, name = [dependencies(x) for x in equation.invars], equation.primitive.name
        union = frozenset().union(*of_operands)
        if name == "dot_general":
            found.append(tuple(sum(kind == each for kind, _ in union) for each in ("dot_general", "ppermute")))
        if name in ("dot_general", "ppermute"):
            union |= {(name, id(equation))}
        inside = bodies(equation.params)
        results = _follow(inside[0], of_operands, found) if len(inside) == 1 else [union] * len(equation.outvars)
        known |= dict(zip(equation.outvars, results, strict=True))
    return [dependencies(x) for x in jaxpr.outvars]


def matmul_readers(jaxpr: Any) -> list[set[str]]:
    """For every matmul the primitives that read its result."""
    products = [equation.outvars[0] for equation in jaxpr.eqns if equation.primitive.name == "dot_general"]
    here = [{each.primitive.name for each in jaxpr.eqns if y in each.invars} for y in products]
    return here + [names for each in jaxpr.eqns for body in bodies(each.params) for names in matmul_readers(body)]


def linear(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.dot_general(x, w, (((2,), (0,)), ((), ())))


class Product(eqx.Module):
    """`linear` as a layer without a bias."""

    weight: jax.Array
    is_linear = True

    def __call__(self, x: jax.Array) -> jax.Array:
        return linear(self.weight, x)

    def add_bias(self, y: jax.Array) -> jax.Array:
        return y


X, W = jnp.ones((8, 4, 16)), jnp.ones((8 * 16, 16))


def row_parallel(x: jax.Array, *weights: jax.Array) -> jax.Array:
    return CollectiveMatmul().row_parallel(*[((x,) * 8, Product(w)) for w in weights])


def column_parallel(x: jax.Array, *weights: jax.Array) -> jax.Array:
    products = CollectiveMatmul().column_parallel(x, *[Product(w) for w in weights])
    return sum(chunk for chunks in products for chunk in chunks)


def input_gradient(function: Callable) -> Callable:
    return lambda x, *weights: jax.vjp(lambda x: function(x, *weights), x)[1](x)[0]


SCHEDULE = [(0, 0), (1, 0), (0, 0), (2, 1), (1, 0), (3, 2), (2, 1), (7, 5)]
"""The matmuls of offsets 4, 3, -3, 2, -2, 1, -1, 0.  Each starts when the partial sum that it is added to has been
computed one hop away, and does not wait for that hop to end: at offset 3 that would be (1, 1)."""


def test_matmuls_of_a_ring_reduction_overlap_its_hops():
    assert matmul_dependencies(row_parallel, X, W) == SCHEDULE
    assert matmul_dependencies(input_gradient(column_parallel), X, W)[-8:] == SCHEDULE


def test_of_two_matmuls_per_chunk_one_overlaps_the_hop_and_one_waits_for_it():
    overlapping = [(2 * products, hops) for products, hops in SCHEDULE]
    waiting = [(products, hops + (0 < products < 14)) for products, hops in overlapping]
    for found in (
        matmul_dependencies(row_parallel, X, W, W),
        matmul_dependencies(input_gradient(column_parallel), X, W, W)[-16:],
    ):
        assert (found[::2], found[1::2]) == (overlapping, waiting)


def test_the_overlapping_matmul_is_separated_from_the_addition():
    """Otherwise XLA would add the received sum in that matmul, which would then wait for the hop, too."""
    readers = matmul_readers(jax.make_jaxpr(on_mp(row_parallel))(X, W, W).jaxpr)
    is_separated = [names == {"optimization_barrier"} for names in readers]
    assert is_separated == [True, False] * 8


def test_row_parallel_matmuls_wait_for_all_operands():
    """Otherwise an MLP's matmuls would run before attention's, with no hop to overlap."""

    def with_late_operand(x: jax.Array, w: jax.Array) -> jax.Array:
        attention = linear(w, x)
        layer = Product(w)
        return CollectiveMatmul().row_parallel(((attention,) * 8, layer), ((x,) * 8, layer))

    assert [products for products, _ in matmul_dependencies(with_late_operand, X, W)].count(0) == 1


def test_the_backward_ring_of_a_row_parallel_product_waits_for_recomputed_operands():
    """Otherwise its gradient would be communicated at the same time as what rematerialisation communicates."""

    def gradient_with_recomputed_operand(x: jax.Array, w: jax.Array) -> jax.Array:
        recomputed = linear(w, x)
        layer = Product(w)
        return jax.vjp(lambda y: CollectiveMatmul().row_parallel(((y,) * 8, layer)), recomputed)[1](x)[0]

    found = [products for products, _ in matmul_dependencies(gradient_with_recomputed_operand, X, W)]
    assert len(found) == 1 + 8 + 2 * 8 and found.count(0) == 1
