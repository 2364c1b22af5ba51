"""The formulas of the search: memory, the figures of a machine, and what is communicated over which links."""

import pytest

from shmap_tp.config.choices import SavedActivation
from shmap_tp.config.compose import CONF, load
from shmap_tp.model.flops import parameters
from shmap_tp.parallel.mesh import DP, DP_SLICE, MP, axis_sizes
from shmap_tp.plan.ledger import Direction, Operation, without_trivial_axes
from shmap_tp.plan.predict import step_communication
from shmap_tp.plan.search.collective_seconds import _TRACED, activation_entries, links_of
from shmap_tp.plan.search.formulas import TIME, activation_values, estimate, layer_values
from shmap_tp.plan.targets import VERSIONS, find_target, machine_of
from tests.helpers.communication_rules import ArrayTraffic, tally
from tests.helpers.searching import config


@pytest.mark.parametrize(("zero", "bytes_per_parameter"), [("none", 16), ("zero1", 8 + 8 / 4), ("fsdp", 16 / 4)])
def test_the_state_of_a_device_counts_parameters_moments_and_gradients(zero, bytes_per_parameter):
    """4 bytes of each parameter, of its gradient, and of each moment of AdamW; norms stay on every device."""
    one = config("mesh.dp=4", f"mesh.zero={zero}")
    found = estimate(one, find_target("v5e", 4, None, 1)).memory_terms["state"]
    assert found == pytest.approx(bytes_per_parameter * parameters(one.model), rel=0.02)


RINGS = "model.block=sequential model.mlp=swiglu mesh.tensor_parallel=collective_matmul mesh.mp=2 train.microbatches=1"
SHARED = {
    "the ZeRO stages, dp and slices": (
        [
            f"mesh.dp=2 mesh.mp=2 train.microbatches=2 model.norm=rmsnorm mesh.zero={zero}"
            for zero in ("none", "zero1", "fsdp", "fsdp mesh.fsdp_gradients=ring")
        ],
        1,
    ),
    "policies with collective matmul": (
        [f"{RINGS} model.remat={remat}" for remat in ("full", "attention_output", "mlp")],
        3 * 3 - 1,
    ),
    "one size of a replicated key's gradient for any number of sequences": (
        ["mesh.dp=2 mesh.mp=4 train.microbatches=2 model.kv_heads=2"],
        1,
    ),
}


@pytest.mark.parametrize("case", SHARED)
def test_a_trace_is_shared_by_what_communicates_the_same(case):
    _TRACED.clear()
    settings, traces = SHARED[case]
    for each in settings:
        one = config(*each.split())
        step = [entry for entry in step_communication(one, "bfloat16") if entry.axis == MP and entry.what != "loss"]
        per_microbatch = tally(entry for entry in step if entry.direction != Direction.once)
        assert tally(without_trivial_axes(activation_entries(one), axis_sizes(one.mesh))) == per_microbatch, each
    assert len(_TRACED) <= traces


def test_more_devices_microbatches_and_recomputation_need_less_memory():
    target, base = find_target("v5e", 4, None, 1), ["mesh.dp=4", "mesh.zero=none", "model.remat=all_matmuls"]
    whole = estimate(config(*base), target)
    for setting in ("mesh.zero=fsdp", "train.microbatches=4", "model.remat=full", "model.offload=[up]"):
        assert estimate(config(*base, setting), target).peak_bytes < whole.peak_bytes
    assert estimate(config(*base, "model.offload=[up]"), target).host_bytes > whole.host_bytes == 0
    assert estimate(config(*base, "model.remat=full"), target).seconds > whole.seconds


@pytest.mark.parametrize(("version", "kind"), [("v5e", "TPU v5 lite"), ("h100", "NVIDIA H100 80GB HBM3")])
def test_a_machine_has_the_figures_of_its_devices(version, kind):
    machine = machine_of(find_target(version, 16, None, 1))
    assert (machine.kind, machine.devices, machine.chips) == (kind, 16, 16)
    assert machine.hosts == {"v5e": 4, "h100": 2}[version]


# Links


def seconds_of(axes: str, operation: Operation, *settings: str, slices: int = 2) -> float:
    """Seconds of a collective of a gigabyte over these axes of 16 dp ranks a slice of 16 chips."""
    mesh = config(f"mesh.dp={16 * slices}", f"mesh.slices={slices}", "train.batch=64", *settings).mesh
    entry = ArrayTraffic(10**9, "int8", 1).over(axes, "x", operation, Direction.backward)
    return links_of(mesh, find_target("v5e", 16 * slices, None, slices)).seconds(entry)


