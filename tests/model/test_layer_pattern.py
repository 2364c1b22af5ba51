"""Layers that differ: the length of the program.  Mistakes in them: tests/silent_bugs/test_layers_that_differ.py."""

import jax
import jax.numpy as jnp
import pytest

from shmap_tp.model.abstract_trace import trace_gradients
from shmap_tp.model.components import parameter_shapes
from shmap_tp.parallel.tensor_parallel import AllReduce
from shmap_tp.training.step import build_step_functions
from tests.helpers.assertions import assert_close, by_path
from tests.helpers.jaxprs import equations
from tests.helpers.model_fixtures import config, mesh_of
from tests.helpers.step_fixtures import learnable_batch, step_config


def test_the_program_is_as_long_for_48_layers_as_for_12():
    pattern = "model.layer_pattern=[local,local,local,local,local,global]"

    def length(layers: int) -> int:
        model = config(f"model.layers={layers}", "model.window=3", pattern, "model.remat=full").model
        return len(list(equations(trace_gradients(parameter_shapes(model), AllReduce(), (1, model.context)))))

    assert length(48) == length(12) > 2 * length(6) / 3


@pytest.mark.parametrize(
    ("period", "layers", "barriers"), [(3, 3, 3), (3, 5, 5), (3, 6, 0), (3, 8, 2), (1, 1, 1), (1, 2, 0)]
)
def test_only_layers_in_no_loop_are_recomputed_behind_a_barrier(period, layers, barriers):
    """Without it XLA finds in the forward pass what the backward pass computes again, and keeps it.  It unrolls a loop
    of one iteration."""
    pattern = ",".join(["local", "global", "global"][:period])
    settings = f"model.layers={layers} model.window=3 model.layer_pattern=[{pattern}] model.remat=full"
    model = config(*settings.split()).model
    traced = equations(trace_gradients(parameter_shapes(model), AllReduce(), (1, model.context)))
    recomputed = [one.params["prevent_cse"] for one in traced if one.params.get("policy")]
    assert sum(recomputed) == barriers, recomputed
    assert len(recomputed) - barriers == (period if layers >= 2 * period else 0)


def test_layers_beyond_the_last_whole_period_train_alike_with_one_microbatch_and_with_two():
    """The gradients of two are added up in place."""
    pattern = "model.window=3", "model.layer_pattern=[local,global]", "model.layers=5"
    found = []
    for microbatches in (1, 2):
        conf = step_config((2, 2), *pattern, "mesh.zero=fsdp", f"train.microbatches={microbatches}")
        made = build_step_functions(conf, mesh_of(conf), jnp.float32)
        ids = learnable_batch(0, (1, 16, made.tokens.shape[-1])).reshape(made.tokens.shape)
        state, _ = made.step(made.init(), jax.device_put(ids, made.tokens.sharding))
        found.append(by_path(state.params))
    assert_close(*found, 1e-5)
