"""Mistral, inside its sliding window."""

from collections.abc import Mapping
from typing import Any

from shmap_tp.pretrained.config_json import RotaryKeys
from shmap_tp.pretrained.families.llama import FIXED, ROWS, SHAPE, SWIGLU
from shmap_tp.pretrained.family import ContextLimit, Family


def _window(config: Mapping[str, Any]) -> ContextLimit | None:
    window = config.get("sliding_window", 4096)
    return None if window is None else ContextLimit.of("sliding_window", window)


MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    keys=(*SHAPE, SWIGLU),
    fixed=FIXED,
    context_key="max_position_embeddings",
    rows=ROWS,
    prefix="model.",
    rotary=RotaryKeys(),
    window=_window,
    ignored=frozenset({"sliding_window"}),
    write=lambda model: {"sliding_window": None},
)
