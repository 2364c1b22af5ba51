"""Parameters and FLOPs equal hand computations and published figures, and those of a block and an MLP of one's own are
counted like those of the project; the files of conf/model say what they are."""

from dataclasses import fields, replace

import jax.numpy as jnp
import pytest
from omegaconf import OmegaConf

from shmap_tp.config.choices import AttentionKernel, Block, LayerKind, Mlp, PositionKind, Remat
from shmap_tp.config.schema import ModelConfig
from shmap_tp.config.validate import GATED_MLPS
from shmap_tp.config.values import padded_vocabulary
from shmap_tp.model.flops import (
    UncountedError,
    flops_per_token,
    forward_terms,
    hardware_flops_per_token,
    parameter_terms,
    parameters,
    recomputed_terms,
)
from shmap_tp.model.sharded_model import ModelComponents
from tests.helpers.components import ADAPTER, AdapterBlock, LoopMlp, ReGluMlp
from tests.helpers.named_models import DEFAULTS, TINY, ZOO, load

# name: (exact parameters, the figure in the file's comment or published, largest mp)
EXPECTED = {
    "bytes": (852_608, "0.85M", 8), "bytes_llama": (869_504, "0.87M", 8), "cpu_33m": (33_559_040, "33.56M", 8),
    "llama_1_8m": (1_787_008, "1.79M", 4),
    "test": (229_696, "0.23M", 16), "test_remat": (131_264, "0.13M", 8), "160m": (162_211_584, "162.2M", 4),
    "2_8b": (2_828_062_720, "2.83B", 16), "6_9b": (6_854_676_480, "6.85B", 16),
    "11b": (11_068_182_528, "11.07B", 16), "16b": (15_831_666_688, "15.83B", 16),
    "26b": (25_760_962_560, "25.76B", 8), "32b": (31_663_333_376, "31.66B", 16),
    "64b": (62_802_370_560, "62.80B", 16), "128b": (125_079_396_352, "125.08B", 16),
    "bytes_moe": (2_495_616, "2.50M", 8), "mixtral_8x7b": (46_702_792_704, "46.70B", 8),
    "olmoe_1b_7b": (6_919_161_856, "6.92B", 16), "qwen3_30b_a3b": (30_532_122_624, "30.53B", 4),
    "llama2_70b": (68_976_648_192, "68.98B", 8), "llama3_8b": (8_030_261_248, "8.03B", 8),
    "llama3_70b": (70_553_706_496, "70.55B", 8), "6b": (6_050_254_848, "6.05B", 16),
    "gemma3_124m": (123_571_200, "123.6M", 4), "gpt2": (124_439_808, "124.4M", 4),
    "gpt2_1_3b": (1_313_083_392, "1.31B", 16), "gpt2_xl": (1_557_611_200, "1.558B", 1),
    "gpt2_10b": (9_874_120_704, "9.87B", 16), "gpt2_20b": (20_246_949_888, "20.25B", 16),
    "gpt2_60b": (60_924_088_320, "60.92B", 16), "gpt2_64b": (64_699_023_360, "64.70B", 16),
    "gpt2_128b": (128_872_919_040, "128.87B", 16),
}  # fmt: skip
"""6_9b: Megatron's own code has the same parameters (no biases, 33 norm scales), which its paper rounds to 6.86B."""

LARGE = [name for name, (exact, _, _) in EXPECTED.items() if exact > 2e9 and not load(name).experts]


def printed(count: int, like: str) -> str:
    """`count` in the unit of `like`, with as many digits."""
    digits = len(like[:-1].partition(".")[2])
    return f"{count / {'M': 1e6, 'B': 1e9}[like[-1]]:.{digits}f}{like[-1]}"


def test_every_model_file_has_an_expected_size_and_vice_versa():
    """pretrained.yaml has no size: a Hugging Face directory names it."""
    assert {path.stem for path in ZOO.glob("*.yaml")} == {*EXPECTED, "pretrained"}


