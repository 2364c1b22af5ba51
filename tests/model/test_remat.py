"""What is saved between the passes, by name and by memory, as traced for one device of (2, 4)."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shmap_tp.config.activation_names import SAVED_BY_REMAT
from shmap_tp.config.schema import Remat, SavedActivation
from shmap_tp.layers.attention import Chunked
from shmap_tp.layers.flash_attention import Splash
from shmap_tp.training.step import build_step_functions
from tests.helpers.jaxprs import equations_named, is_on_host, trace_loss_and_gradients
from tests.helpers.model_fixtures import config, mesh_of

B, T, D, H, K, F = 2, 8, 24, 2, 4, 10
"""On one device: 8 sequences in 2 microbatches over 2 dp ranks; 8 heads and 40 hidden columns over 4 mp ranks."""
SHAPES = {
    SavedActivation.input: {(B, T, D): 1},
    SavedActivation.sublayer_output: {(B, T, D): 1},  # that of attention; nothing reads that of the MLP
    SavedActivation.query_key_value: {(B, H, T, K): 3},
    SavedActivation.attention_output: {(B, H, T, K): 1},
    SavedActivation.gate: {(B, T, F): 1},
    SavedActivation.up: {(B, T, F): 1},
}


def host_writes(jaxpr: Any) -> Counter[tuple[int, ...]]:
    """The shapes of all arrays that are written to host memory."""
    return Counter(
        one.outvars[0].aval.shape for one in equations_named(jaxpr, "device_put") if is_on_host(one.outvars[0])
    )


def host_writes_of_a_step(remat: Remat, offload: list[SavedActivation]) -> Counter[tuple[int, ...]]:
    """Of one layer, because layers are a scan."""
    conf = config(
        "mesh.dp=2", "mesh.mp=4", "model.context=8", "model.block=sequential", "model.mlp=swiglu",
        f"model.remat={remat}", f"model.offload=[{','.join(offload)}]",
    )  # fmt: skip
    made = build_step_functions(conf, mesh_of(conf), jnp.float32)
    return host_writes(jax.make_jaxpr(made.step)(made.shapes, made.tokens).jaxpr)


@pytest.mark.parametrize(
    ("remat", "offload"),
    [(remat, [saved]) for remat in SAVED_BY_REMAT for saved in SAVED_BY_REMAT[remat]]
    + [(Remat.all_matmuls, list(SavedActivation))],
)
def test_exactly_the_offloaded_activations_are_written_to_the_host(remat, offload):
    expected = Counter()
    for saved in offload:
        expected.update(SHAPES[saved])
    assert host_writes_of_a_step(remat, offload) == expected


@pytest.mark.parametrize("remat", Remat)
def test_nothing_is_written_to_the_host_without_offload(remat):
    assert not host_writes_of_a_step(remat, [])


@pytest.mark.parametrize("defer", [False, True])
def test_softmax_denominators_of_a_kernel_stay_on_the_device(defer):
    """Of splash attention q, k, v and the output are written, each once; the values per query are not."""
    offload = "model.offload=[query_key_value,attention_output]"
    model = config("model.context=128", "model.positions=rotary", "model.remat=attention", offload).model
    expected = {(B * H, 128, K) if defer else (B, H, 128, K): 3, (B * H, 1, 128, K): 1}
    assert host_writes(trace_loss_and_gradients(model, Splash(defer))) == expected


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("remat", Remat)
def test_policies_without_sublayer_outputs_recompute_the_means_of_norms(remat, norm):
    """A layer has two norms, each with two means (layernorm) or one (rmsnorm)."""

    def means(remat: Remat) -> int:
        settings = "model.context=8", "model.block=sequential", f"model.norm={norm}", f"model.remat={remat}"
        model = config(*settings).model
        sums = equations_named(trace_loss_and_gradients(model, Chunked(model.attention_chunk)), "reduce_sum")
        return sum(one.invars[0].aval.shape == (B, T, D) and one.params["axes"] == (2,) for one in sums)

    recomputed = 2 * (2 if norm == "layernorm" else 1)
    assert means(remat) - means(Remat.none) == (recomputed if remat in (Remat.full, Remat.attention_output) else 0)


@pytest.mark.parametrize("qk_norm", ["false", "true"])
@pytest.mark.parametrize(
    ("block", "shapes"), [("sequential", {(B, T, D), (B, H, T, K)}), ("parallel", {(B, H, T, K)})], ids=str
)
def test_row_major_is_what_a_policy_saves_of_attention_and_of_sequential_blocks(block, shapes, qk_norm):
    """q, k and v before their norms, if they have any."""
    settings = [f"model.block={block}", f"model.qk_norm={qk_norm}", "model.norm=rmsnorm", "model.context=8"]
    for value, expected in (("false", set()), ("true", shapes)):
        model = config(*settings, "model.remat=attention", f"model.row_major={value}").model
        found = equations_named(trace_loss_and_gradients(model, Chunked(8)), "row_major")
        assert {one.outvars[0].aval.shape for one in found} == expected
