"""The compiler's twin, which benchmarks compare with, is the same mathematics: three steps of it are three of ours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gspmd import build_gspmd_programs

from shmap_tp.config.schema import Config, Remat
from shmap_tp.model.loss import IGNORE
from shmap_tp.training.step import build_step_functions
from tests.helpers.assertions import assert_close
from tests.helpers.model_fixtures import config, mesh
from tests.plan.test_report import products

STEPS, RELATIVE = 3, 1e-5
CASES = {
    "parallel gelu alibi, 2 of 8 kv heads, the loss in chunks": (
        (2, 4),
        ["model.kv_heads=2", "model.remat=all_matmuls", "train.loss_chunk=10"],
    ),
    "sequential swiglu rotary tied": (
        (2, 4),
        [
            "model.block=sequential",
            "model.mlp=swiglu",
            "model.positions=rotary",
            "model.tie_embeddings=true",
            "model.remat=full",
        ],
    ),
    "sequential gelu learned rmsnorm": (
        (8, 1),
        ["model.block=sequential", "model.positions=learned", "model.norm=rmsnorm"],
    ),
    "parallel swiglu alibi tied, 1 of 8 kv heads, in chunks": (
        (1, 8),
        ["model.mlp=swiglu", "model.tie_embeddings=true", "model.kv_heads=1", "model.attention_chunk=3"],
    ),
}


def settings(case: str) -> Config:
    """A warm-up within the steps, clipping that bites, a z-loss: all that a step does."""
    shape, more = CASES[case]
    return config(
        f"mesh.dp={shape[0]}", f"mesh.mp={shape[1]}", "train.batch=16", "train.microbatches=2", "train.z_loss=1e-4",
        "optimizer.learning_rate=1e-2", "optimizer.warmup_steps=2", "optimizer.clip_norm=0.5",
        "model.block=parallel", "model.mlp=gelu", "model.positions=alibi", "model.tie_embeddings=false", *more,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_twin_takes_the_same_steps(case):
    conf, on = settings(case), mesh(CASES[case][0])
    ours, baseline = (build(conf, on, jnp.float32) for build in (build_step_functions, build_gspmd_programs))
    assert baseline.tokens == ours.tokens
    tokens = np.random.default_rng(0).integers(0, 50, (STEPS, *ours.tokens.shape), np.int32)
    tokens[:, 1, -3:, -2:] = IGNORE
    ends = []
    for programs in (baseline, ours):
        state, losses = programs.init(), []
        for batch in tokens:
            state, metrics = programs.step(state, jax.device_put(batch, programs.tokens.sharding))
            losses.append(metrics)
        held_out = programs.evaluate(state.params, jax.device_put(tokens[0], programs.tokens.sharding))
        ends.append({"params": state.params, "metrics": losses, "held_out": held_out})
        assert state.step == STEPS
    assert_close(*ends, RELATIVE)


@pytest.mark.parametrize("block", ["parallel", "sequential"])
@pytest.mark.parametrize("remat", Remat)
def test_the_twin_computes_as_much_again(remat, block):
    """By the products of a step on one device: a twin that kept less would be slower for that alone."""
    conf = config("mesh.dp=1", "mesh.mp=1", "model.mlp=swiglu", f"model.remat={remat}", f"model.block={block}")
    ours, baseline = (build(conf, mesh((1, 1)), jnp.float32) for build in (build_step_functions, build_gspmd_programs))
    assert products(jax.make_jaxpr(baseline.step)(baseline.shapes, baseline.tokens).jaxpr) == products(
        jax.make_jaxpr(ours.step)(ours.shapes, ours.tokens).jaxpr
    )
