"""FSDP weights whose gradient reduce-scatter overlaps the matmul that produces it (`mesh.fsdp_gradients=ring`).

Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models",
section 5, https://doi.org/10.1145/3567955.3567959

B batch, T time, I features in, O features out, n ranks of the ring, the axis dp of the mesh, r the rank in it.  I/dp:
dim I sharded over dp.  {+dp}: a partial sum, not yet reduced over dp.

    forward    y = x[B T I] @ w[I O], w gathered before
    backward   dx = dy @ w'
               dw[I/n O] = x[B T I/n]' @ dy for every rank of the ring in turn, the farthest first, each term added to
               the partial sum received for that rank and passed on (`parallel/ring.py`)
               where a slice has several rings (the axis dp_ring), one reduce-scatter between them:
               dw[I/n O] {+dp_ring} -> dw[I/dp/dp_ring O]

The bytes are those of one reduce-scatter of dw[I O], in x's dtype; sums are accumulated in float32.  The plain version
is `jax.linear_transpose` of the layer followed by the reduce-scatter that is the transpose of the weight's all-gather.
XLA for TPU overlaps ppermutes with matmuls, but on v2 to v5e no reduce-scatter (docs/performance-notes.md).  Where w is
stored as [O I], or is sharded along its second dim, x and dy change places.
"""

import math
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from shmap_tp.parallel.collectives import reduce_scatter
from shmap_tp.parallel.mesh import DP, DP_RING, ring_permutation, token_axes
from shmap_tp.parallel.ring import RingStep, ring_reduce_scatter

MIN_TOKENS_TO_OVERLAP = 16384
"""Below so many tokens per device a term of the ring waits for the sum it is added to (docs/performance-notes.md)."""


class RingSide(Enum):
    """Which features of a weight dp shards."""

    rows = auto()
    """Those that are stored first."""
    columns = auto()
    """Those that are stored second."""


class WeightLayout(NamedTuple):
    """How a weight is stored, and how dp shards it."""

    outputs_first: bool
    """Stored as [outputs, inputs], else as [inputs, outputs]."""
    sharded: RingSide


class OverlappedLinear(eqx.Module):
    """A linear layer, its weight gathered over dp; called like the layer.

    Its gradient is that of `shard`, reduced over dp in a ring.  `fsdp.gather` puts it in the layer's place.
    """

    layer: Callable[[Array], Array]
    """The layer with the gathered weight, which takes no gradient."""
    shard: Float[Array, "..."]
    """This device's shard of the weight."""
    layout: WeightLayout = eqx.field(static=True)

    def __call__(self, x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        skeleton = eqx.tree_at(lambda layer: layer.weight, self.layer, None)  # its bias is not used by the product

        def multiply(x: Array, weight: Array) -> Array:
            return eqx.tree_at(lambda layer: layer.weight, skeleton, weight, is_leaf=lambda x: x is None)(x)

        return _matmul(multiply, self.layout, x, self.layer.weight, self.shard)

    def add_bias(self, y: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        return self.layer.add_bias(y)


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
