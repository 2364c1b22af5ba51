"""A row's figures: FLOPs against the products of the step as it is traced, bytes against the compiled program, seconds
against a clock that is known."""

import json
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shmap_tp.config.compose import CONF, load
from shmap_tp.config.schema import AttentionKernel, Block, Config, Remat, padded_vocabulary
from shmap_tp.hardware.devices import GIB, Peak, table_peak
from shmap_tp.model.flops import forward_terms, parameters, recomputed_terms
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.plan import measure
from shmap_tp.plan.communication.from_jaxpr import bodies
from shmap_tp.plan.measure import WARM_UP, step_seconds
from shmap_tp.plan.report import Row, describe, of_config
from shmap_tp.training.step import StepFunctions, build_step_functions
from tests.helpers.model_fixtures import mesh_config


def config(*overrides: str) -> Config:
    return load(
        str(CONF / "config.yaml"),
        ["model=test", "mesh.dp=2", "mesh.mp=4", "train.batch=8", "train.microbatches=2", *overrides],
    )


def programs(config: Config) -> StepFunctions:
    mesh = make_mesh(config.mesh, jax.devices()[: config.mesh.dp * config.mesh.mp])
    return build_step_functions(config, mesh, jnp.dtype(jnp.float32))


# FLOPs


def products(jaxpr: Any) -> int:
    """FLOPs of all matrix products in one run, on one device."""
    total = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        below = sum(products(body) for body in bodies(params))
        assert not (below and name in ("while", "cond")), f"who knows how often: {name}"
        if name == "dot_general":
            ((contracted, _), _), left = params["dimension_numbers"], equation.invars[0].aval
            below = 2 * equation.outvars[0].aval.size * math.prod(left.shape[dim] for dim in contracted)
        total += below * (params["length"] if name == "scan" else 1)
    return total


TRACED = {
    "as it is": [],
    "whole": ["mesh.dp=1", "mesh.mp=1"],
    "one microbatch": ["train.microbatches=1"],
    "sequential": ["model.block=sequential"],
    "swiglu": ["model.mlp=swiglu"],
    "4 kv heads": ["model.kv_heads=4"],
    "tied": ["model.tie_embeddings=true"],
    "chunks": ["model.attention_chunk=8"],
    "padded": ["model.vocabulary=200"],
    "loss in chunks": ["train.loss_chunk=16"],
    "dots": ["model.remat=all_matmuls"],
    "mlp": ["model.remat=mlp"],
    "up": ["model.remat=attention_and_up"],
    "up, swiglu": ["model.remat=attention_and_up", "model.mlp=swiglu", "model.attention_chunk=8"],
    "mlp, sequential, in chunks": ["model.remat=mlp", "model.block=sequential", "model.attention_chunk=8"],
    "all on the host": ["model.remat=all_matmuls", "model.offload=[input,attention_output,up]"],
    "dots in chunks": ["model.remat=all_matmuls", "model.attention_chunk=8"],
    "attention": ["model.remat=attention"],
    "attention in chunks, swiglu, sequential": [
        "model.remat=attention", "model.attention_chunk=8", "model.mlp=swiglu", "model.block=sequential",
    ],
    "full": ["model.remat=full"],
    "full, sequential": ["model.remat=full", "model.block=sequential"],
    "full in chunks": ["model.remat=full", "model.attention_chunk=8"],
}  # fmt: skip


@pytest.mark.parametrize("overrides", TRACED.values(), ids=TRACED)
def test_the_flops_of_a_row_are_the_products_of_the_step(overrides):
    """Exactly, once what a row leaves out is put back: keys that are masked out, padding of the vocabulary; and once
    the upper bound of full remat is lowered by the last product of a block, which nothing reads again."""
    made = config("model.attention=chunked", *overrides)
    model, step, devices = made.model, programs(made), made.mesh.dp * made.mesh.mp
    masked_too = (model.context + model.attention_chunk) / model.context  # of the half that a row counts
    seen = {"scores": masked_too, "values": masked_too, "head": padded_vocabulary(model) / model.vocabulary}
    forward, again = (
        {name: flops * seen.get(name, 1) for name, flops in terms(model).items()}
        for terms in (forward_terms, recomputed_terms)
    )
    unread = 0
    if model.remat == Remat.full:
        last = model.ffn + (model.heads * model.head_dim if model.block == Block.parallel else 0)
        unread = 2 * model.layers * model.width * last
    tokens = made.train.batch * model.context
    row = of_config(made, AttentionKernel.chunked, devices, None)
    traced = products(jax.make_jaxpr(step.step)(step.shapes, step.tokens).jaxpr)
    assert traced * devices == tokens * (3 * sum(forward.values()) + sum(again.values()) - unread)
    assert row["model_flops_per_device"] * devices == tokens * 3 * sum(forward_terms(model).values())
    assert row["hardware_flops_per_device"] - row["model_flops_per_device"] == pytest.approx(
        tokens * sum(recomputed_terms(model).values()) / devices
    )
    assert row["model_flops_per_device"] < traced, "an MFU of 100 % is out of reach"


