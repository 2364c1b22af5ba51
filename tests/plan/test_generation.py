"""The plan of generation: communication as traced and as compiled, bytes, and the times of a compiled program."""

import json

import jax.numpy as jnp
import pytest

import shmap_tp
from shmap_tp.config.schema import Config
from shmap_tp.inference.cache import cache_bytes
from shmap_tp.inference.generator import Options, stream
from shmap_tp.inference.programs import GenerationPrograms
from shmap_tp.parallel.mesh import DP, MP, make_mesh
from shmap_tp.plan.communication.analytic import decode_communication, prefill_communication
from shmap_tp.plan.communication.from_hlo import CompiledCollective, communication_in_hlo
from shmap_tp.plan.communication.from_jaxpr import communication_in_jaxpr
from shmap_tp.plan.communication.ledger import Direction, Entry, Operation, tally
from shmap_tp.plan.communication.reconcile import reconcile
from shmap_tp.plan.generation import GREEDY, Requests, format_generation, predict_generation, read_bytes, trace
from shmap_tp.plan.tpu import find_slice
from shmap_tp.training.model_functions import build_model_functions
from tests.helpers.commands import call

PLAN = ["-m", "shmap_tp.plan", "--model", "test", "--dp", "2", "--mp", "2", "--version", "v5e"]
VARIANTS = {
    "parallel": ["model.block=parallel"],
    "sequential, two key/value heads, SwiGLU": ["model.block=sequential", "model.kv_heads=2", "model.mlp=swiglu"],
    "learned, tied": ["model.positions=learned", "model.tie_embeddings=true"],
    "FSDP": ["mesh.zero=fsdp", "mesh.fsdp_gradients=ring", "model.remat=full"],
    "FSDP, tied": ["mesh.zero=fsdp", "model.tie_embeddings=true"],
}


SMALL = Requests(batch=8, prompt=20, new=4)


def configuration(dp: int, mp: int, *more: str) -> Config:
    return shmap_tp.load_config("model=test", f"mesh.dp={dp}", f"mesh.mp={mp}", "train.microbatches=2", *more)


def traced(config: Config, dtype: type):
    """(prefill, decode) for SMALL on emulated devices."""
    mesh = make_mesh(config.mesh)
    functions = build_model_functions(config, mesh, dtype)
    return trace(GenerationPrograms(config.model, functions.model), functions.shapes, mesh, SMALL)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("shape", [(2, 4), (8, 1)], ids=str)
def test_the_analytic_communication_is_that_of_the_traced_programs(shape, variant):
    config = configuration(*shape, *variant)
    prefill, decode = traced(config, jnp.bfloat16)
    planned = prefill_communication(config, 8, 32, jnp.bfloat16)
    assert tally(planned) == tally(communication_in_jaxpr(prefill.jaxpr.jaxpr))
    planned = decode_communication(config, 8, GREEDY.decode_tokens, jnp.bfloat16)
    assert tally(planned) == tally(communication_in_jaxpr(decode.jaxpr.jaxpr))


def test_the_compiled_programs_communicate_as_planned():
    config, sizes = configuration(2, 4, "model.block=sequential"), {DP: 2, MP: 4}
    planned = [prefill_communication(config, 8, 32, jnp.float32), decode_communication(config, 8, 16, jnp.float32)]
    for plan, program in zip(planned, traced(config, jnp.float32), strict=True):
        found = reconcile(plan, communication_in_hlo(program.lower().compile().as_text(), sizes), sizes)
        assert found.balanced, found


def test_the_slots_are_those_of_a_real_call():
    model = shmap_tp.Model.initialize(configuration(1, 1, "model.context=128"))
    for prompt, new in [(1, 1), (20, 4), (33, 17), (32, 18)]:
        shapes = []
        programs = model.generation_programs
        original = programs.prefill

        def prefill(*arguments, original=original, shapes=shapes, **settings):
            shapes.append(settings["shape"])
            return original(*arguments, **settings)

        programs.prefill = prefill
        list(stream(programs, model.parameters, [[1] * prompt], Options(new)))
        programs.prefill = original
        assert shapes[0].slots == Requests(1, prompt, new).slots


