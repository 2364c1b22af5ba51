"""The full model on every mesh equals its dense reference: logits, loss, and the gradient of every parameter.

Without a reference: no position depends on a later one, and k microbatches give the gradients of one batch.
"""

from itertools import cycle

import jax
import numpy as np
import pytest

from tests.helpers.assertions import RELATIVE, assert_close
from tests.helpers.model_cases import (
    FSDP_RING_FEW_HEADS,
    FSDP_RING_OFFLOAD_DEEP,
    FSDP_RING_SEQUENCE,
    FSDP_RING_TWO_SLICES,
    MODELS,
    compare_model,
    model_on_mesh,
    random_parameters,
    random_tokens,
)
from tests.helpers.model_fixtures import MESHES, config

ON_SOME_MESHES = (FSDP_RING_FEW_HEADS, FSDP_RING_OFFLOAD_DEEP)
EVERYWHERE = [model for model in MODELS if model not in ON_SOME_MESHES]
PLACES = [*zip((m for m in EVERYWHERE for _ in MESHES), cycle(MESHES), cycle(["float32", "float64"]))]
CHOSEN = {"all_reduce": (0, 2), "sequence": (0, 2), "collective_matmul": (0, 1, 3)}


def mode_of(model: str) -> str:
    return next((mode for mode in ("sequence", "collective_matmul") if model.startswith(mode)), "all_reduce")


QUICK = [place for i, place in enumerate(PLACES) if (i % 5 - i // 5) % 5 in CHOSEN[mode_of(place[0])]]
"""Two or three meshes of each model; other models have the other meshes."""


@pytest.mark.parametrize(
    ("model", "shape", "precision"),
    [pytest.param(*place, marks=[] if place in QUICK else pytest.mark.slow) for place in PLACES],
    ids=str,
)
def test_model_equals_its_dense_reference(model, shape, precision):
    """In one precision each, because compiling takes seconds; test_layers compares the blocks on every mesh."""
    compare_model(model, shape, precision)


def test_quick_places_cover_every_mesh_in_every_mode_and_with_fsdp():
    found = {(mode_of(model), shape) for model, shape, _ in QUICK}
    assert found == {(mode, shape) for mode in {mode for mode, _ in found} for shape in MESHES}
    assert {mode for mode, _ in found} == {"all_reduce", "sequence", "collective_matmul"}
    sharded = {("mesh.zero=fsdp" in MODELS[model], shape) for model, shape, _ in QUICK}
    assert sharded == {(fsdp, shape) for fsdp in (False, True) for shape in MESHES}
    assert {precision for _, _, precision in QUICK} == {"float32", "float64"}


@pytest.mark.parametrize(
    ("model", "ring_size"),
    [
        (FSDP_RING_FEW_HEADS, 8),
        (FSDP_RING_FEW_HEADS, 4),
        (FSDP_RING_FEW_HEADS, 2),
        (FSDP_RING_TWO_SLICES, 2),
        (FSDP_RING_SEQUENCE, 4),
    ],
)
def test_model_with_one_or_several_gradient_rings_equals_its_dense_reference(monkeypatch, model, ring_size):
    """8 dp ranks form one ring, two or four; or two rings in each of two slices."""
    monkeypatch.setattr("shmap_tp.parallel.mesh.MAX_RING_SIZE", ring_size)
    compare_model(model, (8, 1), "float64")


@pytest.mark.parametrize("shape", [(2, 4), (8, 1)], ids=str)
def test_every_layer_of_the_offloaded_scan_uses_its_own_prefetched_weight(shape):
    compare_model(FSDP_RING_OFFLOAD_DEEP, shape, "float64")


def test_microbatches_give_the_loss_and_gradients_of_one_batch():
    """1, 2 or 4 microbatches, with different numbers of counted targets."""
    found = {}
    with jax.enable_x64(True):
        for count in (1, 2, 4):
            conf = config("train.batch=32", f"train.microbatches={count}", "train.z_loss=0.01")
            ids = random_tokens(conf).reshape(count, 32 // count, -1)
            run = model_on_mesh(conf, (2, 4), "float64", logits=False)
            found[count] = run(random_parameters(conf, "float64"), ids)
    assert_close(found[2], found[1], RELATIVE["float64"])
    assert_close(found[4], found[1], RELATIVE["float64"])


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
