"""Which rows of tokens a device multiplies with its experts, how they come to it, and how their results go back.

B batch, T time, D model width, E experts, C chosen experts of a token, N = B T tokens, R rows: pairs of a token and one
of its experts.  E/(ep mp): whole experts, sharded over both axes.  {+mp}: a partial sum, not yet reduced.

    OverMp        a device has all tokens of its experts already: those that entered.  No communication

                  x[N D]  --sort by expert, those of this device first-->  [R D]  --compute-->  [R D]
                          --add up by token-->  y[N D] {+mp}

    OverTokens    the ranks of ep have other tokens.  Each sends its rows to the rank of their expert, in S places for
                  each rank, and gets their results back

                  x[N D]  --sort by rank and expert-->  [ep S D]  --all-to-all over ep-->  [ep S D]
                          --sort by expert, compute, sort back-->  [ep S D]  --all-to-all over ep-->  [ep S D]
                          --add up by token-->  y[N D] {+mp}

    rank 0, tokens a b      rows for rank 0 | rank 1                      rank 0, experts 0 1: its rows of a b c d
    rank 1, tokens c d      rows for rank 0 | rank 1     all-to-all       rank 1, experts 2 3: its rows of a b c d

With mp, each of its ranks sends the rows of its own experts alone: of the E/mp experts that have its number on the
ranks of ep.  No row is sent twice.

All shapes are fixed.  Without a capacity there is room for every choice; with one, rows beyond S are dropped, those of
the last experts and tokens of a rank first, and counted.  Slots without a token have no rows, and no share in the
capacity.  Lepikhin et al. 2020, "GShard", section 2.2,
https://arxiv.org/abs/2006.16668
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from shmap_tp.parallel.mesh import EP, MP, Role, axes_of, ranks

Compute = Callable[[Array, Array, Array], Array]
"""(x[R D], weights[R], sizes[E]) -> the weighted results [R D] of rows that are sorted by expert; what is in rows
beyond the sum of the sizes is not specified."""


Dispatch = Callable[[Array, Array, Array, int, Compute], tuple[Array, Array]]
"""A way to bring tokens and experts together: (x[N D], experts[N C], weights[N C], count, compute) -> (for each token
the sum [N D] {+mp} over its experts, how many rows of this device were dropped).  A device has `count` experts, and
a choice of an expert with a number beyond the last has no row."""


@dataclass(frozen=True)
class OverMp:
    """Each device computes the rows of its experts among its own tokens.

    No token is dropped, and no shape depends on the choice: R = N min(C, E/mp) rows, which is what a device needs where
    its experts are chosen as often as possible.  Rows beyond those that are chosen are multiplied by nothing.

    Communication  none.
    """

    has_all: bool
    """Whether every slot has a token, so that one device has a row of every pair."""

    def __call__(
        self,
        x_ND: Float[Array, "N D"],
        experts_NC: Int[Array, "N C"],
        weights_NC: Float[Array, "N C"],
        count: int,
        compute: Compute,
    ) -> tuple[Float[Array, "N D"], Int[Array, ""]]:
        with jax.named_scope("dispatch"):
            rows = sort_by_expert(experts_NC - lax.axis_index(MP) * count, count)
            is_row_CN = None if self.has_all and ranks((MP,)) == 1 else rows.place_CN < jnp.sum(rows.sizes)
            places = Places(rows.token, jnp.minimum(rows.place_CN, len(rows.token) - 1), is_row_CN)
            x_RD, weights_R = take_rows(x_ND, places), take_rows(weights_NC.ravel(), places.of_pairs(rows.pair))
        y_RD = compute(x_RD, weights_R, rows.sizes)
        with jax.named_scope("combine"):
            return add_rows(y_RD, places), jnp.zeros((), jnp.int32)


@dataclass(frozen=True)
class OverTokens:
    """Each row is sent to the rank of ep that has its expert, and its result back.

    Communication  over ep two all-to-alls of [ep S D] in x's dtype, one of [ep S] in float32 (weights), one of [ep S]
                   in int32 (which expert); backward those of floats again; every `remat` but `none` repeats all but the
                   one that brings results back.
    """

    capacity: float | None
    """S, relative to its value where all experts are chosen equally often; None: S has room for any choice."""
    tokens: Int[Array, ""] | None = None
    """How many tokens of this device choose experts; None: all N."""

    def __call__(
        self,
        x_ND: Float[Array, "N D"],
        experts_NC: Int[Array, "N C"],
        weights_NC: Float[Array, "N C"],
        count: int,
        compute: Compute,
    ) -> tuple[Float[Array, "N D"], Int[Array, ""]]:
        (tokens, chosen), over, mp = experts_NC.shape, ranks((EP,)), ranks((MP,))
        rank_NC, expert_NC = jnp.divmod(experts_NC, count)  # its rank among all of ep and mp, its number there
        is_mine_NC = rank_NC % mp == lax.axis_index(MP)
        rows = sort_by_expert(jnp.where(is_mine_NC, rank_NC // mp * count + expert_NC, -1), over * count)
        sizes_r = jnp.sum(rows.sizes.reshape(over, count), axis=1)
        places = places_for_a_rank(tokens, chosen, count, over * mp, self.capacity)
        limit = places if self.tokens is None else self._limit(places, chosen, over * mp)
        place_rS = jnp.broadcast_to(jnp.arange(places)[None], (over, places))
        is_row_S = (place_rS < (sizes_r if limit is places else jnp.minimum(sizes_r, limit))[:, None]).ravel()
        first_r = jnp.cumsum(sizes_r) - sizes_r
        pair_S = rows.pair.at[(first_r[:, None] + place_rS).ravel()].get(mode="clip")
        rank_CN = jnp.minimum(rank_NC.T // mp, over - 1)
        number_CN = rows.place_CN - first_r[rank_CN]  # among the rows for its rank
        has_all = self.capacity is None and self.tokens is None and mp == 1
        is_sent_CN = None if has_all else (rows.place_CN < jnp.sum(sizes_r)) & (number_CN < limit)
        slot_CN = rank_CN * places + jnp.clip(number_CN, 0, places - 1)
        sent = Places(pair_S // chosen, slot_CN, is_sent_CN)
        with jax.named_scope("dispatch"):
            x_SD = _all_to_all(take_rows(x_ND, sent))
            weights_S = _all_to_all(take_rows(weights_NC.ravel(), sent.of_pairs(pair_S)))
            expert_S = _all_to_all(jnp.where(is_row_S, expert_NC.ravel()[pair_S], count))
            order_S = jnp.argsort(expert_S, stable=True)
            sorted_S = Places(order_S, _inverse(order_S)[None], None)
            x_RD, weights_R = (take_rows(received, sorted_S) for received in (x_SD, weights_S))
        y_RD = compute(x_RD, weights_R, _sizes(expert_S, count))
        with jax.named_scope("combine"):
            y_ND = add_rows(_all_to_all(add_rows(y_RD, sorted_S)), sent)
        return y_ND, jnp.sum(jnp.maximum(sizes_r - limit, 0))

    def _limit(self, places: int, chosen: int, devices: int) -> Int[Array, ""] | int:
        """How many of S `places` may be taken: the S of a batch that has only the `tokens`."""
        if self.capacity is None:
            return places
        rows = self.capacity * (chosen * self.tokens).astype(jnp.float32) / devices
        return jnp.minimum(places, jnp.ceil(rows).astype(jnp.int32))


def dispatch_of_mesh(capacity: float | None, tokens: Int[Array, ""] | None) -> Dispatch:
    """The dispatch on the mesh that is being mapped over; only `OverTokens` needs the capacity."""
    return OverTokens(capacity, tokens) if EP in axes_of(Role.experts) else OverMp(tokens is None)


def places_for_a_rank(tokens: int, chosen: int, experts: int, devices: int, capacity: float | None) -> int:
    """S: of a device with this number of tokens, each with `chosen` experts, for one of the ranks, which has `experts`
    experts; `devices` is the product of ep and mp."""
    most = tokens * min(chosen, experts)
    return most if capacity is None else min(most, math.ceil(capacity * tokens * chosen / devices))


class Rows(NamedTuple):
    """The pairs of a token and one of some experts, sorted by expert, and pairs with others after them."""

    pair: Int[Array, " R"]
    """The number n C + c of the pair of token n and its expert number c."""
    token: Int[Array, " R"]
    sizes: Int[Array, " E"]
    """How many rows each of the experts has."""
    place_CN: Int[Array, "C N"]
    """Where each pair stands: of one with another expert, a number beyond the sum of the sizes."""


def sort_by_expert(experts_NC: Int[Array, "N C"], experts: int) -> Rows:
    """The rows of the experts 0 to `experts` - 1; those with other numbers are no rows.  Communication: none."""
    tokens, chosen = experts_NC.shape
    expert_P = experts_NC.ravel()
    group_P = jnp.where((expert_P >= 0) & (expert_P < experts), expert_P, experts)
    pair_P = jnp.argsort(group_P, stable=True)
    pair_R = pair_P[: tokens * min(chosen, experts)]
    place_CN = _inverse(pair_P).reshape(tokens, chosen).T
    return Rows(pair_R, pair_R // chosen, _sizes(group_P, experts), place_CN)


def _sizes(expert_P: Int[Array, " P"], experts: int) -> Int[Array, " E"]:
    return jnp.sum(expert_P[:, None] == jnp.arange(experts)[None], axis=0, dtype=jnp.int32)


def _inverse(order_R: Int[Array, " R"]) -> Int[Array, " R"]:
    """The place of each number in a permutation of them."""
    return jnp.zeros_like(order_R).at[order_R].set(jnp.arange(len(order_R), dtype=order_R.dtype), unique_indices=True)


class Places(NamedTuple):
    """Which rows of one array, of N, become which of another, of R: each in up to C places."""

    source_R: Int[Array, " R"]
    places_CN: Int[Array, "C N"]
    is_there_CN: Bool[Array, "C N"] | None
    """None: all are."""

    def of_pairs(self, pair_R: Int[Array, " R"]) -> "Places":
        """The places of the pairs n C + c: each in one."""
        is_there = None if self.is_there_CN is None else self.is_there_CN.T.reshape(1, -1)
        return Places(pair_R, self.places_CN.T.reshape(1, -1), is_there)


@jax.custom_vjp
def take_rows(x_N: Float[Array, "N ..."], places: Places) -> Float[Array, "R ..."]:
    """The row of x for each of R places.  Its gradient is that of the places of a row, added up: JAX's own would
    scatter them.  What stands in a place to which no row goes has no part in it.

    The plain version is the function without this gradient; that of `add_rows`, a scatter that adds up."""
    return x_N.at[places.source_R].get(mode="promise_in_bounds")


@jax.custom_vjp
def add_rows(y_R: Float[Array, "R ..."], places: Places) -> Float[Array, "N ..."]:
    """For each of N rows the sum over its places, in float32 at least; one gather after the other, because XLA for TPU
    adds slices of one gathered array more slowly."""
    wide, total = jnp.promote_types(y_R.dtype, jnp.float32), None
    for c, place_N in enumerate(places.places_CN):
        row_N = y_R.at[place_N].get(mode="promise_in_bounds")
        if places.is_there_CN is not None:
            row_N = jnp.where(places.is_there_CN[c].reshape(-1, *[1] * (y_R.ndim - 1)), row_N, 0)
        total = row_N.astype(wide) if total is None else total + row_N.astype(wide)
    return total.astype(y_R.dtype)


take_rows.defvjp(lambda x, places: (take_rows(x, places), places), lambda places, dx: (add_rows(dx, places), None))
add_rows.defvjp(lambda y, places: (add_rows(y, places), places), lambda places, dy: (take_rows(dy, places), None))


def _all_to_all(x: Array) -> Array:
    """x[ep S ...], a part for each rank of ep -> the part that each has for this one."""
    return lax.all_to_all(x, EP, 0, 0, tiled=True)
