"""Flash-attention kernels equal the dense reference; which devices use which kernel; how often a kernel runs.

T time, D model width, H query heads, N key/value heads, K head dim.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shmap_tp.config.choices import AttentionKernel, PositionKind, Remat, RotaryScaling, SavedActivation
from shmap_tp.errors import UserError
from shmap_tp.layers import flash_attention
from shmap_tp.layers.attention import AnyAttention, Attention, Chunked
from shmap_tp.layers.attention_selection import kernel_name, select_attention
from shmap_tp.layers.causal_attention import Pattern
from shmap_tp.layers.context import Context
from shmap_tp.layers.flash_attention import Cudnn, Splash
from shmap_tp.layers.norm import RMSNorm
from shmap_tp.layers.positions import Rotary, Rotation
from shmap_tp.model.blocks import save_at_block_end
from shmap_tp.model.tracing import bodies
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.collectives import varying_axes
from shmap_tp.parallel.mesh import DP, MP
from tests.helpers import reference
from tests.helpers.assertions import RELATIVE, assert_close
from tests.helpers.fake_tpu_devices import FakeTpuDevice
from tests.helpers.jaxprs import (
    equations,
    equations_named,
    loss_and_gradients_on_mesh,
    pallas_kernels,
    trace_loss_and_gradients,
)
from tests.helpers.model_fixtures import config, mesh, random_like, shapes_of
from tests.helpers.named_models import load
from tests.helpers.sharded_harness import ALL_REDUCE, BATCH_SHARDED, Case, compare

T, D, H = 256, 24, 4
"""With blocks of 128 positions: two blocks on the diagonal, one below it, and one above it, which is skipped."""


def splash_attention(kv_heads: int, head_dim: int, batch: int, defer: bool, has_norms: bool) -> Case:
    """Attention of half the input: sharper softmaxes amplify float32's rounding errors, to 1.6e-6 in the kernel and to
    0.9e-6 in XLA's own operations."""

    def call(layer, x):
        y, extras = layer(0.5 * x, Context(ALL_REDUCE, Rotary(Rotation(10_000.0))))
        return save_at_block_end(y, extras.residuals)

    norms = (RMSNorm(head_dim), RMSNorm(head_dim)) if has_norms else None
    options = config("model.norm=rmsnorm", "model.norm_epsilon=1e-6", f"model.qk_norm={has_norms}").model
    sizes = (H, kv_heads), head_dim, Splash(defer, interpret=True)
    return Case(
        partial(Attention, D, *sizes, std=1.0, std_out=1.0, head_norms=norms),
        call,
        lambda p, x: reference.attention(p, 0.5 * x, positions="rotary", config=options),
        (((batch, T, D), BATCH_SHARDED),),
        BATCH_SHARDED,
    )


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "shape", "defer", "has_norms"),
    [(2, 128, (2, 4), False, False), (1, 64, (4, 2), True, False), (2, 128, (2, 4), False, True)],
)
def test_splash_attention_equals_its_dense_reference(monkeypatch, kv_heads, head_dim, shape, defer, has_norms):
    """Output, input gradient and parameter gradients; also where mp exceeds the number of key/value heads, with
    deferred residuals, and with norms of heads, which kernels compute."""
    monkeypatch.setattr(flash_attention, "BLOCKS", (128,))
    compare(splash_attention(kv_heads, head_dim, shape[0], defer, has_norms), shape, "float32")