# What follows from the time of a step


def row(config: Config, peak: Peak | None, **given: Any) -> Row:
    fields = dict(
        kind="predicted", device_kind="TPU v3", chips=4, topology="2x2", slices=1, tile=[1, 2, 1, 2],
        step_seconds=0.5, step_seconds_range=None, peak_bytes_per_device=GIB, limit_bytes_per_device=15.48 * GIB,
        fits=True, compile_seconds=1.0, comm_seconds=0.2, exposed_comm_seconds=0.1, places={"mlp": 0.4, "other": 0.1},
    )  # fmt: skip
    return Row(**({"program": "explicit"} | fields | of_config(config, AttentionKernel.chunked, 8, peak) | given))


def test_by_hand():
    """8 windows of 32 tokens on 4 chips of a v3: 1,327,104 FLOPs a token by test_flops' formulas."""
    made = row(config(), table_peak("TPU v3", 8))
    assert (made.tokens_per_step, made.tokens_per_second, made.tokens_per_second_per_chip) == (256, 512, 128)
    assert made.model_flops_per_device == 256 * 1_327_104 / 8
    assert made.peak_flops_per_device == 61.5e12
    assert made.mfu == pytest.approx(256 * 1_327_104 / 0.5 / (4 * 123e12))
    assert made.tflops_per_chip == pytest.approx(made.mfu * 123)
    assert made.hfu == made.mfu, "nothing is recomputed"
    assert row(config("model.remat=full"), table_peak("TPU v3", 8)).hfu > made.hfu


def test_a_step_twice_as_long_is_half_as_good():
    one, two = (row(config(), table_peak("TPU v3", 8), step_seconds=seconds) for seconds in (1.0, 2.0))
    for name in ("mfu", "hfu", "tokens_per_second", "tokens_per_second_per_chip", "tflops_per_chip"):
        assert getattr(one, name) == pytest.approx(2 * getattr(two, name))


def test_without_a_time_or_a_peak_nothing_is_made_up():
    nowhere = row(config(), None)
    assert nowhere.mfu is nowhere.hfu is nowhere.peak_flops_per_device is None and nowhere.tokens_per_second == 512
    assert "MFU" not in describe(nowhere)
    too_large = row(
        config(), table_peak("TPU v3", 8), step_seconds=None, fits=False, peak_bytes_per_device=16 * GIB, places={},
        comm_seconds=None, exposed_comm_seconds=None,
    )  # fmt: skip
    assert too_large.mfu is too_large.tokens_per_second is None
    assert "16.0 GiB of 15.5 GiB a device: DOES NOT FIT" in describe(too_large)
    assert "time" not in describe(too_large)


def test_a_row_is_json_and_reads_as_what_it_is():
    made = row(config(), table_peak("TPU v3", 8))
    assert json.loads(json.dumps(made.to_json())) == made.to_json()
    text = describe(made)
    assert text.startswith("PREDICTED  test, 0.23M parameters, on 8 x TPU v3, 2x2 chips\n")
    assert "0.200 s, of which 0.100 s (20.0% of the step) nothing hides" in text
    assert "mlp 80.0%, other 20.0%" in text
    for block in Block:
        of_block = row(config(f"model.block={block}"), None)
        assert of_block.block == block and f"; block {block}; " in describe(of_block)
    assert row(config(), None, kind="emulated").to_json()["kind"] == "emulated"


# Bytes


