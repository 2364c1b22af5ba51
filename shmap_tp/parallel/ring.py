"""A ring reduce-scatter by ppermute, whose hops overlap the computation of the terms that they add up.

Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models",
section 5 (bidirectional), https://doi.org/10.1145/3567955.3567959

Every device of a ring of n holds one term for each device; device i receives the sum of the n terms that are meant for
it.  On device i, offset o stands for device (i + o) mod n.  Offsets run from -(n - 1) // 2 to n // 2: partial sums
move in both directions at once, each at most n / 2 hops.

When a term is computed is not left to the compiler: XLA for TPU computes most terms before or under the first hop, so
that the other hops overlap nothing (docs/performance-notes.md).  A `RingStep` offers optimization barriers with which a
term waits for a hop to begin or to end.  Without them this would be a plain `lax.psum_scatter` of all terms.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree


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
