"""OLMo 2 and OLMo 3: norms after the sublayers alone, and norms of all heads of q, and of k, together.  OLMoE: such
norms of heads, norms before the sublayers, and experts in every layer.

In OLMo 3 every fourth layer is global, and scaled rates are those of the global layers alone.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shmap_tp.pretrained.config_json import LocalRotaryKeys, RotaryKeys, layer_types, pattern_in, require
from shmap_tp.pretrained.families.llama import ATTENTION_BIAS, FIXED, ROUTER_TRAINING, ROWS, SWIGLU, shape
from shmap_tp.pretrained.families.qwen import EXPERT_ROWS
from shmap_tp.pretrained.family import Family, Key, TensorRow, with_rows

_LAYER = "model.layers.{layer}."
_NORMS_OF_HEADS = (
    TensorRow("blocks.attention.query_norm.scale", _LAYER + "self_attn.q_norm.weight", "(h k) -> h k"),
    TensorRow("blocks.attention.key_norm.scale", _LAYER + "self_attn.k_norm.weight", "(n k) -> n k"),
)
_OWN = (
    *_NORMS_OF_HEADS,
    TensorRow("blocks.attention_output_norm.scale", _LAYER + "post_attention_layernorm.weight", "d -> d"),
    TensorRow("blocks.mlp_output_norm.scale", _LAYER + "post_feedforward_layernorm.weight", "d -> d"),
)

OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    keys=(*shape(rms_norm_eps=1e-5), SWIGLU, ATTENTION_BIAS),
    fixed=FIXED | {"norm_placement": "after", "qk_norm": True, "qk_norm_across_heads": True},
    rows=with_rows(ROWS, *_OWN),
    rotary=RotaryKeys(),
)

OLMO3 = replace(
    OLMO2,
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    keys=(*OLMO2.keys, Key("sliding_window", ("window",), 4096)),
    rotary=LocalRotaryKeys(RotaryKeys(default_base=5e5), local=None, default_local=5e5),
    derived=lambda config, where: {"layer_pattern": pattern_in(config, 4)},
    write=lambda model: {"layer_types": layer_types(model.layer_pattern, model.layers)},
    ignored=frozenset({"layer_types"}),
)


def _head_dim(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The norms of heads in transformers have the width, whatever head_dim is."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    rule = f"must be hidden_size / num_attention_heads={head_dim} in OlmoeForCausalLM, whose norms have the width"
    require(config.get("head_dim") in (None, head_dim), "head_dim", config.get("head_dim"), rule, where)
    return {"head_dim": head_dim}


OLMOE = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    keys=(
        *(key for key in OLMO2.keys if key.theirs != "head_dim"),
        Key("num_experts", ("experts",), 64),
        Key("num_experts_per_tok", ("experts_per_token",), 8),
        Key("norm_topk_prob", ("router_normalize",), False),
    ),
    fixed=FIXED | {"qk_norm": True, "qk_norm_across_heads": True},
    rows=with_rows(EXPERT_ROWS, *_NORMS_OF_HEADS),
    rotary=RotaryKeys(),
    only={"clip_qkv": (None,)},
    ignored=ROUTER_TRAINING | {"num_local_experts", "head_dim"},
    derived=_head_dim,
)
