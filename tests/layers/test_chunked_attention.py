"""Chunked attention equals attention of all queries at once, and its memory is linear in the sequence length."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shmap_tp.layers.causal_attention import Pattern, causal_attention
from tests.helpers.assertions import RELATIVE, assert_close

SLOPES = [0.5, 0.25, 0.125, 0.0625]


def vjp(chunk: int):
    """(output, gradients of q, k and v) as a function of (q, k, v, the cotangent of the output)."""

    def run(q, k, v, cotangent, slopes_H=None, segments_BT=None):
        pattern = Pattern(slopes_H, segments_BT)
        out, pull = jax.vjp(lambda *qkv: causal_attention(*qkv, pattern, chunk), q, k, v)
        return out, pull(cotangent)

    return run


at_once = jax.jit(vjp(37))
"""All queries at once, compiled once for each shape."""


@pytest.mark.parametrize(
    ("chunk", "slopes"), [*((chunk, None) for chunk in (1, 2, 3, 5, 12, 36)), (5, SLOPES), (12, SLOPES)], ids=str
)
def test_any_chunk_gives_the_result_of_all_queries_at_once(chunk, slopes):
    """37 positions: groups of one chunk and of several, the last one shorter in most cases."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        q, k, v, cotangent = (rng.normal(size=(2, 37, heads, 4)) for heads in (4, 2, 2, 4))
        slopes_H = None if slopes is None else jnp.array(slopes)
        found = jax.jit(vjp(chunk))(q, k, v, cotangent, slopes_H)
        assert_close(found, at_once(q, k, v, cotangent, slopes_H), RELATIVE["float64"])


@pytest.mark.parametrize("chunk", [5, 12, 37])
def test_segments_attend_as_if_each_were_a_sequence_of_its_own(chunk):
    """Segments that end within and between chunks, other ones in each row; a segment's number may come again."""
    rng, ends = np.random.default_rng(0), ([5, 12, 13, 37], [20, 37])
    segments = np.stack([np.concatenate([np.full(n, i % 2) for i, n in enumerate(np.diff([0, *row]))]) for row in ends])
    unique = np.stack([np.cumsum(np.diff(row, prepend=row[0]) != 0) for row in segments]).astype(np.int32)
    with jax.enable_x64(True):
        q, k, v, cotangent = (rng.normal(size=(2, 37, heads, 4)) for heads in (4, 2, 2, 4))
        slopes_H = jnp.array(SLOPES)
        found, gradients = jax.jit(vjp(chunk))(q, k, v, cotangent, slopes_H, unique)
        for row, row_ends in enumerate(ends):
            for start, end in itertools.pairwise([0, *row_ends]):
                part = [x[row : row + 1, start:end] for x in (q, k, v, cotangent)]
                alone = at_once(*part, slopes_H)
                within = [x[row : row + 1, start:end] for x in (found, *gradients)]
                assert_close(within, [alone[0], *alone[1]], RELATIVE["float64"])
        joined, _ = jax.jit(vjp(chunk))(q, k, v, cotangent, slopes_H)
        assert np.abs(found - joined).max() > 0.1


@pytest.mark.parametrize(("backward", "limit"), [(False, 24), (True, 48)], ids=["forward", "backward"])
def test_memory_is_linear_in_the_sequence_length(backward, limit):
    """Temporaries of the compiled program in KiB per position, for B=1, H=4, K=64, chunk 512, float32: forward the
    scores of about three chunks, backward of six.  All scores would take 256 KiB per position at 16384.  At 2048, four
    groups of one chunk each, the compiler may compute all of them at a time."""
    found = {}
    for time in (2048, 4096, 8192, 16384):
        x = jax.ShapeDtypeStruct((1, time, 4, 64), jnp.float32)
        run = vjp(512) if backward else lambda q, k, v, _: causal_attention(q, k, v, Pattern(), 512)
        memory = jax.jit(run).lower(x, x, x, x).compile().memory_analysis()
        found[time] = memory.temp_size_in_bytes / 1024 / time
    assert max(found[4096], found[8192], found[16384]) < limit and found[2048] < 2 * limit, found