def test_a_reduce_scatter_within_a_slice_takes_as_long_with_gradient_rings():
    plain, ring = (
        seconds_of(DP, Operation.reduce_scatter, "mesh.zero=fsdp", f"mesh.fsdp_gradients={name}")
        for name in ("reduce_scatter", "ring")
    )
    assert plain == pytest.approx(ring, rel=0.01) and plain > 15 / 16 * 1e9 / (4 * 4.5e10)


def test_a_shard_gathered_from_two_slices_crosses_the_network_once():
    """Each device receives the shard of the other slice over its quarter of the network of its host."""
    gather = seconds_of(DP_SLICE, Operation.all_gather, "mesh.zero=fsdp")
    assert gather == pytest.approx(1e9 / (2.5e10 / 4), rel=0.01)
    assert seconds_of(DP_SLICE, Operation.reduce_scatter, "mesh.zero=fsdp") == pytest.approx(gather / 2, rel=0.01)


def test_a_gradient_summed_over_all_slices_also_crosses_the_network():
    """Each device as its shard of a slice: a sixteenth."""
    found, within = (
        seconds_of(axes, Operation.all_reduce, slices=slices) for axes, slices in ((f"{DP} {DP_SLICE}", 2), (DP, 1))
    )
    assert found == pytest.approx(within + 2 * 1e9 / 16 / 2 / (2.5e10 / 4), rel=0.01)


@pytest.mark.parametrize("name", ["16b_v5e-256", "llama3_8b_v5p-8", "6_9b_v3-32", "2_8b_v2-32", "llama3_8b_8xh100"])
def test_a_target_has_as_many_hosts_as_its_recipe_has_processes(name):
    version = next(each for each in VERSIONS if each in name.split("_")[-1])
    recipe = load(str(CONF / "recipes" / f"{name}.yaml"), []).mesh
    assert machine_of(find_target(version, recipe.dp * recipe.mp, None, 1)).hosts == recipe.processes


@pytest.mark.parametrize(
    ("mp", "ep", "capacity", "values"),
    [(1, 1, "null", 2 * 12), (4, 1, "null", 2 * 12), (8, 1, "null", 12), (2, 4, "null", 4 * 12), (2, 4, 1.25, 15)],
)
def test_a_device_has_room_for_all_tokens_at_its_experts(mp, ep, capacity, values):
    """Two of eight experts of a hidden size of 12: where a device has one of them, no token needs more than one row; or
    for 1.25 times the even load, of which a device of two ranks of mp computes one row a token."""
    settings = "block=sequential mlp=swiglu experts=8 experts_per_token=2 ffn=12"
    places = f"mesh.mp={mp}", f"mesh.dp={ep}", f"mesh.ep={ep}", f"model.expert_capacity={capacity}"
    one = config(*places, *(f"model.{setting}" for setting in settings.split()))
    assert activation_values(one)[SavedActivation.up] == activation_values(one)[SavedActivation.gate] == values


def test_experts_take_longer_the_fewer_rows_each_has():
    """Tiles that two experts share are computed twice; a dense model takes as long in any number of microbatches."""
    target = find_target("v6e", 4, None, 1)

    def matmuls(model: str, microbatches: int) -> float:
        given = f"model={model}", "train.batch=64", "mesh.dp=4", f"train.microbatches={microbatches}"
        return estimate(load(str(CONF / "base.yaml"), [*given, "mesh.mp=1"]), target).time_terms["matmuls"]

    assert matmuls("mixtral_8x7b", 16) > 1.05 * matmuls("mixtral_8x7b", 1)
    assert matmuls("llama3_8b", 16) == matmuls("llama3_8b", 1)


def test_the_scores_of_a_window_need_as_much_memory_as_the_widest_layer():
    """A window of 16 has the scores of two blocks of keys; where any layer is global, all 128 keys have them."""
    target = find_target("v3", 8, None, 1)

    def scores(*settings: str) -> float:
        given = "mesh.dp=8", "model.attention=chunked", "model.context=128", *settings
        return estimate(config(*given), target).memory_terms["scores"]

    local = "model.window=16", "model.layer_pattern=[local]"
    assert scores() == 4 * scores(*local) == scores(local[0], "model.layer_pattern=[local,global]")


