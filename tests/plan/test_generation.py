"""The plan of generation: communication as traced and as compiled, bytes, and the times of a compiled program."""

import json
from dataclasses import replace

import jax.numpy as jnp
import pytest

import shmap_tp
from shmap_tp.config.choices import TensorParallelMode
from shmap_tp.config.schema import Config
from shmap_tp.inference.cache import cache_bytes
from shmap_tp.inference.generator import Options, stream
from shmap_tp.inference.programs import GenerationPrograms
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.plan.compiled_communication import communication_in_hlo
from shmap_tp.plan.generation import GREEDY, Requests, format_generation, predict_generation, read_bytes, trace
from shmap_tp.plan.ledger import (
    Direction,
    Entry,
    Operation,
    bytes_by_operation,
    communication_in_jaxpr,
    comparison,
    without_trivial_axes,
)
from shmap_tp.plan.tpu import find_slice
from shmap_tp.training.model_functions import build_model_functions
from tests.helpers import communication_rules
from tests.helpers.commands import call
from tests.helpers.communication_rules import ArrayTraffic, tally
from tests.helpers.model_fixtures import config, mesh_of

PLAN = ["-m", "shmap_tp.plan", "decode", "--model", "test", "--dp", "2", "--mp", "2", "--version", "v5e"]
SMALL = Requests(batch=8, prompt=20, new=4)


def configuration(dp: int, mp: int, *more: str) -> Config:
    return config(f"mesh.dp={dp}", f"mesh.mp={mp}", "train.microbatches=1", "model.context=64", *more)


def traced(config: Config, dtype: type):
    """(prefill, decode) for SMALL on emulated devices."""
    mesh = mesh_of(config)
    functions = build_model_functions(config, mesh, dtype)
    return trace(GenerationPrograms(config.model, functions.model), functions.shapes, mesh, SMALL)


def by_hand(config: Config, positions: int, steps: int, mode: TensorParallelMode) -> list[Entry]:
    """What reading `positions` of each of SMALL's sequences communicates, `steps` times: the forward pass, in bfloat16,
    whose weights FSDP gathers; the best token of each device and its number; at the end the new tokens."""
    mesh, train = replace(config.mesh, tensor_parallel=mode), replace(config.train, batch=SMALL.batch, microbatches=1)
    once = replace(config, mesh=mesh, train=train)
    part = replace(once, model=replace(config.model, context=positions))
    found = [*communication_rules.activations(part, "bfloat16"), *communication_rules.parameters(once, "bfloat16")]
    sequences, forward = SMALL.batch // config.mesh.dp, Direction.forward
    chosen = [ArrayTraffic(sequences, of, 1).over(MP, "", Operation.all_gather, forward) for of in ("float32", "int32")]
    new = ArrayTraffic(sequences * steps, "int32", 1).over(DP, "", Operation.all_gather, forward)
    return [replace(e, count=e.count * steps) for e in [*found, *chosen] if e.direction == forward] + [new]


@pytest.mark.parametrize(
    ("shape", "variant"),
    [
        ((2, 4), "model.block=sequential model.kv_heads=2 model.mlp=swiglu"),
        ((8, 1), "model.positions=learned model.tie_embeddings=true"),
        ((2, 4), "model.positions=learned model.tie_embeddings=true mesh.zero=fsdp"),
        ((8, 1), "model.block=sequential mesh.zero=fsdp mesh.fsdp_gradients=ring model.remat=full"),
    ],
    ids=str,
)
def test_generation_communicates_what_is_written_down_by_hand(shape, variant):
    """Decoding replicates the residual stream over mp; a prompt shards it over time."""
    config, sizes = configuration(*shape, *variant.split()), dict(zip((DP, MP), shape, strict=True))
    modes = (32, 1, TensorParallelMode.sequence), (1, GREEDY.decode_tokens, TensorParallelMode.all_reduce)
    for program, rules in zip(traced(config, jnp.bfloat16), modes, strict=True):
        found = without_trivial_axes(communication_in_jaxpr(program.jaxpr.jaxpr), sizes)
        assert tally(found) == tally(without_trivial_axes(by_hand(config, *rules), sizes))


