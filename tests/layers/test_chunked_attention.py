"""Chunked attention equals attention of all queries at once, and its memory is linear in the sequence length."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shmap_tp.layers.causal_attention import Pattern, causal_attention
from shmap_tp.model.jaxprs import equations
from shmap_tp.model.matmul_count import matmul_flops
from tests.helpers.assertions import RELATIVE, assert_close
from tests.helpers.reference import one_head

SLOPES = [0.5, 0.25, 0.125, 0.0625]


def vjp(chunk: int, window: int | None = None):
    """(output, gradients of q, k and v) as a function of (q, k, v, the cotangent of the output)."""

    def run(q, k, v, cotangent, slopes_H=None, segments_BT=None):
        pattern = Pattern(slopes_H, segments_BT, window)
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


@pytest.mark.parametrize(
    ("window", "chunk", "with_segments"),
    [(2, 36, False), (3, 2, True), (5, 12, True), (12, 5, False), (18, 36, False), (30, 5, True)],
)
def test_a_query_attends_to_as_many_tokens_as_the_window_has_of_which_it_is_one(window, chunk, with_segments):
    """Output and gradients against the dense reference: blocks of a whole window and larger, and a window
    that is too large for blocks."""
    rng = np.random.default_rng(0)
    segments = np.repeat([0, 1, 2], [9, 4, 24])[None].astype(np.int32) if with_segments else np.zeros((1, 37), np.int32)

    def dense(q, k, v, cotangent, slopes_H, segments_BT):
        def of_head(q, k, v, slope):
            ends = [*np.flatnonzero(np.diff(segments[0])) + 1, 37]
            parts = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
            alone = [one_head(q[:, s], k[:, s], v[:, s], slope, -jnp.inf, window) for s in parts]
            return jnp.concatenate(alone, axis=1)

        heads = jax.vmap(of_head, in_axes=(2, 2, 2, 0), out_axes=2)
        out, pull = jax.vjp(lambda q, k, v: heads(q, *(jnp.repeat(x, 2, axis=2) for x in (k, v)), slopes_H), q, k, v)
        return out, pull(cotangent)

    with jax.enable_x64(True):
        q, k, v, cotangent = (rng.normal(size=(1, 37, heads, 4)) for heads in (4, 2, 2, 4))
        arguments = q, k, v, cotangent, jnp.array(SLOPES), segments if with_segments else None
        assert_close(jax.jit(vjp(chunk, window))(*arguments), dense(*arguments), RELATIVE["float64"])


def test_the_work_within_a_window_is_linear_in_the_sequence_length():
    """FLOPs of the matrix products, forward and backward, per position; a chunk of 32 in a window of 16 and of 100."""

    def flops(time: int, window: int) -> float:
        x = jax.ShapeDtypeStruct((1, time, 2, 4), jnp.float32)
        return sum(matmul_flops(visit) for visit in equations(jax.make_jaxpr(vjp(32, window))(x, x, x, x).jaxpr)) / time

    for window in (16, 100):
        assert flops(4096, window) <= 1.01 * flops(2048, window)
        pair = 2 * 2 * 4 * 6  # of two heads of 4: scores twice, values once, and three products for the gradients
        assert flops(4096, window) <= 1.1 * pair * (2 * window + 32)


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
