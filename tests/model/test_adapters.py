"""Low-rank adapters: the same factors and the same curve on every mesh, beside a base that nothing changes."""

import math
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shmap_tp.config.compose import load
from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.layers.linear import Kind, LinearProduct, product_with_adapter
from shmap_tp.model.adapters import adapter_scale
from shmap_tp.model.flops import flops_per_token, forward_terms, frozen_parameters, parameters
from shmap_tp.model.tracing import equations
from shmap_tp.parallel.partitioning import leaves_by_path
from shmap_tp.plan.predict import state_bytes
from shmap_tp.plan.search.collective_seconds import local_parameters, planned_state_bytes
from shmap_tp.training.step import build_step_functions
from tests.helpers.adapter_cases import (
    ADAPTER,
    BLOCKS,
    assert_base_keeps_its_bits,
    compare_with_merged,
    functions_of,
    step_functions,
    trained_on,
)
from tests.helpers.assertions import assert_close, assert_same_bits, by_path
from tests.helpers.model_fixtures import config, mesh_of
from tests.helpers.mutations import trace_step
from tests.helpers.run_fixtures import FIRST
from tests.helpers.step_fixtures import largest_difference, step_config


def test_adapters_start_and_train_alike_on_every_mesh_beside_a_base_that_keeps_its_bits():
    """On meshes and in modes that share nothing: (4, 2) with sequence parallelism and FSDP, (2, 4) with neither."""
    start, losses, end = trained_on((2, 4), "collective_matmul")
    other_start, other_losses, _ = trained_on((4, 2), "sequence", "fsdp")
    assert_same_bits(start, other_start)
    assert largest_difference(losses, other_losses) < 1e-5
    assert losses[-1] < 0.8 * losses[0]
    factors = assert_base_keeps_its_bits(start, end)
    assert len(factors) == 2 * 6
    moments = step_functions(step_config((2, 4), *ADAPTER)).shapes.optimizer[0].mu
    assert set(leaves_by_path(moments, ".")) == factors


