"""What is saved between the passes, by name and by memory, as traced for one device of (2, 4)."""

from collections import Counter
from functools import cache
from typing import Any

import pytest

from shmap_tp.config.activation_names import SAVED_BY_REMAT
from shmap_tp.config.choices import Remat, SavedActivation
from shmap_tp.layers.attention import Chunked
from shmap_tp.layers.flash_attention import Splash
from tests.helpers.jaxprs import equations_named, is_on_host, trace_loss_and_gradients
from tests.helpers.model_fixtures import config

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


@cache
def traced(remat: Remat, offload: tuple[SavedActivation, ...] = (), norm: str = "layernorm") -> Any:
    """Loss and gradients of a step; one layer, because layers are a scan."""
    settings = "model.context=8", "model.block=sequential", "model.mlp=swiglu", f"model.norm={norm}"
    model = config(*settings, f"model.remat={remat}", f"model.offload=[{','.join(offload)}]").model
    return trace_loss_and_gradients(model, Chunked(model.attention_chunk))


QKV_UP = SavedActivation.input, SavedActivation.query_key_value, SavedActivation.up
OTHERS = SavedActivation.sublayer_output, SavedActivation.attention_output, SavedActivation.gate


@pytest.mark.parametrize(
    ("remat", "offload"),
    [*SAVED_BY_REMAT.items(), *((Remat.all_matmuls, some) for some in ((), QKV_UP, OTHERS))],
    ids=str,
)
def test_exactly_the_offloaded_activations_are_written_to_the_host(remat, offload):
    expected = Counter()
    for saved in offload:
        expected.update(SHAPES[saved])
    assert host_writes(traced(remat, offload)) == expected


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("head_dim", [K, 128])
def test_softmax_denominators_of_a_kernel_stay_on_the_device(defer, head_dim):
    """q, k, v and the output of splash attention are written, each once, also where kernels rotate q and k; the values
    per query are not."""
    sizes = "model.context=128", "model.positions=rotary", f"model.head_dim={head_dim}"
    model = config(*sizes, "model.remat=attention", "model.offload=[query_key_value,attention_output]").model
    as_written = (B, 128, H * head_dim) if head_dim == 128 else (B, H, 128, head_dim)
    expected = {(B * H, 128, head_dim) if defer else as_written: 3, (B * H, 1, 128, head_dim): 1}
    assert host_writes(trace_loss_and_gradients(model, Splash(defer))) == expected


@pytest.mark.parametrize(("remat", "norm"), [*((remat, "layernorm") for remat in Remat), (Remat.full, "rmsnorm")])
def test_policies_without_sublayer_outputs_recompute_the_means_of_norms(remat, norm):
    """A layer has two norms, each with two means (layernorm) or one (rmsnorm)."""

    def means(remat: Remat) -> int:
        sums = equations_named(traced(remat, SAVED_BY_REMAT[remat], norm), "reduce_sum")
        return sum(one.invars[0].aval.shape == (B, T, D) and one.params["axes"] == (2,) for one in sums)

    recomputed = 2 * (2 if norm == "layernorm" else 1)
    assert means(remat) - means(Remat.none) == (recomputed if remat in (Remat.full, Remat.attention_output) else 0)


@pytest.mark.parametrize(
    ("block", "row_major", "qk_norm", "shapes"),
    [
        ("sequential", "true", "true", {(B, T, D), (B, H, T, K)}), ("parallel", "true", "false", {(B, H, T, K)}),
        ("sequential", "false", "false", set()),
    ],
)  # fmt: skip
def test_row_major_is_what_a_policy_saves_of_attention_and_of_sequential_blocks(block, row_major, qk_norm, shapes):
    """q, k and v before their norms, if they have any."""
    settings = [f"model.block={block}", f"model.qk_norm={qk_norm}", "model.norm=rmsnorm", "model.context=8"]
    model = config(*settings, "model.remat=attention", f"model.row_major={row_major}").model
    found = equations_named(trace_loss_and_gradients(model, Chunked(8)), "row_major")
    assert {one.outvars[0].aval.shape for one in found} == shapes
