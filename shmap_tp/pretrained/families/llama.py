"""Llama 1, 2 and 3, SmolLM2, and whatever else is a LlamaForCausalLM."""

from collections.abc import Mapping
from typing import Any

from shmap_tp.errors import UserError
from shmap_tp.pretrained.config_json import RotaryKeys
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
