"""Llama 1, 2 and 3, SmolLM2 and whatever else is a LlamaForCausalLM; and families that differ from it in a few keys.

Mistral has a sliding window in every layer, or none; Mixtral is the same with experts.  Phi-3 and Phi-4 have q, k and v
in one matrix, gate and up in another, and some a sliding window; scalings of their rotary encoding are refused: they
have LongRoPE, and transformers reads `yarn` and `su` as that, too.  SmolLM3 has no rotary encoding in every fourth
layer.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shmap_tp.config.schema import ModelConfig
from shmap_tp.errors import UserError, shown
from shmap_tp.pretrained.config_json import RotaryKeys, repeated, shortest_pattern, size
from shmap_tp.pretrained.family import Family, Key, Row

SHAPE = (
    Key("hidden_size", ("width",)),
    Key("num_hidden_layers", ("layers",)),
    Key("num_attention_heads", ("heads",)),
    Key("num_key_value_heads", ("kv_heads",), lambda config: config["num_attention_heads"]),
    Key("head_dim", ("head_dim",), lambda config: config["hidden_size"] // config["num_attention_heads"]),
    Key("intermediate_size", ("ffn",)),
    Key("vocab_size", ("vocabulary",)),
    Key("rms_norm_eps", ("norm_epsilon",), 1e-6),
    Key("tie_word_embeddings", ("tie_embeddings",), False),
)
"""What the families that descend from Llama have in common."""

SWIGLU = Key("hidden_act", ("mlp",), "silu", {"silu": "swiglu"})

ROWS = (
    Row("embedding.weight", "model.embed_tokens.weight", "v d -> v d"),
    Row("norm.scale", "model.norm.weight", "d -> d"),
    Row("head.weight", "lm_head.weight", "v d -> v d"),
    Row("blocks.attention_norm.scale", "model.layers.{layer}.input_layernorm.weight", "d -> d"),
    Row("blocks.attention.query.weight", "model.layers.{layer}.self_attn.q_proj.weight", "(h k) d -> (h k) d"),
    Row("blocks.attention.query.bias", "model.layers.{layer}.self_attn.q_proj.bias", "(h k) -> (h k)"),
    Row("blocks.attention.key.weight", "model.layers.{layer}.self_attn.k_proj.weight", "(n k) d -> d n k"),
    Row("blocks.attention.key.bias", "model.layers.{layer}.self_attn.k_proj.bias", "(n k) -> n k"),
    Row("blocks.attention.value.weight", "model.layers.{layer}.self_attn.v_proj.weight", "(n k) d -> d n k"),
    Row("blocks.attention.value.bias", "model.layers.{layer}.self_attn.v_proj.bias", "(n k) -> n k"),
    Row("blocks.attention.out.weight", "model.layers.{layer}.self_attn.o_proj.weight", "d (h k) -> (h k) d"),
    Row("blocks.attention.out.bias", "model.layers.{layer}.self_attn.o_proj.bias", "d -> d"),
    Row("blocks.attention.query_norm.scale", "model.layers.{layer}.self_attn.q_norm.weight", "k -> k"),
    Row("blocks.attention.key_norm.scale", "model.layers.{layer}.self_attn.k_norm.weight", "k -> k"),
    Row("blocks.mlp_norm.scale", "model.layers.{layer}.post_attention_layernorm.weight", "d -> d"),
    Row("blocks.mlp.gate.weight", "model.layers.{layer}.mlp.gate_proj.weight", "f d -> f d"),
    Row("blocks.mlp.gate.bias", "model.layers.{layer}.mlp.gate_proj.bias", "f -> f"),
    Row("blocks.mlp.up.weight", "model.layers.{layer}.mlp.up_proj.weight", "f d -> f d"),
    Row("blocks.mlp.up.bias", "model.layers.{layer}.mlp.up_proj.bias", "f -> f"),
    Row("blocks.mlp.down.weight", "model.layers.{layer}.mlp.down_proj.weight", "d f -> f d"),
    Row("blocks.mlp.down.bias", "model.layers.{layer}.mlp.down_proj.bias", "d -> d"),
)


def without_mlp(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows of a family whose blocks have experts."""
    return tuple(row for row in rows if not row.ours.startswith("blocks.mlp."))


ROUTER_TRAINING = frozenset({"router_aux_loss_coef", "output_router_logits"})
"""Keys of config.json with which a router was trained; here model.router_balance_loss is given."""


def whole_heads(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What transformers asks of some classes, also where head_dim is given."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    if width % heads:
        raise UserError(f"{where}: hidden_size={width} must be a multiple of num_attention_heads={heads}")
    return {}


FIXED = {"block": "sequential", "norm": "rmsnorm", "positions": "rotary"}

LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    keys=(
        *SHAPE,
        SWIGLU,
        Key("attention_bias", ("qkv_bias", "attention_output_bias"), False),
        Key("mlp_bias", ("mlp_bias",), False),
    ),
    fixed=FIXED,
    context_key="max_position_embeddings",
    rows=ROWS,
    prefix="model.",
    rotary=RotaryKeys(),
    derived=whole_heads,
)


