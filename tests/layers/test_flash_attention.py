"""Attention kernels: the values and gradients of the dense reference, which devices get which, and how often one runs.

T time, D model width, H query heads, N key/value heads, K head dim.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shmap_tp.config.compose import CONF, load
from shmap_tp.config.schema import AttentionKernel, ModelConfig, Positions
from shmap_tp.errors import UserError
from shmap_tp.layers import flash_attention as kernels
from shmap_tp.layers.attention import AnyAttention, Attention, Chunked
from shmap_tp.layers.attention_selection import kernel_name, select_attention
from shmap_tp.layers.flash_attention import Cudnn, Splash
from shmap_tp.layers.positions import Rotary
from shmap_tp.model.host_offload import save_at_block_end
from shmap_tp.model.loss import LinearCrossEntropy
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.collectives import varying_axes
from shmap_tp.parallel.fsdp import Replicated
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.parallel.partitioning import partition_specs
from shmap_tp.plan.communication.from_jaxpr import bodies
from shmap_tp.training.step import TOKENS, Objective, loss_and_gradients
from tests.helpers import reference
from tests.helpers.fake_tpu_devices import Stand
from tests.helpers.model_fixtures import config, mesh, shapes_of
from tests.helpers.sharded_harness import ALL_REDUCE, ROWS, Case, compare

T, D, H = 256, 24, 4
"""Blocks of 128: two on the diagonal, one below it, one above that is left out."""


def attention(kv_heads: int, head_dim: int, windows: int, later: bool) -> Case:
    """Of half the input: sharper softmaxes amplify float32's rounding, in the kernel to 1.6e-6, in XLA to 0.9e-6."""

    def call(layer, x):
        (qkv,) = ALL_REDUCE.into(0.5 * x, attention=layer.columns)
        mixed, handed = layer(*qkv, Rotary(10_000.0), ALL_REDUCE)
        return save_at_block_end(ALL_REDUCE.out_of(attention=(mixed, layer.out)), handed)

    return Case(
        partial(Attention, D, (H, kv_heads), head_dim, Splash(later, interpret=True), std=1.0, std_out=1.0),
        call,
        lambda p, x: reference.attention(p, 0.5 * x, positions="rotary"),
        (((windows, T, D), ROWS),),
        ROWS,
    )


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "shape", "later"),
    [
        (4, 64, (1, 1), False), (4, 64, (4, 2), False), (1, 64, (4, 2), False), (2, 64, (2, 4), False),
        (4, 128, (2, 4), False), (2, 256, (1, 1), False), (1, 64, (4, 2), True), (2, 64, (2, 4), True),
    ],
)  # fmt: skip
def test_splash_is_the_dense_reference(monkeypatch, kv_heads, head_dim, shape, later):
    """Output, input gradient and parameter gradients; mp larger than the number of key/value heads, too; and with what
    the backward pass reads put off."""
    monkeypatch.setattr(kernels, "BLOCKS", (128,))
    compare(attention(kv_heads, head_dim, shape[0], later), shape, "float32")


def test_what_comes_out_of_the_fence_varies_as_what_went_in():
    """q is cut over both axes, k and v over dp alone; its gradient then owes a sum over mp, which JAX pays."""
    heads, shared = P(DP, None, MP, None), P(DP, None, None, None)

    def local(q, k, v):
        mixed, pull = jax.vjp(lambda *qkv: Splash(interpret=True)(*qkv, None)[0], q, k, v)
        gradients = pull(mixed)
        assert varying_axes(mixed) == varying_axes(gradients[0]) == {DP, MP}
        assert varying_axes(gradients[1]) == varying_axes(gradients[2]) == {DP}
        return gradients

    specs = (heads, shared, shared)
    q, k, v = [jnp.ones((2, 128, n, 64)) for n in (4, 1, 1)]
    jax.eval_shape(jax.shard_map(local, mesh=mesh((2, 4)), in_specs=specs, out_specs=specs), q, k, v)


# Which devices get which


@dataclass(frozen=True)
class Gpu:
    """What is asked of a GPU; passes for one where types are checked."""

    device_kind: str
    compute_capability: str
    __class__ = jax.Device