def test_splash_attention_of_segments_equals_that_of_chunked_attention(monkeypatch):
    """Output and gradients, with segments that end within and between blocks, others in each row; also of sinks."""
    monkeypatch.setattr(flash_attention, "BLOCKS", (128,))
    rng, lengths = np.random.default_rng(0), ([100, 28, 60, 68], [256])
    segments = np.array([np.repeat(np.arange(len(row)), row) for row in lengths], np.int32)
    q, k, v, cotangent = (rng.normal(size=(2, T, heads, 64)).astype(np.float32) for heads in (4, 2, 2, 4))
    heads = P(DP, None, MP, None)
    sinks_BH = np.tile(np.float32([1.0, -2.0, 4.0, 2.0]), (2, 1))  # a gradient for each row

    def run(attend):
        def local(q, k, v, sinks_BH, cotangent, segments):
            def call(q, k, v, sinks_BH):
                options = {"window": 100, "softcap": 1.5, "scale": 0.25, "sinks_H": sinks_BH[0]}
                return attend(q, k, v, Pattern(None, segments, **options))[0]

            mixed, pull = jax.vjp(call, q, k, v, sinks_BH)
            return mixed, *pull(cotangent)

        specs, out_specs = (*[heads] * 3, P(DP, MP), heads, P(DP, None)), (*[heads] * 4, P(DP, MP))
        mapped = jax.jit(jax.shard_map(local, mesh=mesh((2, 2)), in_specs=specs, out_specs=out_specs))
        return [mapped(q, k, v, sinks_BH, cotangent, given) for given in (segments, 0 * segments)]

    splash, joined = run(Splash(interpret=True))
    assert_close(splash, run(Chunked(64))[0], RELATIVE["float32"])
    assert np.abs(splash[0] - joined[0]).max() > 0.1


def test_splash_attention_skips_the_blocks_outside_of_the_window():
    """8 x 8 blocks of 128: all up to the diagonal are computed, or two in each row, and three where the window begins
    within another block."""

    def blocks(window: int | None) -> list[int]:
        kernel = flash_attention.make_splash((1, 1024, 1024), Pattern(window=window), None, interpret=True)
        return [np.count_nonzero(info.block_mask) for info in (kernel.fwd_mask_info, kernel.dkv_mask_info)]

    with mock.patch.object(flash_attention, "BLOCKS", (128,)):
        assert blocks(None) == [36, 36]
        assert blocks(129) == [15, 15] and blocks(130) == [21, 21]


@pytest.mark.parametrize(("keys", "block"), [(4096, 512), (8192, 1024), (16384, 1024), (32768, 2048)])
def test_longer_rows_have_larger_blocks_of_keys_in_the_backward_kernel(keys, block):
    kernel = flash_attention.make_splash((1, keys, keys), Pattern(), None, interpret=True)
    assert kernel.kwargs["block_sizes"].block_kv_dkv == block


def test_kernel_results_vary_over_the_axes_of_their_arguments():
    """q is sharded over both axes, k and v only over dp; JAX then reduces their gradients over mp."""
    heads_sharded, replicated_heads = P(DP, None, MP, None), P(DP, None, None, None)

    def local(q, k, v):
        mixed, pull = jax.vjp(lambda *qkv: Splash(interpret=True)(*qkv, Pattern())[0], q, k, v)
        gradients = pull(mixed)
        assert varying_axes(mixed) == varying_axes(gradients[0]) == {DP, MP}
        assert varying_axes(gradients[1]) == varying_axes(gradients[2]) == {DP}
        return gradients

    specs = (heads_sharded, replicated_heads, replicated_heads)
    q, k, v = [jnp.ones((2, 128, n, 64)) for n in (4, 1, 1)]
    jax.eval_shape(jax.shard_map(local, mesh=mesh((2, 4)), in_specs=specs, out_specs=specs), q, k, v)


# Which devices use which kernel


@dataclass(frozen=True)
class Gpu:
    """The attributes of a GPU that selection reads."""

    device_kind: str
    compute_capability: str


