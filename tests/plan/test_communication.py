"""The collectives of every layer and step, as traced, are exactly those that are written down by hand, on every mesh.

So are the bytes of the compiled step, where the compiler may merge and move collectives, but not add or drop any.

B sequences on this device, T time, D model width.
"""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shmap_tp.training.optimizer
from shmap_tp.config.choices import AttentionKernel
from shmap_tp.config.schema import Config
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.mesh import DP, DP_RING, MP, axis_sizes
from shmap_tp.parallel.tensor_parallel import AllReduce
from shmap_tp.plan.compiled_communication import communication_in_hlo
from shmap_tp.plan.ledger import (
    Direction,
    Entry,
    Operation,
    bytes_by_operation,
    communication_in_jaxpr,
    comparison,
    table,
)
from shmap_tp.plan.predict import predict, step_communication, step_dtype
from shmap_tp.plan.report import config_fields
from shmap_tp.plan.tpu import Slice
from shmap_tp.training import step
from shmap_tp.training.step import Components, build_step_functions
from tests.helpers import communication_rules, loss_cases
from tests.helpers.communication_checks import (
    PROGRAMS,
    check_case,
    check_layer,
    check_step,
    program_config,
)
from tests.helpers.communication_rules import ArrayTraffic, cross_entropy, entering, tally
from tests.helpers.components import COMPONENTS
from tests.helpers.layer_cases import LAYERS
from tests.helpers.model_fixtures import MESHES, config, mesh_config, mesh_of

# Layers


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_communicates_as_its_docstring_says(layer):
    check_layer(layer, (2, 4))


@pytest.mark.parametrize("shape", [shape for shape in MESHES if shape != (2, 4)], ids=str)
@pytest.mark.parametrize(
    "layer",
    [
        "key_value_2_of_8",  # replicated where mp > 2
        "embedding, sequence",
        "gelu, collective_matmul",
        "sequential_block, sequence",
    ],
)
def test_layer_communicates_so_on_every_mesh(layer, shape):
    check_layer(layer, shape)


