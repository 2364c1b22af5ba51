"""Phi-3 and Phi-4: Llama with q, k and v in one matrix, gate and up in another, and a sliding window in some.

Scalings of the rotary encoding are refused: they have LongRoPE, and transformers reads `yarn` and `su` as that, too.
"""

from dataclasses import replace

from shmap_tp.pretrained.config_json import RotaryKeys
from shmap_tp.pretrained.families.llama import FIXED, ROWS, SHAPE, SWIGLU
from shmap_tp.pretrained.family import Family, Key, Row

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