CHUNKED, CUDNN = Chunked(512), Cudnn(otherwise=Chunked(512))
DEVICES = {
    # name: (device, the kernel that auto selects)
    "cpu": (jax.devices("cpu")[0], CHUNKED),
    "v3": (FakeTpuDevice("TPU v3", (0, 0, 0)), CHUNKED),
    "v4": (FakeTpuDevice("TPU v4", (0, 0, 0)), Splash(most_keys=2048)),
    "v5e": (FakeTpuDevice("TPU v5 lite", (0, 0, 0)), Splash()),
    "v5p": (FakeTpuDevice("TPU v5p", (0, 0, 0)), Splash()),
    "v6e": (FakeTpuDevice("TPU v6 lite", (0, 0, 0)), Splash()),
    "tpu7x": (FakeTpuDevice("TPU7x", (0, 0, 0)), Splash()),
    "V100": (Gpu("Tesla V100-SXM2-16GB", "7.0"), CHUNKED),
    "A100": (Gpu("NVIDIA A100-SXM4-40GB", "8.0"), CUDNN),
    "H100": (Gpu("NVIDIA H100 80GB HBM3", "9.0"), CUDNN),
    "MI300": (Gpu("AMD Instinct MI300X", "gfx942"), CHUNKED),
}
LLAMA = replace(load("llama3_8b"), rotary_scaling=RotaryScaling.none, attention=AttentionKernel.auto)
ALIBI = {"positions": PositionKind.alibi}


def selected(device: str, dtype: str = "bfloat16", isolated: bool = False, **changes: Any) -> AnyAttention:
    return select_attention(replace(LLAMA, **changes), DEVICES[device][0], jnp.dtype(dtype), isolated=isolated)


@pytest.mark.parametrize("device", DEVICES)
def test_auto_selects_the_best_kernel_of_the_device(device):
    best = DEVICES[device][1]
    assert selected(device) == best
    assert selected(device, attention=AttentionKernel.chunked) == CHUNKED, "on any device"
    named = Cudnn() if best == CUDNN else best
    by_name = selected(device, attention=AttentionKernel(kernel_name(named)))
    assert by_name == named, "also by its name, which nothing replaces"
    assert selected(device, **ALIBI) == CHUNKED


@pytest.mark.parametrize(
    ("device", "changes", "expected"),
    [
        ("v5e", {"context": 2176}, Splash()), ("v5e", {"head_dim": 256, "dtype": "float32"}, Splash()),
        ("v5e", {"attention_sinks": True}, Splash()), ("H100", {"head_dim": 256}, CUDNN),
        ("H100", {"context": 2112, "dtype": "float16"}, CUDNN),
    ],
)  # fmt: skip
def test_auto_selects_a_kernel_that_can_run(device, changes, expected):
    """Below: none that cannot."""
    assert selected(device, **changes) == expected


@pytest.mark.parametrize(("device", "kernel"), [("v5e", Splash), ("H100", Cudnn)])
def test_a_kernel_defers_q_k_and_v_where_they_are_offloaded(device, kernel):
    for offload, defer in ((SavedActivation.query_key_value, True), (SavedActivation.attention_output, False)):
        found = selected(device, remat=Remat.attention, offload=[offload])
        assert isinstance(found, kernel) and found.defer is defer


AMPERE = "it is for NVIDIA GPUs of compute capability 8.0 (Ampere) and later"
REFUSED = [
    ("cpu", "splash", {}, "(model llama3_8b, cpu): it is for TPU v4 and later"),
    ("v3", "splash", {}, "(model llama3_8b, TPU v3): it is for TPU v4 and later"),
    ("v4", "splash", ALIBI, "it adds no bias to scores, and model.positions=alibi needs one"),
    ("v4", "splash", {"context": 2112}, "128 positions, which does not divide model.context=2112"),
    ("v4", "splash", {"head_dim": 80}, "model.head_dim=80 is not one of its 64, 128, 256"),
    ("cpu", "cudnn", {}, AMPERE),
    ("v5e", "cudnn", {}, "it is for NVIDIA GPUs"),
    ("V100", "cudnn", {}, AMPERE),
    ("MI300", "cudnn", {}, "it is for NVIDIA GPUs"),
    ("H100", "cudnn", ALIBI, "it is used without a bias, and model.positions=alibi needs one"),
    ("H100", "cudnn", {"attention_softcap": 50.0}, "caps no scores, and model.attention_softcap=50.0 needs"),
    ("H100", "cudnn", {"attention_sinks": True}, "it has no sinks, and model.attention_sinks=true needs them"),
    ("H100", "cudnn", {"dtype": "float32"}, "in bfloat16 or float16, not float32; set train.precision=bfloat16"),
    ("A100", "cudnn", {"head_dim": 256}, "model.head_dim=256 must be a multiple of 8, and 128 or less"),
    ("H100", "cudnn", {"head_dim": 100}, "model.head_dim=100 must be a multiple of 8, and 256 or less"),
]


