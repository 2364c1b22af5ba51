"""Chunked attention equals attention of all queries at once, and its memory is linear in the sequence length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shmap_tp.layers.attention import causal_attention
from tests.helpers.assertions import RELATIVE, assert_close

MIB = 2**20


def vjp(chunk: int):
    """(output, gradients of q, k and v) as a function of (q, k, v, the cotangent of the output)."""

    def run(q, k, v, cotangent, slopes_H=None):
        out, pull = jax.vjp(lambda *qkv: causal_attention(*qkv, slopes_H, chunk), q, k, v)
        return out, pull(cotangent)

    return run


@pytest.mark.parametrize("slopes", [None, [0.5, 0.25, 0.125, 0.0625]], ids=["no bias", "ALiBi"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 12, 36])
def test_any_chunk_gives_the_result_of_all_queries_at_once(chunk, slopes):
    """37 positions: groups of one chunk and of several, the last one shorter in most cases."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        q, k, v, cotangent = (rng.normal(size=(2, 37, heads, 4)) for heads in (4, 2, 2, 4))
        slopes_H = None if slopes is None else jnp.array(slopes)
        found, expected = (jax.jit(vjp(each))(q, k, v, cotangent, slopes_H) for each in (chunk, 37))
        assert_close(found, expected, RELATIVE["float64"])


@pytest.mark.parametrize(("backward", "limit"), [(False, 24), (True, 48)], ids=["forward", "backward"])
def test_memory_is_linear_in_the_sequence_length(backward, limit):
    """Temporaries of the compiled program in KiB per position, for B=1, H=4, K=64, chunk 512, float32: forward the
    scores of about three chunks, backward of six.  All scores would take 256 KiB per position at 16384.  At 2048, four
    groups of one chunk each, the compiler may compute all of them at a time."""
    found = {}
    for time in (2048, 4096, 8192, 16384):
        x = jax.ShapeDtypeStruct((1, time, 4, 64), jnp.float32)
        run = vjp(512) if backward else lambda q, k, v, _: causal_attention(q, k, v, None, 512)
        memory = jax.jit(run).lower(x, x, x, x).compile().memory_analysis()
        found[time] = memory.temp_size_in_bytes / 1024 / time
    assert max(found[4096], found[8192], found[16384]) < limit and found[2048] < 2 * limit, found
