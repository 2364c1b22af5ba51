"""Layers that differ: the length of the program, and errors that the dense reference detects."""

from dataclasses import replace

import shmap_tp.model.transformer
from shmap_tp.layers import causal_attention
from shmap_tp.model.abstract_trace import trace_gradients
from shmap_tp.model.components import parameter_shapes
from shmap_tp.model.layer_pattern import layer_options
from shmap_tp.parallel.tensor_parallel import AllReduce
from tests.helpers.jaxprs import equations
from tests.helpers.model_cases import compare_model
from tests.helpers.model_fixtures import config
from tests.helpers.mutations import wrong

LOCAL = "local and global"


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
        compare_model(LOCAL, (1, 1), "float32")


def test_a_pattern_shifted_by_one_layer_gives_wrong_values(monkeypatch):
    def shifted(model):
        first, *rest = layer_options(model)
        return (*rest, first)

    monkeypatch.setattr(shmap_tp.model.transformer, "layer_options", shifted)
    with wrong:
        compare_model(LOCAL, (1, 1), "float32")
