"""Models on meshes equal their dense reference: the loss and the gradient of every parameter.

Without a reference: no position depends on a later one, and k microbatches give the gradients of one batch.
"""

import jax
import numpy as np
import pytest

from tests.helpers.assertions import RELATIVE, assert_close
from tests.helpers.model_cases import (
    FEW_HEADS,
    MODELS,
    SLICES,
    compare_model,
    model_on_mesh,
    random_parameters,
    random_tokens,
)
from tests.helpers.model_fixtures import config


@pytest.mark.parametrize("model", MODELS)
def test_model_equals_its_dense_reference(model):
    compare_model(model)


@pytest.mark.parametrize(("model", "ring_size"), [(FEW_HEADS, 2), (SLICES, 2)])
def test_model_with_several_gradient_rings_equals_its_dense_reference(monkeypatch, model, ring_size):
    """8 dp ranks form four rings; or two rings in each of two slices.  One ring: above."""
    monkeypatch.setattr("shmap_tp.parallel.mesh.MAX_RING_SIZE", ring_size)
    compare_model(model, (8, 1))


def test_microbatches_give_the_loss_and_gradients_of_one_batch():
    """With different numbers of counted targets; gradients of layers within and beyond whole periods of a pattern are
    added up in place."""
    pattern, found = ("model.window=3", "model.layer_pattern=[local,global]", "model.layers=5"), []
    with jax.enable_x64(True):
        for count in (1, 4):
            settings = "train.batch=32", f"train.microbatches={count}", "train.z_loss=0.01", "mesh.zero=fsdp"
            conf = config(*settings, *pattern)
            ids = random_tokens(conf).reshape(count, 32 // count, -1)
            run = model_on_mesh(conf, (4, 2), "float64", logits=False)
            found.append(run(random_parameters(conf, "float64"), ids))
    assert_close(*found, RELATIVE["float64"])


def test_no_position_depends_on_later_positions_or_other_rows():
    """The logits up to t do not change by a bit if tokens after t, or in other rows, do."""
    conf = config("model.attention_chunk=3", "model.remat=all_matmuls")
    run, params = model_on_mesh(conf, (2, 4), "float32"), random_parameters(conf, "float32")
    ids = np.abs(random_tokens(conf))
    before = np.asarray(run(params, ids)["logits"])
    for t in (0, 3, 5):
        changed = ids.copy()
        changed[0, 2, t + 1 :] = (changed[0, 2, t + 1 :] + 1) % conf.model.vocabulary
        after = np.asarray(run(params, changed)["logits"])
        rows = np.arange(len(ids[0])) != 2
        np.testing.assert_array_equal(after[rows], before[rows])
        np.testing.assert_array_equal(after[2, : t + 1], before[2, : t + 1])
        assert np.any(after[2, t + 1] != before[2, t + 1])
