"""OLMo 2 and OLMo 3: norms after the sublayers alone, and norms of all heads of q, and of k, together.  OLMoE: such
norms of heads, norms before the sublayers, and experts in every layer.

In OLMo 3 every fourth layer is global, and scaled rates are those of the global layers alone.
"""

from dataclasses import replace

from shmap_tp.pretrained.config_json import LocalRotaryKeys, RotaryKeys
from shmap_tp.pretrained.families.llama import FIXED, ROUTER_TRAINING, ROWS, SHAPE, SWIGLU
from shmap_tp.pretrained.families.qwen import EXPERT_ROWS
from shmap_tp.pretrained.family import Family, Key, Row
from shmap_tp.pretrained.layer_types import layer_types, pattern_in

_LAYER = "model.layers.{layer}."
_NORMS_OF_HEADS = (
    Row("blocks.attention.query_norm.scale", _LAYER + "self_attn.q_norm.weight", "(h k) -> h k"),
    Row("blocks.attention.key_norm.scale", _LAYER + "self_attn.k_norm.weight", "(n k) -> n k"),
)
_OWN = (
    *_NORMS_OF_HEADS,
    Row("blocks.attention_output_norm.scale", _LAYER + "post_attention_layernorm.weight", "d -> d"),
    Row("blocks.mlp_output_norm.scale", _LAYER + "post_feedforward_layernorm.weight", "d -> d"),
)

OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    keys=(
        *(replace(key, default=1e-5) if key.theirs == "rms_norm_eps" else key for key in SHAPE),
        SWIGLU,
        Key("attention_bias", ("qkv_bias", "attention_output_bias"), False),
    ),
    fixed=FIXED | {"norm_placement": "after", "qk_norm": True, "qk_norm_across_heads": True},
    context_key="max_position_embeddings",
    rows=(*(row for row in ROWS if row.ours not in {own.ours for own in _OWN}), *_OWN),
    prefix="model.",
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

OLMOE = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    keys=(
        *(replace(key, default=1e-5) if key.theirs == "rms_norm_eps" else key for key in SHAPE),
        SWIGLU,
        Key("attention_bias", ("qkv_bias", "attention_output_bias"), False),
        Key("num_experts", ("experts",), 64),
        Key("num_experts_per_tok", ("experts_per_token",), 8),
        Key("norm_topk_prob", ("router_normalize",), False),
    ),
    fixed=FIXED | {"qk_norm": True, "qk_norm_across_heads": True},
    context_key="max_position_embeddings",
    rows=(*(row for row in EXPERT_ROWS if row.ours not in {own.ours for own in _NORMS_OF_HEADS}), *_NORMS_OF_HEADS),
    prefix="model.",
    rotary=RotaryKeys(),
    only={"clip_qkv": (None,)},
    ignored=ROUTER_TRAINING | {"num_local_experts"},
)
