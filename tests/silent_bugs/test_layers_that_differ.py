"""A window, softcap, sink or norm that other frameworks gave to the wrong layer or applied in the wrong place, each
written as the mistake would be made here.  docs/silent-bugs.md names the published threads, test by test."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import shmap_tp.model.loss
import shmap_tp.model.transformer
from shmap_tp.layers import causal_attention
from shmap_tp.layers.positions import NoPositions, Rotation, rotate_pairs
from shmap_tp.model.blocks import SequentialBlock
from shmap_tp.model.transformer import LayerOptions, layer_options
from tests.helpers.layer_cases import JOINT_NORMS
from tests.helpers.model_cases import PATTERNS, compare_model
from tests.helpers.mutations import compare_layer, mutate, wrong

Period = tuple[LayerOptions, ...]


COMPARE = partial(compare_model, PATTERNS, (1, 1), gradients=False)
"""A model with a window of 3 tokens in one of its layers, rows of 8, caps, sinks and norms around sublayers."""


def with_options(monkeypatch: pytest.MonkeyPatch, changed: Callable[[Period], Period]) -> None:
    monkeypatch.setattr(shmap_tp.model.transformer, "layer_options", lambda model: changed(layer_options(model)))


@pytest.mark.parametrize("other", [lambda window: window + 1, lambda window: window - 1, lambda window: None])
def test_a_window_has_a_token_more_or_less_or_is_ignored(monkeypatch, other):
    def changed(period: Period) -> Period:
        patterns = [replace(one.pattern, window=one.pattern.window and other(one.pattern.window)) for one in period]
        return tuple(replace(one, pattern=pattern) for one, pattern in zip(period, patterns, strict=True))

    with_options(monkeypatch, changed)
    with wrong:
        COMPARE()


def test_a_pattern_is_shifted_by_one_layer(monkeypatch):
    with_options(monkeypatch, lambda period: (*period[1:], period[0]))
    with wrong:
        COMPARE()


def test_a_layer_without_the_rotary_encoding_rotates(monkeypatch):
    monkeypatch.setattr(NoPositions, "rotate", lambda self, x, positions=None: rotate_pairs(Rotation(1e4), 1, x))
    with wrong:
        COMPARE()


def test_scores_are_capped_after_the_mask(monkeypatch):
    """A masked score becomes -softcap, and its key is seen."""
    capped = lambda softmax: lambda scores, sinks: softmax(jnp.maximum(scores, -1), sinks)  # noqa: E731
    mutate(monkeypatch, causal_attention, "_softmax", capped)
    with wrong:
        COMPARE()


def test_the_gradient_of_capped_logits_is_that_of_logits_without_a_cap(monkeypatch):
    mutate(monkeypatch, shmap_tp.model.loss, "_scores", lambda of: lambda *given: replace(of(*given), slope_NV=None))
    with wrong:
        compare_model(PATTERNS, (1, 1))


def test_attention_drops_its_sinks(monkeypatch):
    monkeypatch.setattr(causal_attention, "_softmax", lambda scores, sinks_H: jax.nn.softmax(scores, axis=-1))
    with wrong:
        COMPARE()


def test_the_norms_after_sublayers_are_applied_before_them(monkeypatch):
    def before(self, x_BTD, context):
        y_BTD, extras = self.attention(self.attention_output_norm(x_BTD), context)
        x_BTD = x_BTD + y_BTD
        return x_BTD + self.mlp(self.mlp_output_norm(x_BTD), context.tp), extras

    monkeypatch.setattr(SequentialBlock, "__call__", before)
    with wrong:
        compare_layer(f"{JOINT_NORMS}; all_reduce", gradients=False)
