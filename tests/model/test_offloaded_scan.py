"""The hand-written scan over layers with host offload, as it is traced; test_model compares its values."""

import hashlib
import os
import subprocess
import sys
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shmap_tp.layers.flash_attention import Splash
from shmap_tp.training.step import StepFunctions, build_step_functions
from tests.helpers.jaxprs import equations_named, is_on_host
from tests.helpers.model_fixtures import config, mesh_of
from tests.helpers.paths import ROOT

LAYERS, B, T, D, F = 3, 2, 8, 24, 40
"""On (4, 1) with 2 microbatches; every device has all heads."""
RING = ("mesh.zero=fsdp", "mesh.fsdp_gradients=ring")
OFFLOADED = (*RING, "model.offload=[query_key_value,up]")


def step_functions(*overrides: str) -> StepFunctions:
    conf = config(
        "mesh.dp=4", "mesh.mp=1", "train.batch=16", "train.microbatches=2", f"model.context={T}",
        f"model.layers={LAYERS}", "model.block=sequential", "model.mlp=swiglu", "model.remat=attention_and_up",
        *overrides,
    )  # fmt: skip
    return build_step_functions(conf, mesh_of(conf), jnp.float32)


@cache
def step(*overrides: str) -> Any:
    """The jaxpr of a step."""
    made = step_functions(*overrides)
    return jax.make_jaxpr(made.step)(made.shapes, made.tokens).jaxpr


def backward_scan(jaxpr: Any) -> Any:
    """The scan that reads from host memory."""
    (loop,) = [one for one in equations_named(jaxpr, "scan") if any(map(is_on_host, one.invars))]
    return loop


def host_stacks(jaxpr: Any) -> list[tuple[int, ...]]:
    """The shapes of what scans write to host memory."""
    return [var.aval.shape for one in equations_named(jaxpr, "scan") for var in one.outvars if is_on_host(var)]


def test_the_last_block_writes_nothing_to_the_host():
    found = host_stacks(step(*OFFLOADED))
    assert sorted(found) == sorted([*3 * [(LAYERS - 1, B, 8, T, 4)], (LAYERS - 1, B, T, F)])
    with_lax_scan = step("mesh.zero=fsdp", "model.offload=[query_key_value,up]")
    assert {shape[0] for shape in host_stacks(with_lax_scan)} == {LAYERS}
    assert not equations_named(with_lax_scan, "empty")


def test_stacks_on_the_device_and_of_gradients_start_uninitialised():
    """lax.scan would fill them with zeros."""
    empty = [one.outvars[0].aval.shape for one in equations_named(step(*OFFLOADED), "empty")]
    saved, gradients = [one for one in empty if one[0] == LAYERS - 1], [one for one in empty if one[0] == LAYERS]
    assert saved.count((LAYERS - 1, B, T, D)) == 2  # the block's input, and the output of attention
    assert len(gradients) == 9 and (LAYERS, F // 4, D) in gradients
    assert not equations_named(step(*RING), "empty")


def test_the_backward_pass_of_a_block_starts_with_its_last_weight_prefetched():
    body = backward_scan(step(*OFFLOADED)).params["jaxpr"].jaxpr
    (prefetched,) = [var for var in body.invars if var.aval.shape == (F, D)]
    (prefetched_for_next,) = [var for var in body.outvars if var.aval.shape == (F, D)]
    (prefetch,) = [one for one in body.eqns if one.primitive.name == "all_gather"]
    assert prefetched_for_next in prefetch.outvars
    others = [one for one in equations_named(body, "all_gather") if one is not prefetch]
    assert len(others) == 6, "query, key, value, out, gate and up are gathered inside the block"
    assert prefetched not in prefetch.invars


def test_all_host_writes_finish_before_the_backward_pass_of_the_last_block():
    """One barrier ties the arrays on the host to what the last block saved on the device."""
    tied = []
    for one in equations_named(step(*OFFLOADED), "optimization_barrier"):
        on_host = [var.aval.shape for var in one.outvars if is_on_host(var)]
        on_device = [var.aval.shape for var in one.outvars if not is_on_host(var)]
        tied += [(on_host, on_device)] if on_host else []
    ((on_host, on_device),) = tied
    assert sorted(on_host) == sorted([*3 * [(LAYERS - 1, B, 8, T, 4)], (LAYERS - 1, B, T, F)])
    weights = [(8, D), (D // 4, 8, 4), (D // 4, 8, 4), (8, D), *3 * [(F // 4, D)]]  # gathered again
    assert on_device == [*weights, *4 * [(B, 8, T, 4)], (B, T, F)]  # q, k, v and the attention output; up


def test_the_last_block_reduces_its_gradients_by_reduce_scatters():
    """The gradients of a single block need no overlap."""
    program = step(*OFFLOADED)
    body = backward_scan(program).params["jaxpr"].jaxpr
    assert len(equations_named(body, "ppermute")) == len(equations_named(program, "ppermute")) == 7 * 3
    assert not equations_named(body, "reduce_scatter")
    assert len(equations_named(program, "reduce_scatter")) == 7 + 2, "of the last block, and of embedding and head"


@pytest.mark.parametrize("overrides", [("model.offload=[up]",), (*OFFLOADED, "model.layers=1")], ids=str)
def test_other_configurations_use_lax_scan(overrides):
    assert not equations_named(step(*overrides), "empty")


def test_the_last_block_copies_no_deferred_residuals(monkeypatch):
    """Each of the other blocks makes three copies in the forward pass and two in the backward pass
    (`save_at_block_end`)."""
    monkeypatch.setattr("shmap_tp.model.sharded_model.select_attention", lambda *_: Splash(defer=True))
    kernel = ("model.context=128", "model.head_dim=64", "model.positions=rotary")
    barriers = equations_named(step(*OFFLOADED, *kernel), "optimization_barrier")
    assert len([one for one in barriers if any(var.aval.dtype == bool for var in one.outvars)]) == 5


def test_every_process_lowers_the_same_program():
    """For hash seeds that give sets of names opposite orders: otherwise processes could run different programs, and the
    compilation cache would miss."""
    command = "from tests.model import test_offloaded_scan as t; print(t.lowered_program_hash(), list({'dp', 'mp'}))"
    found = []
    for seed in ("6", "21"):
        paths = {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        environment = os.environ | paths | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
        found.append(subprocess.check_output([sys.executable, "-c", command], env=environment, text=True).split(" ", 1))
    (program, order), (other_program, other_order) = found
    assert program == other_program and order != other_order


def lowered_program_hash() -> str:
    """Of a program that offloads arrays which vary over one axis, and arrays which vary over two."""
    made = step_functions(*RING, "model.offload=[input,sublayer_output,query_key_value,attention_output,up]")
    return hashlib.sha256(made.step.lower(made.shapes, made.tokens).as_text().encode()).hexdigest()