def test_a_window_that_ends_in_the_chunk_before_needs_the_keys_of_one_more_part_of_a_row():
    """And a layer without one those of all others: with mesh.cp=4, of three."""

    def values(cp: int, *settings: str) -> float:
        return layer_values(config("model.context=128", f"mesh.cp={cp}", *settings))

    local = "model.window=17", "model.layer_pattern=[local]"
    assert values(4, *local) == values(2, *local) == values(2) > values(1) == values(1, *local)
    assert values(4) - values(1) == 3 * (values(4, *local) - values(1))
    assert values(4, "model.window=18") == values(4, local[0], "model.layer_pattern=[local,global]") == values(4)


MIXTRAL = "model=mixtral_8x7b train.batch=3072 mesh.dp=256 mesh.mp=1 mesh.zero=fsdp mesh.tensor_parallel=all_reduce"
MIXTRAL += " model.remat=attention_output model.offload=[input,attention_output] model.row_major=true"


@pytest.mark.parametrize(
    ("file", "words", "slice_of", "share", "matmuls_below"),
    [("recipes/llama3_8b_v5p-8", "", ("v5p", 4), 0.782, 0.6), ("base", MIXTRAL, ("v6e", 256), 0.853, 0.7)],
)
def test_products_of_blocks_in_eight_bits_take_the_share_of_the_compiled_steps(
    file, words, slice_of, share, matmuls_below
):
    """The seconds of a compiled step in int8, relative to those in bfloat16."""
    cfg, target = str(CONF / f"{file}.yaml"), find_target(*slice_of, None, 1)
    each = [load(cfg, [*words.split(), f"train.matmul_precision={one}"]) for one in ("bfloat16", "int8")]
    plain, rounded = (estimate(one, target) for one in each)
    assert rounded.seconds / plain.seconds == pytest.approx(share, rel=0.03)
    assert rounded.time_terms["matmuls"] < matmuls_below * plain.time_terms["matmuls"]
    assert rounded.time_terms["kernel"] == plain.time_terms["kernel"]
    part = estimate(load(cfg, [*words.split(), "train.matmul_precision=int8", "train.matmul_scope=mlp"]), target)
    matmuls = [each.time_terms["matmuls"] for each in (rounded, part, plain)]
    assert part.seconds < plain.seconds and sorted(set(matmuls)) == matmuls


QWEN3 = "model=qwen3_30b_a3b train.batch=512 mesh.dp=64 model.remat=full"
LLAMA = "model=llama3_8b model.context=8192 train.batch=48 mesh.dp=16"


@pytest.mark.parametrize(
    ("words", "compiled"),
    [
        (f"{QWEN3} train.microbatches=1", 3.33), (f"{QWEN3} train.microbatches=2", 5.19),
        (f"{LLAMA} train.microbatches=1 model.remat=attention_output", 2.74),
        (f"{LLAMA} train.microbatches=3 model.remat=attention", 3.06),
    ],
)  # fmt: skip
def test_steps_take_what_the_compiled_ones_take_within_15_percent(words, compiled):
    """On v6e (benchmarks/results/observed.jsonl and fastest.jsonl)."""
    given = "mesh.mp=1 mesh.tensor_parallel=all_reduce mesh.zero=fsdp data.documents=joined mesh.processes=1"
    one = load(str(CONF / "base.yaml"), [*words.split(), *given.split()])
    found = estimate(one, find_target("v6e", one.mesh.dp, None, 1))
    assert found.seconds == pytest.approx(compiled, rel=0.15)


def test_kernels_save_time_where_heads_are_narrower_than_an_mxu_and_offload_costs_time():
    """Heads of 128 that are rotated in halves, on v6e and not on v5e."""

    def terms(version: str, *settings: str) -> dict[str, float]:
        given = "model.head_dim=128", "model.positions=rotary", "model.context=128", "model.remat=all_matmuls"
        return estimate(config(*given, "mesh.dp=4", *settings), find_target(version, 4, None, 1)).time_terms

    assert terms("v6e")["heads"] > 0 == terms("v5e")["heads"] == terms("v6e", "model.rotary_dim=64")["heads"]
    assert terms("v6e", "model.norm=rmsnorm", "model.qk_norm=true")["heads"] > terms("v6e")["heads"]
    assert terms("v6e", "model.remat=full")["heads"] == 4 / 3 * terms("v6e")["heads"]
    assert TIME["heads"] < 0 < TIME["host"] * terms("v6e", "model.offload=[up]")["host"]