DEVICES = {
    "cpu": jax.devices("cpu")[0],
    "v2": Stand("TPU v2", (0, 0, 0)),
    "v3": Stand("TPU v3", (0, 0, 0)),
    "v4": Stand("TPU v4", (0, 0, 0)),
    "v5e": Stand("TPU v5 lite", (0, 0, 0)),
    "v5p": Stand("TPU v5p", (0, 0, 0)),
    "v6e": Stand("TPU v6 lite", (0, 0, 0)),
    "tpu7x": Stand("TPU7x", (0, 0, 0)),
    "V100": Gpu("Tesla V100-SXM2-16GB", "7.0"),
    "A100": Gpu("NVIDIA A100-SXM4-40GB", "8.0"),
    "H100": Gpu("NVIDIA H100 80GB HBM3", "9.0"),
    "MI300": Gpu("AMD Instinct MI300X", "gfx942"),
}


def chosen(device: str, *overrides: str, dtype: str = "bfloat16") -> AnyAttention:
    return select_attention(loaded(*overrides), DEVICES[device], jnp.dtype(dtype))


@cache
def loaded(*overrides: str) -> ModelConfig:
    given = ["model=llama3_8b", "mesh.mp=1", *[f"model.{setting}" for setting in overrides]]
    return load(str(CONF / "config.yaml"), given).model


