"""The figures of a row: FLOPs checked against the traced step, bytes against the compiled program."""

import json
import math
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from omegaconf import DictConfig, OmegaConf

from shmap_tp.config.choices import AttentionKernel, Block, Remat
from shmap_tp.config.compose import CONF, load
from shmap_tp.config.schema import Config
from shmap_tp.config.values import padded_vocabulary
from shmap_tp.hardware.devices import GIB, Peak, table_peak
from shmap_tp.model.flops import forward_terms, parameters, recomputed_terms
from shmap_tp.plan.report import Row, config_fields, format_row
from shmap_tp.training.step import StepFunctions, build_step_functions
from tests.helpers.flops import matmul_flops
from tests.helpers.model_fixtures import mesh_of


@cache
def of_test() -> DictConfig:
    settings = ["model=test", "mesh.dp=2", "mesh.mp=4", "train.batch=8", "train.microbatches=2"]
    return OmegaConf.structured(load(str(CONF / "base.yaml"), settings))


def config(*overrides: str) -> Config:
    return OmegaConf.to_object(OmegaConf.merge(of_test(), OmegaConf.from_dotlist([*overrides])))


def programs(config: Config) -> StepFunctions:
    return build_step_functions(config, mesh_of(config), jnp.dtype(jnp.float32))


# FLOPs


TRACED = [
    "remat=none block=parallel mlp=gelu attention_chunk=8 vocabulary=200 kv_heads=4 train.loss_chunk=16",
    "remat=none block=sequential mlp=swiglu attention_chunk=32 tie_embeddings=true mesh.dp=1 mesh.mp=1",
    "remat=full block=parallel mlp=swiglu attention_chunk=8 tie_embeddings=true train.microbatches=1",
    "remat=full block=sequential mlp=gelu attention_chunk=32 kv_heads=4",
    "remat=all_matmuls block=parallel mlp=gelu attention_chunk=8 offload=[input,attention_output,up] vocabulary=200",
    "remat=mlp block=sequential mlp=gelu attention_chunk=8 tie_embeddings=true train.loss_chunk=16",
    "remat=mlp block=parallel mlp=swiglu attention_chunk=32 vocabulary=200",
    "remat=attention_and_up block=parallel mlp=swiglu attention_chunk=8 kv_heads=4",
    "remat=attention block=sequential mlp=swiglu attention_chunk=8 mesh.dp=1 mesh.mp=1",
    "remat=attention block=parallel mlp=gelu attention_chunk=32 tie_embeddings=true vocabulary=200",
    "remat=attention_output block=sequential mlp=swiglu attention_chunk=8 vocabulary=200",
]


@pytest.mark.parametrize("settings", TRACED)
def test_the_flops_of_a_row_are_those_of_the_traced_matmuls(settings):
    """Exactly, after two corrections.  A row does not count masked keys and vocabulary padding; and its upper bound for
    full remat includes the last matmul of a block, which the backward pass does not need."""
    names = (name if name.startswith(("mesh", "train")) else f"model.{name}" for name in settings.split())
    conf = config("model.attention=chunked", *names)
    model, step, devices = conf.model, programs(conf), conf.mesh.dp * conf.mesh.mp
    with_masked = (model.context + model.attention_chunk) / model.context  # relative to the half that a row counts
    corrections = {"scores": with_masked, "values": with_masked, "head": padded_vocabulary(model) / model.vocabulary}
    forward, recomputed = (
        {name: flops * corrections.get(name, 1) for name, flops in terms(model).items()}
        for terms in (forward_terms, recomputed_terms)
    )
    unneeded = 0
    if model.remat == Remat.full:
        last = model.ffn + (model.heads * model.head_dim if model.block == Block.parallel else 0)
        unneeded = 2 * model.layers * model.width * last
    tokens = conf.train.batch * model.context
    row = config_fields(conf, AttentionKernel.chunked, devices, None)
    traced = matmul_flops(jax.make_jaxpr(step.step)(step.shapes, step.tokens).jaxpr)
    assert traced * devices == tokens * (3 * sum(forward.values()) + sum(recomputed.values()) - unneeded)
    assert row["model_flops_per_device"] * devices == tokens * 3 * sum(forward_terms(model).values())
    assert row["hardware_flops_per_device"] - row["model_flops_per_device"] == pytest.approx(
        tokens * sum(recomputed_terms(model).values()) / devices
    )
    assert row["model_flops_per_device"] < traced, "an MFU of 100 % is out of reach"


# Figures derived from the step time


def row(config: Config, peak: Peak | None, **overrides: Any) -> Row:
    fields = dict(
        kind="predicted", device_kind="TPU v3", chips=4, topology="2x2", slices=1, tile=[1, 2, 1, 2],
        step_seconds=0.5, step_seconds_range=None, peak_bytes_per_device=GIB, limit_bytes_per_device=15.48 * GIB,
        fits=True, compile_seconds=1.0, comm_seconds=0.2, exposed_comm_seconds=0.1, scopes={"mlp": 0.4, "other": 0.1},
    )  # fmt: skip
    return Row(
        **({"program": "explicit"} | fields | config_fields(config, AttentionKernel.chunked, 8, peak) | overrides)
    )


