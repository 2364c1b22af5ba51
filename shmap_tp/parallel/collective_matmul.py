"""Collective matmul: sequence parallelism whose all-gather and reduce-scatter overlap the matmuls around them.

Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models",
section 5 (bidirectional), https://doi.org/10.1145/3567955.3567959

B batch, T time, D model width, F features, n devices of mp.  T/mp: dim T sharded over mp.

The residual stream is x[B T/mp D].  Time is computed in n chunks; on device i, offset o stands for the chunk of device
(i + o) mod n, and chunks are ordered by distance: 0, -1, 1, -2, 2 ... n/2 (`ring_offsets`).

    all_gather_matmul       x[B T/mp D]  --chunk o, by ppermute from the neighbour that holds it-->  x_o @ w[D F/mp]
                            ->  y_o[B T/mp F/mp]
    matmul_reduce_scatter   y_o[B T/mp F/mp] @ w[F/mp D]  --added to the partial sum for the same device, passed on to
                            the neighbour nearer to it-->  y[B T/mp D]

Hops in one direction overlap matmuls of the chunks of the other.  Each function's backward pass is a ring like the
other's forward pass; it is written out because JAX's own transpose leaves the compiler free to compute the terms of a
sum at any time (`RingStep`).  The plain versions are `SequenceParallel.column_parallel` and `row_parallel`.

One hop hides at most what is multiplied meanwhile: a chunk of n tokens takes n D 2 / rate seconds to the next neighbour
while two chunks are multiplied, 2 n D 2 F / peak.  A sublayer hides its ring where F > peak / (2 rate): 3055 features
per device on v4, 2550 on v5p, 2190 on v5e, 5100 on v6e.  A parallel block has the features of attention and MLP
together. Each weight is multiplied n times and its gradient accumulated from n terms, so this pays where communication
is exposed and chunks are large; the planner compares.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.dtypes import float0
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from shmap_tp.parallel.collectives import mark_varying
from shmap_tp.parallel.mesh import MP, ring_permutation

# A reduce-scatter in a ring


def ring_offsets(n: int) -> list[int]:
    """The offsets of a ring of n devices, the nearest first: 0, -1, 1, -2, 2 ... n/2."""
    return sorted(range(-((n - 1) // 2), n // 2 + 1), key=abs)


@dataclass(frozen=True)
class RingStep:
    """The computation of one term, and its place in the schedule.

    When a term is computed is not left to the compiler: XLA for TPU computes most terms before or under the first hop,
    so that the other hops overlap nothing (docs/performance-notes.md).  Optimization barriers let a term wait for a hop
    to begin or to end.  Without them the ring would be a plain `lax.psum_scatter` of all terms.

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

    Every device holds one term for each device.  On device i, offset o stands for device (i + o) mod n.  Offsets run
    from -(n - 1) // 2 to n // 2: partial sums move in both directions at once, each at most n / 2 hops, and the hops
    overlap the computation of the terms that they add up.

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


# Matmuls with collectives

TimeChunks = tuple[PyTree[Float[Array, "B chunk ..."]], ...]
"""One array per chunk of time, in the order of `ring_offsets`; of `AfterNorm` one tuple of arrays."""


@runtime_checkable
class Product(Protocol):
    """What a tensor-parallel mode multiplies with, a pytree of its parameters: a `Linear`, or several of them behind
    the scale and bias of a norm (`layers/norm.AfterNorm`)."""

    is_linear: bool
    """Whether a call is linear in x, and in all parameters together."""

    def __call__(self, x: Array) -> Any:
        """x[B any ...] -> x @ w.  Communication: none."""
        ...

    def add_bias(self, y: Any) -> Any:
        """y + b, or y where there is no bias.  Communication: none."""
        ...


