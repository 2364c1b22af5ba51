"""Sums that go round a ring of devices: what all of them owe to each, added up on its way there.

Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models",
section 5, both ways round, https://doi.org/10.1145/3567955.3567959

On device i of n, place o is what is for device i + o, round the ring.  Half the places lie ahead, half behind.

When a product is made is not left to the compiler.  XLA for TPU makes most of them before the first hop, or under it,
and lets the other hops flow under nothing (seen in modules of libtpu 0.0.42).  A `Turn` tells a product to wait: until
what it is added to is on its way, or until that is here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array


def places(n: int) -> list[int]:
    """Of n devices the nearest first: 0, -1, 1, -2, 2 ... n/2."""
    return sorted(range(-((n - 1) // 2), n // 2 + 1), key=abs)


@dataclass(frozen=True)
class Turn:
    """What is made for a place, and when.  It is an operand that waits; where a backward pass reads that again, it
    makes all that was waited for again, too."""

    place: int
    sent: list[Array]
    """What comes for the same place from farther, as it left there."""
    came: list[Array]
    """The same, here; but at place 0 not what comes last: that flows under what is made there."""

    def under(self, x: Array) -> Array:
        """x, there no sooner than all that is `sent`: what is made of it flows under its hop."""
        return _waiting(self.sent, x)

    def after(self, x: Array) -> Array:
        """x, there no sooner than all that `came`: XLA adds that to what is made of x as it makes it.  Left free, it
        makes it before, and adds later, from memory."""
        return _waiting(self.came, x)


def _waiting(found: list[Array], x: Array) -> Array:
    return lax.optimization_barrier((found, x))[1] if found else x


def scattered(owed: Callable[[Turn], Array], n: int, dtype: DTypeLike, passed: Callable[[Array, int], Array]) -> Array:
    """The sum of what all n devices of a ring owe to this one, each place added up on its way here, the farthest first.

    `owed(turn)` makes what is owed to a place, of one shape for all.  `passed(x, by)`, in `dtype`, is x to the device
    `by` farther.

    Wire    n - 1 times `passed`, of one place's sum in `dtype`; half of them each way, both at a time.
    """
    sent: dict[int, list[Array]] = {place: [] for place in places(n)}
    came: dict[int, list[Array]] = {place: [] for place in places(n)}
    for place in reversed(came):
        total = wide(owed(Turn(place, sent[place], came[place][: None if place else -1])))
        for arrived in came[place]:
            total += wide(arrived)
        if place:
            way = 1 if place > 0 else -1
            sent[place - way].append(total.astype(dtype))
            came[place - way].append(passed(total.astype(dtype), way))
    return total.astype(dtype)


def wide(x: Array) -> Array:
    """In float32 or wider.  So is added what comes round a ring, which travels in its own dtype: it rounds less, and
    takes a v5e two thirds of the time of a sum in bfloat16, by the compiler's estimate (libtpu 0.0.42)."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
