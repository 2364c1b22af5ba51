"""Context parallelism: which positions of a row each rank of the axes of time has, and how a device gets the others.

R ranks, T positions of a row, in 2R chunks of c = T / 2R.  Rank r has the chunks r and 2R - 1 - r, one of either end:

    positions    0    c    2c   3c   4c   5c   6c   7c         R = 4
    rank         0    1    2    3    3    2    1    0

A query attends to the keys before it, so that with chunks of one end the last rank would have almost all of the work.
One of the two chunks has r chunks before it and the other 2R - 1 - r: every rank has the same.  This is the layout of
Dubey et al. 2024, Llama 3, section 3.3.2, and as there keys and values are gathered before attention, and not passed on
in a ring: with few key/value heads they are small beside the queries.  Where no query sees further than the chunk
before its own, that chunk is fetched in their place: the one before r is of rank r - 1, the one before 2R - 1 - r of
rank r + 1, and of the last rank its own.

What depends on the order of the tokens (targets, positions) is made before a row is cut; the segments of its documents
are not cut.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

from shmap_tp.parallel.collectives import all_gather
from shmap_tp.parallel.mesh import Role, axes_of, ranks


def time_ranks(sizes: Mapping[str, int]) -> int:
    """R, of a mesh whose axes have these sizes."""
    return math.prod(sizes[axis] for axis in axes_of(Role.time, sizes))


def row_order(x: Shaped[Array, "..."], ranks: int, dim: int = -1) -> Shaped[Array, "..."]:
    """Parts of rows, one after the other along `dim` in the order of the ranks -> whole rows; with one rank, x."""
    if ranks == 1:
        return x
    dim %= x.ndim
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    chunks = x.reshape(*before, ranks, 2, x.shape[dim] // (2 * ranks), *after)
    low, high = (lax.index_in_dim(chunks, end, dim + 1, keepdims=False) for end in (0, 1))
    return jnp.stack([low, jnp.flip(high, dim)], axis=dim).reshape(x.shape)


def whole_rows(tree: Any) -> Any:
    """All positions of every array [B T/ranks ...] in order, [B T ...]; inside shard_map.  Without an axis that shards
    time, the arrays themselves.

    Communication  one all-gather of each over the axes of time; backward one reduce-scatter of its gradient, in its
                   dtype.
    """
    over = axes_of(Role.time)
    if not over:
        return tree
    return jax.tree.map(lambda x: row_order(all_gather(x, over, 1), ranks(over), 1), tree)


def own_chunks(tree: Any) -> Any:
    """This device's two chunks of every array [... T] of whole rows; inside shard_map.  Without an axis of time, the
    arrays themselves.  Communication: none."""
    if not axes_of(Role.time):
        return tree

    def cut(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        size = x.shape[-1] // (2 * ranks(axes_of(Role.time)))
        chunks = [lax.dynamic_slice_in_dim(x, number * size, size, x.ndim - 1) for number in chunk_numbers()]
        return jnp.concatenate(chunks, axis=-1)

    return jax.tree.map(cut, tree)


def sees_one_chunk_back(window: int | None, time: int) -> bool:
    """Whether no query of this device's `time` positions sees further than the chunk before its own, within `window`
    positions; inside shard_map.  False for rows that are not split along time."""
    return bool(axes_of(Role.time)) and window is not None and window - 1 <= time // 2


def with_chunks_before(tree: Any) -> Any:
    """Each of this device's two chunks of every array [B 2c ...] as a row, behind the chunk before it: [2B 2c ...].
    Zeros are before the first chunk of all.  Inside shard_map, with an axis that shards time.

    Communication  of each array 2 ppermutes of B c ... over the axes of time; backward the opposite ones of its
                   gradient, in its dtype.
    """
    over = axes_of(Role.time)
    last = ranks(over) - 1
    up = [(rank, rank + 1) for rank in range(last)]
    down = [(target, source) for source, target in up]

    def joined(x: Shaped[Array, "B time ..."]) -> Shaped[Array, "rows time ..."]:
        low, high = jnp.split(x, 2, axis=1)
        before_high = jnp.where(lax.axis_index(over) == last, low, lax.ppermute(high, over, down))
        before = jnp.concatenate([lax.ppermute(low, over, up), before_high], axis=1)
        return jnp.concatenate([chunks_as_rows(before), chunks_as_rows(x)], axis=1)

    return jax.tree.map(joined, tree)


def own_chunks_with_before(x: Shaped[Array, "B row"], filling: int) -> Shaped[Array, "rows time"]:
    """As `with_chunks_before`, but from whole rows, and with `filling` before the first chunk.  Communication: none."""
    size = x.shape[1] // (2 * ranks(axes_of(Role.time)))
    padded = jnp.pad(x, [(0, 0), (size, 0)], constant_values=filling)
    parts = [lax.dynamic_slice_in_dim(padded, number * size, 2 * size, 1) for number in chunk_numbers()]
    return chunks_as_rows(jnp.concatenate(parts, axis=1))


def chunks_as_rows(x: Shaped[Array, "B time ..."]) -> Shaped[Array, "rows c ..."]:
    """Each half of the positions as a row of its own."""
    return x.reshape(2 * x.shape[0], x.shape[1] // 2, *x.shape[2:])


def chunk_numbers() -> list[Int[Array, ""]]:
    """The numbers of this device's two chunks among the 2 R of a row; inside shard_map, with an axis that shards
    time."""
    over = axes_of(Role.time)
    return chunks_of(lax.axis_index(over), ranks(over))


def chunks_of(rank: Any, ranks: int) -> list[Any]:
    """The numbers of the two chunks of a rank, which is an integer or an array of one."""
    return [rank, 2 * ranks - 1 - rank]