@pytest.mark.parametrize("name", EXPECTED)
def test_each_model_file_has_its_name_the_published_parameters_and_sizes_that_its_mp_divides(name):
    """The keys of the schema that have no default are in order; the vocabulary shard of a large model is a multiple of
    128, except for the vocabulary 50304, a common choice, whose shard fills 128 lanes only at mp 1 and 3."""
    (exact, figure, largest), path, model = EXPECTED[name], ZOO / f"{name}.yaml", load(name)
    named = list(OmegaConf.load(path))
    assert named == [field.name for field in fields(ModelConfig) if field.name in named or field.name not in DEFAULTS]
    assert isinstance(model, ModelConfig) and model.name == name
    assert parameters(model) == exact and printed(exact, figure) == figure
    small = name in ("bytes", "cpu_33m", "test", "test_remat", "160m")
    assert path.read_text().startswith("# " if small else f"# {figure}")
    shared = [model.heads, model.kv_heads, model.ffn, padded_vocabulary(model)]
    for mp in (1, 2, 4, 8, 16):
        assert all(size % mp == 0 for size in shared) == (mp <= largest), f"mp={mp} of {shared}"
    assert name not in LARGE or model.vocabulary == 50304 or padded_vocabulary(model) // largest % 128 == 0
    assert model.heads % model.kv_heads == model.context % model.attention_chunk == 0
    assert model.attention_chunk == 512 or model.context < 512


def test_parameters_equal_a_hand_computation():
    assert parameter_terms(TINY) == {
        "embedding": 11 * 8,
        "positions": 4 * 8,
        "blocks.attention_norm": 2 * 8,
        "blocks.attention": 2 * (8 * 30 + 8 * 15 + 8 * 15 + 30 * 8),
        "blocks.mlp_norm": 2 * 8,
        "blocks.mlp": 2 * (8 * 7 + 8 * 7 + 7 * 8),
        "norm": 8,
        "head": 8 * 11,
    }
    assert parameters(TINY) == 88 + 32 + 1440 + 336 + 40 + 88
    assert parameters(TINY, padded=True) == parameters(TINY) + 2 * 8
    assert parameters(replace(TINY, tie_embeddings=True), padded=True) == parameters(TINY) - 88 + 8
    assert parameters(replace(TINY, block=Block.parallel)) == parameters(TINY) - 2 * 8
    assert parameters(replace(TINY, mlp=Mlp.gelu)) == parameters(TINY) - 2 * 8 * 7
    assert parameters(replace(TINY, positions=PositionKind.alibi)) == parameters(TINY) - 4 * 8


def test_forward_flops_equal_a_hand_computation():
    """Per token and layer, 4 keys of 5 in each of 6 heads: 2 * 4 * 5 * 6 = 240 for scores, as much for values."""
    full = {"blocks": 2880 + 672, "scores": 2 * 240, "values": 2 * 240, "head": 176}
    assert forward_terms(TINY, causal=False) == full
    assert forward_terms(TINY) == full | {"scores": 240, "values": 240}
    assert flops_per_token(TINY, causal=False) == 3 * (2880 + 960 + 672 + 176) == 14_064
    assert flops_per_token(TINY) == 3 * (2880 + 480 + 672 + 176) == 12_624


def test_flops_within_a_window_equal_a_hand_computation():
    """A query of 4 tokens sees min(t, 3) keys in the first layer, 9 pairs, and all of them, counted as 4 / 2 each, in
    the second.  5 numbers in each of 6 heads: 60 FLOPs a pair."""
    windowed = replace(TINY, window=3, layer_pattern=[LayerKind("local"), LayerKind("global")])
    pairs = 60 * (9 + 8) // 4
    assert forward_terms(windowed) == forward_terms(TINY) | {"scores": pairs, "values": pairs}
    assert forward_terms(windowed, causal=False)["values"] == 60 * (3 + 4)
    assert flops_per_token(replace(TINY, window=4)) == flops_per_token(TINY)


