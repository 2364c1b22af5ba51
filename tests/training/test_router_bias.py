"""The biases of routers: moved by the load of the whole step, alike everywhere, without a gradient."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shmap_tp.layers.experts import Router
from shmap_tp.training.step import StepFunctions, build_step_functions
from tests.helpers.assertions import assert_replicas_agree, by_path
from tests.helpers.model_fixtures import config, mesh_of
from tests.helpers.step_fixtures import learnable_batch, step_config

SMALL = ["model.block=sequential", "model.mlp=swiglu"]
SETTINGS = (
    "block=sequential norm=rmsnorm mlp=swiglu positions=rotary context=8 attention_chunk=8 ffn=16 experts=8 "
    "router_bias_rate=0.01"
)
BIAS = "blocks.mlp.router.choice_bias"
STEPS = 6


def made(shape: tuple[int, int], *settings: str) -> StepFunctions:
    conf = step_config(shape, *(f"model.{one}" for one in SETTINGS.split()), *settings)
    return build_step_functions(conf, mesh_of(conf), jnp.float32)


@cache
def biases(shape: tuple[int, int], *settings: str) -> np.ndarray:
    """[L E] after a few steps."""
    functions = made(shape, *settings)
    state = functions.init()
    assert not any("router.choice_bias" in path for path in by_path(state.optimizer))
    for i in range(STEPS):
        batch = learnable_batch(i, (16, 9)).reshape(functions.tokens.shape)
        state, _ = functions.step(state, jax.device_put(batch, functions.tokens.sharding))
        assert_replicas_agree(state)
    return by_path(state.params)[BIAS]


PLACES = [
    ((2, 4), "mesh.zero=fsdp", "mesh.tensor_parallel=sequence", "train.microbatches=4"),
    ((4, 2), "mesh.ep=4", "mesh.zero=zero1", "train.microbatches=1"),
    ((8, 1), "mesh.ep=2", "mesh.zero=fsdp"),
]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_the_bias_of_a_router_has_the_same_bits_on_every_mesh_and_for_any_microbatches(place):
    expected = biases((1, 1))
    assert len(np.unique(expected)) > 2 and np.max(np.abs(expected)) <= 0.01 * STEPS * (1 + 1e-6)
    assert np.array_equal(biases(*place), expected)


def test_the_bias_moves_by_its_rate_towards_the_mean_load_and_not_for_a_skipped_step():
    model = config(*SMALL, "model.experts=4", "model.router_bias_rate=0.5").model
    router = jax.vmap(lambda key: Router(model, key=key))(jax.random.split(jax.random.key(0)))  # of two layers
    loads = jnp.array([[5, 3, 4, 4], [16, 0, 0, 0]])  # of 8 tokens, 2 experts each
    assert router.balanced(loads, 8, jnp.array(True)).choice_bias.tolist() == [[-0.5, 0.5, 0, 0], [-0.5, 0.5, 0.5, 0.5]]
    assert router.balanced(loads, 8, jnp.array(False)).choice_bias.tolist() == [[0.0] * 4] * 2
    between = router.balanced(jnp.array([[5, 4, 4, 5]] * 2), 9, jnp.array(True))  # a mean of 4.5
    assert between.choice_bias.tolist() == [[-0.5, 0.5, 0.5, -0.5]] * 2


def test_the_bias_balances_a_router_that_does_not_learn():
    """The load of the most chosen expert of any layer, relative to the mean; without a bias it stays."""

    def load(rate: float) -> tuple[float, float]:
        still = "optimizer.learning_rate=0", "optimizer.final_learning_rate=0", "model.init_std=0.3"
        functions = made((2, 1), *still, f"model.router_bias_rate={rate}")
        state, found = functions.init(), []
        batch = jax.device_put(learnable_batch(0, functions.tokens.shape), functions.tokens.sharding)
        for _ in range(150):
            state, metrics = functions.step(state, batch)
            found.append(float(metrics["expert_load"]))
        return found[0], found[-1]

    (before, unmoved), (same, after) = load(0), load(0.003)
    assert before == unmoved == same > 1.5 and after < 1.15
