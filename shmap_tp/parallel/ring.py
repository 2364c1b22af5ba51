"""A ring reduce-scatter by ppermute, whose hops overlap the computation of the terms that they add up.

Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models",
section 5 (bidirectional), https://doi.org/10.1145/3567955.3567959

Every device of a ring of n holds one term for each device; device i receives the sum of the n terms that are meant for
it.  On device i, offset o stands for device (i + o) mod n.  Offsets run from -(n - 1) // 2 to n // 2: partial sums
move in both directions at once, each at most n / 2 hops.

When a term is computed is not left to the compiler: XLA for TPU computes most terms before or under the first hop, so
that the other hops overlap nothing (docs/performance-notes.md).  A `RingStep` offers optimization barriers with which a
term waits for a hop to begin or to end.  Without them this would be a plain `lax.psum_scatter` of all terms.

`Ring` is an FSDP weight whose gradient is reduced so (`mesh.fsdp_gradients=ring`), over the axis dp, overlapping the
matmul that produces it.  B batch, T time, I features in, O features out, {+dp}: a partial sum, not yet reduced over dp.

    forward    y = x[B T I] @ w[I O], w gathered before
    backward   dx = dy @ w'
               dw[I/n O] = x[B T I/n]' @ dy for every rank of the ring in turn, the farthest first, each term added to
               the partial sum received for that rank and passed on
               where a slice has several rings (the axis dp_ring), one reduce-scatter between them:
               dw[I/n O] {+dp_ring} -> dw[I/dp/dp_ring O]

The bytes are those of one reduce-scatter of dw[I O], in x's dtype; sums are accumulated in float32.  The plain version
is `jax.linear_transpose` of the product, then the reduce-scatter that is the transpose of the weight's all-gather.
XLA for TPU overlaps ppermutes with matmuls, but on v2 to v5e no reduce-scatter (docs/performance-notes.md).  Where w is
stored as [O I], or is sharded along its second dim, x and dy change places.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from shmap_tp.parallel.collectives import reduce_scatter
from shmap_tp.parallel.mesh import DP, DP_RING, ring_permutation, token_axes


def ring_offsets(n: int) -> list[int]:
    """The offsets of a ring of n devices, the nearest first: 0, -1, 1, -2, 2 ... n/2."""
    return sorted(range(-((n - 1) // 2), n // 2 + 1), key=abs)


@dataclass(frozen=True)
class RingStep:
    """The computation of one term, and its place in the schedule.

    The barriers apply to an operand of the computation.  Where a backward pass recomputes what reads that operand, it
    recomputes everything the operand waited for, too.
    """

    offset: int
    """Which device the term is meant for."""
    sent: list[Array]
    """Partial sums for the same device, before their hop to this one."""
    received: list[Array]
    """The same after their hop; at offset 0 without the last one, whose hop overlaps the computation of this term."""

    def after_send(self, x: PyTree[Array]) -> PyTree[Array]:
        """x, not available before everything in `sent`: what is computed from it overlaps the hop."""
        return _wait_for(self.sent, x)

    def after_receive(self, x: PyTree[Array]) -> PyTree[Array]:
        """x, not available before everything in `received`: XLA then adds the received sums as it computes the term,
        instead of reading both from memory afterwards."""
        return _wait_for(self.received, x)


def _wait_for(arrays: list[Array], x: PyTree[Array]) -> PyTree[Array]:
    return lax.optimization_barrier((arrays, x))[1] if arrays else x


def ring_reduce_scatter(
    term: Callable[[RingStep], Array], n: int, dtype: DTypeLike, send: Callable[[Array, int], Array]
) -> Array:
    """The sum, over the n devices of a ring, of the terms that are meant for this device; in `dtype`.

    `term(step)` computes the term for the device at `step.offset`; all have one shape.  `send(x, by)` passes x, in
    `dtype`, to the device `by` positions further along the ring.  Sums are accumulated in float32 or wider.

    Communication  n - 1 calls of `send`, each of one term in `dtype`; half of them in each direction, two at a time.
    """
    sent: dict[int, list[Array]] = {offset: [] for offset in ring_offsets(n)}
    received: dict[int, list[Array]] = {offset: [] for offset in ring_offsets(n)}
    for offset in reversed(received):  # the farthest first
        total = to_float32(term(RingStep(offset, sent[offset], received[offset][: None if offset else -1])))
        for partial_sum in received[offset]:
            total += to_float32(partial_sum)
        if offset:
            towards = 1 if offset > 0 else -1
            sent[offset - towards].append(total.astype(dtype))
            received[offset - towards].append(send(total.astype(dtype), towards))
    return total.astype(dtype)


def to_float32(x: Array) -> Array:
    """x in float32, or in its own dtype if that is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


