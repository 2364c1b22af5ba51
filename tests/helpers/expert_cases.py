"""Layers of experts as `Case`s, by their load and the tensor-parallel mode."""

from functools import cache, partial

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shmap_tp.layers.context import Context
from shmap_tp.layers.experts import Experts
from shmap_tp.layers.grouped_matmul import in_blocks
from shmap_tp.layers.positions import Alibi
from shmap_tp.parallel.collectives import all_reduce, varying_axes
from shmap_tp.parallel.mesh import token_axes
from tests.helpers import reference
from tests.helpers.layer_cases import MODES, RESIDUAL_STREAM, D, on_residual_stream
from tests.helpers.model_fixtures import config
from tests.helpers.sharded_harness import Case

BASE = "block=sequential mlp=swiglu ffn=12 experts=8 router_balance_loss=0.3 router_z_loss=0.2"
EVEN, SKEWED = (1.0, 0.0), (0.1, 6.0)
LOADS = {
    "two of eight": (BASE, EVEN),
    "one expert takes all": (f"{BASE} experts_per_token=1 router_normalize=false", SKEWED),
    "two experts take all": (BASE, SKEWED),
    "all experts, geglu": (f"{BASE} experts_per_token=8 mlp=geglu", EVEN),
    "three of sixteen by biased sigmoid, shared": (
        f"{BASE} experts=16 experts_per_token=3 router_scores=sigmoid router_bias_rate=0 shared_expert_ffn=8", EVEN,
    ),
    "two of eight, biases, clamped": (f"{BASE} mlp=clamped_swiglu mlp_bias=true", EVEN),
    "two of eight, not normalised": (f"{BASE} router_normalize=false", EVEN),
}  # fmt: skip
"""Settings, and what every token is multiplied by, with what is added to its first feature: SKEWED makes all tokens
choose the experts for which the first row of the router is largest."""


def moved(x, scale, shift):
    return scale * x + shift * (jnp.arange(D) == 0).astype(x.dtype)[None, None]


@cache
def experts_case(load: str, mode: str, multiply=in_blocks, settings: str = "") -> Case:
    model, dense = reference_of(load, settings)
    tp, place = MODES[mode], LOADS[load][1]

    def call(layer, x):
        y, loss, _ = layer(moved(x, *place), Context(tp, Alibi(8), grouped_matmul=multiply))
        over = tuple(axis for axis in (*token_axes(), *tp.time_axes) if axis in varying_axes(loss))
        return y, all_reduce(loss, over)

    return on_residual_stream(
        partial(Experts, model, std=1.0, std_out=1.0), call, dense, tp, (RESIDUAL_STREAM[tp][1], P())
    )


@cache
def reference_of(load: str, settings: str):
    given, place = LOADS[load]
    model = config(*(f"model.{setting}" for setting in f"{given} {settings}".split())).model
    return model, lambda p, x: reference.experts(p, moved(x, *place), model)
