"""Mistral: Llama with a sliding window in every layer, or without one."""

from shmap_tp.pretrained.config_json import RotaryKeys
from shmap_tp.pretrained.families.llama import FIXED, ROWS, SHAPE, SWIGLU
from shmap_tp.pretrained.family import Family, Key

MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    keys=(*SHAPE, SWIGLU, Key("sliding_window", ("window",), lambda config: config.get("sliding_window", 4096))),
    fixed=FIXED,
    context_key="max_position_embeddings",
    rows=ROWS,
    prefix="model.",
    rotary=RotaryKeys(),
)
