"""Qwen2 (and Qwen2.5) and Qwen3, the dense models, inside their sliding window where they use one."""

from collections.abc import Mapping
from typing import Any

from shmap_tp.pretrained.config_json import RotaryKeys
from shmap_tp.pretrained.families.llama import FIXED, ROWS, SHAPE, SWIGLU
from shmap_tp.pretrained.family import ContextLimit, Family, Key


def _window(config: Mapping[str, Any]) -> ContextLimit | None:
    window, kinds = config.get("sliding_window", 4096), config.get("layer_types")
    used = config.get("use_sliding_window", False) if kinds is None else "sliding_attention" in str(kinds)
    return ContextLimit.of("sliding_window", window) if used and window is not None else None


_COMMON = {
    "fixed": FIXED | {"qkv_bias": True},
    "context_key": "max_position_embeddings",
    "rows": ROWS,
    "prefix": "model.",
    "rotary": RotaryKeys(),
    "window": _window,
    "ignored": frozenset({"use_sliding_window", "sliding_window", "layer_types"}),
}

QWEN2 = Family(architecture="Qwen2ForCausalLM", model_type="qwen2", keys=(*SHAPE, SWIGLU), **_COMMON)

_HEAD_DIM = Key("head_dim", ("head_dim",), 128)
QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    keys=(
        *(_HEAD_DIM if key.theirs == "head_dim" else key for key in SHAPE),
        SWIGLU,
        Key("attention_bias", ("qkv_bias", "attention_output_bias"), False),
    ),
    **_COMMON | {"fixed": FIXED | {"qk_norm": True}},
)
