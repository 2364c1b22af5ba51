"""Attention of rows that are split along time equals that of whole rows, of every implementation; its work is balanced.

T time, R ranks of the axis cp, H query heads, N key/value heads, K head dim.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shmap_tp.layers import attention, flash_attention
from shmap_tp.layers.attention import Chunked
from shmap_tp.layers.causal_attention import Pattern, causal_attention
from shmap_tp.layers.flash_attention import Splash, make_splash
from shmap_tp.parallel.collectives import all_reduce
from shmap_tp.parallel.context_parallel import chunks_of, row_order
from shmap_tp.parallel.mesh import CP, MP, make_mesh
from tests.helpers.assertions import RELATIVE, assert_close
from tests.helpers.model_fixtures import mesh_config

OPTIONS = {"window": 100, "softcap": 1.5, "scale": 0.25, "sinks_H": np.float32([1.0, -2.0, 4.0, 2.0])}


def rank_order(x: np.ndarray, ranks: int) -> np.ndarray:
    """Whole rows [B T ...], as the ranks have their parts."""
    chunks = np.split(x, 2 * ranks, axis=1)
    return np.concatenate([x for rank in range(ranks) for x in (chunks[rank], chunks[-1 - rank])], axis=1)


def rows(time: int, documents: int) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """(q, k and v of two rows, where their documents are), of lengths that nothing divides."""
    rng = np.random.default_rng(time)
    qkv = {
        name: np.float32(rng.standard_normal((2, time, heads, 64))) for name, heads in (("q", 4), ("k", 2), ("v", 2))
    }
    if documents == 1:
        return qkv, None
    ends = np.sort(rng.choice(np.arange(1, time), (2, documents - 1)), axis=1)
    return qkv, np.int32([np.searchsorted(row, np.arange(time), side="right") for row in ends])


def mixed_and_gradients(attend, options, qkv, segments):
    """(the gradients of a function of the mixed values with respect to q, k and v, with the mixed values)."""

    def total(qkv):
        arrays = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
        mixed = attend((qkv["q"], qkv["k"], qkv["v"]), Pattern(segments_BT=segments, **arrays))
        return jnp.sum(jnp.sin(mixed)), mixed

    gradients, mixed = jax.grad(total, has_aux=True)(qkv)
    return gradients | {"mixed": mixed}


def compare(attend, ranks: int, time: int, documents: int, options) -> None:
    """Asserts that `attend` on a mesh that cuts the rows gives what chunked attention gives for whole rows."""
    qkv, segments = rows(time, documents)
    mesh, cut = make_mesh(mesh_config(1, 1, cp=ranks), jax.devices()[:ranks]), P(None, CP)

    def local(qkv, segments):
        on_rows = lambda qkv, pattern: attention.attend_rows(attend, qkv, pattern)[0]  # noqa: E731
        return all_reduce(mixed_and_gradients(on_rows, options, qkv, segments), MP)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(cut, P()), out_specs=cut)
    back = partial(row_order, ranks=ranks, dim=1)
    run = jax.jit(lambda qkv, segments: jax.tree.map(back, mapped(qkv, segments)))
    whole = jax.jit(partial(mixed_and_gradients, lambda qkv, pattern: causal_attention(*qkv, pattern, 64), options))
    found = run({name: rank_order(x, ranks) for name, x in qkv.items()}, segments)
    assert_close(found, whole(qkv, segments), RELATIVE["float32"])


@pytest.mark.parametrize(("ranks", "documents", "options"), [
    (8, 3, OPTIONS), (4, 1, {"window": 27}), (4, 30, {"window": 28}),
])  # fmt: skip
def test_chunked_attention_of_cut_rows_equals_that_of_whole_rows(ranks, documents, options):
    """A rank has parts of 26 positions on four ranks: one window ends at the border of the next, and one beyond it."""
    compare(Chunked(5), ranks, 208, documents, options)


@pytest.mark.parametrize(("documents", "options", "most_keys"), [
    (1, {}, 512), (7, OPTIONS | {"window": 129}, 128),
])  # fmt: skip
def test_splash_attention_of_cut_rows_equals_that_of_whole_rows(monkeypatch, documents, options, most_keys):
    """With one backward kernel, whose blocks of keys are 4 or 2 times those of the forward pass, and with the two of
    longer rows."""
    for name, value in (("BLOCKS", (128,)), ("ADDED_AT_ONCE", 1), ("MAX_PARTIAL_DQ", 2)):
        monkeypatch.setattr(flash_attention, name, value)
    compare(Splash(interpret=True, most_keys=most_keys), 2, 512, documents, options)


@pytest.mark.parametrize("window", [None, 1100])
def test_the_blocks_that_splash_attention_computes_are_as_many_on_every_rank(window):
    """To the blocks of one row in a hundred.  Segments are data, and blocks between documents are not skipped: the work
    is the same for rows of 1, 10 or 100 documents."""
    ranks, keys = 8, 16384
    pattern = Pattern(window=window)
    counts = []
    for rank in range(ranks):
        kernel = make_splash((1, keys // ranks, keys), pattern, jnp.int32(rank), interpret=True)
        counts.append(int(np.count_nonzero(kernel.fwd_mask_info.block_mask)))
    whole = make_splash((1, keys, keys), pattern, None, interpret=True)
    assert sum(counts) == np.count_nonzero(whole.fwd_mask_info.block_mask)
    assert max(counts) <= 1.05 * np.mean(counts)


@pytest.mark.parametrize(("documents", "unequal"), [(1, 1.00), (10, 1.82), (100, 1.52)])
def test_the_pairs_that_the_masks_of_documents_leave_are_equal_on_all_ranks_for_one_document(documents, unequal):
    """The table of docs/parallelism.md: of the rank with most of them, relative to the mean, in the median of 20 rows
    with random borders.  Blocks of other documents are computed, too, so that the work is that of one document."""
    ranks, time, found = 8, 131072, []
    for seed in range(20):
        begins = np.zeros(time, int)
        borders = np.random.default_rng(seed).choice(np.arange(1, time), documents - 1, replace=False)
        begins[borders] = borders
        pairs = (np.arange(time) + 1 - np.maximum.accumulate(begins)).reshape(2 * ranks, -1).sum(axis=1)
        of_ranks = [pairs[chunks_of(rank, ranks)].sum() for rank in range(ranks)]
        found.append(max(of_ranks) / np.mean(of_ranks))
    assert np.median(found) == pytest.approx(unequal, abs=0.005)