def test_mfu_and_throughput_are_those_computed_by_hand():
    """8 sequences of 32 tokens on 4 chips of a v3: 1,327,104 FLOPs per token by the formulas of test_flops."""
    predicted = row(config(), table_peak("TPU v3", 8))
    tokens = predicted.tokens_per_step, predicted.tokens_per_second, predicted.tokens_per_second_per_chip
    assert tokens == (256, 512, 128)
    assert predicted.model_flops_per_device == 256 * 1_327_104 / 8
    assert predicted.peak_flops_per_device == 61.5e12
    assert predicted.mfu == pytest.approx(256 * 1_327_104 / 0.5 / (4 * 123e12))
    assert predicted.tflops_per_chip == pytest.approx(predicted.mfu * 123)
    assert predicted.hfu == predicted.mfu, "nothing is recomputed"
    assert row(config("model.remat=full"), table_peak("TPU v3", 8)).hfu > predicted.hfu
    slower = row(config(), table_peak("TPU v3", 8), step_seconds=1.0)
    for name in ("mfu", "hfu", "tokens_per_second", "tokens_per_second_per_chip", "tflops_per_chip"):
        assert getattr(predicted, name) == pytest.approx(2 * getattr(slower, name))


def test_mfu_in_eight_bits_is_by_both_peaks():
    kind = "TPU v5 lite"
    eight = row(config("train.matmul_precision=int8"), table_peak(kind, 8), device_kind=kind, step_seconds=1e-5)
    assert f"{eight.mfu:.1%}, HFU" in format_row(eight) and "; matmuls in int8\n" in format_row(eight)
    assert f"bf16; MFU {eight.mfu * 197 / 393:.1%} of the int8 peak, 393 TFLOP/s per device" in format_row(eight)
    assert "int8" not in format_row(row(config(), table_peak(kind, 8), device_kind=kind))
    part = row(config("train.matmul_precision=int8", "train.matmul_scope=mlp"), table_peak(kind, 8), device_kind=kind)
    assert "; matmuls of mlp in int8\n" in format_row(part)


def test_figures_without_a_step_time_or_a_peak_are_none():
    unknown_peak = row(config(), None)
    assert unknown_peak.mfu is unknown_peak.hfu is unknown_peak.peak_flops_per_device is None
    assert unknown_peak.tokens_per_second == 512
    assert "MFU" not in format_row(unknown_peak)
    too_large = row(
        config(), table_peak("TPU v3", 8), step_seconds=None, fits=False, peak_bytes_per_device=16 * GIB, scopes={},
        comm_seconds=None, exposed_comm_seconds=None,
    )  # fmt: skip
    assert too_large.mfu is too_large.tokens_per_second is None
    assert "16.0 GiB of 15.5 GiB per device: DOES NOT FIT" in format_row(too_large)
    assert "time" not in format_row(too_large)


ADVICE = {
    "": "mesh.zero=fsdp, a larger mp, more microbatches or model.remat=full",
    "model.remat=full mesh.zero=fsdp": "a larger mp or more microbatches",
    "model.remat=full mesh.zero=fsdp train.microbatches=4": "a larger mp",
    "mesh.dp=1 mesh.mp=8 train.microbatches=8 model.remat=full": "more devices",
}


def test_advice_for_a_step_that_does_not_fit_names_only_what_it_does_not_do():
    for settings, advice in ADVICE.items():
        too_large = row(config(*settings.split()), None, step_seconds=None, fits=False)
        assert format_row(too_large).splitlines()[3].endswith(f": DOES NOT FIT; try {advice}")
    small = replace(row(config(), None, step_seconds=None, fits=False), params=10**9, limit_bytes_per_device=1.5e9)
    assert "DOES NOT FIT; try 11 devices or more: parameters, optimizer state and gradients alone are 14.9 GiB" in (
        format_row(small)
    )


def test_a_row_survives_json_and_prints_its_main_figures():
    predicted = row(config(), table_peak("TPU v3", 8))
    assert json.loads(json.dumps(predicted.to_json())) == predicted.to_json()
    text = format_row(predicted)
    assert text.startswith("PREDICTED  test, 0.23M parameters, on 8 x TPU v3, 2x2 chips\n")
    assert "0.200 s, of which 0.100 s (20.0% of the step) exposed" in text
    assert "mlp 80.0%, other 20.0%" in text
    for block in Block:
        of_block = row(config(f"model.block={block}"), None)
        assert of_block.block == block and f"; block {block}; " in format_row(of_block)
    assert row(config(), None, kind="emulated").to_json()["kind"] == "emulated"


# Bytes


@pytest.mark.parametrize("mesh", [(2, 4), (8, 1), (1, 8)], ids=str)
def test_a_compiled_step_takes_one_shard_of_parameters_optimizer_state_and_tokens(mesh):
    conf = config(f"mesh.dp={mesh[0]}", f"mesh.mp={mesh[1]}", "train.batch=16")
    step = programs(conf)
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(step.shapes))
    masters = 3 * 4 * parameters(conf.model, padded=True)
    assert masters <= state <= masters + 64, "parameters and two moments in float32, and a few counters"
    shard = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(step.shapes)
    )
    replicated = 4 * 64 * (conf.model.layers + 1)  # norm scales
    assert shard == pytest.approx(masters / mesh[1], abs=3 * replicated + 64)
    tokens = math.prod(step.tokens.sharding.shard_shape(step.tokens.shape)) * 4
    if mesh == (2, 4):
        compiled = step.step.lower(step.shapes, step.tokens).compile().memory_analysis()
        assert compiled.argument_size_in_bytes == shard + tokens
        assert compiled.peak_memory_in_bytes > shard
