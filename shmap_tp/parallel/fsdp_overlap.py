"""A gathered weight whose gradient goes home in a ring, under the product that makes it.

B batch, T time, I features in, O features out, n devices of a ring of dp, one of which is at place r.
I/dp: dim I cut along dp.  {+dp}: a sum over dp still owed.

    forward    y = x[B T I] @ w[I O], gathered
    backward   dx = dy @ w'
               dw[I/n O] = x[B T I/n]' @ dy, of every place in turn, the farthest first; each is added to what comes
               for the same device from farther, and passed on to the neighbour nearer to it
               then, where a slice has several rings, one reduce-scatter between them:  dw[I/n O] {+dp} -> dw[I/dp O]

What travels is as much as one reduce-scatter of dw[I O], in x's dtype; it is added up in float32.  But it flows under
the products of the other way round, and of other weights: XLA for TPU lets ppermutes do so, and on v2 to v5e
reduce-scatters never (libtpu 0.0.42), of which, over all the devices there are, it even makes an all-reduce.  (On v5p
and v6e the SparseCores make them, `hardware.SPARSE_CORES`, and this is not needed.)  Where w is kept as [O I], or is
cut along its second dim, x and dy stand the other way round.

The ring wire makes a product of each part of time.  Their gradients would have to be put together for one ring of dp:
32B on a v5p, (16, 4), takes 9.2 s a step so, and 8.2 with reduce-scatters of the TensorCore's (predicted).

Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models",
section 5, https://doi.org/10.1145/3567955.3567959
"""

import math
from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from shmap_tp.parallel.collectives import reduce_scatter
from shmap_tp.parallel.mesh import DP, DataParallelGroups, Groups
from shmap_tp.parallel.ring import Turn, scattered

FEW = 16384
"""Positions of a device below which a product of the ring waits for what it is added to: adding what was made before
takes longer, then, than making it a little slower.  Seconds a step on a v5e-256, free and waiting, predicted: 9.72 and
8.52 with 6144 (16B); of earlier programs 13.0 and 12.3 with 8192 (32B), 15.4 and 14.1 with 2048 (128B), 13.6 and 13.3
with 4096 (64B), but 10.8 and 11.1 with 12288 (16B), which was not compared again."""


class RingWeight(eqx.Module):
    """w[I O] or w[O I], or with the features in several dims, as `product` takes it."""

    whole: Float[Array, "..."]
    """Gathered; takes no gradient."""
    part: Float[Array, "..."]
    """This device's part of it: takes it."""
    by_rows: bool = eqx.field(static=True)
    """Whether it is cut along its first features, else along the second."""
    parts: DataParallelGroups = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape


Weight = Float[Array, "..."] | RingWeight


Product = Callable[[Array, Array], Array]
"""(x[B T I...], w[I... O...] or w[O... I...]) -> y[B T O...], linear in each of the two, in x's dtype."""


Cut = tuple[bool, bool, DataParallelGroups]
"""(whether w is kept as [O I], whether it is cut along its first features, among whom)."""


def product(
    multiply: Product, x: Float[Array, "B T ..."], weight: Weight, *, outputs_first: bool
) -> Float[Array, "B T ..."]:
    """multiply(x, w); of a RingWeight the gradient goes home in a ring.  `outputs_first`: w is kept as [O I]."""
    if not isinstance(weight, RingWeight):
        return multiply(x, weight)
    return _product(multiply, (outputs_first, weight.by_rows, weight.parts), x, weight.whole, weight.part)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(multiply: Product, cut: Cut, x: Array, whole: Array, part: Array) -> Array:
    """This custom gradient stands for no collective's by itself: dw of `part` is what the gather of `part` would give,
    a sum over dp of which each device has its own.  It says only how that is summed."""
    return multiply(x, whole)


def _forward(multiply: Product, cut: Cut, x: Array, whole: Array, part: Array) -> tuple:
    return multiply(x, whole), (x, whole, part)


def _backward(multiply: Product, cut: Cut, kept: tuple, dy: Array) -> tuple:
    x, whole, part = kept
    (dx,) = jax.linear_transpose(lambda x: multiply(x, whole), x)(dy)
    outputs_first, by_rows, parts = cut
    pair = (dy, x) if outputs_first else (x, dy)
    if outputs_first:
        # what comes next is a norm's gradient.  Apart 6B on v5e-16 takes 0.668 s a step instead of 0.687, 16B on 256
        # chips 8.52 instead of 8.50, predicted
        dx = lax.optimization_barrier(dx)
    return dx, None, _sent_home(*pair, by_rows, parts).reshape(part.shape)


_product.defvjp(_forward, _backward)


def _sent_home(first: Array, second: Array, by_rows: bool, parts: DataParallelGroups) -> Float[Array, "..."]:
    """first' @ second {+dp}, of which each device gets its rows, or its columns."""
    cut, rest = (first, second) if by_rows else (second, first)
    # heads are cut as such where the ring divides them: to put their features in one dim takes a copy of them all
    cut = _flat(cut) if cut.shape[2] % parts.ring else cut
    size = cut.shape[2] // parts.ring
    here = lax.axis_index(DP) // (parts.count // parts.ring)
    wide = jnp.promote_types(rest.dtype, jnp.float32)

    def owed(turn: Turn) -> Array:
        mine = turn.after(cut) if cut.shape[0] * cut.shape[1] < FEW else cut
        piece = lax.dynamic_slice_in_dim(mine, (here + turn.place) % parts.ring * size, size, axis=2)
        pair = (piece, rest) if by_rows else (rest, piece)
        made = jnp.tensordot(*pair, axes=((0, 1), (0, 1)), preferred_element_type=wide)
        return made.reshape(-1, *rest.shape[2:]) if by_rows else made.reshape(*rest.shape[2:], -1)

    def passed(sums: Array, by: int) -> Array:
        return lax.ppermute(sums, DP, parts.passed(by))

    dw = scattered(owed, parts.ring, rest.dtype, passed)
    if parts.beside is None:
        return dw
    return _between_rings(dw, 0 if by_rows else dw.ndim - 1, parts.beside)


def _between_rings(dw: Float[Array, "..."], dim: int, rings: Groups) -> Float[Array, "..."]:
    """dw {+dp} -> of the sum over the rings the part along `dim` that is this device's.  The parts lie along a dim of
    their own: along one that they cut into no whole tiles, XLA for TPU (libtpu 0.0.42) pads them, and sends the result
    on to another device (16B on a v5e-256: 9.42 s a step instead of 9.37, predicted).

    Wire    one reduce-scatter of dw between the rings.
    """
    parts = dw.reshape(*dw.shape[:dim], len(rings[0]), -1, *dw.shape[dim + 1 :])
    return reduce_scatter(parts, DP, dim, rings).squeeze(dim)


def _flat(x: Float[Array, "B T ..."]) -> Float[Array, "B T features"]:
    return x.reshape(*x.shape[:2], math.prod(x.shape[2:]))