def test_flops_of_the_head_do_not_depend_on_tying_or_padding():
    for other in (replace(TINY, tie_embeddings=True), replace(TINY, vocabulary_multiple=128)):
        assert flops_per_token(other) == flops_per_token(TINY)


def test_recomputed_flops_equal_a_hand_computation():
    """Chunks of 2: the scores are recomputed; of 4, the whole context: they are saved without rematerialisation."""
    gelu, parallel, chunks = {"mlp": Mlp.gelu}, {"block": Block.parallel}, {"attention_chunk": 2}
    for remat, changes, recomputed in [
        (Remat.none, {}, 0), (Remat.none, chunks, 240),
        (Remat.all_matmuls, {}, 240),
        (Remat.attention, {}, 240 + 448), (Remat.attention, gelu, 240 + 224),
        (Remat.attention_and_up, {}, 240 + 224), (Remat.attention_and_up, gelu, 240),
        (Remat.attention_output, {}, 2880 + 240 + 448), (Remat.attention_output, parallel, 2880 - 960 + 240 + 448),
        (Remat.mlp, {}, 2880 - 960 + 240 + 240), (Remat.mlp, chunks, 2880 - 960 + 240 + 240 + 240),
        (Remat.full, {}, 2880 + 480 + 672), (Remat.full, chunks, 2880 + 480 + 672 + 240),
    ]:  # fmt: skip
        without = 12_624 - (3 * 224 if changes == gelu else 0)
        model = replace(TINY, remat=remat, **changes)
        assert hardware_flops_per_token(model) == without + recomputed, (remat, changes)
    assert recomputed_terms(replace(TINY, remat=Remat.full))["head"] == 0


@pytest.mark.parametrize("kernel", [AttentionKernel.splash, AttentionKernel.cudnn])
def test_recomputed_flops_with_a_kernel_equal_a_hand_computation(kernel):
    """A kernel's backward pass recomputes the scores, 240; with remat=full they are recomputed once more."""
    model = replace(TINY, attention=kernel)
    for same in (model, replace(model, remat=Remat.all_matmuls), replace(model, attention_chunk=2)):
        assert recomputed_terms(same) == {"blocks": 0, "scores": 240, "values": 0, "head": 0}
    recomputed = {"blocks": 2880 + 672, "scores": 480, "values": 240, "head": 0}
    assert recomputed_terms(replace(model, remat=Remat.full)) == recomputed


def test_recomputed_flops_are_undefined_for_attention_auto():
    with pytest.raises(AssertionError, match="attention=auto does not determine"):
        recomputed_terms(replace(TINY, attention=AttentionKernel.auto))


@pytest.mark.parametrize("name", ["bytes_moe", "mixtral_8x7b", "llama3_8b", "6_9b"])
def test_flops_with_full_attention_equal_the_formula_of_palm(name):
    """PaLM, appendix B, where N counts the parameters that take part in a matmul: of query and output [D, HK], key and
    value [D, NK]; two matrices of D F, three with a gate, of each expert of the token; a router; and the head."""
    model = load(name)
    projections = 2 * model.width * (model.heads + model.kv_heads) * model.head_dim
    hidden = model.experts_per_token * model.ffn + model.shared_expert_ffn if model.experts else model.ffn
    mlp = (3 if model.mlp in GATED_MLPS else 2) * model.width * hidden + model.width * model.experts
    n = model.layers * (projections + mlp) + model.width * model.vocabulary
    attention = 12 * model.layers * model.heads * model.head_dim * model.context
    assert flops_per_token(model, causal=False) == 6 * n + attention
    assert flops_per_token(model) == 6 * n + attention // 2


def test_flops_of_a_gpt_with_full_remat_equal_the_formula_of_narayanan():
    """96 L D^2 (1 + T / 6D + V / 16LD) per token: Narayanan et al. 2021, section 5.1, https://arxiv.org/abs/2104.04473"""
    model = replace(load("gpt2_10b"), attention=AttentionKernel.chunked, attention_chunk=1024)
    depth, width = model.layers, model.width
    by_formula = 96 * depth * width**2 * (1 + model.context / (6 * width) + model.vocabulary / (16 * depth * width))
    assert hardware_flops_per_token(model, causal=False) == pytest.approx(by_formula, rel=1e-12)


