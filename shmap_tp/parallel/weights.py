"""Weights that multiply in a way of their own, in the place of an array: `Ring` and `Int8`.

B batch, T time, I features in, O features out, {+dp}: a partial sum, not yet reduced over dp.

A `Ring` is an FSDP weight whose gradient is reduced over the axis dp in a ring (`mesh.fsdp_gradients=ring`), which
overlaps the matmul that produces it:

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

An `Int8` has a scale for each output feature, half the bytes of bfloat16, for a model that is used and not trained:

    w[D F]  ~  values[D F] x scale[F]        scale = max over D of |w| / 127, values = w / scale, rounded

Values are exact in the dtype of the activations, so a linear layer multiplies with them in that, and the scale is
applied to its result: XLA for TPUs makes the conversion part of the matmul, which reads int8
(docs/performance-notes.md).  A weight of experts becomes an array where it is used, one that FSDP shards before it is
gathered.  Symmetric and by the largest value, as the weights of Dettmers et al. 2022, "LLM.int8()", section 2.1,
https://arxiv.org/abs/2208.07339
"""

import math
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float
from jaxtyping import Int8 as Int8Array

from shmap_tp.errors import UserError
from shmap_tp.parallel.collective_matmul import RingStep, ring_reduce_scatter
from shmap_tp.parallel.collectives import reduce_scatter
from shmap_tp.parallel.eight_bit import EightBit, Rounded, sum_over_tokens
from shmap_tp.parallel.mesh import DP, DP_RING, ring_permutation, token_axes
from shmap_tp.parallel.rounding import rounded

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

    full: Float[Array, "..."] | EightBit
    """The gathered weight, which takes no gradient."""
    shard: Float[Array, "..."]
    """This device's shard, in the dtype of the activations."""
    layout: WeightLayout = eqx.field(static=True)

    def multiply(self, product: Callable[[Array, Array], Array], x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        """product(x, w)."""
        return _matmul(product, self.layout, x, self.full, self.shard)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmul(
    multiply: Callable[[Array, Array], Array], layout: WeightLayout, x: Array, full: Array | EightBit, shard: Array
) -> Array:
    """multiply(x, full).  The custom gradient is that of `shard` as its all-gather would give it, a sum over dp of
    which each device has its own shard; it only says how that sum is computed."""
    return full.product(multiply, x) if isinstance(full, EightBit) else multiply(x, full)


def _forward(multiply: Any, layout: WeightLayout, x: Array, full: Array | EightBit, shard: Array) -> tuple:
    return _matmul(multiply, layout, x, full, shard), (x, full, shard)


def _backward(multiply: Any, layout: WeightLayout, saved: tuple, dy: Array) -> tuple:
    x, full, shard = saved
    if isinstance(full, EightBit):
        # stored with tokens last, each piece of features would be copied before its product
        full = replace(full, to=full.to._replace(in_pieces=True))
        dx, x, dy = full.gradients(multiply, x, dy)
    else:
        (dx,) = jax.linear_transpose(lambda x: multiply(x, full), x)(dy)
    pair = (dy, x) if layout.outputs_first else (x, dy)
    if layout.outputs_first:
        dx = lax.optimization_barrier(dx)  # keeps the gradient of the norm before it out of this matmul
    return dx, None, _ring_reduce_weight_gradient(*pair, layout.sharded, shard.dtype).reshape(shard.shape)


_matmul.defvjp(_forward, _backward)


def _ring_reduce_weight_gradient(
    first: Array | Rounded, second: Array | Rounded, side: RingSide, dtype: DTypeLike
) -> Float[Array, "..."]:
    """This device's rows, or columns, of first' @ second {+dp}, summed over dp, in `dtype`."""
    rows, n = side == RingSide.rows, lax.axis_size(DP)
    sharded, full = (first, second) if rows else (second, first)
    features = _values(full).shape[2:]
    # heads stay a dim of their own where the ring divides them: flattening would copy them all
    if _values(sharded).shape[2] % n:
        sharded = jax.tree.map(_flatten_features, sharded)
    size, rank = _values(sharded).shape[2] // n, lax.axis_index(DP)
    waiting = math.prod(_values(sharded).shape[:2]) < MIN_TOKENS_TO_OVERLAP

    def term(step: RingStep) -> Array:
        start = (rank + step.offset) % n * size
        operand = step.after_receive(sharded) if waiting else sharded
        piece = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, axis=2), operand)
        dw = sum_over_tokens(*(piece, full) if rows else (full, piece))
        return dw.reshape(-1, *features) if rows else dw.reshape(*features, -1)

    def send(partial_sum: Array, by: int) -> Array:
        return lax.ppermute(partial_sum, DP, ring_permutation(n, by))

    dw = ring_reduce_scatter(term, n, dtype, send)
    return _reduce_scatter_between_rings(dw, 0 if rows else dw.ndim - 1) if DP_RING in token_axes() else dw