def test_a_decode_step_reads_all_weights_but_tables_that_it_looks_up():
    """Model test: 4 layers of width 64, ffn 256, a vocabulary of 256; one norm in a parallel block."""
    block = 4 * 64 * 64 + 2 * 64 * 256
    for tied in ("true", "false"):
        config = configuration(2, 4, f"model.tie_embeddings={tied}", "model.norm=rmsnorm", "model.mlp=gelu")
        functions = build_model_functions(config, make_mesh(config.mesh), jnp.float32)
        assert read_bytes(functions.shapes, 4) == 4 * ((4 * block + 256 * 64) // 4 + (4 + 1) * 64)


def test_an_all_gather_that_is_compiled_to_a_sum_of_as_many_bytes_as_all_shards_costs_more():
    planned = Entry("next token", Operation.all_gather, MP, "int32", 32, 5, Direction.forward)

    def found(size: int, dtype: str = "int32") -> list[CompiledCollective]:
        entry = Entry("all-reduce.1", Operation.all_reduce, MP, dtype, size, 5, Direction.forward)
        return [CompiledCollective("all-reduce.1", (entry,))]

    sizes = {DP: 1, MP: 4}
    report = reconcile([planned], found(128), sizes)
    assert report.summed == [planned] and report.report.startswith("the planned result at a higher cost")
    for wrong in (found(64), found(128, "float32")):
        assert reconcile([planned], wrong, sizes).missing == [planned]
    assert reconcile([planned], found(64), sizes).report.startswith("NOT as planned\n")


def test_a_prediction_is_consistent():
    pytest.importorskip("libtpu")
    config = configuration(2, 2, "model.context=256")
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
    sizes = {DP: 2, MP: 2}
    plan = decode_communication(config, 4, GREEDY.decode_tokens, jnp.bfloat16)
    report = reconcile(plan, communication_in_hlo(found.decode.text, sizes), sizes)
    assert not report.unplanned and not report.missing, str(report)


def test_the_command_prints_the_row_and_its_communication(tmp_path):
    pytest.importorskip("libtpu")
    done = call(*PLAN, "--decode", "--dtype", "int8", "--json", str(file := tmp_path / "rows.jsonl"))
    assert done.returncode == 0, done.stderr
    row = json.loads(file.read_text())
    assert row["model"] == "test" and row["prompt"] + row["new"] <= 128 and row["batch"] == 16
    values = (4 * (4 * 64 * 64 + 2 * 64 * 256) + 2 * 256 * 64) // 2  # of one of mp=2, with a head of bfloat16
    assert row["dtype"] == "int8" and values < row["read_bytes"] < 1.1 * values, "and scales and norms"
    costlier = "the planned result at a higher cost"
    for heading in (
        "PREDICTED  test",
        "mp=2; int8, computing in bfloat16",
        f"COLLECTIVES of prefill: {costlier}",
        f"COLLECTIVES of decode: {costlier}",
    ):
        assert heading in done.stdout
    assert "MISSING" not in done.stdout and "NOT PLANNED" not in done.stdout


MISTAKES = {
    "without --decode": (["--new-tokens", "4"], "--new-tokens applies to generation; add --decode"),
    "of weights": (["--dtype", "int8"], "--dtype applies to generation; add --decode"),
    "of training": (["--decode", "--plot", "x.png"], "--plot applies to training"),
    "batch": (["--decode", "--batch", "3"], "--batch 3 is not divisible by --dp 2"),
    "too long": (["--decode", "--prompt-tokens", "500"], "tokens, above model.context="),
    "none": (["--decode", "--new-tokens", "0"], "--new-tokens 0 is too small"),
    "GPUs": (["--decode", "--version", "h100", "--dp", "4"], "generation is planned for TPUs only"),
    "slices": (["--decode", "--slices", "2", "--dp", "4"], "generation is planned on one slice"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_in_one_line(mistake):
    arguments, reason = MISTAKES[mistake]
    done = call(*PLAN, *arguments)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and reason in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) <= 2
