"""Gemma 1.  Gemma 2 and 3 have soft caps and local layers, which are not supported."""

import math

from shmap_tp.pretrained.config_json import RotaryKeys
from shmap_tp.pretrained.families.llama import ROWS, SHAPE
from shmap_tp.pretrained.family import Family, Key

_TANH = "gelu_pytorch_tanh"
_OTHER_DEFAULTS = {
    "head_dim": Key("head_dim", ("head_dim",), 256),
    "tie_word_embeddings": Key("tie_word_embeddings", ("tie_embeddings",), True),
}

GEMMA = Family(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    keys=(
        *(_OTHER_DEFAULTS.get(key.theirs, key) for key in SHAPE),
        Key("hidden_act", ("mlp",), _TANH, {_TANH: "geglu", "gelu": "geglu"}),  # gelu means the tanh form here
        Key("attention_bias", ("qkv_bias", "attention_output_bias"), False),
    ),
    fixed={"block": "sequential", "norm": "rmsnorm_unit_offset", "positions": "rotary"},
    context_key="max_position_embeddings",
    rows=ROWS,
    prefix="model.",
    rotary=RotaryKeys(),
    only={"hidden_activation": (_TANH,), "use_bidirectional_attention": (False,)},
    derived=lambda config: {"embedding_scale": math.sqrt(config["hidden_size"])},
)
