"""The evaluation loss is differentiable: its gradient is that of the dense reference, on every mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shmap_tp.training.step import build_step_functions
from tests.helpers import reference
from tests.helpers.assertions import RELATIVE, assert_close, by_path
from tests.helpers.model_fixtures import config, mesh_of

CASES = {
    "2 x 4": ((2, 4), []),
    "2 x 4, sequence parallelism": ((2, 4), ["mesh.tensor_parallel=sequence", "model.context=8"]),
    "4 x 2, FSDP over two slices": ((4, 2), ["mesh.zero=fsdp", "mesh.slices=2"]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_of_the_evaluation_loss_is_the_references(case):
    shape, overrides = CASES[case]
    sizes = [f"mesh.dp={shape[0]}", f"mesh.mp={shape[1]}", "train.microbatches=2", "train.z_loss=0.1"]
    conf = config(*sizes, *overrides)
    with jax.enable_x64(True):
        functions = build_step_functions(conf, mesh_of(conf), jnp.float64)
        params = functions.init().params
        tokens = np.random.default_rng(0).integers(0, conf.model.vocabulary, functions.tokens.shape, np.int32)
        placed = jax.device_put(tokens, functions.tokens.sharding)
        found = jax.grad(lambda p, tokens: functions.evaluate(p, tokens)[0])(params, placed)
        objective = partial(reference.objective, config=conf.model, z_loss=0.0)
        expected, _ = jax.jit(jax.grad(objective, has_aux=True))(by_path(params), tokens.reshape(-1, tokens.shape[-1]))
        assert_close(by_path(found), by_path(expected), RELATIVE["float64"])