def all_gather_matmul(x_BTD: Float[Array, "B chunk D"], layers: Sequence[Product]) -> tuple[TimeChunks, ...]:
    """x[B T/mp D] -> for each layer its product with every chunk of time.

    Communication  forward n - 1 ppermutes of x; backward n - 1 ppermutes of dx.
    """
    return tuple(_all_gather_matmul(x_BTD, list(layers)))


def matmul_reduce_scatter(products: Sequence[tuple[TimeChunks, Product]]) -> Float[Array, "B chunk D"]:
    """(chunks y, layer) pairs -> this device's chunk of the sum over pairs and over mp of y @ w.

    Communication  forward n - 1 ppermutes of a chunk of the sum; backward n - 1 ppermutes of a chunk of its gradient.
    """
    operands, layers = zip(*products, strict=True)
    return _matmul_reduce_scatter(list(operands), list(layers))


def _send(x: Array, by: int) -> Array:
    """x to the device `by` positions further along the ring."""
    return lax.ppermute(x, MP, ring_permutation(lax.axis_size(MP), by))


def _all_gather_chunks(x_BTD: Float[Array, "B chunk D"]) -> TimeChunks:
    """The chunk of every device, the nearest first, each passed on as soon as it is received."""
    chunks = {0: x_BTD}
    for offset in ring_offsets(lax.axis_size(MP))[1:]:
        towards = 1 if offset > 0 else -1
        chunks[offset] = _send(chunks[offset - towards], -towards)
    return tuple(chunks.values())


def _input_gradient(layer: Product, x: Array, dy: Any) -> Array:
    return _transpose(layer, layer, x, dy)


def _transpose(layer: Product, function: Callable[[Any], Any], at: Any, dy: Any) -> Any:
    """The gradient of `at` for dy = d function(at), where `function` is one of `layer`: its transpose if it is linear.

    Else the gradient of a norm reads that of the norm's output, and that of an adapter's factor the product with the
    other, which are computed here once more.
    """
    return (jax.linear_transpose(function, at)(dy) if layer.is_linear else jax.vjp(function, at)[1](dy))[0]


def _weight_gradient(layer: Product, chunks: TimeChunks, d_chunks: TimeChunks) -> Product:
    """dw, as a pytree like the layer, summed over the chunks."""
    terms = [_transpose(layer, lambda layer, x=x: layer(x), layer, dy) for x, dy in zip(chunks, d_chunks, strict=True)]
    return jax.tree.map(lambda *dw: dw[0] if dw[0].dtype == float0 else functools.reduce(operator.add, dw), *terms)


# Neither custom gradient replaces a cast or a reduction over mp: arguments and results vary over mp, and the type of
# every gradient is checked.


@jax.custom_vjp
def _all_gather_matmul(x_BTD: Array, layers: list[Product]) -> list[TimeChunks]:
    return _all_gather_matmul_forward(x_BTD, layers)[0]


def _all_gather_matmul_forward(x_BTD: Array, layers: list[Product]) -> tuple[list[TimeChunks], tuple]:
    chunks = _all_gather_chunks(x_BTD)
    products = [[layer(chunk) for layer in layers] for chunk in chunks]
    return list(zip(*products, strict=True)), (chunks, layers)


def _all_gather_matmul_backward(saved: tuple, dy: list[TimeChunks]) -> tuple[Array, list[Product]]:
    chunks, layers = saved
    to_dx = [[partial(_input_gradient, layer, chunk) for layer in layers] for chunk in chunks]
    dw = [_weight_gradient(layer, chunks, d_chunks) for layer, d_chunks in zip(layers, dy, strict=True)]
    return _reduce_scatter_products(to_dx, dy), dw


_all_gather_matmul.defvjp(_all_gather_matmul_forward, _all_gather_matmul_backward)


@jax.custom_vjp
def _matmul_reduce_scatter(operands: list[TimeChunks], layers: list[Product]) -> Array:
    return _matmul_reduce_scatter_forward(operands, layers)[0]


