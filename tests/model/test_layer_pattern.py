"""Layers that differ: the length of the program, and errors that the dense reference detects."""

from dataclasses import replace

import jax
import jax.numpy as jnp

import shmap_tp.model.loss
import shmap_tp.model.transformer
from shmap_tp.layers import causal_attention
from shmap_tp.layers.positions import NoPositions
from shmap_tp.layers.rotation import Rotation
from shmap_tp.layers.xla_workarounds import rotate_pairs
from shmap_tp.model.abstract_trace import trace_gradients
from shmap_tp.model.blocks import SequentialBlock
from shmap_tp.model.components import parameter_shapes
from shmap_tp.model.layer_pattern import layer_options
from shmap_tp.parallel.tensor_parallel import AllReduce
from tests.helpers.jaxprs import equations
from tests.helpers.model_cases import compare_model
from tests.helpers.model_fixtures import config
from tests.helpers.mutations import wrong

LOCAL = "gemma2 and 3"


def test_the_program_is_as_long_for_48_layers_as_for_12():
    pattern = "model.layer_pattern=[local,local,local,local,local,global]"

    def length(layers: int) -> int:
        model = config(f"model.layers={layers}", "model.window=3", pattern, "model.remat=full").model
        return len(list(equations(trace_gradients(parameter_shapes(model), AllReduce(), (1, model.context)))))

    assert length(48) == length(12) > 2 * length(6) / 3


def test_a_window_with_one_token_more_gives_wrong_values(monkeypatch):
    bias = causal_attention._bias

    def longer(pattern, *arguments):
        return bias(pattern if pattern.window is None else replace(pattern, window=pattern.window + 1), *arguments)

    monkeypatch.setattr(causal_attention, "_bias", longer)
    with wrong:
        compare_model(LOCAL, (1, 1), "float64")


def test_a_pattern_shifted_by_one_layer_gives_wrong_values(monkeypatch):
    def shifted(model):
        first, *rest = layer_options(model)
        return (*rest, first)

    monkeypatch.setattr(shmap_tp.model.transformer, "layer_options", shifted)
    with wrong:
        compare_model(LOCAL, (1, 1), "float64")


def test_the_rotary_encoding_in_a_layer_without_it_gives_wrong_values(monkeypatch):
    monkeypatch.setattr(NoPositions, "rotate", lambda self, x, positions=None: rotate_pairs(Rotation(1e4), 1, x))
    with wrong:
        compare_model(LOCAL, (1, 1), "float64")


def test_a_softcap_after_the_mask_gives_wrong_values(monkeypatch):
    """A masked score would become -softcap, and its key would be seen."""
    softmax = jax.nn.softmax

    def capped(scores, axis):
        return softmax(jnp.tanh(scores), axis=axis)

    monkeypatch.setattr(causal_attention.jax.nn, "softmax", capped)
    with wrong:
        compare_model(LOCAL, (1, 1), "float64")


def test_a_dropped_sink_gives_wrong_values(monkeypatch):
    monkeypatch.setattr(causal_attention, "_softmax", lambda scores, sinks_H: jax.nn.softmax(scores, axis=-1))
    with wrong:
        compare_model("sinks", (1, 1), "float64")


def test_a_loss_without_the_gradient_of_its_softcap_gives_wrong_values(monkeypatch):
    scores = shmap_tp.model.loss._scores
    monkeypatch.setattr(shmap_tp.model.loss, "_scores", lambda *given: replace(scores(*given), slope_NV=None))
    with wrong:
        compare_model(LOCAL, (1, 1), "float64")


def test_output_norms_in_place_of_input_norms_give_wrong_values(monkeypatch):
    def moved(self, x_BTD, context):
        y_BTD, extras = self.attention(x_BTD, context)
        x_BTD = x_BTD + self.attention_output_norm(y_BTD)
        return x_BTD + self.mlp_output_norm(self.mlp(x_BTD, context.tp)), extras

    monkeypatch.setattr(SequentialBlock, "__call__", moved)
    with wrong:
        compare_model(LOCAL, (1, 1), "float64")
