"""The way through a stack that the host keeps a part of, as it is traced; its values are held by test_model."""

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
from tests.helpers.model_fixtures import config, mesh
from tests.layers.test_flash_attention import equations

LAYERS, B, T, D, F = 3, 2, 8, 24, 40
"""On (4, 1), 2 microbatches; every device has all of the heads."""
RING = ("mesh.zero=fsdp", "mesh.fsdp_gradients=ring")


def programs(*more: str) -> StepFunctions:
    conf = config(
        "mesh.dp=4", "mesh.mp=1", "train.batch=16", "train.microbatches=2", f"model.context={T}",
        f"model.layers={LAYERS}", "model.block=sequential", "model.mlp=swiglu", "model.remat=attention_and_up", *more,
    )  # fmt: skip
    return build_step_functions(conf, mesh((4, 1)), jnp.float32)


@cache
def step(*more: str) -> list[Any]:
    """The equations of a step, those within others too, the outer first."""
    made = programs(*more)
    return list(equations(jax.make_jaxpr(made.step)(made.shapes, made.tokens).jaxpr))


def on_host(var: Any) -> bool:
    return "host" in str(getattr(var.aval, "memory_space", "")).lower()


def named(found: list[Any], name: str) -> list[Any]:
    return [one for one in found if one.primitive.name == name]


def backward(found: list[Any]) -> Any:
    """The scan that reads what the host has."""
    (loop,) = [one for one in named(found, "scan") if any(map(on_host, one.invars))]
    return loop


OFFLOADED = (*RING, "model.offload=[query_key_value,up]")


def test_the_host_keeps_nothing_of_the_last_block():
    stacks = [var.aval.shape for one in named(step(*OFFLOADED), "scan") for var in one.outvars if on_host(var)]
    assert sorted(stacks) == sorted([*3 * [(LAYERS - 1, B, 8, T, 4)], (LAYERS - 1, B, T, F)])
    without = step("mesh.zero=fsdp", "model.offload=[query_key_value,up]")
    assert {var.aval.shape[0] for one in named(without, "scan") for var in one.outvars if on_host(var)} == {LAYERS}


def test_what_stays_is_put_where_nothing_was():
    """And so are the gradients; lax.scan begins with zeros."""
    made = [one.outvars[0].aval.shape for one in named(step(*OFFLOADED), "empty")]
    kept, gradients = [one for one in made if one[0] == LAYERS - 1], [one for one in made if one[0] == LAYERS]
    assert kept.count((LAYERS - 1, B, T, D)) == 2  # the block's input, and what the attention left with
    assert len(gradients) == 9 and (LAYERS, F // 4, D) in gradients
    assert not named(step(*RING), "empty")


def test_a_block_is_entered_backward_with_its_last_weight_gathered():
    loop = backward(step(*OFFLOADED))
    body = loop.params["jaxpr"].jaxpr
    (whole,) = [var for var in body.invars if var.aval.shape == (F, D)]
    (handed_on,) = [var for var in body.outvars if var.aval.shape == (F, D)]
    (gathered,) = [one for one in body.eqns if one.primitive.name == "all_gather"]
    assert handed_on in gathered.outvars
    again = [one for one in equations(body) if one.primitive.name == "all_gather" and one is not gathered]
    assert len(again) == 6, "query, key, value, out, gate and up are gathered in the block's own time"
    assert whole not in gathered.invars


def test_all_has_been_written_before_the_last_block_is_gone_back_through():
    """What the host has and what the last block keeps of its own come out of one barrier."""
    together = []
    for one in named(step(*OFFLOADED), "optimization_barrier"):
        far = [var.aval.shape for var in one.outvars if on_host(var)]
        near = [var.aval.shape for var in one.outvars if not on_host(var)]
        together += [(far, near)] if far else []
    ((far, near),) = together
    assert sorted(far) == sorted([*3 * [(LAYERS - 1, B, 8, T, 4)], (LAYERS - 1, B, T, F)])
    weights = [(8, D), (D // 4, 8, 4), (D // 4, 8, 4), (8, D), *3 * [(F // 4, D)]]  # gathered once more
    assert near == [*weights, *4 * [(B, 8, T, 4)], (B, T, F)]  # what attention made of q, k, v, too


def test_the_last_block_sends_no_gradient_round_a_ring():
    """Of one block they need not be hidden."""
    found = step(*OFFLOADED)
    within = list(equations(backward(found).params["jaxpr"].jaxpr))
    assert len(named(within, "ppermute")) == len(named(found, "ppermute")) == 7 * 3
    assert not named(within, "reduce_scatter")
    assert len(named(found, "reduce_scatter")) == 7 + 2, "of the last block, and of embedding and head"


@pytest.mark.parametrize(
    "more",
    [("model.offload=[up]",), RING, (*OFFLOADED, "model.layers=1"), ("mesh.zero=fsdp", "model.offload=[up]")],
)
def test_other_stacks_are_gone_through_by_lax_scan(more):
    assert not named(step(*more), "empty")


def test_the_last_block_copies_nothing_for_later(monkeypatch):
    """Of what a kernel reads the others make three copies forward and two backward (`put_off`)."""
    monkeypatch.setattr("shmap_tp.training.step.select_attention", lambda *_: Splash(later=True))
    kernel = ("model.context=128", "model.head_dim=64", "model.positions=rotary")
    copies = [
        one
        for one in named(step(*OFFLOADED, *kernel), "optimization_barrier")
        if any(var.aval.dtype == bool for var in one.outvars)
    ]
    assert len(copies) == 5


def test_every_process_makes_the_same_program():
    """In whatever order it has its sets of strings: else hosts might run different programs, and none would be found
    again that was compiled before."""
    asked = "import conftest, test_through; print(test_through.made_here())"
    made = set()
    for seed in ("1", "2", "3"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True
        )
        made.add(done.stdout)
    assert len(made) == 1


def made_here() -> str:
    """The hash of a program whose host keeps what varies over one axis and what varies over two."""
    made = programs(*RING, "model.offload=[input,sublayer_output,query_key_value,attention_output,up]")
    return hashlib.sha256(made.step.lower(made.shapes, made.tokens).as_text().encode()).hexdigest()
