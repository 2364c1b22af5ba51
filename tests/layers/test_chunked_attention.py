"""Chunked attention equals dense attention, and its memory is linear in the sequence length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shmap_tp.layers.causal_attention import Pattern, causal_attention
from shmap_tp.model.flops import matmul_flops
from shmap_tp.model.tracing import equations
from tests.helpers.assertions import RELATIVE, assert_close

SLOPES, ENDS = np.array([0.5, 0.25, 0.125, 0.0625]), ([5, 12, 13, 37], [20, 37])


def vjp(chunk: int, window: int | None = None):
    """(output, gradients of q, k and v) as a function of (q, k, v, the cotangent of the output)."""

    def run(q, k, v, cotangent, slopes_H=None, segments_BT=None):
        pattern = Pattern(slopes_H, segments_BT, window)
        out, pull = jax.vjp(lambda *qkv: causal_attention(*qkv, pattern, chunk), q, k, v)
        return out, pull(cotangent)

    return run


@jax.jit
def dense(q, k, v, cotangent, bias_BHTS):
    """The same from all scores at once: two query heads for each key/value head, -inf where a query sees no key."""

    def attend(q, k, v):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        scores = jnp.exp(jnp.einsum("bthk,bshk->bhts", q, k) / 2 + bias_BHTS)  # 2 = sqrt(K)
        return jnp.einsum("bhts,bshk->bthk", scores / scores.sum(-1, keepdims=True), v)

    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(cotangent)


@pytest.mark.parametrize(
    ("chunk", "window", "sloped", "cut"),
    [
        (1, None, False, False), (3, None, True, False), (5, None, True, True), (12, None, False, True),
        (36, None, False, False), (37, None, True, True), (36, 2, True, False), (2, 3, True, True),
        (12, 5, False, True), (5, 12, True, False), (36, 18, True, False), (5, 30, True, True),
    ],
)  # fmt: skip
def test_any_chunk_gives_dense_attention_to_the_window_and_the_segment_of_a_query(chunk, window, sloped, cut):
    """37 positions, output and gradients: groups of one chunk and of several, the last one shorter in most cases;
    segments that end within and between chunks, other ones in each row; blocks of a whole window and larger, and a
    window that is too large for blocks.  A window has as many tokens as its number says, of which the query is one."""
    rng, t, s = np.random.default_rng(0), np.arange(37)[:, None], np.arange(37)[None]
    segments = np.array(
        [np.searchsorted(ends if cut else [37], np.arange(37), side="right") for ends in ENDS], np.int32
    )
    seen = (s <= t) & (s > t - (window or 37)) & (segments[:, :, None] == segments[:, None])
    slopes = SLOPES if sloped else 0 * SLOPES
    bias = np.where(seen[:, None], slopes[:, None, None] * (s - t), -np.inf)
    arrays = [rng.normal(size=(2, 37, heads, 4)) for heads in (4, 2, 2, 4)]
    with jax.enable_x64(True):
        found = jax.jit(vjp(chunk, window))(*arrays, slopes if sloped else None, segments if cut else None)
        assert_close(found, dense(*arrays, bias), RELATIVE["float64"])


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
    scores of about three chunks, backward of six.  All scores would take 256 KiB per position at 16384."""
    found = {}
    for time in (4096, 16384):
        x = jax.ShapeDtypeStruct((1, time, 4, 64), jnp.float32)
        run = vjp(512) if backward else lambda q, k, v, _: causal_attention(q, k, v, Pattern(), 512)
        memory = jax.jit(run).lower(x, x, x, x).compile().memory_analysis()
        found[time] = memory.temp_size_in_bytes / 1024 / time
    assert max(found.values()) < limit, found