@pytest.mark.parametrize("mesh", [(2, 4), (8, 1), (1, 8)], ids=str)
def test_a_device_is_given_its_part_of_weights_optimizer_and_tokens(mesh):
    made = config(f"mesh.dp={mesh[0]}", f"mesh.mp={mesh[1]}", "train.batch=16")
    step = programs(made)
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(step.shapes))
    masters = 3 * 4 * parameters(made.model, padded=True)
    assert masters <= state <= masters + 64, "weights and two moments, float32, and a few counters"
    part = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(step.shapes)
    )
    whole_everywhere = 4 * 64 * (made.model.layers + 1)  # norm scales
    assert part == pytest.approx(masters / mesh[1], abs=3 * whole_everywhere + 64)
    tokens = math.prod(step.tokens.sharding.shard_shape(step.tokens.shape)) * 4
    compiled = step.step.lower(step.shapes, step.tokens).compile().memory_analysis()
    assert compiled.argument_size_in_bytes == part + tokens
    assert compiled.peak_memory_in_bytes > part


def test_what_the_host_keeps_is_no_part_of_what_a_device_needs():
    """Of a program that ran where the devices do not say how much they used: all of theirs as if there at once."""
    facts = {"argument_size_in_bytes": 5, "output_size_in_bytes": 4, "alias_size_in_bytes": 3, "temp_size_in_bytes": 2}
    for host, most in [(0, 7), (100, 5 + (4 - 3) + 2)]:
        facts |= {"host_temp_size_in_bytes": host, "peak_memory_in_bytes": 7 + host}
        assert measure.most_bytes(SimpleNamespace(**facts)) == most


# Seconds


@dataclass
class Clockwork:
    """A device that works off its steps one after the other, and a host whose clock runs only where it has to wait."""

    durations: list[float]
    dispatch: float
    """Seconds that the host takes to dispatch a step."""
    now: float = 0.0
    free: float = 0.0
    dispatched: list[float] = field(default_factory=list)
    waited: int = 0
    most_in_flight: int = 0

    def once(self) -> dict[str, "Output"]:
        self.now += self.dispatch
        self.free = max(self.free, self.now) + self.durations[len(self.dispatched)]
        self.dispatched.append(self.free)
        self.most_in_flight = max(self.most_in_flight, sum(end > self.now for end in self.dispatched))
        return {"loss": Output(self, self.free), "grad_norm": Output(self, self.free)}


@dataclass(frozen=True)
class Output:
    clockwork: Clockwork
    ready: float

    def block_until_ready(self) -> "Output":
        self.clockwork.now = max(self.clockwork.now, self.ready)
        self.clockwork.waited += 1
        return self


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("dispatch", [0.0, 0.5])
def test_a_step_takes_until_its_outputs_are_there(monkeypatch, steps, dispatch):
    """Not what dispatching it takes, which the step before hides; warming up and the step after it are not timed."""
    wanted = [float(2**i) for i in range(steps)]
    device = Clockwork([100.0] * WARM_UP + [7.0] + wanted, dispatch)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: device.now)
    assert step_seconds(device.once, steps) == pytest.approx(wanted)
    assert len(device.dispatched) == WARM_UP + 1 + steps and device.waited == 2 * len(device.dispatched)
    assert device.most_in_flight <= 2, "emulated devices deadlock with many steps in flight"


def test_a_device_that_is_faster_than_its_host_is_timed_by_the_host(monkeypatch):
    device = Clockwork([0.25] * 9, dispatch=1.0)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: device.now)
    assert step_seconds(device.once, 4)[:-1] == pytest.approx([1.0] * 3)


def test_an_emulated_step_is_measured():
    made = config("mesh.mp=2")
    mesh = make_mesh(mesh_config(2, 2), jax.devices()[:4])
    found = measure.measure(made, mesh, jnp.dtype(jnp.float32), 3)
    row = found.row
    assert (row.kind, row.device_kind, row.devices, row.chips, row.tile) == ("emulated", "cpu", 4, 4, None)
    assert 0 < row.mfu <= row.hfu <= 1
    low, high = row.step_seconds_range
    assert low <= row.step_seconds <= high
    assert row.fits and row.limit_bytes_per_device is None
    assert found.meta == {
        "device_kind": "cpu", "coords": None, "model_flops_per_device": row.model_flops_per_device,
    }  # fmt: skip
    assert "HloModule" in found.text
    json.dumps(row.to_json())
