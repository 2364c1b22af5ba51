"""What is kept between the passes, by name and by memory: as traced, one device of (2, 4)."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shmap_tp.config.remat_policies import SAVED_BY_REMAT
from shmap_tp.config.schema import Remat, SavedActivation
from shmap_tp.layers.attention import Chunked
from shmap_tp.layers.flash_attention import Splash
from shmap_tp.training.step import build_step_functions
from tests.helpers.model_fixtures import config, mesh
from tests.layers.test_flash_attention import equations, traced

B, T, D, H, K, F = 2, 8, 24, 2, 4, 10
"""Of a device: 8 windows in 2 microbatches on 2 parts of dp; 8 heads and 40 hidden columns on 4 parts of mp."""
SHAPES = {
    SavedActivation.input: {(B, T, D): 1},
    SavedActivation.sublayer_output: {(B, T, D): 1},  # what the attention left with; nothing reads what the MLP did
    SavedActivation.query_key_value: {(B, H, T, K): 3},
    SavedActivation.attention_output: {(B, H, T, K): 1},
    SavedActivation.gate: {(B, T, F): 1},
    SavedActivation.up: {(B, T, F): 1},
}


def to_the_host(jaxpr: Any) -> Counter[tuple[int, ...]]:
    """Shapes of all that is written there."""
    puts = (one.outvars[0].aval for one in equations(jaxpr) if one.primitive.name == "device_put")
    return Counter(aval.shape for aval in puts if "host" in str(aval.memory_space).lower())


def written(remat: Remat, offload: list[SavedActivation]) -> Counter[tuple[int, ...]]:
    """What a layer of a step hands to the host."""
    conf = config(
        "mesh.dp=2", "mesh.mp=4", "model.context=8", "model.block=sequential", "model.mlp=swiglu",
        f"model.remat={remat}", f"model.offload=[{','.join(offload)}]",
    )  # fmt: skip
    made = build_step_functions(conf, mesh((2, 4)), jnp.float32)
    return to_the_host(jax.make_jaxpr(made.step)(made.shapes, made.tokens).jaxpr)


@pytest.mark.parametrize(
    ("remat", "offload"),
    [(remat, [kept]) for remat in SAVED_BY_REMAT for kept in SAVED_BY_REMAT[remat]]
    + [(Remat.all_matmuls, list(SavedActivation))],
)
def test_the_host_gets_what_is_offloaded_and_nothing_else(remat, offload):
    expected = Counter()
    for kept in offload:
        expected.update(SHAPES[kept])
    assert written(remat, offload) == expected


@pytest.mark.parametrize("remat", Remat)
def test_nothing_goes_to_the_host_unasked(remat):
    assert not written(remat, [])


@pytest.mark.parametrize("later", [False, True])
def test_the_denominators_of_a_kernel_stay(later):
    """Of splash attention the host gets q, k, v and the output, each once, not one number for each query."""
    offload = "model.offload=[query_key_value,attention_output]"
    made = config("model.context=128", "model.positions=rotary", "model.remat=attention", offload)
    where_made = {(B, H, 128, K): 3, (B * H, 1, 128, K): 1}
    handed = {(B * H, 128, K): 3, (B * H, 1, 128, K): 1}
    found = to_the_host(traced(made.model, Splash(later)))
    assert found == (handed if later else where_made)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("remat", Remat)
def test_only_full_averages_again(remat, norm):
    """Each of a layer's two norms has one mean, or two, which everyone but `full` keeps."""

    def means(remat: Remat) -> int:
        conf = config("model.context=8", "model.block=sequential", f"model.norm={norm}", f"model.remat={remat}")
        found = (
            one
            for one in equations(traced(conf.model, Chunked(conf.model.attention_chunk)))
            if one.primitive.name == "reduce_sum"
        )
        return sum(one.invars[0].aval.shape == (B, T, D) and one.params["axes"] == (2,) for one in found)

    again = 2 * (2 if norm == "layernorm" else 1)
    assert means(remat) - means(Remat.none) == (again if remat == Remat.full else 0)
