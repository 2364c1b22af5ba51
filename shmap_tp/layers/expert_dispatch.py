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

Rows move by gathers alone, forward and backward (`gather_rows`, `sum_rows`): each token knows the places of its rows.
Rows that are of no pair hold anything, and are never read.

All shapes are fixed.  Without a capacity there is room for every choice; with one, rows beyond S are dropped, those of
the last experts and tokens of a rank first, and counted.  Lepikhin et al. 2020, "GShard", section 2.2,
https://arxiv.org/abs/2006.16668
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from shmap_tp.parallel.collectives import mark_varying, varying_axes
from shmap_tp.parallel.mesh import EP, MP, Role, axes_of, ranks

Compute = Callable[[Array, Array, Array], Array]
"""(x[R D], weights[R], sizes[E]) -> the weighted results [R D] of rows that are sorted by expert; what is in rows
beyond the sum of the sizes is not specified."""


@runtime_checkable
class Dispatch(Protocol):
    """A way to bring tokens and experts together."""

    def __call__(
        self,
        x_ND: Float[Array, "N D"],
        experts_NC: Int[Array, "N C"],
        weights_NC: Float[Array, "N C"],
        count: int,
        compute: Compute,
    ) -> tuple[Float[Array, "N D"], Int[Array, ""]]:
        """(for each token the sum {+mp} over its experts, how many rows of this device were dropped); a device has
        `count` experts."""
        ...


@dataclass(frozen=True)
class OverMp:
    """Each device computes the rows of its experts among its own tokens.

    No token is dropped, and no shape depends on the choice: R = N min(C, E/mp) rows, which is what a device needs where
    its experts are chosen as often as possible.  Rows beyond those that are chosen are multiplied by nothing.

    Communication  none.
    """

    def __call__(
        self,
        x_ND: Float[Array, "N D"],
        experts_NC: Int[Array, "N C"],
        weights_NC: Float[Array, "N C"],
        count: int,
        compute: Compute,
    ) -> tuple[Float[Array, "N D"], Int[Array, ""]]:
        rows = sort_by_expert(experts_NC - lax.axis_index(MP) * count, count)
        x_RD, weights_R = rows_of_pairs(x_ND, weights_NC, rows.pair, rows.place)
        y_RD = compute(x_RD, weights_R, rows.sizes)
        return sum_rows(y_RD, rows.place, rows.token), jnp.zeros((), jnp.int32)


