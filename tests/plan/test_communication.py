"""The collectives of every layer, block and program, as traced, are exactly those of the analytic model, on every mesh.

So are those of the compiled step, where the compiler may merge and move collectives, but not add or drop any.

B sequences on this device, T time, D model width.
"""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shmap_tp.training.optimizer
from shmap_tp.config.schema import Config
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.mesh import DP, DP_RING, MP, axis_sizes
from shmap_tp.parallel.tensor_parallel import AllReduce
from shmap_tp.plan.communication.analytic import (
    analytic_communication,
    analytic_evaluation_communication,
    cross_entropy,
    whole_matrices,
)
from shmap_tp.plan.communication.from_hlo import communication_in_hlo
from shmap_tp.plan.communication.from_jaxpr import communication_in_jaxpr
from shmap_tp.plan.communication.ledger import ArrayTraffic, Direction, Entry, Operation, table, tally
from shmap_tp.plan.communication.reconcile import Reconciliation, reconcile
from shmap_tp.plan.predict import predict
from shmap_tp.plan.tpu import Slice
from shmap_tp.training import step
from shmap_tp.training.step import build_step_functions
from tests.helpers import loss_cases
from tests.helpers.communication_checks import (
    PROGRAMS,
    by_direction,
    check_case,
    check_layer,
    check_step,
    program_config,
    step_communication,
)
from tests.helpers.communication_rules import entering
from tests.helpers.layer_cases import LAYERS
from tests.helpers.model_fixtures import MESHES, config, every_mesh, mesh_config, mesh_of


@every_mesh
@pytest.mark.parametrize("layer", LAYERS)
def test_layer_communicates_as_its_docstring_says(layer, shape):
    check_layer(layer, shape)