_WINDOW = Key("sliding_window", ("window",), lambda config: config.get("sliding_window", 4096))

MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    keys=(*SHAPE, SWIGLU, _WINDOW),
    fixed=FIXED,
    context_key="max_position_embeddings",
    rows=ROWS,
    prefix="model.",
    rotary=RotaryKeys(),
)

_EXPERT = "model.layers.{layer}.block_sparse_moe.experts.{expert}."
MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    keys=(
        *(replace(key, default=1e-5) if key.theirs == "rms_norm_eps" else key for key in SHAPE),
        SWIGLU,
        Key("sliding_window", ("window",), None),
        Key("num_local_experts", ("experts",), 8),
        Key("num_experts_per_tok", ("experts_per_token",), 2),
    ),
    fixed=FIXED,
    context_key="max_position_embeddings",
    rows=(
        *without_mlp(ROWS),
        Row("blocks.mlp.router.weight", "model.layers.{layer}.block_sparse_moe.gate.weight", "e d -> d e"),
        Row("blocks.mlp.gate.weight", _EXPERT + "w1.weight", "f d -> d f"),
        Row("blocks.mlp.up.weight", _EXPERT + "w3.weight", "f d -> d f"),
        Row("blocks.mlp.down.weight", _EXPERT + "w2.weight", "d f -> f d"),
    ),
    prefix="model.",
    rotary=RotaryKeys(default_base=1e6),
    only={"router_jitter_noise": (0.0,)},
    ignored=ROUTER_TRAINING,
)
"""Its softmax over the chosen experts is `router_normalize`."""


_QKV = "model.layers.{layer}.self_attn.qkv_proj.weight"
_GATE_UP = "model.layers.{layer}.mlp.gate_up_proj.weight"
_FUSED = (
    Row("blocks.attention.query.weight", _QKV, "(0/h+n+n k) d -> (h k) d"),
    Row("blocks.attention.key.weight", _QKV, "(1/h+n+n k) d -> d n k"),
    Row("blocks.attention.value.weight", _QKV, "(2/h+n+n k) d -> d n k"),
    Row("blocks.mlp.gate.weight", _GATE_UP, "(0/2 f) d -> f d"),
    Row("blocks.mlp.up.weight", _GATE_UP, "(1/2 f) d -> f d"),
)

PHI3 = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    keys=(
        *(replace(key, default=1e-5) if key.theirs == "rms_norm_eps" else key for key in SHAPE),
        SWIGLU,
        Key("sliding_window", ("window",), None),
    ),
    fixed=FIXED,
    context_key="max_position_embeddings",
    rows=(*(row for row in ROWS if row.ours not in {fused.ours for fused in _FUSED}), *_FUSED),
    prefix="model.",
    rotary=RotaryKeys(partial="partial_rotary_factor", scalings=()),
    ignored=frozenset({"original_max_position_embeddings"}),  # of LongRoPE
)


def _smollm3_pattern(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    layers, interval, has_rotary = (
        config.get(key) for key in ("num_hidden_layers", "no_rope_layer_interval", "no_rope_layers")
    )
    if has_rotary is None:
        interval = size(4 if interval is None else interval, "no_rope_layer_interval", where)
        has_rotary = [int((i + 1) % interval != 0) for i in range(layers)]
    if not isinstance(has_rotary, list) or len(has_rotary) != layers or any(one not in (0, 1) for one in has_rotary):
        raise UserError(
            f"{where}: no_rope_layers={shown(has_rotary)} must be a list of num_hidden_layers={layers} "
            f"numbers, 1 for a layer with the rotary encoding and 0 for one without"
        )
    if "sliding_attention" in (kinds := config.get("layer_types") or []):
        raise UserError(f"{where}: layer_types={shown(kinds)} is not supported; supported is full_attention")
    kinds = shortest_pattern(["global" if one else "nope" for one in has_rotary])
    return {"layer_pattern": [] if kinds == ["global"] else kinds}


def _smollm3_layers(model: ModelConfig) -> dict[str, Any]:
    return {"no_rope_layers": [int(kind != "nope") for kind in repeated(model.layer_pattern, model.layers)]}


SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    keys=(
        *(key for key in SHAPE if key.theirs != "tie_word_embeddings"),
        Key("tie_word_embeddings", ("tie_embeddings",), True),
        *LLAMA.keys[len(SHAPE) :],
    ),
    fixed=FIXED,
    context_key="max_position_embeddings",
    rows=LLAMA.rows,
    prefix="model.",
    rotary=RotaryKeys(default_base=2e6),
    only={"use_sliding_window": (False,)},
    ignored=frozenset({"no_rope_layers", "no_rope_layer_interval", "layer_types", "sliding_window"}),
    derived=_smollm3_pattern,
    write=_smollm3_layers,
)
