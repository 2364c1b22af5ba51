"""What is said on the wire is what the theory says: of each layer, block and program as traced, exactly, on every mesh;
and of the step as compiled, where the compiler may merge and move, and nothing else.

B windows on this device, T time, D model width.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shmap_tp.training.optimizer
from shmap_tp.config.schema import Config, MeshConfig, TensorParallelMode
from shmap_tp.parallel.mesh import DP, MP, DataParallelGroups
from shmap_tp.parallel.partitioning import partition_specs
from shmap_tp.parallel.tensor_parallel import AllReduce
from shmap_tp.plan.communication.analytic import (
    analytic_communication,
    analytic_evaluation_communication,
    attention,
    block,
    cross_entropy,
    entering,
    into,
    key_value,
    leaving,
    out_of,
)
from shmap_tp.plan.communication.from_hlo import communication_in_hlo
from shmap_tp.plan.communication.from_jaxpr import communication_in_jaxpr
from shmap_tp.plan.communication.ledger import ArrayTraffic, Direction, Entry, Operation, table, tally
from shmap_tp.plan.communication.parameters import summing
from shmap_tp.plan.communication.reconcile import Reconciliation, reconcile
from shmap_tp.training.step import build_step_functions
from tests.helpers.model_fixtures import MESHES, config, every_mesh, mesh, mesh_config, shapes_of
from tests.helpers.sharded_harness import ALL_REDUCE, RING, SEQUENCE, Case, on_mesh
from tests.layers import test_layers
from tests.model import test_loss


def model(*settings: str):
    """Of the sizes that the layers of test_layers have."""
    return config(*[f"model.{setting}" for setting in settings]).model


def across(x: ArrayTraffic, mesh: MeshConfig) -> list[Entry]:
    return [*into(mesh, "x", x), *out_of(mesh, "x", x)]


# layer: what travels over mp where it is entered or left with x[B T D] on this mesh, by its wire
LAYERS = {
    "column": lambda x, mesh: entering(mesh, "x", x),
    "row": lambda x, mesh: leaving(mesh, "x", x),
    "gelu": across,
    "swiglu": across,
    "layernorm": lambda x, mesh: [],
    "rmsnorm": lambda x, mesh: [],
    "embedding": lambda x, mesh: leaving(mesh, "x", x),
    "head": lambda x, mesh: entering(mesh, "x", x),
    "learned": lambda x, mesh: [],
    "rotary": lambda x, mesh: [],
    "key_value_2_of_8": lambda x, mesh: [*entering(mesh, "x", x), *key_value(model("kv_heads=2"), mesh, 1)],
    "attention_alibi": lambda x, mesh: [*across(x, mesh), *attention(model(), mesh, x)],
    "attention_alibi_24_heads": lambda x, mesh: [
        *across(x, mesh), *attention(model("heads=24", "kv_heads=24"), mesh, x)
    ],
    "attention_rotary_1_of_8_in_chunks_of_3": lambda x, mesh: [
        *across(x, mesh), *attention(model("kv_heads=1"), mesh, x)
    ],
    "parallel_block_2_of_8": lambda x, mesh: block(model("kv_heads=2"), mesh, x),
    "sequential_block": lambda x, mesh: block(model("block=sequential"), mesh, x),
}  # fmt: skip


def traced(case: Case, shape: tuple[int, int]) -> tuple[list[Entry], list[Entry], list[Entry]]:
    """(what a layer says forward, what it says in both directions, its parameters' gradients meeting)."""
    params, inputs = case.arrays("float32")
    specs = partition_specs(shapes_of(case.make), dict(mesh(shape).shape))
    forward = jax.shard_map(case.call, mesh=mesh(shape), in_specs=(specs, *case.layouts), out_specs=case.out)
    out = jax.eval_shape(forward, params, *inputs)
    both = jax.make_jaxpr(on_mesh(case, mesh(shape)))(params, inputs, out).jaxpr
    cut = jax.tree.map(lambda x, spec: x.size // (shape[1] if MP in spec else 1), params, specs)
    whole = [size for size, spec in zip(jax.tree.leaves(cut), jax.tree.leaves(specs), strict=True) if MP not in spec]
    axes = {DP: jax.tree.leaves(cut), MP: [] if case.wire == ALL_REDUCE else whole}
    dw = [(axis, ArrayTraffic(size, "float32", 1)) for axis, sizes in axes.items() for size in sizes]
    meeting = [entry for axis, x in dw for entry in summing(axis, "dw", x)]
    return communication_in_jaxpr(jax.make_jaxpr(forward)(params, *inputs).jaxpr), communication_in_jaxpr(both), meeting


def hold(case: Case, shape: tuple[int, int], planned: list[Entry]) -> None:
    forward, both, meeting = traced(case, shape)
    assert tally(forward) == tally(entry for entry in planned if entry.direction == Direction.forward)
    assert tally(both) == tally([*planned, *meeting])


@every_mesh
@pytest.mark.parametrize("layer", test_layers.LAYERS)
def test_a_layer_talks_as_its_docstring_says(layer, shape):
    case, (plain, _, named) = test_layers.LAYERS[layer], layer.partition(", ")
    (((batch, time, width), _),) = test_layers.STREAM[case.wire]
    assert named == {SEQUENCE: "sequence", RING: "collective_matmul", ALL_REDUCE: ""}[case.wire]
    x = ArrayTraffic(batch // shape[0] * time * width, "float32", 1)
    hold(
        case,
        shape,
        LAYERS[plain](x, mesh_config(*shape, tensor_parallel=TensorParallelMode(named or "all_reduce"))),
    )


@every_mesh
@pytest.mark.parametrize("chunks", test_loss.CHUNKS)
def test_the_loss_talks_as_its_docstring_says(chunks, shape):
    """And its test enters with h, and sums the objective and the loss over dp."""
    positions = ArrayTraffic(test_loss.B // shape[0] * test_loss.T, "float32", 1)
    on = mesh_config(*shape)
    planned = [
        *entering(on, "h", replace(positions, values=positions.values * test_loss.D)),
        *cross_entropy(positions, test_loss.CHUNKS[chunks]),
        *2 * [ArrayTraffic(1, "float32", 1).over(DP, "sums", Operation.all_reduce, Direction.forward)],
    ]
    hold(test_loss.LOSSES[f"all columns are real, {chunks}"], shape, planned)


PROGRAMS = {
    "parallel": "",
    "parallel dots": "remat=all_matmuls",
    "parallel full": "remat=full",
    "sequential": "block=sequential",
    "sequential dots": "block=sequential remat=all_matmuls",
    "sequential attention": "block=sequential remat=attention",
    "sequential MLP, offloaded": "block=sequential remat=mlp offload=[input,gate,up] mlp=swiglu",
    "sequential up, offloaded": "block=sequential remat=attention_and_up offload=[query_key_value,up] mlp=swiglu",
    "sequential full": "block=sequential remat=full",
    "in chunks": "attention_chunk=3 train.loss_chunk=14",
    "in chunks, full": "attention_chunk=3 remat=full",
    "2 key/value heads": "kv_heads=2 positions=rotary mlp=swiglu norm=rmsnorm",
    "shared update": "kv_heads=2 positions=learned mesh.zero=zero1",
    "shared weights": "kv_heads=2 positions=learned mesh.zero=fsdp",
    "shared weights, tied, full": "kv_heads=2 tie_embeddings=true remat=full block=sequential mlp=swiglu mesh.zero=fsdp",
    "gradients in a ring": "kv_heads=2 mesh.zero=fsdp mesh.fsdp_gradients=ring",
    "gradients in a ring, offloaded": (
        "block=sequential remat=attention_and_up offload=[query_key_value,up] mlp=swiglu mesh.zero=fsdp mesh.fsdp_gradients=ring"
    ),
    "2 slices": "kv_heads=2 positions=learned mesh.zero=fsdp mesh.slices=2",
    "2 slices, gradients in a ring": "mlp=swiglu remat=full mesh.zero=fsdp mesh.fsdp_gradients=ring mesh.slices=2",
    "2 slices, shared update": "kv_heads=2 positions=learned mesh.zero=zero1 mesh.slices=2",
    "1 key/value head, sequential full": "kv_heads=1 block=sequential remat=full positions=learned tie_embeddings=true",
}

PROGRAMS |= {
    f"{program}; {wire}": f"{settings} mesh.tensor_parallel={wire} context=8"
    for wire in ("sequence", "collective_matmul")
    for program, settings in PROGRAMS.items()
    if not (wire == "collective_matmul" and "gradients=ring" in settings)
} | {"a window at a time; sequence": "mesh.tensor_parallel=sequence context=8 train.batch=4"}


def settings(program: str, shape: tuple[int, int]) -> Config:
    """Two microbatches and three layers of one of PROGRAMS."""
    sizes = f"mesh.dp={shape[0]} mesh.mp={shape[1]} model.layers=3 train.batch=16 train.microbatches=2"
    more = [setting if "." in setting else f"model.{setting}" for setting in PROGRAMS[program].split()]
    return config(*sizes.split(), *more)


def by_direction(entries: list[Entry]) -> dict[Direction, Any]:
    return {towards: tally(entry for entry in entries if entry.direction == towards) for towards in Direction}


def says(conf: Config, precision: str) -> list[Entry]:
    """What a step of `conf` says as it is traced."""
    made = build_step_functions(conf, mesh((conf.mesh.dp, conf.mesh.mp)), jnp.dtype(precision))
    return communication_in_jaxpr(jax.make_jaxpr(made.step)(made.shapes, made.tokens).jaxpr)


@pytest.mark.parametrize(
    ("program", "shape", "precision"),
    [(program, (2, 4), "bfloat16") for program in PROGRAMS]
    + [(program, shape, "bfloat16") for program in PROGRAMS if "slices" in program for shape in ((4, 2), (8, 1))]
    + [("gradients in a ring", (8, 1), "float32")]
    + [("1 key/value head, sequential full", shape, "bfloat16") for shape in MESHES if shape != (2, 4)]
    + [("2 key/value heads", shape, "float32") for shape in MESHES]
    + [(program, shape, "float32") for program in ("shared update", "shared update; sequence") for shape in MESHES]
    + [
        (f"1 key/value head, sequential full; {wire}", shape, "float32")
        for wire in ("sequence", "collective_matmul")
        for shape in MESHES
    ]
    + [("2 key/value heads; sequence", shape, "bfloat16") for shape in MESHES if shape != (2, 4)],
    ids=str,
)
def test_a_step_talks_as_the_theory_says(program, shape, precision):
    """In each direction every array as often, as large and in the dtype that was planned, and nothing else."""
    conf = settings(program, shape)
    assert by_direction(says(conf, precision)) == by_direction(analytic_communication(conf, precision))


@pytest.mark.parametrize("program", ["gradients in a ring", "2 slices, gradients in a ring"])
def test_several_rings_meet_once_more(monkeypatch, program):
    monkeypatch.setattr("shmap_tp.parallel.mesh.MAX_RING_SIZE", 2)
    conf = settings(program, (8, 1))
    assert DataParallelGroups.of(conf.mesh).beside is not None
    assert by_direction(says(conf, "bfloat16")) == by_direction(analytic_communication(conf, "bfloat16"))


@every_mesh
@pytest.mark.parametrize(
    "program", ["sequential full", "sequential full; sequence", "sequential full; collective_matmul"]
)
def test_the_other_programs_talk_as_the_theory_says(program, shape):
    conf = settings(program, shape)
    made = build_step_functions(conf, mesh(shape), jnp.bfloat16)
    found = communication_in_jaxpr(jax.make_jaxpr(made.evaluate)(made.shapes.params, made.tokens).jaxpr)
    assert by_direction(found) == by_direction(analytic_evaluation_communication(conf, "bfloat16"))
    assert not communication_in_jaxpr(jax.make_jaxpr(made.init)().jaxpr)


def test_only_activations_travel_in_bfloat16():
    """Gradients of parameters, those of replicated key/value heads too, and all sums of the loss travel in float32."""
    conf = settings("2 key/value heads", (2, 4))
    activations = 2 * 4 * conf.model.context * conf.model.width
    assert {(e.axis, e.bytes) for e in analytic_communication(conf, "bfloat16") if e.dtype == "bfloat16"} == {
        (MP, activations)
    }


# As compiled


def compiled(conf: Config, precision: str) -> Reconciliation:
    """What became of the theory; XLA on CPU sums bfloat16 in float32."""
    on = mesh((conf.mesh.dp, conf.mesh.mp))
    made = build_step_functions(conf, on, jnp.dtype(precision))
    text = made.step.lower(made.shapes, made.tokens).compile().as_text()
    return reconcile(
        analytic_communication(conf, "float32"), communication_in_hlo(text, dict(on.shape)), dict(on.shape)
    )


@pytest.mark.parametrize(
    ("program", "shape", "precision", "together"),
    [
        ("parallel", (2, 4), "float32", 1),  # all that meets over dp
        ("in chunks", (2, 4), "float32", 1),
        ("1 key/value head, sequential full", (2, 4), "bfloat16", 2),  # a layer's key, value and input gradients, too
        ("2 key/value heads", (8, 1), "bfloat16", 1),  # nothing travels over an mp of one device
        ("sequential dots", (1, 8), "float32", 0),  # nor over a dp of one
        ("1 key/value head, sequential full; sequence", (2, 4), "float32", 2),  # what meets over mp
        ("sequential dots; ring", (1, 8), "float32", 1),
        ("1 key/value head, sequential full; ring", (2, 4), "float32", 2),
    ],
    ids=str,
)
def test_the_compiler_merges_and_adds_nothing(program, shape, precision, together):
    found = compiled(settings(program, shape), precision)
    assert found.balanced, str(found)
    assert len(found.merges) == together, str(found)
    assert not found.stacked and not found.padding_exchanges, str(found)


def test_an_extra_sum_is_seen(monkeypatch):
    """As traced and as compiled there is one more wherever x leaves, and another for its gradient."""
    conf = settings("parallel", (2, 4))
    leave = AllReduce.leave
    monkeypatch.setattr(AllReduce, "leave", lambda self, x: lax.psum(leave(self, x), MP))
    more = {(Operation.all_reduce, MP, "float32", 4 * 4 * 7 * 24): 2 * 2 * (3 + 1)}
    assert tally(says(conf, "float32")) - tally(analytic_communication(conf, "float32")) == more
    found = compiled(conf, "float32")
    assert tally(found.unplanned) == more and not found.missing


def test_dp_that_speaks_in_every_microbatch_is_seen(monkeypatch):
    """Parameters that are not kept at home: JAX sums their gradients where they arise."""
    monkeypatch.setattr(AllReduce, "at_home", lambda self, params: params)
    found = compiled(settings("parallel", (2, 4)), "float32")
    assert {entry.axis for entry in found.unplanned} == {DP}
    assert max(entry.count for entry in found.unplanned) == 4 * 3 * 2  # projections, layers, microbatches


def test_a_sum_that_is_left_out_is_seen(monkeypatch):
    """A norm of gradients that takes one device's for all."""
    alone = SimpleNamespace(**{**vars(lax), "psum": lambda x, axes: lax.pmax(x, axes)})
    monkeypatch.setattr(shmap_tp.training.optimizer, "lax", alone)
    found = compiled(settings("parallel", (2, 4)), "float32")
    assert [entry.what for entry in found.missing] == ["norm of gradients"]
    assert [entry.operation for entry in found.unplanned] == [Operation.max]


# On paper


def test_the_table_adds_up():
    entries = analytic_communication(settings("sequential full", (2, 4)), "bfloat16")
    lines = table(entries).splitlines()
    assert len(lines) == 1 + len(entries) + 2 + 1
    assert " ".join(lines[1].split()) == "forward embedding leave all-reduce mp bfloat16 1.3 KiB 2 2.6 KiB"
    for line, axis in zip(lines[-3:-1], (DP, MP), strict=True):
        there = [entry for entry in entries if entry.axis == axis]
        size = sum(entry.bytes * entry.count for entry in there)
        assert line.split()[:3] == ["total", axis, str(sum(entry.count for entry in there))]
        assert line.split()[3:] == [f"{size / 1024:.1f}", "KiB"]