@every_mesh
@pytest.mark.parametrize("chunks", loss_cases.CHUNK_SIZES)
def test_loss_communicates_as_its_docstring_says(chunks, shape):
    """The case also lets h enter, and reduces the objective and the loss over dp."""
    positions = ArrayTraffic(loss_cases.B // shape[0] * loss_cases.T, "float32", 1)
    analytic = [
        *entering(mesh_config(*shape), "h", replace(positions, values=positions.values * loss_cases.D)),
        *cross_entropy(positions, loss_cases.CHUNK_SIZES[chunks]),
        *2 * [ArrayTraffic(1, "float32", 1).over(DP, "sums", Operation.all_reduce, Direction.forward)],
    ]
    check_case(loss_cases.LOSSES[f"{loss_cases.ALL_COLUMNS_REAL}, {chunks}"], shape, analytic)


@pytest.mark.parametrize(
    ("program", "shape", "precision"),
    [(program, (2, 4), "bfloat16") for program in PROGRAMS]
    + [(program, shape, "bfloat16") for program in PROGRAMS if "slices" in program for shape in ((4, 2), (8, 1))]
    + [("fsdp ring", (8, 1), "float32")]
    + [("1 kv head, sequential, remat full", shape, "bfloat16") for shape in MESHES if shape != (2, 4)]
    + [("2 kv heads", shape, "float32") for shape in MESHES]
    + [(program, shape, "float32") for program in ("zero1", "zero1; sequence") for shape in ((8, 1), (1, 8))]
    + [
        (f"1 kv head, sequential, remat full; {mode}", shape, "float32")
        for mode in ("sequence", "collective_matmul")
        for shape in ((8, 1), (1, 8))
    ]
    + [("2 kv heads; sequence", shape, "bfloat16") for shape in ((1, 1), (1, 8))],
    ids=str,
)
def test_traced_step_communicates_as_the_analytic_model_says(program, shape, precision):
    check_step(program, shape, precision)


def test_muon_exchanges_each_momentum_once_over_each_axis_and_back_with_zeros_up_to_a_matrix_a_device():
    """Of two layers: 4 matrices [32 24] (query, output), 4 [24 8 4] (key, value) and 4 [40 24] (up, down)."""
    conf = config("mesh.dp=2", "mesh.mp=4", "mesh.zero=fsdp", "optimizer.name=muon")
    expected = {
        (Operation.all_to_all, axis, "bfloat16", 2 * 8 * size // 8): 2 * stacks
        for axis in (DP, MP)
        for size, stacks in ((32 * 24, 2), (40 * 24, 1))
    }
    assert tally(whole_matrices(conf, "bfloat16")) == expected
    assert not whole_matrices(config("mesh.dp=2", "mesh.mp=4"), "bfloat16")


@pytest.mark.parametrize("program", ["fsdp ring", "2 slices, fsdp ring"])
def test_several_rings_per_slice_need_one_more_reduce_scatter(monkeypatch, program):
    monkeypatch.setattr("shmap_tp.parallel.mesh.MAX_RING_SIZE", 2)
    assert axis_sizes(program_config(program, (8, 1)).mesh)[DP_RING] == (4 if program == "fsdp ring" else 2)
    check_step(program, (8, 1), "bfloat16")


@every_mesh
@pytest.mark.parametrize(
    "program",
    [
        "sequential, remat full",
        "sequential, remat full; sequence",
        "sequential, remat full; collective_matmul",
    ],
)
def test_evaluation_communicates_as_the_analytic_model_says_and_initialisation_not_at_all(program, shape):
    conf = program_config(program, shape)
    made = build_step_functions(conf, mesh_of(conf), jnp.bfloat16)
    found = communication_in_jaxpr(jax.make_jaxpr(made.evaluate)(made.shapes.params, made.tokens).jaxpr)
    assert by_direction(found) == by_direction(analytic_evaluation_communication(conf, "bfloat16"))
    assert not communication_in_jaxpr(jax.make_jaxpr(made.init)().jaxpr)


def test_only_activations_are_communicated_in_bfloat16():
    """Gradients of parameters, including replicated key/value heads, and all sums of the loss are float32."""
    conf = program_config("2 kv heads", (2, 4))
    activations = 2 * 4 * conf.model.context * conf.model.width
    assert {(e.axis, e.bytes) for e in analytic_communication(conf, "bfloat16") if e.dtype == "bfloat16"} == {
        (MP, activations)
    }


# The compiled step


def reconciled(conf: Config, precision: str, planned: list[Entry] | None = None) -> Reconciliation:
    """The compiled step compared with the plan, in float32: XLA for CPU reduces bfloat16 in float32."""
    planned = planned or analytic_communication(conf, "float32")
    on = mesh_of(conf)
    made = build_step_functions(conf, on, jnp.dtype(precision))
    text = made.step.lower(made.shapes, made.tokens).compile().as_text()
    return reconcile(planned, communication_in_hlo(text, dict(on.shape)), dict(on.shape))


@pytest.mark.parametrize(
    ("program", "shape", "precision", "merges"),
    [
        ("parallel", (2, 4), "float32", 1),  # everything that is reduced over dp
        ("chunks", (2, 4), "float32", 1),
        ("1 kv head, sequential, remat full", (2, 4), "bfloat16", 2),  # also a layer's key, value and input gradients
        ("2 kv heads", (8, 1), "bfloat16", 1),  # mp is 1: no communication over mp
        ("sequential, remat all_matmuls", (1, 8), "float32", 0),  # dp is 1: no communication over dp
        ("1 kv head, sequential, remat full; sequence", (2, 4), "float32", 2),  # also gradients reduced over mp
        ("sequential, remat all_matmuls; collective_matmul", (1, 8), "float32", 1),
        ("1 kv head, sequential, remat full; collective_matmul", (2, 4), "float32", 2),
    ],
    ids=str,
)
def test_compiler_merges_collectives_and_adds_none(program, shape, precision, merges):
    found = reconciled(program_config(program, shape), precision)
    assert found.balanced, str(found)
    assert len(found.merges) == merges, str(found)
    assert not found.stacked and not found.padding_exchanges, str(found)


@pytest.mark.parametrize("layers", [2, 5])
def test_weights_of_layers_in_no_loop_are_gathered_again_in_the_backward_pass(layers):
    """For TPUs: XLA for CPU ignores barriers.  A period of two layers, which XLA unrolls; two periods and a layer."""
    pytest.importorskip("libtpu")
    sizes = "width=128 ffn=256 heads=1 kv_heads=1 head_dim=128 context=128 vocabulary=512 block=sequential remat=full"
    settings = f"{sizes} layers={layers} window=32 layer_pattern=[local,global] attention=chunked".split()
    conf = config(
        "mesh.dp=4",
        "mesh.mp=1",
        "mesh.zero=fsdp",
        "train.microbatches=1",
        *[f"model.{setting}" for setting in settings],
    )
    text = predict(conf, Slice("v5e", (2, 2)), cache=None).text
    sizes = axis_sizes(conf.mesh)
    planned = analytic_communication(conf, jnp.bfloat16)
    found = reconcile(planned, communication_in_hlo(text, sizes), sizes)
    assert not found.missing and not found.shared and not found.unplanned, str(found)


def test_an_extra_all_reduce_is_reported(monkeypatch):
    """As traced and as compiled: one more wherever a partial sum is reduced, and one for its gradient."""
    conf = program_config("parallel", (2, 4))
    planned = analytic_communication(conf, "float32")  # with the mode as it is: the plan traces it
    reduce = AllReduce.reduce
    monkeypatch.setattr(AllReduce, "reduce", lambda self, x: lax.psum(reduce(self, x), MP))
    extra = {(Operation.all_reduce, MP, "float32", 4 * 4 * 7 * 24): 2 * 2 * (3 + 1)}
    assert tally(step_communication(conf, "float32")) - tally(planned) == extra
    found = reconciled(conf, "float32", planned)
    assert tally(found.unplanned) == extra and not found.missing


def test_reducing_gradients_over_dp_in_every_microbatch_is_reported(monkeypatch):
    """JAX sums the gradients of parameters that were not marked as varying over dp where they arise."""
    conf = program_config("parallel", (2, 4))
    planned = analytic_communication(conf, "float32")
    mark_others = step.mark_varying
    only_others = lambda tree, axes: tree if isinstance(tree, Transformer) else mark_others(tree, axes)  # noqa: E731
    monkeypatch.setattr(step, "mark_varying", only_others)
    found = reconciled(conf, "float32", planned)
    assert {entry.axis for entry in found.unplanned} == {DP}
    assert max(entry.count for entry in found.unplanned) == 4 * 3 * 2  # projections, layers, microbatches


def test_a_missing_all_reduce_is_reported(monkeypatch):
    """Norms that take the maximum over devices instead of the sum."""
    maximum = SimpleNamespace(**{**vars(lax), "psum": lambda x, axes: lax.pmax(x, axes)})
    monkeypatch.setattr(shmap_tp.training.optimizer, "lax", maximum)
    found = reconciled(program_config("parallel", (2, 4)), "float32")
    assert [entry.what for entry in found.missing] == ["gradient norm", "parameter norms"]
    assert [entry.operation for entry in found.unplanned] == [Operation.max] * 2


# The printed table


def test_printed_totals_are_the_sums_of_the_entries(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    entries = analytic_communication(program_config("sequential, remat full", (2, 4)), "bfloat16")
    lines = table(entries).splitlines()
    assert len(lines) == 1 + len(entries) + 2 + 1
    assert " ".join(lines[1].split()) == "forward embedding reduce all-reduce mp bfloat16 1.3 KiB 2 2.6 KiB"
    for line, axis in zip(lines[-3:-1], (DP, MP), strict=True):
        of_axis = [entry for entry in entries if entry.axis == axis]
        size = sum(entry.bytes * entry.count for entry in of_axis)
        assert line.split()[:3] == ["total", axis, str(sum(entry.count for entry in of_axis))]
        assert line.split()[3:] == [f"{size / 1024:.1f}", "KiB"]
