"""gpt-oss: experts with biases and a clamped SwiGLU in every layer, attention sinks, a window in every second layer.

Weights are read where they are floats; the published ones are MXFP4, of four bits, and are refused with the way to
write them as bfloat16.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shmap_tp.config.choices import RotaryScaling
from shmap_tp.config.schema import ModelConfig
from shmap_tp.pretrained.config_json import RotaryKeys, layer_types, pattern_in, require
from shmap_tp.pretrained.families.llama import ATTENTION_BIAS, FIXED, ROUTER_TRAINING, ROWS, shape, without_mlp
from shmap_tp.pretrained.family import Family, Key, TensorRow


def _derived(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    rule = (
        "says that the weights are quantized, which is not supported; write them as bfloat16:\n"
        "AutoModelForCausalLM.from_pretrained(DIR, quantization_config=Mxfp4Config(dequantize=True), "
        "dtype='bfloat16').save_pretrained(OUT)"
    )
    require(not config.get("quantization_config"), "quantization_config", None, rule, where)
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    require(bool(scaling), "rope_scaling", None, "is missing, which every GptOssForCausalLM has", where)
    return {"layer_pattern": pattern_in(config, 2)}


def _write(model: ModelConfig) -> dict[str, Any]:
    unscaled = {} if model.rotary_scaling != RotaryScaling.none else {"rope_scaling": {"rope_type": "default"}}
    return {"layer_types": layer_types(model.layer_pattern, model.layers)} | unscaled


_LAYER = "model.layers.{layer}."
_EXPERTS = _LAYER + "mlp.experts."
GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    keys=(
        *shape(head_dim=64, rms_norm_eps=1e-5),
        Key("hidden_act", ("mlp",), "silu", {"silu": "clamped_swiglu"}),
        replace(ATTENTION_BIAS, default=True),
        Key("sliding_window", ("window",), 128),
        Key("num_local_experts", ("experts",), 128),
        Key("num_experts_per_tok", ("experts_per_token",), 4),
    ),
    fixed=FIXED | {"attention_sinks": True, "mlp_bias": True},
    rows=(
        *without_mlp(ROWS),
        TensorRow("blocks.attention.sinks", _LAYER + "self_attn.sinks", "h -> h"),
        TensorRow("blocks.mlp.router.weight", _LAYER + "mlp.router.weight", "e d -> d e"),
        TensorRow("blocks.mlp.router.bias", _LAYER + "mlp.router.bias", "e -> e"),
        TensorRow("blocks.mlp.gate.weight", _EXPERTS + "gate_up_proj", "e d (f 0/2) -> e d f"),
        TensorRow("blocks.mlp.gate.bias", _EXPERTS + "gate_up_proj_bias", "e (f 0/2) -> e f"),
        TensorRow("blocks.mlp.up.weight", _EXPERTS + "gate_up_proj", "e d (f 1/2) -> e d f"),
        TensorRow("blocks.mlp.up.bias", _EXPERTS + "gate_up_proj_bias", "e (f 1/2) -> e f"),
        TensorRow("blocks.mlp.down.weight", _EXPERTS + "down_proj", "e f d -> e f d"),
        TensorRow("blocks.mlp.down.bias", _EXPERTS + "down_proj_bias", "e d -> e d"),
    ),
    rotary=RotaryKeys(default_base=150_000.0),
    only={"swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
    ignored=ROUTER_TRAINING | {"layer_types", "initial_context_length", "experts_per_token", "quantization_config"},
    derived=_derived,
    write=_write,
)
"""initial_context_length is that of the rotary scaling, and experts_per_token the same as num_experts_per_tok."""