@pytest.mark.parametrize(("device", "kernel", "changes", "reason"), REFUSED, ids=str)
def test_a_kernel_that_cannot_run_is_not_selected_and_refused_by_its_name(device, kernel, changes, reason):
    assert kernel_name(selected(device, **changes)) != kernel
    with pytest.raises(UserError) as caught:
        selected(device, attention=AttentionKernel(kernel), **changes)
    message = str(caught.value)
    assert message.startswith(f"model.attention={kernel} (model llama3_8b, ") and reason in message
    assert len(message.splitlines()) <= 2 and message.endswith(
        "use model.attention=auto, or chunked, which runs everywhere"
    )


# How often a kernel runs


FORWARD, BACKWARD = "splash_mqa_fwd_residuals", "splash_mqa_dkv_no_residuals"


@pytest.mark.parametrize(
    ("block", "remat"),
    [("parallel", remat) for remat in Remat if remat != Remat.attention_and_up]
    + [("sequential", Remat.attention_output), ("sequential", Remat.full)],
)
def test_the_forward_kernel_runs_once_if_its_output_is_saved(remat, block):
    """Counted in the forward and the backward scan over layers."""
    model = config("model.context=128", "model.positions=rotary", f"model.remat={remat}", f"model.block={block}").model
    found = pallas_kernels(trace_loss_and_gradients(model, Splash()))
    forward = 2 if remat in (Remat.mlp, Remat.full) else 1
    assert sorted(found) == sorted([*forward * [FORWARD], BACKWARD])


@pytest.mark.parametrize(
    "saved", [[("full", False), ("attention_output", False)], [("attention", False), ("attention", True)]], ids=str
)
def test_saved_outputs_and_deferred_residuals_change_no_bit_of_loss_and_gradients(saved):
    """Everything recomputed, or the kernel's output saved; and q, k and v offloaded: as copies made at the end of a
    block, or as the arrays themselves."""
    found, sizes = [], "context=128 head_dim=64 positions=rotary block=sequential layers=1"
    for remat, defer in saved:
        offload = "[query_key_value]" if remat == "attention" else "[]"
        model = config(*(f"model.{each}" for each in f"{sizes} remat={remat} offload={offload}".split())).model
        params = random_like(shapes_of(partial(Transformer, model, Splash(defer, interpret=True))), "float32")
        tokens = np.random.default_rng(1).integers(0, model.vocabulary, (1, 2, 129)).astype(np.int32)
        found.append(jax.tree.leaves(jax.jit(loss_and_gradients_on_mesh(model, params))(params, tokens)))
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
    assert np.any(found[0][1])


def test_the_forward_kernel_runs_twice_if_its_output_is_not_named(monkeypatch):
    monkeypatch.setattr(flash_attention, "ATTENTION_OUTPUT", "another name")
    model = config("model.context=128", "model.positions=rotary", "model.remat=all_matmuls").model
    assert sorted(pallas_kernels(trace_loss_and_gradients(model, Splash()))) == sorted([FORWARD, FORWARD, BACKWARD])


