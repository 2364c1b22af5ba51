"""An optimizer whose update of an element depends on a full matrix gives the same parameters on every mesh and with
every sharding of parameters and optimizer state."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shmap_tp.api import load_config
from shmap_tp.config.schema import OptimizerConfig
from shmap_tp.training.optimizer import Optimizer, describe_schedule
from shmap_tp.training.step import Components, build_step_functions
from tests.helpers.assertions import assert_close, by_path, distances
from tests.helpers.model_fixtures import MESHES, mesh
from tests.helpers.step_fixtures import learnable_batch, step_config

STEPS = 3
RELATIVE = 1e-5
"""As the loss curves of different meshes in test_step."""
ZEROS = ["none", "zero1", "fsdp"]


@pytest.mark.parametrize(
    "steps, rest",
    [
        (300, "down to 0.0003 at step 300"),
        (20000, "at step 300, constant until step 20,000 (optimizer.decay_steps=300 is apart from train.steps)"),
        (40, "would end at step 300 (optimizer.decay_steps), after train.steps"),
    ],
)
def test_a_schedule_is_described_up_to_the_last_step(steps, rest):
    section = load_config("optimizer.learning_rate=3e-3").optimizer
    described = describe_schedule(section, steps)
    assert described.startswith("up to 0.003 at step 30, then a cosine ") and described.endswith(rest)


def normalised_descent(config: OptimizerConfig) -> optax.GradientTransformation:
    """Momentum, divided by its Frobenius norm: a minimal optimizer that needs full matrices (as Muon does)."""

    def normalise(updates: Any, params: Any) -> Any:
        return jax.tree.map(lambda u: u / (jnp.sqrt(jnp.sum(jnp.square(u))) + 1e-6), updates)

    return optax.chain(optax.trace(0.9), optax.stateless(normalise), optax.add_decayed_weights(0.01), optax.scale(-0.1))


@cache
def parameters_after_training(shape: tuple[int, int], zero: str, elementwise: bool = False) -> dict[str, np.ndarray]:
    """After 3 steps in float32."""
    components = Components(make_optimizer=lambda config: Optimizer(normalised_descent(config), elementwise))
    made = build_step_functions(step_config(shape, f"mesh.zero={zero}"), mesh(shape), jnp.float32, components)
    state = made.init()
    for i in range(STEPS):
        tokens = jax.device_put(learnable_batch(i, made.tokens.shape), made.tokens.sharding)
        state, _ = made.step(state, tokens)
    return by_path(state.params)


@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_a_matrix_wise_optimizer_gives_the_parameters_of_one_device(shape, zero):
    assert_close(parameters_after_training(shape, zero), parameters_after_training((1, 1), "none"), RELATIVE)


@pytest.mark.parametrize(("shape", "zero"), [((1, 8), "none"), ((2, 4), "none"), ((8, 1), "zero1"), ((8, 1), "fsdp")])
def test_a_matrix_wise_optimizer_declared_as_elementwise_gives_other_parameters(shape, zero):
    """It then divides by the norm of one device's shard."""
    found = parameters_after_training(shape, zero, elementwise=True)
    assert max(distances(found, parameters_after_training((1, 1), "none")).values()) > 1e-2
