"""Layers that differ: the length of the program.  Mistakes in them: tests/silent_bugs/test_layers_that_differ.py."""

from typing import Any

import pytest

from shmap_tp.model.sharded_model import parameter_shapes
from shmap_tp.model.tracing import trace_gradients
from shmap_tp.parallel.tensor_parallel import AllReduce
from tests.helpers.jaxprs import equations
from tests.helpers.model_fixtures import config


def traced(period: int, layers: int) -> list[Any]:
    """The equations of forward and backward pass."""
    pattern = ",".join(["local", "global"][:period])
    settings = f"model.layers={layers} model.window=3 model.layer_pattern=[{pattern}] model.remat=full"
    model = config(*settings.split()).model
    return list(equations(trace_gradients(parameter_shapes(model), AllReduce(), (1, model.context))))


@pytest.mark.parametrize(("period", "layers", "barriers"), [(2, 3, 3), (2, 4, 0), (2, 5, 1), (1, 1, 1)])
def test_only_layers_in_no_loop_are_recomputed_behind_a_barrier(period, layers, barriers):
    """Without it XLA finds in the forward pass what the backward pass computes again, and keeps it.  It unrolls a loop
    of one iteration."""
    recomputed = [one.params["prevent_cse"] for one in traced(period, layers) if one.params.get("policy")]
    assert sum(recomputed) == barriers, recomputed
    assert len(recomputed) - barriers == (period if layers >= 2 * period else 0)


def test_the_program_is_as_long_for_48_layers_as_for_4():
    assert len(traced(2, 48)) == len(traced(2, 4))