@dataclass(frozen=True)
class OverTokens:
    """Each row is sent to the rank of ep that has its expert, and its result back.

    Communication  over ep two all-to-alls of [ep S D] in x's dtype, one of [ep S] in float32 (weights), one of [ep S]
                   in int32 (which expert); backward those of floats again; every `remat` but `none` repeats all but the
                   one that brings results back.
    """

    capacity: float | None
    """S, relative to what it is where all experts are chosen equally often; None: S has room for any choice."""

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
        starts_r = jnp.cumsum(sizes_r) - sizes_r
        places = places_for_a_rank(tokens, chosen, count, over * mp, self.capacity)
        place_rS = jnp.broadcast_to(jnp.arange(places)[None], (over, places))
        is_row_S = (place_rS < sizes_r[:, None]).ravel()
        pair_S = rows.pair.at[(starts_r[:, None] + place_rS).ravel()].get(mode="clip")
        place_NC = rows.place - starts_r[rank_NC // mp]  # among those for its rank
        has_place_NC = is_mine_NC & (place_NC < places)
        place_NC = jnp.where(has_place_NC, rank_NC // mp * places + place_NC, over * places)
        with jax.named_scope("dispatch"):
            x_SD, weights_S = map(_all_to_all, rows_of_pairs(x_ND, weights_NC, pair_S, place_NC))
            expert_S = _all_to_all(jnp.where(is_row_S, expert_NC.ravel()[pair_S], count))
        order_S = jnp.argsort(expert_S, stable=True)
        back_S = jnp.argsort(order_S)
        x_SD, weights_S = (gather_rows(rows, order_S, back_S[:, None]) for rows in (x_SD, weights_S))
        y_SD = compute(x_SD, weights_S, _sizes(expert_S, count))
        with jax.named_scope("combine"):
            y_SD = _all_to_all(gather_rows(y_SD, back_S, order_S[:, None]))
        return sum_rows(y_SD, place_NC, pair_S // chosen), jnp.sum(jnp.maximum(sizes_r - places, 0))


def dispatch_of_mesh(capacity: float | None) -> Dispatch:
    """That of the mesh which is being mapped over; `capacity` as of `OverTokens`, which other ways do not need."""
    return OverTokens(capacity) if EP in axes_of(Role.experts) else OverMp()


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
    place: Int[Array, "N C"]
    """Which row each pair is; of pairs that are no rows, R."""
    sizes: Int[Array, " E"]
    """How many rows each of the experts has."""


def sort_by_expert(experts_NC: Int[Array, "N C"], experts: int) -> Rows:
    """The rows of the experts 0 to `experts` - 1; those with other numbers are no rows.  Communication: none."""
    tokens, chosen = experts_NC.shape
    expert_P = experts_NC.ravel()
    group_P = jnp.where((expert_P >= 0) & (expert_P < experts), expert_P, experts)
    order_P = jnp.argsort(group_P, stable=True)
    pair_R = order_P[: tokens * min(chosen, experts)]
    place_P = jnp.where(group_P < experts, jnp.argsort(order_P), len(pair_R))
    return Rows(pair_R, pair_R // chosen, place_P.reshape(tokens, chosen), _sizes(group_P, experts))


def _sizes(expert_P: Int[Array, " P"], experts: int) -> Int[Array, " E"]:
    return jnp.sum(expert_P[:, None] == jnp.arange(experts)[None], axis=0, dtype=jnp.int32)


def rows_of_pairs(
    x_ND: Float[Array, "N D"], weights_NC: Float[Array, "N C"], pair_R: Int[Array, " R"], place_NC: Int[Array, "N C"]
) -> tuple[Float[Array, "R D"], Float[Array, " R"]]:
    """(x of the token, the weight) of each row's pair.  Communication: none."""
    x_RD = gather_rows(x_ND, pair_R // weights_NC.shape[1], place_NC)
    return x_RD, gather_rows(weights_NC.ravel(), pair_R, place_NC.reshape(-1, 1))


def gather_rows(
    x: Float[Array, "N ..."], index_R: Int[Array, " R"], place_NC: Int[Array, "N C"]
) -> Float[Array, "R ..."]:
    """y[r] = x[index[r]].  The gradient of x[n] is the sum of those of the rows place[n]; R is no row.

    The plain version is `x[index_R]`, whose gradient is a scatter that adds up.  Communication: none.
    """
    return _gather(mark_varying(x, tuple(varying_axes(index_R))), index_R, place_NC)


def sum_rows(y: Float[Array, "R ..."], place_NC: Int[Array, "N C"], index_R: Int[Array, " R"]) -> Float[Array, "N ..."]:
    """x[n] = the sum of y over the rows place[n]; R is no row.  The gradient of y[r] is that of x[index[r]].

    The plain version is `_sum(y, place_NC)`.  Communication: none.
    """
    return _sum_by_gather(mark_varying(y, tuple(varying_axes(place_NC))), place_NC, index_R)


def _sum(y: Array, place_NC: Array) -> Array:
    return jnp.sum(y.at[place_NC].get(mode="fill", fill_value=0), axis=1)


@jax.custom_vjp
def _gather(x: Array, index_R: Array, place_NC: Array) -> Array:
    return x.at[index_R].get(mode="promise_in_bounds")


@jax.custom_vjp
def _sum_by_gather(y: Array, place_NC: Array, index_R: Array) -> Array:
    return _sum(y, place_NC)


_gather.defvjp(
    lambda x, index_R, place_NC: (_gather(x, index_R, place_NC), (index_R, place_NC)),
    lambda saved, dy: (_sum_by_gather(dy, saved[1], saved[0]), None, None),
)
_sum_by_gather.defvjp(
    lambda y, place_NC, index_R: (_sum(y, place_NC), (index_R, place_NC)),
    lambda saved, dx: (_gather(dx, *saved), None, None),
)


def _all_to_all(x: Array) -> Array:
    """x[ep S ...], a part for each rank of ep -> the part that each has for this one."""
    return lax.all_to_all(x, EP, 0, 0, tiled=True)
