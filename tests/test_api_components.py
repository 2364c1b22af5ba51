"""The library takes components of the user's, and what it offers as a loss is differentiable."""

import jax
import numpy as np

import shmap_tp
from shmap_tp.layers.mlp import GatedMlp
from tests.helpers.assertions import assert_close, assert_same_bits

TINY = ["model=test", "mesh.dp=2", "mesh.mp=4", "train.batch=4", "train.microbatches=1", "model.context=8"]


def tokens(config: shmap_tp.Config) -> np.ndarray:
    shape = (config.train.batch, config.model.context + 1)
    return np.random.default_rng(0).integers(0, config.model.vocabulary, shape)


def test_an_mlp_given_as_a_component_is_the_one_that_the_configuration_would_name():
    named, given = (shmap_tp.load_config(*TINY, f"model.mlp={mlp}") for mlp in ("swiglu", "gelu"))
    components = shmap_tp.Components(mlp=GatedMlp)
    expected, found = shmap_tp.Model.initialize(named), shmap_tp.Model.initialize(given, components)
    assert_same_bits(found.parameters, expected.parameters)
    trainers = shmap_tp.Trainer(named), shmap_tp.Trainer(given, components=components)
    losses = [float(trainer.step(tokens(named))["loss"]) for trainer in trainers]
    assert losses[0] == losses[1]
    assert_same_bits(trainers[1].model().parameters, trainers[0].model().parameters)


def test_the_gradient_of_the_loss_is_that_of_loss_and_gradients():
    config = shmap_tp.load_config(*TINY, "train.z_loss=0.0")
    model = shmap_tp.Model.initialize(config)
    batch = tokens(config).astype(np.int32)
    gradients = jax.grad(model.functions.loss)(model.parameters, batch[None])
    assert_close(gradients, model.loss_and_gradients(batch)[1], 1e-6)
