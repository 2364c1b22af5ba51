"""Layers that differ: the length of the program.  Mistakes in them: tests/silent_bugs/test_layers_that_differ.py."""

from shmap_tp.model.abstract_trace import trace_gradients
from shmap_tp.model.components import parameter_shapes
from shmap_tp.parallel.tensor_parallel import AllReduce
from tests.helpers.jaxprs import equations
from tests.helpers.model_fixtures import config


def test_the_program_is_as_long_for_48_layers_as_for_12():
    pattern = "model.layer_pattern=[local,local,local,local,local,global]"

    def length(layers: int) -> int:
        model = config(f"model.layers={layers}", "model.window=3", pattern, "model.remat=full").model
        return len(list(equations(trace_gradients(parameter_shapes(model), AllReduce(), (1, model.context)))))

    assert length(48) == length(12) > 2 * length(6) / 3
