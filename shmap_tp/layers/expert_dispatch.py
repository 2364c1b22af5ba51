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
from jaxtyping import Array, Float, Int

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

    def __call__(
        self,
        x_ND: Float[Array, "N D"],
        experts_NC: Int[Array, "N C"],
        weights_NC: Float[Array, "N C"],
        count: int,
        compute: Compute,
    ) -> tuple[Float[Array, "N D"], Int[Array, ""]]:
        rows = sort_by_expert(experts_NC - lax.axis_index(MP) * count, count)
        y_RD = compute(x_ND[rows.token], weights_NC.ravel()[rows.pair], rows.sizes)
        return _added_up(x_ND, rows.token, y_RD, jnp.sum(rows.sizes)), jnp.zeros((), jnp.int32)


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
        row_S = ((jnp.cumsum(sizes_r) - sizes_r)[:, None] + place_rS).ravel()
        pair_S = rows.pair.at[row_S].get(mode="clip")
        token_S = pair_S // chosen
        with jax.named_scope("dispatch"):
            x_SD = _all_to_all(jnp.where(is_row_S[:, None], x_ND[token_S], 0))
            weights_S = _all_to_all(jnp.where(is_row_S, weights_NC.ravel()[pair_S], 0))
            expert_S = _all_to_all(jnp.where(is_row_S, expert_NC.ravel()[pair_S], count))
        order_S = jnp.argsort(expert_S, stable=True)
        sizes_E = _sizes(expert_S, count)
        y_SD = compute(x_SD[order_S], weights_S[order_S], sizes_E)
        y_SD = jnp.where((jnp.arange(len(y_SD)) < jnp.sum(sizes_E))[:, None], y_SD, 0)
        with jax.named_scope("combine"):
            y_SD = _all_to_all(y_SD[jnp.argsort(order_S)])
        y_SD = jnp.where(is_row_S[:, None], y_SD, 0)
        y_ND = jnp.zeros_like(x_ND).at[token_S].add(y_SD)
        return y_ND, jnp.sum(jnp.maximum(sizes_r - limit, 0))

    def _limit(self, places: int, chosen: int, devices: int) -> Int[Array, ""] | int:
        """How many of S `places` may be taken: the S of a batch that has only the `tokens`."""
        if self.capacity is None:
            return places
        rows = self.capacity * (chosen * self.tokens).astype(jnp.float32) / devices
        return jnp.minimum(places, jnp.ceil(rows).astype(jnp.int32))


def dispatch_of_mesh(capacity: float | None, tokens: Int[Array, ""] | None) -> Dispatch:
    """The dispatch on the mesh that is being mapped over; only `OverTokens` needs the arguments."""
    return OverTokens(capacity, tokens) if EP in axes_of(Role.experts) else OverMp()


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


def sort_by_expert(experts_NC: Int[Array, "N C"], experts: int) -> Rows:
    """The rows of the experts 0 to `experts` - 1; those with other numbers are no rows.  Communication: none."""
    tokens, chosen = experts_NC.shape
    expert_P = experts_NC.ravel()
    group_P = jnp.where((expert_P >= 0) & (expert_P < experts), expert_P, experts)
    pair_R = jnp.argsort(group_P, stable=True)[: tokens * min(chosen, experts)]
    return Rows(pair_R, pair_R // chosen, _sizes(group_P, experts))


def _sizes(expert_P: Int[Array, " P"], experts: int) -> Int[Array, " E"]:
    return jnp.sum(expert_P[:, None] == jnp.arange(experts)[None], axis=0, dtype=jnp.int32)


def _added_up(
    x_ND: Float[Array, "N D"], token_R: Int[Array, " R"], y_RD: Float[Array, "R D"], rows: Int[Array, ""]
) -> Float[Array, "N D"]:
    """For each token the sum of y over the first `rows` rows."""
    is_row_R = jnp.arange(len(y_RD)) < rows
    return jnp.zeros_like(x_ND).at[token_R].add(jnp.where(is_row_R[:, None], y_RD, 0))


def _all_to_all(x: Array) -> Array:
    """x[ep S ...], a part for each rank of ep -> the part that each has for this one."""
    return lax.all_to_all(x, EP, 0, 0, tiled=True)