def test_the_compiled_programs_communicate_as_traced():
    config, sizes = configuration(2, 4, "model.block=sequential"), {DP: 2, MP: 4}
    for program in traced(config, jnp.float32):
        found = communication_in_hlo(program.lower().compile().as_text(), sizes)
        assert bytes_by_operation(found) == bytes_by_operation(communication_in_jaxpr(program.jaxpr.jaxpr))


def test_the_slots_are_those_of_a_real_call(monkeypatch):
    """The prefill is called with them; nothing need be computed for that."""
    config = configuration(1, 1)
    functions = build_model_functions(config, mesh_of(config), jnp.float32)
    programs = GenerationPrograms(config.model, functions.model)
    for prompt, new in [(1, 1), (20, 4), (33, 17), (32, 18)]:
        slots = []

        def prefill(*arguments, shape, slots=slots, **settings):
            slots.append(shape.slots)
            raise InterruptedError

        monkeypatch.setattr(programs, "prefill", prefill)
        with pytest.raises(InterruptedError):
            list(stream(programs, functions.shapes, [[1] * prompt], Options(new)))
        assert slots == [Requests(1, prompt, new).slots]


def test_a_decode_step_reads_all_weights_but_tables_that_it_looks_up():
    """2 layers of width 24, heads of 32 together, ffn 40, a vocabulary of 64 rows; one norm in a parallel block."""
    block = 4 * 24 * 32 + 2 * 24 * 40
    for tied in ("true", "false"):
        config = configuration(2, 4, f"model.tie_embeddings={tied}", "model.norm=rmsnorm", "model.mlp=gelu")
        functions = build_model_functions(config, mesh_of(config), jnp.float32)
        assert read_bytes(functions.shapes, 4) == 4 * ((2 * block + 64 * 24) // 4 + (2 + 1) * 24)


def test_a_prediction_is_consistent():
    pytest.importorskip("libtpu")
    config = shmap_tp.load_config("model=test", "mesh.dp=2", "mesh.mp=2", "train.microbatches=2", "model.context=256")
    requests = Requests(batch=4, prompt=100, new=40)
    found = predict_generation(config, find_slice("v5e", 4, None, 1), requests, cache=None)
    row = found.row
    assert row.fits and row.weight_bytes < row.peak_bytes < row.limit_bytes
    assert row.cache_bytes == cache_bytes(config.model, 2, 2, 4, requests.slots, jnp.bfloat16)
    assert row.bound_seconds < row.decode_seconds < 1 and 0 < row.prefill_seconds < 1
    assert row.tokens_per_second == pytest.approx(4 / row.decode_seconds)
    text = format_generation(row)
    for line in ("PREDICTED  test, generation on 4 x TPU v5 lite", "prefill ", "decode ", "scopes ", "bound "):
        assert line in text
    assert sum(row.scopes.values()) == pytest.approx(row.decode_seconds) and row.scopes["mlp"] > 0
    assert "all-reduce" in comparison(
        found.communication["decode"], communication_in_hlo(found.decode.text, {DP: 2, MP: 2})
    )


def test_the_command_prints_the_row_and_its_communication(tmp_path):
    pytest.importorskip("libtpu")
    done = call(*PLAN, "--dtype", "int8", "--json", str(file := tmp_path / "rows.jsonl"))
    assert done.returncode == 0, done.stderr
    row = json.loads(file.read_text())
    assert row["model"] == "test" and row["prompt"] + row["new"] <= 128 and row["batch"] == 16
    values = (4 * (4 * 64 * 64 + 2 * 64 * 256) + 2 * 256 * 64) // 2  # of one of mp=2, with a head of bfloat16
    assert row["dtype"] == "int8" and values < row["read_bytes"] < 1.1 * values, "and scales and norms"
    as_sums = "not all as traced; no fault where the compiler"  # as for the next token
    for heading in (
        "PREDICTED  test",
        "mp=2; int8, computing in bfloat16",
        f"COLLECTIVES of prefill: {as_sums}",
        f"COLLECTIVES of decode: {as_sums}",
    ):
        assert heading in done.stdout