@pytest.fixture
def without_cudnn(monkeypatch):
    """JAX traces cuDNN's attention although cuDNN is not installed."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)


@pytest.mark.parametrize(
    ("kernel", "dtype", "remat", "defer"),
    [
        (Splash, "float32", "none", False), (Splash, "float32", "attention", True),
        (Cudnn, "bfloat16", "attention", False), (Cudnn, "bfloat16", "attention_and_up", True),
    ],
)  # fmt: skip
def test_inputs_and_output_of_the_kernel_are_saved_once(monkeypatch, without_cudnn, kernel, dtype, remat, defer):
    """Exactly four arrays that the forward scan stacks are as large as q: q, k, v and the output.  The output is saved
    as bits, and so not rounded to its own precision, which would be a copy."""
    # `remat=none` has a policy only with FSDP
    monkeypatch.setattr("shmap_tp.model.transformer.has_gathered", lambda placements: True)
    model = config("model.context=128", "model.head_dim=64", "model.positions=rotary", f"model.remat={remat}").model
    forward = next(
        one for one in equations(trace_loss_and_gradients(model, kernel(defer), dtype)) if one.primitive.name == "scan"
    )
    size = 4 // 2 * 128 * model.heads // 4 * 64  # of q on one device
    saved = [x.aval.dtype.name for x in forward.outvars if x.aval.size == model.layers * size]
    assert sorted(saved) == [*3 * [dtype], "uint32" if dtype == "float32" else "uint16"]
    body = bodies(forward.params)[0]
    (mixed,) = [one.outvars[0] for one in equations_named(body, "bitcast_convert_type")][1::2]
    assert mixed.aval.size == size
    assert not [one for one in equations_named(body, "reduce_precision") if mixed in one.invars]


# cuDNN, as far as it can be tested without a GPU


@pytest.mark.parametrize(
    ("remat", "forward", "defer"), [("none", 1, False), ("full", 2, False), ("all_matmuls", 1, True)]
)
def test_cudnn_attention_is_lowered_to_cudnn_calls(without_cudnn, remat, forward, defer):
    """In a full model in bfloat16 on (2, 4), with four key/value heads for eight query heads."""
    model = config(
        "model.head_dim=8", "model.kv_heads=4", "model.context=16", "model.positions=rotary", f"model.remat={remat}",
        "model.window=5",
    ).model  # fmt: skip
    params = shapes_of(partial(Transformer, model, Cudnn(defer)))
    tokens = jax.ShapeDtypeStruct((1, 4, model.context + 1), jnp.int32)
    traced = jax.jit(loss_and_gradients_on_mesh(model, params, "bfloat16")).trace(params, tokens)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmhaSoftmax(") == forward
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == 1
    assert "tensor<2x16x2x8xbf16>" in text, "q[B/dp T H/mp K]"
    assert text.count(r"sliding_window_length\22: 5") == forward + 1


@pytest.mark.parametrize("attend", [Splash(), Cudnn()])
def test_a_kernel_refuses_alibi_slopes(attend):
    model = replace(config("model.context=128").model, **ALIBI, attention=AttentionKernel.splash)
    with pytest.raises(UserError, match=r"computes no slopes, which these inputs need; use model\.attention=chunked"):
        trace_loss_and_gradients(model, attend)


def test_cudnn_refuses_segments_and_is_not_selected_for_isolated_documents():
    q, segments = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.float32), jax.ShapeDtypeStruct((1, 128), jnp.int32)
    with pytest.raises(UserError, match="computes no segments"):
        jax.eval_shape(lambda q, segments: Cudnn()(q, q, q, Pattern(None, segments)), q, segments)
    auto = selected("H100")
    assert jax.eval_shape(lambda q, s: auto(q, q, q, Pattern(None, s))[0], q, segments).shape == q.shape, "by chunked"
    assert kernel_name(selected("H100", isolated=True)) == "chunked"
    with pytest.raises(UserError, match=r"data\.documents=joined"):
        selected("H100", isolated=True, attention=AttentionKernel.cudnn)
