"""Mistral: Llama with a sliding window in every layer, or without one; and Mixtral, the same with experts."""

from dataclasses import replace

from shmap_tp.pretrained.config_json import RotaryKeys
from shmap_tp.pretrained.families.llama import FIXED, ROUTER_TRAINING, ROWS, SHAPE, SWIGLU, without_mlp
from shmap_tp.pretrained.family import Family, Key, Row

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