def _reduce_scatter_between_rings(dw: Float[Array, "..."], dim: int) -> Float[Array, "..."]:
    """dw {+dp_ring} -> this device's shard, along `dim`, of the sum over the rings.  The shards get a dim of their own,
    so that XLA for TPU need not pad them to tiles (docs/performance-notes.md).

    Communication: one reduce-scatter of dw between the rings.
    """
    shards = dw.reshape(*dw.shape[:dim], lax.axis_size(DP_RING), -1, *dw.shape[dim + 1 :])
    return reduce_scatter(shards, DP_RING, dim).squeeze(dim)


def _values(x: Array | Rounded) -> Array:
    return x.values if isinstance(x, Rounded) else x


def _flatten_features(x: Float[Array, "B T ..."]) -> Float[Array, "B T features"]:
    return x.reshape(*x.shape[:2], math.prod(x.shape[2:]))


# A weight of int8


class Int8(eqx.Module):
    """A weight of int8, in the place of the array; or its shapes, or its PartitionSpecs."""

    values: Int8Array[Array, "..."]
    scale: Float[Array, "..."]
    """float32; without the dims of the inputs."""
    inputs: tuple[int, ...] = eqx.field(static=True)
    """The dims of the input features, counted from the last."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def multiply(self, product: Callable[[Array, Array], Array], x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        """product(x, w), in x's dtype.  Communication: none."""
        y = product(x, self.values.astype(x.dtype))
        return (y * self.scale.reshape(1, 1, *y.shape[2:])).astype(y.dtype)

    def astype(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """The weight, rounded once to `dtype`."""
        return (self.values * jnp.expand_dims(self.scale, self.inputs)).astype(dtype)


def is_int8(node: Any) -> bool:
    return isinstance(node, Int8)


def quantize(w: Float[Array, "..."], inputs: tuple[int, ...]) -> Int8:
    """The weight in int8.

    Communication  under jit, where the inputs are sharded, one all-reduce of the largest values.
    """
    values, scale = rounded(w, inputs, jnp.int8)
    return Int8(values, jnp.squeeze(scale, inputs), inputs)


def quantized_shape(w: jax.ShapeDtypeStruct, inputs: tuple[int, ...]) -> Int8:
    """ShapeDtypeStructs of a weight in int8, sharded as `w` is."""
    shapes = jax.eval_shape(partial(quantize, inputs=inputs), w)
    shardings = jax.tree.map(partial(NamedSharding, w.sharding.mesh), quantized_specs(w.sharding.spec, shapes))
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, shardings)


def quantized_specs(specs: Any, params: Any) -> Any:
    """The PartitionSpecs of parameters, each of a whole weight, for `params`, some of which may be of int8."""

    def spec_of(spec: P, w: Any) -> Any:
        if not is_int8(w):
            return spec
        of_scale = [axes for dim, axes in enumerate(spec, -len(spec)) if dim not in w.inputs]
        return eqx.tree_at(lambda w: (w.values, w.scale), w, (spec, P(*of_scale)))

    return jax.tree.map(spec_of, specs, params)


def quantized_as(held: Any, parameters: Any) -> Any:
    """`parameters`, each in int8 if it is in int8 in `held`.  One array after the other is converted, and freed if the
    caller does not keep it.  Communication: as `quantize`."""
    leaves, structure = jax.tree.flatten(held, is_leaf=is_int8)
    arrays = jax.tree.leaves(parameters)
    del parameters
    for number, leaf in enumerate(leaves):
        if is_int8(leaf):
            shardings = jax.tree.map(lambda part: part.sharding, leaf)
            convert = jax.jit(partial(quantize, inputs=leaf.inputs), out_shardings=shardings)
            arrays[number] = jax.block_until_ready(convert(arrays[number]))
    return jax.tree.unflatten(structure, arrays)


def require_unquantized(parameters: Any, use: str) -> None:
    """Raise UserError if any parameter is in int8; `use` says what is to be done with them, as a participle."""
    if any(map(is_int8, jax.tree.leaves(parameters, is_leaf=is_int8))):
        raise UserError(f'a model held in int8 cannot be {use}: read it with dtype="float32" or "bfloat16"')
