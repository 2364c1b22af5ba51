"""Tensors or options of a family that are exchanged on purpose differ from what transformers computed.

The errors of biases are in test_bias_mutations.py, and those with dense references in tests/test_option_mutations.py.
"""

from dataclasses import replace

import jax
import pytest

from shmap_tp import api
from shmap_tp.layers.mlp import GATES
from shmap_tp.layers.rotation import YarnScaling
from shmap_tp.pretrained.families import FAMILIES
from shmap_tp.pretrained.families.olmo import OLMO2
from shmap_tp.pretrained.family import Row
from tests.helpers.pretrained_models import logit_error, reference, write_directory

AT_LEAST = 5e-5
MUTATIONS = {
    "q, k and v of GPT-NeoX as thirds": (
        "gpt_neox", "blocks.attention.query.weight", "gpt_neox.layers.{layer}.attention.query_key_value.weight",
        "(0/3 h k) d -> (h k) d",
    ),
    "k and v of Phi-3 exchanged": (
        "phi3", "blocks.attention.key.weight", "model.layers.{layer}.self_attn.qkv_proj.weight",
        "(2/h+n+n k) d -> d n k",
    ),
    "a transposed weight": (
        "gptj", "blocks.attention.out.weight", "transformer.h.{layer}.attn.out_proj.weight", "(h k) d -> (h k) d"
    ),
    "gate and up of gpt-oss as halves": (
        "gpt_oss", "blocks.mlp.gate.weight", "model.layers.{layer}.mlp.experts.gate_up_proj", "e d (0/2 f) -> e d f"
    ),
    "gate and up exchanged": (
        "llama", "blocks.mlp.gate.weight", "model.layers.{layer}.mlp.up_proj.weight", "f d -> f d"
    ),
    "the norms of a block exchanged": (
        "gpt_neox", "blocks.mlp_norm.bias", "gpt_neox.layers.{layer}.input_layernorm.bias", "d -> d"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", MUTATIONS)
def test_the_comparison_fails_with(tmp_path, monkeypatch, what):
    case, ours, theirs, pattern = MUTATIONS[what]
    directory = write_directory(tmp_path / "m", case)
    family = next(one for one in FAMILIES if one.architecture in reference(case)["config"]["architectures"])
    rows = tuple(Row(ours, theirs, pattern) if row.ours == ours else row for row in family.rows)
    monkeypatch.setattr(type(family), "is_skipped", lambda *arguments: True)
    monkeypatch.setitem(vars(family), "rows", rows)
    assert logit_error(directory, case) > 1e-3


def test_the_comparison_fails_without_the_amplitude_of_yarn(tmp_path, monkeypatch):
    monkeypatch.setattr(YarnScaling, "amplitude", 1.0)
    assert logit_error(write_directory(tmp_path / "m", "qwen2"), "qwen2") > AT_LEAST


def test_the_comparison_fails_without_the_sinks_of_gpt_oss(tmp_path, monkeypatch):
    monkeypatch.setattr("shmap_tp.layers.causal_attention._softmax", lambda x, sinks_H: jax.nn.softmax(x, axis=-1))
    assert logit_error(write_directory(tmp_path / "m", "gpt_oss"), "gpt_oss") > AT_LEAST


def test_the_comparison_fails_without_the_limits_of_gpt_oss(tmp_path, monkeypatch):
    def unlimited(gate, up):
        return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)

    monkeypatch.setitem(GATES, "clamped_swiglu", unlimited)
    assert logit_error(write_directory(tmp_path / "m", "gpt_oss"), "gpt_oss") > AT_LEAST


def test_the_comparison_fails_with_a_norm_over_the_heads_of_one_device(tmp_path, monkeypatch):
    monkeypatch.setattr("shmap_tp.layers.norm.all_reduce", lambda mean, axes: 4 * mean)
    assert logit_error(write_directory(tmp_path / "m", "olmo2"), "olmo2", mp=4) > AT_LEAST


def test_the_comparison_fails_with_the_norms_of_olmo_before_the_sublayers(tmp_path, monkeypatch):
    directory = write_directory(tmp_path / "m", "olmo2")
    rows = tuple(replace(row, ours=row.ours.replace("_output_norm", "_norm")) for row in OLMO2.rows)
    monkeypatch.setitem(vars(OLMO2), "rows", rows)
    monkeypatch.setitem(vars(OLMO2), "fixed", {**OLMO2.fixed, "norm_placement": "before"})
    assert logit_error(directory, "olmo2") > AT_LEAST


@pytest.mark.parametrize(
    ("case", "changed"),
    [
        ("gptj", "rotary_pairing=half"),
        ("gpt_neox", "rotary_dim=null"),
        ("gpt_neox", "rotary_pairing=neighbouring"),
        ("llama", "norm_epsilon=1e-4"),
        ("gpt2", "norm_epsilon=1e-4"),
        ("llama", "rotary_scaling=none"),
        ("qwen2", "rotary_high_frequency_factor=8"),
        ("gemma3", "rotary_scaling=none"),
        ("gemma", "embedding_scale=1.0"),
        ("gpt2", "mlp=gelu_erf"),
        ("gpt_neox", "block=sequential"),
        ("mistral", "window=99"),
        ("mistral", "window=101"),
        ("gemma2", "layer_pattern=[global,local]"),
        ("gemma2", "attention_softcap=null"),
        ("gemma2", "attention_scale_dim=null"),
        ("gemma2", "logit_softcap=null"),
        ("gemma3", "rotary_local_base=null"),
        ("gemma3", "layer_pattern=[local,global,local]"),
        ("olmo3", "layer_pattern=[global,local,local,local]"),
        ("olmo3", "rotary_local_base=100"),
        ("olmo3", "window=99"),
        ("gpt_oss", "window=101"),
        ("gpt_oss", "layer_pattern=[global,local]"),
        ("gpt_oss", "rotary_scaling=yarn"),
        ("phi3", "rotary_dim=null"),
        ("smollm3", "layer_pattern=[]"),
        ("smollm3", "layer_pattern=[nope,global]"),
    ],
)
def test_the_comparison_fails_with_another_option(tmp_path, monkeypatch, case, changed):
    directory = write_directory(tmp_path / "m", case)
    monkeypatch.setattr("shmap_tp.pretrained.configuration.ARCHITECTURE_KEYS", frozenset())
    load = api.load_config
    monkeypatch.setattr(api, "load_config", lambda *given, **more: load(*given, f"model.{changed}", **more))
    assert logit_error(directory, case) > AT_LEAST