AUTO = {
    "cpu": Chunked(512), "v2": Chunked(512), "v3": Chunked(512), "v4": Splash(), "v5e": Splash(), "v5p": Splash(),
    "v6e": Splash(), "tpu7x": Splash(), "V100": Chunked(512), "A100": Cudnn(), "H100": Cudnn(), "MI300": Chunked(512),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_auto_is_the_kernel_of_the_devices(device):
    assert chosen(device) == AUTO[device]
    assert chosen(device, "attention=chunked") == Chunked(512), "whatever the device"
    assert chosen(device, f"attention={kernel_name(AUTO[device])}") == AUTO[device], "and by its name"
    assert chosen(device, "positions=alibi") == Chunked(512)


@pytest.mark.parametrize(
    ("device", "override", "dtype", "made"),
    [
        ("v5e", "context=2112", "bfloat16", Chunked(512)),
        ("v5e", "context=2176", "bfloat16", Splash()),
        ("v5e", "head_dim=80", "bfloat16", Chunked(512)),
        ("v5e", "head_dim=256", "float32", Splash()),
        ("H100", "head_dim=256", "bfloat16", Cudnn()),
        ("A100", "head_dim=256", "bfloat16", Chunked(512)),
        ("H100", "head_dim=100", "bfloat16", Chunked(512)),
        ("H100", "head_dim=128", "float32", Chunked(512)),
        ("H100", "context=2112", "float16", Cudnn()),
    ],
)
def test_auto_takes_no_kernel_that_cannot(device, override, dtype, made):
    assert chosen(device, override, dtype=dtype) == made


@pytest.mark.parametrize(("device", "kernel"), [("v5e", Splash), ("H100", Cudnn)])
def test_a_kernel_reads_later_what_the_host_keeps(device, kernel):
    assert chosen(device, "remat=attention", "offload=[query_key_value]") == kernel(later=True)
    assert chosen(device, "remat=attention", "offload=[attention_output]") == kernel(later=False)


REFUSED = {
    ("cpu", "splash", "", "bfloat16"): "(model llama3_8b, cpu): it is for TPU v4 and later",
    ("v3", "splash", "", "bfloat16"): "(model llama3_8b, TPU v3): it is for TPU v4 and later",
    ("H100", "splash", "", "bfloat16"): "it is for TPU v4 and later",
    ("v4", "splash", "positions=alibi", "bfloat16"): "it adds no bias to scores, and model.positions=alibi is one",
    ("v4", "splash", "context=2112", "bfloat16"): "of 128 positions, which does not divide model.context=2112",
    ("v4", "splash", "head_dim=80", "bfloat16"): "model.head_dim=80 is not one of its 64, 128, 256",
    ("cpu", "cudnn", "", "bfloat16"): "it is for NVIDIA GPUs of compute capability 8.0 (Ampere) and later",
    ("v5e", "cudnn", "", "bfloat16"): "it is for NVIDIA GPUs",
    ("V100", "cudnn", "", "bfloat16"): "it is for NVIDIA GPUs of compute capability 8.0 (Ampere) and later",
    ("MI300", "cudnn", "", "bfloat16"): "it is for NVIDIA GPUs",
    ("H100", "cudnn", "positions=alibi", "bfloat16"): "it is used without a bias, and model.positions=alibi is one",
    ("H100", "cudnn", "", "float32"): "in bfloat16 or float16, not float32; set train.precision=bfloat16",
    ("A100", "cudnn", "head_dim=256", "bfloat16"): "model.head_dim=256 must be a multiple of 8, and 128 or less",
    ("H100", "cudnn", "head_dim=100", "bfloat16"): "model.head_dim=100 must be a multiple of 8, and 256 or less",
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=" ".join)
def test_a_kernel_that_cannot_is_refused_by_name(case):
    device, kernel, override, dtype = case
    with pytest.raises(UserError) as caught:
        chosen(device, f"attention={kernel}", *filter(None, [override]), dtype=dtype)
    said = str(caught.value)
    assert said.startswith(f"model.attention={kernel} (model llama3_8b, ") and REFUSED[case] in said
    assert len(said.splitlines()) <= 2 and said.endswith("use model.attention=auto, or chunked, which runs everywhere")


# How often a kernel runs


def equations(jaxpr: Any) -> Iterator[Any]:
    """All of a program, those within others too."""
    for equation in jaxpr.eqns:
        yield equation
        for body in bodies(equation.params):
            yield from equations(body)


def kernels_in(jaxpr: Any) -> list[str]:
    """The names of all Pallas kernels of a program, each as often as it stands there."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            name = equation.params["name"] if "name" in equation.params else equation.params["name_and_src_info"].name
            found.append(name)
        else:
            found += [name for body in bodies(equation.params) for name in kernels_in(body)]
    return found


def traced(model: ModelConfig, attend: AnyAttention, dtype: str = "float32") -> Any:
    """The jaxpr of loss and gradients, on (2, 4), computed in `dtype`."""
    params = shapes_of(partial(Transformer, model, attend))
    tokens = jax.ShapeDtypeStruct((1, 4, model.context + 1), jnp.int32)
    return jax.make_jaxpr(graded(model, params, dtype))(params, tokens).jaxpr


def graded(model: ModelConfig, params: Transformer, dtype: str = "float32") -> Callable[..., Any]:
    """(params, tokens[A B T+1]) -> (loss, gradients), on (2, 4)."""
    specs = partition_specs(params, {DP: 2, MP: 4})
    objective = objective_of(model, specs, dtype)
    return jax.shard_map(
        lambda params, tokens: loss_and_gradients(objective, params, tokens),
        mesh=mesh((2, 4)), in_specs=(specs, TOKENS), out_specs=(P(), specs),
    )  # fmt: skip


def objective_of(model: ModelConfig, specs: Transformer, dtype: str) -> Objective:
    placements = jax.tree.map(lambda _: Replicated(), specs)
    return Objective(LinearCrossEntropy(model.vocabulary, 0.0, 2048), jnp.dtype(dtype), ALL_REDUCE, placements)


FORWARD, BACKWARD = "splash_mqa_fwd_residuals", "splash_mqa_dkv_no_residuals"
AGAIN = {
    "none": [FORWARD],
    "all_matmuls": [FORWARD],
    "attention": [FORWARD],
    "mlp": 2 * [FORWARD],
    "full": 2 * [FORWARD],
}


@pytest.mark.parametrize("block", ["parallel", "sequential"])
@pytest.mark.parametrize("remat", AGAIN)
def test_the_forward_kernel_runs_once_where_what_it_made_is_kept(remat, block):
    """In the scans over layers, forward and backward."""
    made = config("model.context=128", "model.positions=rotary", f"model.remat={remat}", f"model.block={block}").model
    assert sorted(kernels_in(traced(made, Splash()))) == sorted([*AGAIN[remat], BACKWARD])


def test_without_its_name_it_runs_twice(monkeypatch):
    monkeypatch.setattr(kernels, "ATTENTION_OUTPUT", "something else")
    made = config("model.context=128", "model.positions=rotary", "model.remat=all_matmuls").model
    assert sorted(kernels_in(traced(made, Splash()))) == sorted([FORWARD, FORWARD, BACKWARD])


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("remat", ["none", "attention_and_up", "attention"])
@pytest.mark.parametrize(("kernel", "dtype"), [(Splash, "float32"), (Cudnn, "bfloat16")])
def test_what_the_kernel_takes_and_makes_is_kept_once(monkeypatch, kernel, dtype, remat, later):
    """Of all that the forward scan stacks as large as one layer's q: q, k, v and the output.  That is kept as bits, and
    so not rounded to its own precision, which would be a copy."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(
        "shmap_tp.model.transformer.are_gathered", lambda placements: True
    )  # `none` has a policy then, too
    made = config("model.context=128", "model.head_dim=64", "model.positions=rotary", f"model.remat={remat}").model
    forward = next(one for one in equations(traced(made, kernel(later), dtype)) if one.primitive.name == "scan")
    of_a_device = 4 // 2 * 128 * made.heads // 4 * 64
    kept = [x.aval.dtype.name for x in forward.outvars if x.aval.size == made.layers * of_a_device]
    assert sorted(kept) == [*3 * [dtype], "uint32" if dtype == "float32" else "uint16"]
    inside = bodies(forward.params)[0]
    (mixed,) = [x.outvars[0] for x in equations(inside) if x.primitive.name == "bitcast_convert_type"][1::2]
    assert mixed.aval.size == of_a_device
    assert not [x for x in equations(inside) if x.primitive.name == "reduce_precision" and mixed in x.invars]


