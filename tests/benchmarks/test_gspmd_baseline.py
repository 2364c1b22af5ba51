"""The GSPMD baseline computes the same training steps as the explicit programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gspmd_baseline import build_gspmd_programs

from shmap_tp.config.choices import Remat
from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.layers.context import IGNORE
from shmap_tp.training.step import build_step_functions
from tests.helpers.assertions import assert_close
from tests.helpers.flops import matmul_flops
from tests.helpers.model_fixtures import config, mesh, mesh_of

STEPS, RELATIVE = 3, 1e-5
CASES = {
    (2, 4): "block=parallel mlp=gelu positions=alibi kv_heads=2 remat=all_matmuls attention_chunk=3",
    (4, 2): "block=sequential mlp=swiglu positions=rotary norm=rmsnorm tie_embeddings=true remat=full",
    (1, 8): "block=sequential mlp=gelu positions=learned kv_heads=1",
}


def settings(shape: tuple[int, int]) -> Config:
    """With a warm-up of the three steps, active gradient clipping, a loss in chunks and a z-loss."""
    train = "batch=16 microbatches=2 z_loss=1e-4 loss_chunk=10"
    optimizer = "learning_rate=1e-2 warmup_steps=3 clip_norm=0.5"
    given = {"model": CASES[shape], "train": train, "optimizer": optimizer, "mesh": "dp={} mp={}".format(*shape)}
    return config(*[f"{section}.{each}" for section, several in given.items() for each in several.split()])


@pytest.mark.parametrize(
    "option", ["mlp_bias=true", "qk_norm=true", "embedding_scale=2", "block=parallel_two_norms", "head_bias=true"]
)
def test_the_gspmd_baseline_refuses_options_that_it_does_not_compute(option):
    with pytest.raises(UserError, match=f"the GSPMD baseline has no model.{option}.* compare a model without it"):
        build_gspmd_programs(config(f"model.{option}"), mesh((2, 4)), jnp.float32)


@pytest.mark.parametrize("shape", CASES, ids=str)
def test_the_gspmd_baseline_takes_the_same_training_steps(shape):
    conf, on = settings(shape), mesh(shape)
    ours, baseline = (build(conf, on, jnp.float32) for build in (build_step_functions, build_gspmd_programs))
    assert baseline.tokens == ours.tokens
    tokens = np.random.default_rng(0).integers(0, 50, (STEPS, *ours.tokens.shape), np.int32)
    tokens[:, 1, -3:, -2:] = IGNORE
    ends = []
    for programs in (baseline, ours):
        state, losses = ours.init(), []
        for batch in tokens:
            state, metrics = programs.step(state, jax.device_put(batch, programs.tokens.sharding))
            losses.append(metrics)
        held_out = programs.evaluate(state.params, jax.device_put(tokens[0], programs.tokens.sharding))
        ends.append({"params": state.params, "metrics": losses, "held_out": held_out})
        assert state.step == STEPS
    assert_close(*ends, RELATIVE)


@pytest.mark.parametrize(
    ("remat", "block"), [*((remat, "sequential") for remat in Remat), ("full", "parallel"), ("attention", "parallel")]
)
def test_the_gspmd_baseline_recomputes_as_much(remat, block):
    """Compared by the matmul FLOPs of a step: a baseline that saves less would be slower for that reason alone."""
    conf = config("mesh.dp=1", "mesh.mp=1", "model.mlp=swiglu", f"model.remat={remat}", f"model.block={block}")
    ours, baseline = (build(conf, mesh_of(conf), jnp.float32) for build in (build_step_functions, build_gspmd_programs))
    assert matmul_flops(jax.make_jaxpr(baseline.step)(baseline.shapes, baseline.tokens).jaxpr) == matmul_flops(
        jax.make_jaxpr(ours.step)(ours.shapes, ours.tokens).jaxpr
    )