@pytest.mark.parametrize(
    ("features_in", "features_out", "head_dim"), [(6, 12, None), (12, 6, None), (8, 8, 4)], ids=str
)
def test_an_adapter_inside_its_matmul_has_the_result_and_gradients_of_two_products(features_in, features_out, head_dim):
    rng, rank = np.random.default_rng(0), 2
    shapes = (2, 3, features_in), (features_in, features_out), (features_in, rank), (rank, features_out)
    x, w, a, b, dy = (rng.normal(size=shape).astype("float32") for shape in (*shapes, (2, 3, features_out)))
    product, inputs, given = LinearProduct(Kind.row, (features_out,)), 0, (x, w, a, b, dy)
    if head_dim is not None:
        product, inputs = LinearProduct(Kind.column, (features_out // head_dim, head_dim)), 1
        given = x, w.T, a, b.T, dy.reshape(2, 3, -1, head_dim)

    @jax.jit
    def run(*given):
        y, pull = jax.vjp(partial(product_with_adapter, product, inputs), *given[:4])
        return y, *pull(given[4])

    with jax.default_matmul_precision("highest"):
        y, dx, dw, da, db = jax.device_get(run(*given))
    x, w, a, b, dy = (each.astype("float64") for each in (x, w, a, b, dy))
    dya = dy @ b.T
    da_expected, db_expected = (np.einsum("btd,btf->df", *pair) for pair in ((x, dya), (x @ a, dy)))
    expected = [x @ w + x @ a @ b, dy @ w.T + dya @ a.T, da_expected, db_expected]
    found = [y.reshape(dy.shape), dx, da, db if head_dim is None else db.T]
    assert_close(found, expected, 1e-6)
    assert not dw.any()


def test_the_base_is_held_in_the_dtype_of_the_activations_or_its_own():
    for settings, dtype in [((), "bfloat16"), (("model.adapter.base_dtype=float32",), "float32")]:
        conf = step_config((2, 4), *ADAPTER, *settings)
        params = build_step_functions(conf, mesh_of(conf), jnp.bfloat16).shapes.params
        assert params.blocks.mlp.up.weight.dtype == params.embedding.weight.dtype == dtype
        assert params.blocks.mlp.up.adapter.a.weight.dtype == params.norm.scale.dtype == "float32"


def test_initial_factors_are_those_of_peft_and_independent_of_other_matrices():
    start, *_ = trained_on((2, 4), "collective_matmul")
    for name, array in start.items():
        if ".adapter.b." in name:
            assert not array.any() and not np.signbit(array).any(), name
        elif ".adapter.a." in name:
            features_in = 40 if "down" in name else 32 if "out" in name else 24
            assert array.shape == (2, features_in, 3)
            assert 0.8 * features_in**-0.5 < np.abs(array).max() <= features_in**-0.5, name
    alone = step_functions(step_config((1, 1), *ADAPTER, "model.adapter.matrices=[down]")).init().params
    assert_same_bits(by_path(alone.blocks.mlp.down.adapter.a), {"weight": start["blocks.mlp.down.adapter.a.weight"]})


@pytest.mark.parametrize("mode", BLOCKS)
def test_a_fresh_adapter_changes_no_bit_and_a_trained_one_is_that_of_the_merged_matrix(mode):
    compare_with_merged(mode)


def test_the_scale_is_by_the_rank_or_its_root():
    adapter = ["model.adapter.rank=16", "model.adapter.alpha=8"]
    assert adapter_scale(config(*adapter).model.adapter) == 0.5
    assert adapter_scale(config(*adapter, "model.adapter.scale=sqrt_rank").model.adapter) == 2


def composed(*settings: str) -> Config:
    return load(FIRST, [*settings])


@pytest.mark.parametrize(("refuse", "settings", "message"), [
    (functions_of, "model.adapter.rank=25", r"rank=25 is above a size of attention.query, \[32, 24\].*leave query out"),
    (functions_of, "model.adapter.rank=9", r"rank=9 is above a size of attention.key, \[24, 2, 4\]"),
    (functions_of, "model.adapter.matrices=[attention,gate]", "has gate, which is no matrix of ParallelBlock; use "),
    (composed, "mesh.zero=fsdp mesh.fsdp_gradients=ring", r"needs model\.adapter\.rank=0, but model\.adapter\.rank=3"),
    (composed, "model.adapter.alpha=0", r"alpha=0\.0 must be above 0"),
    (composed, "model.adapter.matrices=[]", r"cannot be combined with model\.adapter\.matrices=\[\]"),
    (composed, "model.adapter=lora", r"model\.adapter=lora must be a group of keys, such as model\.adapter\.rank="),
])  # fmt: skip
def test_what_no_matrix_of_the_model_has_or_cannot_be_meant_is_refused(refuse, settings, message):
    with pytest.raises(UserError, match=message):
        refuse(*ADAPTER, *settings.split())


def test_flops_are_those_of_the_activations_everywhere_and_of_the_weights_that_are_trained():
    """Forward and backward 2 FLOPs each for a weight of the base, 2 and 4 for one of the factors; scores as ever."""
    without, model = config().model, config(*ADAPTER[:2]).model
    base, factors = forward_terms(without), parameters(model) - parameters(without)
    assert forward_terms(model) == base | {"blocks": base["blocks"] + 2 * factors}
    attention = base["scores"] + base["values"]
    assert flops_per_token(model) == 2 * (base["blocks"] + base["head"]) + 6 * factors + 3 * attention


def test_the_head_is_multiplied_with_twice_and_its_gradient_is_not_computed():
    def products(*settings: str) -> int:
        every = equations(trace_step(*settings))
        return sum(visit.name == "dot_general" and re.search(r"\bhead\b", visit.scope) is not None for visit in every)

    assert products() == 3
    assert products("model.adapter.rank=2") == 2


@pytest.mark.parametrize(("dtype", "momentum"), [("float32", 4), ("bfloat16", 2)])
def test_the_least_memory_is_that_of_the_base_once_and_of_the_factors_four_times(dtype, momentum):
    """On (2, 4) with bfloat16: 2 bytes of a frozen matrix, 4 of a norm; parameter, gradient and two moments of a
    factor, the first of them of `dtype`."""
    conf = step_config((2, 4), *ADAPTER, "mesh.zero=none", f"optimizer.momentum_dtype={dtype}")
    programs = build_step_functions(conf, mesh_of(conf), jnp.bfloat16)
    params = leaves_by_path(programs.shapes.params)
    local = {path: math.prod(leaf.sharding.shard_shape(leaf.shape)) for path, leaf in params.items()}
    factors = sum(size for path, size in local.items() if "/adapter/" in path)
    norms = sum(size for path, size in local.items() if path.endswith("scale"))
    base = sum(local.values()) - factors - norms
    trained = (12 + momentum) * factors
    assert state_bytes(programs) == 2 * base + 4 * norms + trained + 8  # two counters of the optimizer
    every = local_parameters(conf.model, conf.mesh, jnp.bfloat16)
    assert planned_state_bytes(every, momentum) == 2 * base + 4 * norms + trained
    without = replace(conf.model, adapter=replace(conf.model.adapter, rank=0))
    assert frozen_parameters(conf.model) == parameters(without)