@pytest.mark.parametrize("block", ["parallel", "sequential"])
def test_what_is_put_off_is_what_the_backward_pass_reads(block):
    """Of a model whose q, k and v the host keeps: the same bits, in copies that were made at the end of a block."""
    model = config(
        "model.context=128", "model.head_dim=64", "model.positions=rotary", "model.remat=attention",
        "model.offload=[query_key_value]", f"model.block={block}",
    ).model  # fmt: skip
    tokens = jax.random.randint(jax.random.key(1), (1, 2, 129), 0, model.vocabulary)
    found = []
    for attend in (Splash(False, interpret=True), Splash(True, interpret=True)):
        params = Transformer(model, attend, key=jax.random.key(0))
        found.append([np.asarray(x) for x in jax.tree.leaves(jax.jit(graded(model, params))(params, tokens))])
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
    assert np.any(found[0][1])


# cuDNN, as far as it goes without a GPU


@pytest.mark.parametrize(
    ("remat", "forward", "later"),
    [("none", 1, False), ("all_matmuls", 1, False), ("full", 2, False), ("all_matmuls", 1, True)],
)
def test_cudnn_is_lowered_to_its_own_calls(monkeypatch, remat, forward, later):
    """Of a whole model in bfloat16 on (2, 4), two key/value heads shared by eight: forward and backward calls."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    model = config(
        "model.head_dim=8", "model.kv_heads=4", "model.context=16", "model.positions=rotary", f"model.remat={remat}"
    ).model
    params = shapes_of(partial(Transformer, model, Cudnn(later)))
    tokens = jax.ShapeDtypeStruct((1, 4, model.context + 1), jnp.int32)
    text = (
        jax.jit(graded(model, params, "bfloat16")).trace(params, tokens).lower(lowering_platforms=("cuda",)).as_text()
    )
    assert text.count("@__cudnn$fmhaSoftmax(") == forward
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == 1
    assert "tensor<2x16x2x8xbf16>" in text, "q[B/dp T H/mp K]"


def test_a_kernel_takes_no_slopes():
    made = replace(config("model.context=128").model, positions=Positions.alibi, attention=AttentionKernel.splash)
    for attend in (Splash(), Cudnn()):
        with pytest.raises(AssertionError, match="adds no bias"):
            traced(made, attend)
