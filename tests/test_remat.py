"""What is kept between the passes, by name and by memory: as traced, one device of (2, 4)."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from small import config, mesh
from test_kernels import equations, traced

from shmap_tp.config import KEPT, Kept, Remat
from shmap_tp.layers.attention import Chunked
from shmap_tp.layers.kernels import Splash
from shmap_tp.step import build_programs

B, T, D, H, K, F = 2, 8, 24, 2, 4, 10
"""Of a device: 8 windows in 2 microbatches on 2 parts of dp; 8 heads and 40 hidden columns on 4 parts of mp."""
SHAPES = {
    Kept.input: {(B, T, D): 1},
    Kept.left: {(B, T, D): 1},  # what the attention left with; nothing reads what the MLP did
    Kept.query_key_value: {(B, H, T, K): 3},
    Kept.attended: {(B, H, T, K): 1},
    Kept.gate: {(B, T, F): 1},
    Kept.up: {(B, T, F): 1},
}


def to_the_host(jaxpr: Any) -> Counter[tuple[int, ...]]:
    """Shapes of all that is written there."""
    puts = (one.outvars[0].aval for one in equations(jaxpr) if one.primitive.name == "device_put")
    return Counter(aval.shape for aval in puts if "host" in str(aval.memory_space).lower())


def written(remat: Remat, offload: list[Kept]) -> Counter[tuple[int, ...]]:
    """What a layer of a step hands to the host."""
    conf = config(
        "mesh.dp=2", "mesh.mp=4", "model.context=8", "model.block=sequential", "model.mlp=swiglu",
        f"model.remat={remat}", f"model.offload=[{','.join(offload)}]",
    )  # fmt: skip
    made = build_programs(conf, mesh((2, 4)), jnp.float32)
    return to_the_host(jax.make_jaxpr(made.step)(made.shapes, made.tokens).jaxpr)


@pytest.mark.parametrize(
    ("remat", "offload"), [(remat, [kept]) for remat in KEPT for kept in KEPT[remat]] + [(Remat.dots, list(Kept))]
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
    offload = "model.offload=[query_key_value,attended]"
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
