"""Llama 1, 2 and 3, SmolLM2 and whatever else is a LlamaForCausalLM; and families that differ from it in a few keys.

Mistral has a sliding window in every layer, or none; Mixtral is the same with experts.  Phi-3 and Phi-4 have q, k and v
in one matrix, gate and up in another, and some a sliding window; scalings of their rotary encoding are refused: they
have LongRoPE, and transformers reads `yarn` and `su` as that, too.  SmolLM3 has no rotary encoding in every fourth
layer.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shmap_tp.pretrained.config_json import (
    LIST,
    SIZE,
    RotaryKeys,
    checked,
    repeated,
    require,
    require_one_of,
    shortest_pattern,
)
from shmap_tp.pretrained.family import Family, Key, TensorRow, with_bias, with_rows

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


def shape(*without: str, **defaults: Any) -> tuple[Key, ...]:
    """SHAPE without some keys, and with the `defaults` of others."""
    kept = (key for key in SHAPE if key.theirs not in without)
    return tuple(replace(key, default=defaults.get(key.theirs, key.default)) for key in kept)


SWIGLU = Key("hidden_act", ("mlp",), "silu", {"silu": "swiglu"})
ATTENTION_BIAS = Key("attention_bias", ("qkv_bias", "attention_output_bias"), False)

_LAYER = "model.layers.{layer}."

ROWS = (
    TensorRow("embedding.weight", "model.embed_tokens.weight", "v d -> v d"),
    TensorRow("norm.scale", "model.norm.weight", "d -> d"),
    TensorRow("head.weight", "lm_head.weight", "v d -> v d"),
    TensorRow("blocks.attention_norm.scale", _LAYER + "input_layernorm.weight", "d -> d"),
    *with_bias("blocks.attention.query", _LAYER + "self_attn.q_proj", "(h k) d -> (h k) d", "(h k) -> (h k)"),
    *with_bias("blocks.attention.key", _LAYER + "self_attn.k_proj", "(n k) d -> d n k", "(n k) -> n k"),
    *with_bias("blocks.attention.value", _LAYER + "self_attn.v_proj", "(n k) d -> d n k", "(n k) -> n k"),
    *with_bias("blocks.attention.out", _LAYER + "self_attn.o_proj", "d (h k) -> (h k) d", "d -> d"),
    TensorRow("blocks.attention.query_norm.scale", _LAYER + "self_attn.q_norm.weight", "k -> k"),
    TensorRow("blocks.attention.key_norm.scale", _LAYER + "self_attn.k_norm.weight", "k -> k"),
    TensorRow("blocks.mlp_norm.scale", _LAYER + "post_attention_layernorm.weight", "d -> d"),
    *with_bias("blocks.mlp.gate", _LAYER + "mlp.gate_proj", "f d -> f d", "f -> f"),
    *with_bias("blocks.mlp.up", _LAYER + "mlp.up_proj", "f d -> f d", "f -> f"),
    *with_bias("blocks.mlp.down", _LAYER + "mlp.down_proj", "d f -> f d", "d -> d"),
)


def without_mlp(rows: tuple[TensorRow, ...]) -> tuple[TensorRow, ...]:
    """The rows of a family whose blocks have experts."""
    return tuple(row for row in rows if not row.ours.startswith("blocks.mlp."))


ROUTER_TRAINING = frozenset({"router_aux_loss_coef", "output_router_logits"})
"""Keys of config.json with which a router was trained; here model.router_balance_loss is given."""


def whole_heads(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What transformers asks of some classes, also where head_dim is given."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    require(width % heads == 0, "hidden_size", width, f"must be a multiple of num_attention_heads={heads}", where)
    return {}


FIXED = {"block": "sequential", "norm": "rmsnorm", "positions": "rotary"}

LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    keys=(*SHAPE, SWIGLU, ATTENTION_BIAS, Key("mlp_bias", ("mlp_bias",), False)),
    fixed=FIXED,
    rows=ROWS,
    rotary=RotaryKeys(),
    derived=whole_heads,
)


_WINDOW = Key("sliding_window", ("window",), lambda config: config.get("sliding_window", 4096))

MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    keys=(*SHAPE, SWIGLU, _WINDOW),
    fixed=FIXED,
    rows=ROWS,
    rotary=RotaryKeys(),
)

_EXPERT = "model.layers.{layer}.block_sparse_moe.experts.{expert}."
MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    keys=(
        *shape(rms_norm_eps=1e-5),
        SWIGLU,
        Key("sliding_window", ("window",), None),
        Key("num_local_experts", ("experts",), 8),
        Key("num_experts_per_tok", ("experts_per_token",), 2),
    ),
    fixed=FIXED,
    rows=(
        *without_mlp(ROWS),
        TensorRow("blocks.mlp.router.weight", "model.layers.{layer}.block_sparse_moe.gate.weight", "e d -> d e"),
        TensorRow("blocks.mlp.gate.weight", _EXPERT + "w1.weight", "f d -> d f"),
        TensorRow("blocks.mlp.up.weight", _EXPERT + "w3.weight", "f d -> d f"),
        TensorRow("blocks.mlp.down.weight", _EXPERT + "w2.weight", "d f -> f d"),
    ),
    rotary=RotaryKeys(default_base=1e6),
    only={"router_jitter_noise": (0.0,)},
    ignored=ROUTER_TRAINING,
)
"""Its softmax over the chosen experts is `router_normalize`."""


_QKV = "model.layers.{layer}.self_attn.qkv_proj.weight"
_GATE_UP = "model.layers.{layer}.mlp.gate_up_proj.weight"
_FUSED = (
    TensorRow("blocks.attention.query.weight", _QKV, "(0/h+n+n k) d -> (h k) d"),
    TensorRow("blocks.attention.key.weight", _QKV, "(1/h+n+n k) d -> d n k"),
    TensorRow("blocks.attention.value.weight", _QKV, "(2/h+n+n k) d -> d n k"),
    TensorRow("blocks.mlp.gate.weight", _GATE_UP, "(0/2 f) d -> f d"),
    TensorRow("blocks.mlp.up.weight", _GATE_UP, "(1/2 f) d -> f d"),
)

PHI3 = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    keys=(*shape(rms_norm_eps=1e-5), SWIGLU, Key("sliding_window", ("window",), None)),
    fixed=FIXED,
    rows=with_rows(ROWS, *_FUSED),
    rotary=RotaryKeys(partial="partial_rotary_factor", scalings=()),
    ignored=frozenset({"original_max_position_embeddings"}),  # of LongRoPE
)


def _smollm3_pattern(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    layers, interval, has_rotary = map(config.get, ("num_hidden_layers", "no_rope_layer_interval", "no_rope_layers"))
    if has_rotary is None:
        interval = checked(SIZE, 4 if interval is None else interval, "no_rope_layer_interval", where)
        has_rotary = [int((i + 1) % interval != 0) for i in range(layers)]
    numbers = checked(LIST, has_rotary, "no_rope_layers", where)
    rule = f"must have num_hidden_layers={layers} numbers, 1 for a layer with the rotary encoding and 0 for one without"
    require(len(numbers) == layers and all(one in (0, 1) for one in numbers), "no_rope_layers", numbers, rule, where)
    for kind in config.get("layer_types") or []:
        require_one_of(["full_attention"], "layer_types", kind, where)
    kinds = shortest_pattern(["global" if one else "nope" for one in has_rotary])
    return {"layer_pattern": [] if kinds == ["global"] else kinds}


SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    keys=(*shape(tie_word_embeddings=True), *LLAMA.keys[len(SHAPE) :]),
    fixed=FIXED,
    rows=LLAMA.rows,
    rotary=RotaryKeys(default_base=2e6),
    only={"use_sliding_window": (False,)},
    ignored=frozenset({"no_rope_layers", "no_rope_layer_interval", "layer_types", "sliding_window"}),
    derived=_smollm3_pattern,
    write=lambda model: {
        "no_rope_layers": [int(kind != "nope") for kind in repeated(model.layer_pattern, model.layers)]
    },
)