def _matmul_reduce_scatter_forward(operands: list[TimeChunks], layers: list[Product]) -> tuple[Array, tuple]:
    # available together: an MLP's activations are ready before attention's, and would be multiplied before the ring
    together = lax.optimization_barrier(operands)
    return _reduce_scatter_products([layers] * len(operands[0]), together), (operands, layers)


def _matmul_reduce_scatter_backward(saved: tuple, dy: Array) -> tuple[list[TimeChunks], list[Product]]:
    operands, layers = saved
    # the ring of dy starts after rematerialisation: of two rings at a time XLA overlaps too little
    dy, operands = lax.optimization_barrier((dy, operands))
    d_chunks, pairs = _all_gather_chunks(dy), list(zip(layers, operands, strict=True))
    dx = [tuple(_input_gradient(layer, y, d) for y, d in zip(ys, d_chunks, strict=True)) for layer, ys in pairs]
    return dx, [_weight_gradient(layer, ys, d_chunks) for layer, ys in pairs]


_matmul_reduce_scatter.defvjp(_matmul_reduce_scatter_forward, _matmul_reduce_scatter_backward)


def _reduce_scatter_products(multiply: list[list[Callable[[Array], Array]]], operands: list[TimeChunks]) -> Array:
    """This device's chunk of the sum over mp of all products, multiply[chunk][i](operands[i][chunk]).

    The first of several products of a chunk waits for the received sum and adds it as it is computed; the others
    overlap the hop.  A single product overlaps it.  The first stands between two hops, so it should be the smaller one:
    attention's, where an MLP is computed beside it.
    """
    offsets = ring_offsets(len(multiply))

    def term(step: RingStep) -> Array:
        i = offsets.index(step.offset)
        (last, y), *before = zip(multiply[i], [chunks[i] for chunks in operands], strict=True)
        if not before:
            return last(step.after_send(y))
        overlapped = functools.reduce(operator.add, [each(step.after_send(x)) for each, x in before])
        y = step.after_receive(y) if step.offset else step.after_send(y)  # offset 0: everything overlaps the last hop
        return to_float32(last(y)) + to_float32(lax.optimization_barrier(overlapped))  # XLA is to add to `last` only

    return ring_reduce_scatter(term, len(offsets), jax.tree.leaves(operands)[0].dtype, _send)


# Between chunks and time.  Each is the gradient of the other, written as such because JAX's own transposes would fill
# arrays with zeros and add where values only change places.


def _chunk_starts(count: int, size: int) -> list[Array]:
    return [(lax.axis_index(MP) + offset) % count * size for offset in ring_offsets(count)]


def _concat_time(chunks: TimeChunks) -> Float[Array, "B T ..."]:
    (batch, size, *features), n = chunks[0].shape, len(chunks)
    y = mark_varying(lax.empty((batch, n * size, *features), chunks[0].dtype), MP)  # every element is written below
    for start, chunk in zip(_chunk_starts(n, size), chunks, strict=True):
        y = lax.dynamic_update_slice_in_dim(y, chunk, start, axis=1)
    return y


def _split_time(y: Float[Array, "B T ..."]) -> TimeChunks:
    n = lax.axis_size(MP)
    size = y.shape[1] // n
    return tuple(lax.dynamic_slice_in_dim(y, start, size, axis=1) for start in _chunk_starts(n, size))


concat_time: Any = jax.custom_vjp(_concat_time)
"""Chunks -> y[B T ...], positions in order; plainly `jnp.concatenate`.  Communication: none."""
split_time: Any = jax.custom_vjp(_split_time)
"""y[B T ...] -> chunks; plainly `jnp.split`.  Communication: none."""
concat_time.defvjp(lambda chunks: (_concat_time(chunks), None), lambda _, dy: (_split_time(dy),))
split_time.defvjp(lambda y: (_split_time(y), None), lambda _, d_chunks: (_concat_time(d_chunks),))