@pytest.mark.parametrize(("name", "billions"), [("mixtral_8x7b", 12.9), ("olmoe_1b_7b", 1.3), ("qwen3_30b_a3b", 3.3)])
def test_models_with_experts_need_the_flops_of_their_active_parameters(name, billions):
    """Published: 13B of Mixtral, 1.3B of OLMoE, 3.3B of Qwen3-30B-A3B.  The embedding has no FLOPs."""
    model = load(name)
    experts = 3 * model.width * model.ffn * (model.experts - model.experts_per_token)
    active = parameters(model) - model.layers * experts
    assert active / 1e9 == pytest.approx(billions, rel=0.02)
    forward = forward_terms(model)
    assert 2 * (active - model.width * model.vocabulary) == pytest.approx(forward["blocks"] + forward["head"], rel=1e-3)


@pytest.mark.parametrize(
    "name, flops, tokens", [("llama3_70b", 456.442e12, 948.086), ("llama2_70b", 419.193e12, 943.086)]
)
def test_flops_with_full_attention_equal_those_of_maxtext(name, flops, tokens):
    """FLOP/s and tokens/s per chip in the logs of MaxText's recipes for v6e:
    github.com/AI-Hypercomputer/tpu-recipes, training/trillium"""
    assert flops_per_token(load(name), causal=False) == pytest.approx(flops / tokens, rel=1e-5)


# Components of one's own


@pytest.mark.parametrize("remat", [Remat.attention_and_up, Remat.full])
def test_an_mlp_of_three_matrices_is_counted_like_swiglu(remat):
    gelu = replace(TINY, mlp=Mlp.gelu, remat=remat)
    components = ModelComponents(mlp=ReGluMlp)
    swiglu = replace(gelu, mlp=Mlp.swiglu)
    assert parameter_terms(gelu, components=components) == parameter_terms(swiglu)
    assert forward_terms(gelu, components=components) == forward_terms(swiglu)
    assert recomputed_terms(gelu, components=components) == recomputed_terms(swiglu)
    assert flops_per_token(gelu, components=components) == flops_per_token(swiglu) != flops_per_token(gelu)


def test_a_block_of_ones_own_is_counted_as_by_hand():
    """TINY with four norms in each of two blocks, and two matrices [8, ADAPTER] more."""
    components, adapter = ModelComponents(block=AdapterBlock, mlp=ReGluMlp), 2 * 2 * 8 * ADAPTER
    terms = parameter_terms(TINY, components=components)
    assert terms["blocks.norms"] == 2 * 4 * 8
    assert terms["blocks.adapter_in"] + terms["blocks.adapter_out"] == adapter
    assert parameters(TINY, components=components) == parameters(TINY) + 2 * 2 * 8 + adapter
    assert flops_per_token(TINY, components=components) == flops_per_token(TINY) + 6 * adapter
    full = replace(TINY, remat=Remat.full)
    recomputed = recomputed_terms(full, components=components)
    assert recomputed["blocks"] == forward_terms(full, components=components)["blocks"] == 2880 + 672 + 2 * adapter
    attention = recomputed_terms(replace(TINY, remat=Remat.attention), components=components)
    assert attention["blocks"] == 448 + adapter, "gate, up, and adapter_in, which no policy saves"


class FourierMlp(ReGluMlp):
    def activate(self, gate, up):
        return gate * jnp.fft.fft(up).real


@pytest.mark.parametrize(
    "mlp, reason", [(LoopMlp, "in a while, so it is unknown how often"), (FourierMlp, "FLOPs of fft")]
)
def test_what_cannot_be_counted_is_refused(mlp, reason):
    with pytest.raises(UncountedError, match=reason):
        flops_per_token(TINY, components=ModelComponents(mlp=mlp))
