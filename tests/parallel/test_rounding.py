"""Rounding to eight bits, to the nearest and stochastically: plainly, and by the kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shmap_tp.config.choices import MatmulPrecision
from shmap_tp.parallel import rounding
from shmap_tp.parallel.eight_bit import FORMATS
from shmap_tp.parallel.rounding import Noise, divided, rounded
from tests.helpers.sharded_harness import on_one_device

INT8, FP8 = MatmulPrecision.int8, MatmulPrecision.fp8
formats = pytest.mark.parametrize("precision", [INT8, FP8])


@formats
def test_each_row_uses_all_of_the_format_and_is_rounded_to_the_nearest(precision):
    x = np.random.default_rng(0).normal(size=(3, 5, 40)).astype(np.float32) * 10.0 ** np.arange(-2, 3)[None, :, None]
    x[0, 2] = 0
    values, scale = rounded(jnp.asarray(x), (2,), FORMATS[precision].values)
    found, size = np.asarray(values, np.float32), np.abs(x).max(2, keepdims=True)
    most = {INT8: 127, FP8: 448}[precision]
    assert (np.abs(found).max(2, keepdims=True) == np.where(size > 0, most, 0)).all()
    half_a_step = 0.5 / 127 * size if precision == INT8 else np.maximum(np.abs(x) / 16, size / 448 / 2**10)
    assert (np.abs(found * scale - x) <= 1.001 * half_a_step).all()


@formats
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_not_finite_is_not_hidden_by_rounding(precision, bad):
    values, scale = rounded(jnp.asarray([[1.0, bad], [1.0, 2.0]]), (1,), FORMATS[precision].values)
    product = values.astype(jnp.float32).sum(1, keepdims=True) * scale
    assert np.isfinite(product).tolist() == [[False], [True]]


@formats
@pytest.mark.parametrize("largest", [2e-38, 1e-36, 1e-35])
def test_a_row_of_the_smallest_numbers_is_rounded_to_finite_ones(precision, largest):
    values, scale = rounded(jnp.full((1, 2), largest), (1,), FORMATS[precision].values)
    assert np.abs(values.astype(jnp.float32) * scale - largest).max() <= max(0.07 * largest, 1.2e-38)


@formats
def test_a_stochastic_rounding_is_right_on_average_and_never_leaves_the_format(precision):
    """It gives one of the two numbers around a value, and the largest one also where a quotient is inexact."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2000, 1, 40)), jnp.float32)
    x, to = x.at[:, :, :8].set(x[:1, :, :8]).at[:, :, 8].set(9), FORMATS[precision].values
    words = jax.random.bits(jax.random.key(0), (2040,))
    noise = Noise(words[:2000].reshape(-1, 1, 1), words[2000:].reshape(1, 1, -1))
    (values, scale), (nearest, _) = (rounded(x, (2,), to, (), each) for each in (noise, None))
    found, exact, near = (np.asarray(a, np.float32) for a in (values, x / scale, nearest))
    step = 1 if precision == INT8 else np.maximum(2.0 ** np.floor(np.log2(np.abs(exact))) / 8, 2.0**-9)
    assert (np.abs(found - exact) < step).all()
    bias, bias_of_nearest = (np.abs(((a - exact) / step)[:, 0, :8].mean(0)) for a in (found, near))
    assert bias.max() < 4 * 0.5 / 2000**0.5 < bias_of_nearest.max()
    most = jnp.full((2000, 1, 200), jnp.float32(np.abs(found).max()))
    noise = Noise(noise.tokens, jax.random.bits(jax.random.key(1), (1, 1, 200)))
    assert (divided(most, jnp.float32(1 - 2.0**-18), to, noise) == most).all()


@formats
@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize(
    ("shape", "by_feature", "transposed"),
    [
        ((2, 1024, 128), True, True),
        ((2, 1024, 128), True, False),
        ((1, 128, 2048), False, True),
        ((2, 256, 768), True, True),
        ((2, 256, 768), True, False),
    ],
)
def test_the_kernel_gives_the_bits_of_the_plain_rounding(monkeypatch, precision, shape, by_feature, transposed, noise):
    """In several parts, which share a scale.  Columns of the last two are longer than a tile, made small."""
    if shape[1] == 256:
        for name, size in {"TILE": 2**15, "BLOCK": (256, 256), "PART": 256}.items():
            monkeypatch.setattr(rounding, name, size)
    random = np.random.default_rng(0)
    words = [jnp.asarray(random.integers(2**32, size=n), jnp.uint32) for n in ((*shape[:2], 1), (1, 1, shape[2]))]
    x = jnp.asarray(random.normal(size=shape), jnp.bfloat16).at[:, :, 3].set(0)
    factor = jnp.asarray(random.uniform(0.5, 2, (*shape[:2], 1) if by_feature else (1, 1, shape[2])), jnp.float32)
    found, plain = (
        on_one_device(
            lambda x, factor, *words, to=to: jax.tree.leaves(
                to.round(x, factor, by_feature, Noise(*words) if noise else None)
            ),
            *(x, factor, *words),
        )
        for to in (FORMATS[precision]._replace(kernel=True, transposed=transposed), FORMATS[precision])
    )
    for one, other in zip(found, plain, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype and (one == other).all()


@formats
def test_the_kernel_rounds_rows_of_several_arrays_together_as_the_plain_version_does(precision):
    """Each with a factor for each row, and together longer than the tile that one would have."""
    random = np.random.default_rng(0)
    xs = tuple(jnp.asarray(random.normal(size=(128, n)), jnp.bfloat16).at[3].set(0) for n in (128, 5120))
    factors = tuple(jnp.asarray(random.uniform(0.5, 2, (128, 1)), jnp.float32) for _ in xs)
    (values, scale), plain = (
        on_one_device(FORMATS[precision]._replace(kernel=kernel).round_rows, xs, factors) for kernel in (True, None)
    )
    jax.tree.map(np.testing.assert_array_equal, (values, scale), plain)
    largest = jnp.max(jnp.abs(jnp.concatenate([found.astype(jnp.float32) for found in values], axis=1)), axis=1)
    assert (largest == jnp.where(jnp.arange(128) == 3, 0, {INT8: 127, FP8: 448}[precision])).all()