# A weight whose gradient is reduced in a ring (`mesh.fsdp_gradients=ring`)

MIN_TOKENS_TO_OVERLAP = 16384
"""Below so many tokens per device a term of the ring waits for the sum it is added to (docs/performance-notes.md)."""


class RingSide(Enum):
    """Which features of a weight dp shards."""

    rows = auto()
    """The features that are stored first."""
    columns = auto()
    """The features that are stored second."""


class WeightLayout(NamedTuple):
    """How a weight is stored, and how dp shards it."""

    outputs_first: bool
    """Stored as [outputs, inputs], else as [inputs, outputs]."""
    sharded: RingSide


class Ring(eqx.Module):
    """An FSDP weight, gathered over dp, whose gradient is that of `shard`, reduced over dp in a ring."""

    full: Float[Array, "..."]
    """The gathered weight, which takes no gradient."""
    shard: Float[Array, "..."]
    """This device's shard, in the dtype of the activations."""
    layout: WeightLayout = eqx.field(static=True)

    def multiply(self, product: Callable[[Array, Array], Array], x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        """product(x, w)."""
        return _matmul(product, self.layout, x, self.full, self.shard)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmul(
    multiply: Callable[[Array, Array], Array], layout: WeightLayout, x: Array, full: Array, shard: Array
) -> Array:
    """multiply(x, full).  The custom gradient is that of `shard` as its all-gather would give it, a sum over dp of
    which each device has its own shard; it only says how that sum is computed."""
    return multiply(x, full)


def _forward(multiply: Any, layout: WeightLayout, x: Array, full: Array, shard: Array) -> tuple:
    return multiply(x, full), (x, full, shard)


def _backward(multiply: Any, layout: WeightLayout, saved: tuple, dy: Array) -> tuple:
    x, full, shard = saved
    (dx,) = jax.linear_transpose(lambda x: multiply(x, full), x)(dy)
    pair = (dy, x) if layout.outputs_first else (x, dy)
    if layout.outputs_first:
        dx = lax.optimization_barrier(dx)  # keeps the gradient of the norm before it out of this matmul
    return dx, None, _ring_reduce_weight_gradient(*pair, layout.sharded).reshape(shard.shape)


_matmul.defvjp(_forward, _backward)


def _ring_reduce_weight_gradient(first: Array, second: Array, side: RingSide) -> Float[Array, "..."]:
    """This device's rows, or columns, of first' @ second {+dp}, summed over dp."""
    rows, n = side == RingSide.rows, lax.axis_size(DP)
    sharded, full = (first, second) if rows else (second, first)
    # heads stay a dim of their own where the ring divides them: flattening would copy them all
    sharded = _flatten_features(sharded) if sharded.shape[2] % n else sharded
    size, rank = sharded.shape[2] // n, lax.axis_index(DP)
    wide = jnp.promote_types(full.dtype, jnp.float32)

    def term(step: RingStep) -> Array:
        waiting = sharded.shape[0] * sharded.shape[1] < MIN_TOKENS_TO_OVERLAP
        operand = step.after_receive(sharded) if waiting else sharded
        piece = lax.dynamic_slice_in_dim(operand, (rank + step.offset) % n * size, size, axis=2)
        pair = (piece, full) if rows else (full, piece)
        dw = jnp.tensordot(*pair, axes=((0, 1), (0, 1)), preferred_element_type=wide)
        return dw.reshape(-1, *full.shape[2:]) if rows else dw.reshape(*full.shape[2:], -1)

    def send(partial_sum: Array, by: int) -> Array:
        return lax.ppermute(partial_sum, DP, ring_permutation(n, by))

    dw = ring_reduce_scatter(term, n, full.dtype, send)
    return _reduce_scatter_between_rings(dw, 0 if rows else dw.ndim - 1) if DP_RING in token_axes() else dw


def _reduce_scatter_between_rings(dw: Float[Array, "..."], dim: int) -> Float[Array, "..."]:
    """dw {+dp_ring} -> this device's shard, along `dim`, of the sum over the rings.  The shards get a dim of their own,
    so that XLA for TPU need not pad them to tiles (docs/performance-notes.md).

    Communication: one reduce-scatter of dw between the rings.
    """
    shards = dw.reshape(*dw.shape[:dim], lax.axis_size(DP_RING), -1, *dw.shape[dim + 1 :])
    return reduce_scatter(shards, DP_RING, dim).squeeze(dim)


def _flatten_features(x: Float[Array, "B T ..."]) -> Float[Array, "B T features"]:
    return x.reshape(*x.shape[:2], math.prod(x.shape[2:]))
