"""Attention of rows that are split along time equals that of whole rows, of every implementation; its work is balanced.

T time, R ranks of the axis cp, H query heads, N key/value heads, K head dim.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shmap_tp.layers import attention, splash_masks
from shmap_tp.layers.attention import Chunked
from shmap_tp.layers.causal_attention import Pattern, causal_attention
from shmap_tp.layers.flash_attention import Splash
from shmap_tp.layers.splash_masks import make_splash
from shmap_tp.parallel.collectives import all_reduce
from shmap_tp.parallel.context_parallel import chunks_of, row_order
from shmap_tp.parallel.mesh import CP, MP, make_mesh
from tests.helpers.assertions import RELATIVE, assert_close
from tests.helpers.model_fixtures import mesh_config

OPTIONS = {"window": 100, "softcap": 1.5, "scale": 0.25, "sinks_H": np.float32([1.0, -2.0, 4.0, 2.0])}


def as_arrays(options):
    return {key: jnp.asarray(value) if isinstance(value, np.ndarray) else value for key, value in options.items()}


def rank_order(x: jax.Array, ranks: int) -> jax.Array:
    """Whole rows [B T ...], as the ranks have their parts."""
    chunks = jnp.split(x, 2 * ranks, axis=1)
    return jnp.concatenate([x for rank in range(ranks) for x in (chunks[rank], chunks[-1 - rank])], axis=1)


def rows(time: int, documents: int) -> tuple[dict[str, jax.Array], jax.Array | None]:
    """(q, k and v of two rows, where their documents are), of lengths that nothing divides."""
    rng = np.random.default_rng(time)
    sizes = {"q": 4, "k": 2, "v": 2}
    qkv = {name: jnp.float32(rng.standard_normal((2, time, heads, 64))) for name, heads in sizes.items()}
    if documents == 1:
        return qkv, None
    ends = np.sort(rng.choice(np.arange(1, time), (2, documents - 1)), axis=1)
    return qkv, jnp.int32([np.searchsorted(row, np.arange(time), side="right") for row in ends])


def on_ranks(attend, ranks: int, qkv, segments, options):
    """(the mixed values, their gradients with respect to q, k and v) on a mesh that cuts the rows."""
    mesh = make_mesh(mesh_config(1, 1, cp=ranks), jax.devices()[:ranks])

    def local(qkv, segments):
        def total(qkv):
            pattern = Pattern(segments_BT=segments, **as_arrays(options))
            mixed, _ = attention.attend_rows(attend, (qkv["q"], qkv["k"], qkv["v"]), pattern)
            return jnp.sum(jnp.sin(mixed)), mixed

        gradients, mixed = jax.grad(total, has_aux=True)(qkv)
        return all_reduce(mixed, MP), all_reduce(gradients, MP)

    cut = P(None, CP)
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(cut, P()), out_specs=cut))
    found = run(jax.tree.map(partial(rank_order, ranks=ranks), qkv), segments)
    mixed, gradients = jax.tree.map(partial(row_order, ranks=ranks, dim=1), found)
    return {"mixed": mixed, **gradients}


def on_whole_rows(qkv, segments, options):
    def total(qkv):
        mixed = causal_attention(qkv["q"], qkv["k"], qkv["v"], Pattern(segments_BT=segments, **as_arrays(options)), 64)
        return jnp.sum(jnp.sin(mixed)), mixed

    gradients, mixed = jax.jit(jax.grad(total, has_aux=True))(qkv)
    return {"mixed": mixed, **gradients}


@pytest.mark.parametrize(("ranks", "documents", "options"), [
    (2, 1, {}), (4, 5, {}), (8, 3, OPTIONS), (2, 30, {"window": 7}), (4, 1, {"window": 27}), (4, 5, {"window": 28}),
    (8, 2, OPTIONS | {"window": 14}),
])  # fmt: skip
def test_chunked_attention_of_cut_rows_equals_that_of_whole_rows(ranks, documents, options):
    qkv, segments = rows(208, documents)
    found = on_ranks(Chunked(5), ranks, qkv, segments, options)
    assert_close(found, on_whole_rows(qkv, segments, options), RELATIVE["float32"])


@pytest.mark.parametrize(("ranks", "documents", "options", "most_keys"), [
    (2, 1, {}, 512), (2, 1, {}, 256), (2, 7, OPTIONS | {"window": 200}, 512), (2, 7, OPTIONS | {"window": 200}, 128),
    (2, 1, {"window": 129}, 256), (2, 7, OPTIONS, 128),
])  # fmt: skip
def test_splash_attention_of_cut_rows_equals_that_of_whole_rows(monkeypatch, ranks, documents, options, most_keys):
    """With one backward kernel, whose blocks of keys are 4 or 2 times those of the forward pass, and with the two of
    longer rows."""
    monkeypatch.setattr(splash_masks, "BLOCKS", (128,))
    monkeypatch.setattr(splash_masks, "MAX_ADDITIONS", 1)
    monkeypatch.setattr(splash_masks, "MAX_PARTIAL_DQ", 2)
    qkv, segments = rows(512, documents)
    found = on_ranks(Splash(interpret=True, most_keys=most_keys), ranks, qkv, segments, options)
    assert_close(found, on_whole_rows(qkv, segments, options), RELATIVE["float32"])


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