@pytest.mark.parametrize(
    ("chunks", "shape"), [("one chunk", (2, 4)), ("chunks of 32", (1, 8)), ("chunks of 3", (8, 1))], ids=str
)
def test_loss_communicates_as_its_docstring_says(chunks, shape):
    """The case also lets h enter, and reduces the objective and the loss over dp."""
    positions = ArrayTraffic(loss_cases.B // shape[0] * loss_cases.T, "float32", 1)
    by_hand = [
        *entering(mesh_config(*shape), "h", replace(positions, values=positions.values * loss_cases.D)),
        *cross_entropy(positions, loss_cases.CHUNK_SIZES[chunks]),
        *2 * [ArrayTraffic(1, "float32", 1).over(DP, "sums", Operation.all_reduce, Direction.forward)],
    ]
    check_case(loss_cases.LOSSES[f"{loss_cases.ALL_COLUMNS_REAL}, {chunks}"], shape, by_hand)


# Steps

STEPS = """
1x8 float32 all_reduce none sequential mlp 1 alibi swiglu rmsnorm tied biases offload chunks
8x1 float32 all_reduce none sequential attention_and_up 8 rotary swiglu rmsnorm tied biases adapters offload
1x1 float32 all_reduce none sequential full 2 rotary gelu rmsnorm tied loss_chunks
1x8 bfloat16 all_reduce none sequential all_matmuls 8 learned swiglu rmsnorm tied biases loss_chunks chunks small
2x4 bfloat16 all_reduce none parallel none 2 rotary swiglu rmsnorm
2x4 bfloat16 all_reduce zero1 parallel attention 2 learned gelu loss_chunks
8x1 float32 all_reduce zero1 sequential attention_output 8 learned gelu biases loss_chunks
2x4 bfloat16 all_reduce fsdp parallel none 2 learned gelu
4x2 float32 all_reduce ring sequential none 2 rotary swiglu slices biases chunks small
1x1 bfloat16 sequence none sequential attention_output 1 rotary gelu rmsnorm biases adapters loss_chunks
2x4 float32 sequence none parallel attention 8 learned swiglu tied biases loss_chunks small
4x2 bfloat16 sequence zero1 parallel all_matmuls 1 rotary swiglu slices tied biases adapters loss_chunks small
1x8 bfloat16 sequence zero1 parallel mlp 8 alibi swiglu tied offload small
8x1 bfloat16 sequence zero1 parallel none 1 rotary gelu slices rmsnorm tied
8x1 float32 sequence ring sequential full 2 learned swiglu slices loss_chunks chunks
2x4 bfloat16 sequence ring parallel attention_and_up 8 alibi gelu rmsnorm tied biases small
4x2 bfloat16 collective_matmul none parallel none 8 learned gelu tied adapters loss_chunks
8x1 float32 collective_matmul none sequential all_matmuls 8 rotary gelu slices rmsnorm biases offload chunks
4x2 bfloat16 collective_matmul none parallel attention_output 8 rotary swiglu slices tied biases
4x2 float32 collective_matmul zero1 parallel full 1 alibi swiglu slices biases adapters loss_chunks small
1x4 bfloat16 collective_matmul fsdp sequential attention 2 learned swiglu rmsnorm biases adapters loss_chunks small
4x2 bfloat16 collective_matmul fsdp sequential attention_and_up 1 alibi gelu rmsnorm offload small
4x2 bfloat16 collective_matmul fsdp sequential full 8 rotary gelu tied biases loss_chunks chunks small
8x1 float32 collective_matmul fsdp parallel mlp 1 rotary swiglu slices tied biases adapters loss_chunks
"""
"""Mesh, precision, tensor-parallel mode, ZeRO stage, block, rematerialisation, key/value heads, positions, MLP, more:
two settings whose communication depends on each other occur together."""
ZERO = {"none": "none", "zero1": "zero1", "fsdp": "fsdp", "ring": "fsdp mesh.fsdp_gradients=ring"}
OFFLOADED = {"mlp": "[input,gate,up]", "attention_and_up": "[query_key_value,up]", "all_matmuls": "[input,up]"}
MORE = {
    "rmsnorm": "norm=rmsnorm", "tied": "tie_embeddings=true", "biases": "qkv_bias=true", "adapters": "adapter.rank=4",
    "loss_chunks": "train.loss_chunk=14", "chunks": "attention_chunk=3",
    "slices": "mesh.slices=2",
}  # fmt: skip


@pytest.mark.parametrize("step", STEPS.strip().splitlines())
def test_traced_step_communicates_what_is_written_down_by_hand(step):
    """Where `small`, of one sequence per device."""
    mesh, precision, mode, zero, block, remat, kv_heads, positions, mlp, *more = step.split()
    dp, mp = map(int, mesh.split("x"))
    model = f"block={block} remat={remat} kv_heads={kv_heads} positions={positions} mlp={mlp}"
    own = {"offload": f"offload={OFFLOADED.get(remat)}", "small": f"train.batch={2 * dp}"} | MORE
    context = 7 if mode == "all_reduce" else 8
    parallel = f"mesh.tensor_parallel={mode} mesh.zero={ZERO[zero]} context={context}"
    check_step(program_config(" ".join([model, parallel, *(own[name] for name in more)]), (dp, mp)), precision)


def test_muon_exchanges_each_momentum_once_over_each_axis_and_back_with_zeros_up_to_a_matrix_a_device():
    """Two layers have 4 matrices [32 24] (query, output), 4 [24 8 4] (key, value) and 4 [40 24] (up, down)."""
    conf = config("mesh.dp=2", "mesh.mp=4", "mesh.zero=fsdp", "optimizer.name=muon")
    expected = {
        (Operation.all_to_all, axis, "bfloat16", 2 * 8 * size // 8): 2 * stacks
        for axis in (DP, MP)
        for size, stacks in ((32 * 24, 2), (40 * 24, 1))
    }
    exchanged = [e for e in step_communication(conf, "bfloat16") if e.operation == Operation.all_to_all]
    assert tally(exchanged) == expected


@pytest.mark.parametrize(("slices", "ring"), [(1, 4), (2, 2)])
def test_several_rings_per_slice_need_one_more_reduce_scatter(monkeypatch, slices, ring):
    monkeypatch.setattr("shmap_tp.parallel.mesh.MAX_RING_SIZE", 2)
    conf = program_config(f"mlp=swiglu mesh.slices={slices} {PROGRAMS['fsdp ring']}", (8, 1))
    assert axis_sizes(conf.mesh)[DP_RING] == ring
    check_step(conf, "bfloat16")


@pytest.mark.parametrize(("mode", "zero"), [("all_reduce", "none"), ("sequence", "fsdp")])
def test_evaluation_communicates_the_forward_half_and_initialisation_not_at_all(mode, zero):
    conf = program_config(f"block=sequential remat=full context=8 mesh.tensor_parallel={mode} mesh.zero={zero}", (2, 4))
    made = build_step_functions(conf, mesh_of(conf), jnp.bfloat16)
    found = communication_in_jaxpr(jax.make_jaxpr(made.evaluate)(made.shapes.params, made.tokens).jaxpr)
    by_hand = communication_rules.step(conf, "bfloat16")
    assert tally(found) == tally(e for e in by_hand if e.direction == Direction.forward or e.what == "loss")
    assert not communication_in_jaxpr(jax.make_jaxpr(made.init)().jaxpr)


def test_only_activations_are_communicated_in_the_precision_of_the_step():
    """Gradients of parameters, including replicated key/value heads, and all sums of the loss are float32."""
    conf = program_config("kv_heads=2 positions=rotary mlp=swiglu norm=rmsnorm train.precision=bfloat16", (2, 4))
    activations = 2 * 4 * conf.model.context * conf.model.width
    entries = step_communication(conf, step_dtype(conf))
    assert {(e.axis, e.bytes) for e in entries if e.dtype == "bfloat16"} == {(MP, activations)}


def test_the_parts_of_a_step_are_named_and_each_belongs_to_a_pass():
    """As with one microbatch, which is in no loop."""
    names = {}
    for microbatches in (1, 2):
        conf = program_config(f"block=sequential remat=full train.microbatches={microbatches}", (2, 4))
        names[microbatches] = {(e.what, str(e.direction)) for e in step_communication(conf, "bfloat16")}
    forward = {"embedding", "attention", "MLP", "loss"}
    assert names[1] == names[2] == {
        *((part, "forward") for part in forward), ("attention", "recompute"), ("MLP", "backward"),
        ("attention", "backward"), ("head", "backward"), ("gradients", "once"), ("update", "once"), ("step", "once"),
    }  # fmt: skip


# The compiled step


def compiled(conf: Config, precision: str = "float32") -> list[Entry]:
    """What the compiled step communicates, in float32: XLA for CPU reduces bfloat16 in float32."""
    made = build_step_functions(conf, mesh_of(conf), jnp.dtype(precision))
    return communication_in_hlo(
        made.step.lower(made.shapes, made.tokens).compile().as_text(), dict(mesh_of(conf).shape)
    )


@pytest.mark.parametrize(
    ("program", "shape", "precision"),
    [
        ("parallel", (2, 4), "float32"),
        ("2 kv heads", (8, 1), "bfloat16"),  # mp is 1: no communication over mp
        ("1 kv head, sequential, remat full; sequence", (1, 8), "float32"),  # gradients reduced over mp; dp is 1
        ("1 kv head, sequential, remat full; collective_matmul", (4, 2), "float32"),
    ],
    ids=str,
)
def test_the_compiled_step_communicates_the_bytes_of_the_traced_one(program, shape, precision):
    conf = program_config(program, shape)
    assert comparison(step_communication(conf, "float32"), compiled(conf, precision)).startswith("as traced\n")


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
    found = predict(conf, Slice("v5e", (2, 2)), cache=None)
    both = found.communication, communication_in_hlo(found.text, axis_sizes(conf.mesh))
    traced, gathered = (bytes_by_operation(each)[Operation.all_gather, DP] for each in both)
    assert traced == gathered > 0


def test_an_extra_all_reduce_is_reported(monkeypatch):
    """As traced and as compiled: one more wherever a partial sum is reduced, and one for its gradient."""
    conf = program_config("parallel", (2, 4))
    reduce = AllReduce.reduce
    monkeypatch.setattr(AllReduce, "reduce", lambda self, x: lax.psum(reduce(self, x), MP))
    by_hand, size, times = communication_rules.step(conf, "float32"), 4 * 4 * 7 * 24, 2 * 2 * (3 + 1)
    extra = {(Operation.all_reduce, MP, "float32", size): times}
    assert tally(step_communication(conf, "float32")) - tally(by_hand) == extra
    found = compiled(conf)
    assert bytes_by_operation(found) - bytes_by_operation(by_hand) == {(Operation.all_reduce, MP): size * times}
    assert "all-reduce  mp" in (report := comparison(by_hand, found)) and report.startswith("not all as traced")
    assert f" {size * times / 1024:.1f} KiB" in report


def test_reducing_gradients_over_dp_in_every_microbatch_is_reported(monkeypatch):
    """JAX sums the gradients of parameters that were not marked as varying over dp where they arise."""
    conf = program_config("parallel", (2, 4))
    mark_others = step.mark_varying
    only_others = lambda tree, axes: tree if isinstance(tree, Transformer) else mark_others(tree, axes)  # noqa: E731
    monkeypatch.setattr(step, "mark_varying", only_others)
    unplanned = tally(step_communication(conf, "float32")) - tally(communication_rules.step(conf, "float32"))
    assert {axis for _, axis, _, _ in unplanned} == {DP}
    assert max(unplanned.values()) == 4 * 3 * 2  # projections, layers, microbatches


def test_a_missing_all_reduce_is_reported(monkeypatch):
    """Norms that take the maximum over devices instead of the sum."""
    maximum = SimpleNamespace(**{**vars(lax), "psum": lambda x, axes: lax.pmax(x, axes)})
    monkeypatch.setattr(shmap_tp.training.optimizer, "lax", maximum)
    conf = program_config("parallel", (2, 4))
    by_hand = [e for e in communication_rules.step(conf, "float32") if e.axis]
    found = step_communication(conf, "float32")
    missing, unplanned = tally(by_hand) - tally(found), tally(found) - tally(by_hand)
    assert {size for _, _, _, size in missing} == {4, 8} and {each[0] for each in unplanned} == {Operation.max}


def test_a_matrix_that_is_not_counted_would_be_found():
    """A mutation of the reference: one matrix of each layer left out, the figures differ by exactly that matrix."""
    conf = program_config("context=8", (2, 4))
    layers, tokens = conf.model.layers, conf.train.batch * conf.model.context

    def figures(components: Components) -> tuple[int, float, int]:
        """(parameters, FLOPs of a device, bytes over dp)."""
        fields = config_fields(conf, AttentionKernel.chunked, 8, None, components)
        ledger = step_communication(conf, "float32", components)
        over_dp = sum(entry.total for entry in ledger if entry.axis == DP)
        return fields["params"], fields["model_flops_per_device"], over_dp

    without = np.array(figures(COMPONENTS["block and mlp"])) - figures(COMPONENTS["block"])
    weights = 24 * 40 * layers
    assert [*without] == [weights, 6 * weights * tokens / 8, 4 * weights / 4]  # float32, sharded over mp


# The printed table


def test_printed_totals_are_the_sums_of_the_entries(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    entries = step_communication(program_config("sequential, remat full", (2, 4)), "bfloat16")
    lines = table(entries).splitlines()
    assert len(lines) == 1 + len(entries) + 2 + 1
    assert " ".join(lines[1].split()) == "forward embedding all-reduce mp bfloat16 1.3 KiB 2 2.6 KiB"
    for line, axis in zip(lines[-3:-1], (DP, MP), strict=True):
        of_axis = [entry for entry in entries if entry.axis == axis]
        size = sum(entry.bytes * entry.count for entry in of_axis)
        assert line.split()[:3] == ["total", axis, str(sum(entry.count for entry in of_axis))]
        assert line.split()[3:] == [f"{size / 1024:.1f}", "KiB"]
