"""Planning for GPUs: formulas against hand computations; with XLA for CUDA, a real program's memory and collectives."""

import importlib.metadata

import pytest

from shmap_tp.config.compose import CONF, load
from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import DEVICES, GIB
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.plan import gpu
from shmap_tp.plan.compiled_communication import communication_in_hlo
from shmap_tp.plan.gpu import GPUS, GpuCosts, GpuLinks, Nodes, find_nodes, is_installed, node_devices
from shmap_tp.plan.hlo_parser import parse_hlo
from shmap_tp.plan.ledger import Operation, bytes_by_operation
from shmap_tp.plan.predict import predict
from shmap_tp.plan.targets import compiler_missing, devices_of_nodes, find_target

H100 = GPUS["h100"]
NVLINK = H100.nvlink_rate * H100.nvlink_efficiency

DOT = (
    '"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
    '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}'
)
SCORES = '"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "4", "128", "128"]}'
MODULE = f"""HloModule m

%sliced (p0: bf16[2,4096,4096], p1: bf16[4096,4096]) -> bf16[4096,4096] {{
  %p0 = bf16[2,4096,4096] parameter(0)
  %p1 = bf16[4096,4096] parameter(1)
  %one = bf16[4096,4096] bitcast(%p0)
  ROOT %dot = (bf16[4096,4096], s8[1024]) custom-call(%one, %p1), custom_call_target="__cublas$lt$matmul", x={{{DOT}}}
}}

ENTRY %main (a: bf16[4096,4096], q: bf16[2,128,4,64], s: bf16[2,4096,4096]) -> bf16[4096,4096] {{
  %a = bf16[4096,4096] parameter(0)
  %w = f32[4096,4096] parameter(3)
  %q = bf16[2,128,4,64] parameter(1)
  %s = bf16[2,4096,4096] parameter(2)
  %gemm = (bf16[4096,4096], s8[1024]) custom-call(%a, %a), custom_call_target="__cublas$lt$matmul", x={{{DOT}}}
  %wide = (f32[4096,4096], s8[1024]) custom-call(%w, %w), custom_call_target="__cublas$lt$matmul", x={{{DOT}}}
  %b = s8[4096,4096] parameter(4)
  %c = f8e4m3fn[4096,4096] parameter(5)
  %int8 = (s32[4096,4096], s8[1024]) custom-call(%b, %b), custom_call_target="__cublas$lt$matmul", x={{{DOT}}}
  %fp8 = (f32[4096,4096], s8[1024]) custom-call(%c, %c), custom_call_target="__cublas$lt$matmul$f8", x={{{DOT}}}
  %fused = bf16[4096,4096] fusion(%s, %a), kind=kCustom, calls=%sliced
  %fmha = bf16[2,128,4,64] custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", {SCORES}, "mask_type": "CAUSAL"
  ROOT %add = bf16[4096,4096] add(%a, %a)
}}
"""  # noqa: E501


def seconds(name: str) -> float:
    module = parse_hlo(MODULE)
    return GpuCosts(module, H100)(module.entry.instructions[name], module.entry)[0]


def test_matmuls_take_their_flops_in_whole_waves_of_tiles_attention_those_of_the_causal_half_and_others_their_bytes():
    """4096 cubed has 32 x 16 = 512 tiles, 4 waves of 132: 528 tiles' time.  No attention takes less than its bytes."""
    expected = 2 * 4096**3 * 528 / 512 / (gpu.GEMM_EFFICIENCY * 989e12)
    assert seconds("gemm") == seconds("fused") == pytest.approx(expected)
    assert seconds("wide") == pytest.approx(2 * expected)
    assert seconds("int8") == seconds("fp8") == pytest.approx(expected * 989 / 1979)
    rate = gpu.MEMORY_EFFICIENCY * 3350e9
    assert seconds("add") == pytest.approx(3 * 2 * 4096**2 / rate)
    flops, size = 2 * (2 * 2 * 4 * 128 * 128 * 64) / 2, 4 * 2 * 2 * 128 * 4 * 64
    by_flops = flops / (gpu.ATTENTION_EFFICIENCY["forward"] * 989e12)
    assert seconds("fmha") == pytest.approx(max(by_flops, size / rate))


def test_collectives_within_a_node_are_bound_by_nvlink_and_across_nodes_by_the_network():
    links, size, hop = GpuLinks(Nodes("h100", 2)), 1e9, gpu.LATENCY
    inside, across = list(range(8)), list(range(16))
    assert links.collective_seconds("all-gather", size, inside) == pytest.approx(size * 7 / 8 / NVLINK + 7 * hop)
    whole = links.collective_seconds("all-gather", size, across)
    assert whole == pytest.approx(size * 15 / 16 / NVLINK + 15 * hop + gpu.NETWORK_LATENCY)  # 8 cards: 400 GB/s
    pair = links.collective_seconds("reduce-scatter", size, [0, 8])
    assert pair == pytest.approx(size / 2 / 50e9 + hop + gpu.NETWORK_LATENCY)
    assert links.collective_seconds("all-reduce", size, [0, 8]) == pytest.approx(2 * pair)
    assert links.collective_seconds("all-reduce", size, [3]) == 0
    assert links.permute_seconds(size, [(0, 1), (1, 0)]) == pytest.approx(size / NVLINK + hop)
    assert links.permute_seconds(size, [(0, 1), (7, 8)]) == pytest.approx(size / 50e9 + gpu.NETWORK_LATENCY)


