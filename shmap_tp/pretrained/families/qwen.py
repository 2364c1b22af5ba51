"""Qwen2 (and Qwen2.5) and Qwen3, inside their sliding window where they use one; of Qwen3 also the models with experts
in every layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shmap_tp.pretrained.config_json import RotaryKeys
from shmap_tp.pretrained.families.llama import ATTENTION_BIAS, FIXED, ROUTER_TRAINING, ROWS, SWIGLU, shape, without_mlp
from shmap_tp.pretrained.family import ContextLimit, Family, Key, TensorRow


def _window(config: Mapping[str, Any]) -> ContextLimit | None:
    window, kinds = config.get("sliding_window", 4096), config.get("layer_types")
    used = config.get("use_sliding_window", False) if kinds is None else "sliding_attention" in str(kinds)
    return ContextLimit.of("sliding_window", window) if used and window is not None else None


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    keys=(*shape(), SWIGLU),
    fixed=FIXED | {"qkv_bias": True},
    rows=ROWS,
    rotary=RotaryKeys(),
    window=_window,
    ignored=frozenset({"use_sliding_window", "sliding_window", "layer_types"}),
)

QWEN3 = replace(
    QWEN2,
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    keys=(*shape(head_dim=128), SWIGLU, ATTENTION_BIAS),
    fixed=FIXED | {"qk_norm": True},
)

_EXPERT = "model.layers.{layer}.mlp.experts.{expert}."
EXPERT_ROWS = (
    *without_mlp(ROWS),
    TensorRow("blocks.mlp.router.weight", "model.layers.{layer}.mlp.gate.weight", "e d -> d e"),
    TensorRow("blocks.mlp.gate.weight", _EXPERT + "gate_proj.weight", "f d -> d f"),
    TensorRow("blocks.mlp.up.weight", _EXPERT + "up_proj.weight", "f d -> d f"),
    TensorRow("blocks.mlp.down.weight", _EXPERT + "down_proj.weight", "d f -> f d"),
)
QWEN3_MOE = replace(
    QWEN3,
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    keys=(
        *shape("intermediate_size"),
        SWIGLU,
        ATTENTION_BIAS,
        Key("moe_intermediate_size", ("ffn",), 768),
        Key("num_experts", ("experts",), lambda config: config.get("num_local_experts", 128)),
        Key("num_experts_per_tok", ("experts_per_token",), 8),
        Key("norm_topk_prob", ("router_normalize",), False),
    ),
    rows=EXPERT_ROWS,
    only={"decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
    ignored=QWEN3.ignored | ROUTER_TRAINING | {"intermediate_size", "num_local_experts"},
)
"""intermediate_size is that of layers without experts, which are not supported.  The number of experts is
num_local_experts in files of transformers 5."""
