"""Models on meshes equal their dense reference: the loss and the gradient of every parameter.

Without a reference: k microbatches give the gradients of one batch.
"""

import jax
import pytest

from tests.helpers import model_cases as cases
from tests.helpers.assertions import RELATIVE, assert_close
from tests.helpers.model_fixtures import config


@pytest.mark.parametrize("model", cases.MODELS)
def test_model_equals_its_dense_reference(model):
    cases.compare_model(model)


@pytest.mark.parametrize(("model", "ring_size"), [(cases.FEW_HEADS, 2), (cases.SLICES, 2)])
def test_model_with_several_gradient_rings_equals_its_dense_reference(monkeypatch, model, ring_size):
    """8 dp ranks form four rings; or two rings in each of two slices.  One ring: above."""
    monkeypatch.setattr("shmap_tp.parallel.mesh.MAX_RING_SIZE", ring_size)
    cases.compare_model(model, (8, 1))


def test_microbatches_give_the_loss_and_gradients_of_one_batch():
    """With different numbers of counted targets; gradients of layers within and beyond whole periods of a pattern are
    added up in place."""
    pattern, found = ("model.window=3", "model.layer_pattern=[local,global]", "model.layers=5"), []
    with jax.enable_x64(True):
        for count in (1, 4):
            settings = "train.batch=32", f"train.microbatches={count}", "train.z_loss=0.01", "mesh.zero=fsdp"
            conf = config(*settings, *pattern)
            ids = cases.random_tokens(conf).reshape(count, 32 // count, -1)
            run = cases.model_on_mesh(conf, (4, 2), "float64", logits=False)
            found.append(run(cases.random_parameters(conf, "float64"), ids))
    assert_close(*found, RELATIVE["float64"])