def test_a_program_may_use_jax_s_memory_pool_but_not_what_cuda_and_nccl_need(monkeypatch):
    monkeypatch.delenv(gpu.POOL, raising=False)
    assert gpu.usable_bytes(H100) == 0.75 * 80e9
    monkeypatch.setenv(gpu.POOL, "0.99")
    assert gpu.usable_bytes(H100) == 80e9 - 3 * GIB
    monkeypatch.setenv(gpu.POOL, "most")
    with pytest.raises(UserError, match=r"^XLA_PYTHON_CLIENT_MEM_FRACTION=most is no number; give a fraction"):
        gpu.usable_bytes(H100)


MISTAKES = {
    "--dp 3 --mp 4": (lambda: find_nodes("h100", 12), "12 GPUs do not fill nodes of 8"),
    "h300": (lambda: find_nodes("h300", 8), "unknown GPU; use one of a100, h100, h200, b200"),
    "--topology": (lambda: find_target("h100", 8, "2x4", 1), "GPUs have none"),
    "--nodes for TPUs": (lambda: devices_of_nodes(["v5e"], 1), "--nodes 1 is for GPUs"),
    "--nodes 0": (lambda: devices_of_nodes(["h100"], 0), "it must be 1 or more"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_explained(mistake):
    call, message = MISTAKES[mistake]
    with pytest.raises(UserError, match=message):
        call()


@pytest.mark.skipif(is_installed(), reason="XLA for CUDA is installed")
def test_a_missing_compiler_is_named():
    with pytest.raises(UserError, match=r"pip install -e '\.\[plan-gpu\]'"):
        node_devices(find_nodes("h100", 8))
    assert "pip install -e '.[plan-gpu]'" in compiler_missing(find_nodes("h100", 8))


def test_a_search_compiles_where_the_package_of_the_compiler_is_installed(monkeypatch):
    """The package jax-cuda12-pjrt has no module of that name."""
    asked = []
    monkeypatch.setattr(importlib.metadata, "version", lambda name: asked.append(name) or "1")
    assert compiler_missing(find_nodes("h100", 8)) is None and asked == [gpu.COMPILER]


def test_every_gpu_is_of_a_kind_whose_figures_are_known():
    assert {gpu.kind for gpu in GPUS.values()} <= DEVICES.keys()
    assert "device_memory_size: 141000000000" in GPUS["h200"].target_config


@pytest.mark.skipif(not is_installed(), reason="needs XLA for CUDA: pip install -e '.[plan-gpu]'")
@pytest.mark.parametrize("settings", [("8", "1", "fsdp", "all_reduce"), ("2", "4", "none", "sequence")], ids=str)
@pytest.mark.parametrize("version", GPUS)
def test_compiled_collectives_are_as_traced_and_memory_is_the_compiler_s(version, settings):
    dp, mp, zero, mode = settings
    if version == "a100" and zero == "none":
        pytest.skip("one program of A100 is enough")
    given = [f"mesh.dp={dp}", f"mesh.mp={mp}", f"mesh.zero={zero}", f"mesh.tensor_parallel={mode}", "train.batch=16"]
    config = load(CONF / "base.yaml", ["model=test", "train.microbatches=1", *given])
    found = predict(config, find_nodes(version, 8))
    assert found.row.fits and 0 < found.row.peak_bytes_per_device < GIB and found.row.step_seconds > 0
    compiled = bytes_by_operation(communication_in_hlo(found.text, {DP: int(dp), MP: int(mp)}))
    at_once = compiled.pop((Operation.all_reduce, f"{DP} {MP}"), 0)  # two all-reduces of the same arrays
    compiled += {(Operation.all_reduce, axis): at_once for axis in (DP, MP) if at_once}
    assert bytes_by_operation(found.communication) == compiled


@pytest.mark.skipif(not is_installed(), reason="needs XLA for CUDA: pip install -e '.[plan-gpu]'")
def test_a_program_that_does_not_fit_is_said_not_to_fit(monkeypatch):
    monkeypatch.setenv(gpu.POOL, "0.0001")
    config = load(CONF / "base.yaml", ["model=test", "train.batch=16", "mesh.dp=8", "mesh.mp=1"])
    row = predict(config, find_nodes("h100", 8)).row
    assert not row.fits and row.step_seconds is None and row.peak_bytes_per_device > row.limit_bytes_per_device
