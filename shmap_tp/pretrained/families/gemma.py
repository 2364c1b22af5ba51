"""Gemma 1, 2 and 3 (the text models)."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shmap_tp.config.schema import ModelConfig
from shmap_tp.pretrained.config_json import LocalRotaryKeys, RotaryKeys, layer_types, pattern_in
from shmap_tp.pretrained.families.llama import ATTENTION_BIAS, ROWS, shape, whole_heads
from shmap_tp.pretrained.family import Family, Key, TensorRow, with_rows

_TANH = "gelu_pytorch_tanh"
_SHAPE = (*shape(head_dim=256, tie_word_embeddings=True), ATTENTION_BIAS)

GEMMA = Family(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    keys=(
        *_SHAPE,
        Key("hidden_act", ("mlp",), _TANH, {_TANH: "geglu", "gelu": "geglu"}),  # gelu means the tanh form here
    ),
    fixed={"block": "sequential", "norm": "rmsnorm_unit_offset", "positions": "rotary"},
    rows=ROWS,
    rotary=RotaryKeys(),
    only={"hidden_activation": (_TANH,), "use_bidirectional_attention": (False,)},
    derived=lambda config, where: {"embedding_scale": math.sqrt(config["hidden_size"])},
)


def _of_kinds(period: int) -> dict[str, Any]:
    """Fields of a family whose layers, where layer_types is absent, are local but for every `period`-th."""

    def derived(config: Mapping[str, Any], where: str) -> dict[str, Any]:
        pattern = pattern_in(config, config.get("sliding_window_pattern") or period)
        return whole_heads(config, where) | GEMMA.derived(config, where) | {"layer_pattern": pattern}

    def write(model: ModelConfig) -> dict[str, Any]:
        return {"layer_types": layer_types(model.layer_pattern, model.layers)}

    return {"derived": derived, "write": write, "ignored": frozenset({"layer_types", "sliding_window_pattern"})}


_NORMS = {
    "blocks.attention_output_norm.scale": "model.layers.{layer}.post_attention_layernorm.weight",
    "blocks.mlp_norm.scale": "model.layers.{layer}.pre_feedforward_layernorm.weight",
    "blocks.mlp_output_norm.scale": "model.layers.{layer}.post_feedforward_layernorm.weight",
}
_BOTH_NORMS = with_rows(ROWS, *(TensorRow(ours, theirs, "d -> d") for ours, theirs in _NORMS.items()))

GEMMA2 = replace(
    GEMMA,
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    keys=(
        *_SHAPE,
        Key("hidden_activation", ("mlp",), _TANH, {_TANH: "geglu"}),
        Key("query_pre_attn_scalar", ("attention_scale_dim",), 256),
        Key("sliding_window", ("window",), 4096),
        Key(
            "attn_logit_softcapping", ("attention_softcap",), lambda config: config.get("attn_logit_softcapping", 50.0)
        ),
        Key("final_logit_softcapping", ("logit_softcap",), lambda config: config.get("final_logit_softcapping", 30.0)),
    ),
    fixed=GEMMA.fixed | {"norm_placement": "both"},
    rows=_BOTH_NORMS,
    only={"hidden_act": (_TANH,), "use_bidirectional_attention": (False,)},
    **_of_kinds(2),
)

GEMMA3 = replace(
    GEMMA2,
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    keys=tuple(
        replace(key, default=None) if key.theirs == "final_logit_softcapping" else key
        for key in GEMMA2.keys
        if key.theirs != "attn_logit_softcapping"
    ),
    fixed=GEMMA2.fixed | {"qk_norm": True},
    rotary=LocalRotaryKeys(RotaryKeys(default_base=1e6), local="rope_local_base_freq", default_local=10_000.0),
    only=GEMMA2.only | {"attn_logit_softcapping": (None,)},  # which transformers 5 reads and does not use
    **_of_kinds(6),
)
