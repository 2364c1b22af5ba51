"""GPT-NeoX: Pythia, GPT-NeoX-20B and others.  Its fused matrix has q, k and v of the first head, then of the second."""

from shmap_tp.pretrained.config_json import RotaryKeys
from shmap_tp.pretrained.family import GELUS, Family, Key, Row

_BLOCK = "gpt_neox.layers.{layer}."
_FUSED = _BLOCK + "attention.query_key_value."

GPT_NEOX = Family(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    keys=(
        Key("hidden_size", ("width",)),
        Key("num_hidden_layers", ("layers",)),
        Key("num_attention_heads", ("heads", "kv_heads")),
        Key("intermediate_size", ("ffn",)),
        Key("vocab_size", ("vocabulary",)),
        Key("layer_norm_eps", ("norm_epsilon",), 1e-5),
        Key("hidden_act", ("mlp",), "gelu", GELUS),
        Key("use_parallel_residual", ("block",), True, {True: "parallel_two_norms", False: "sequential"}),
        Key("attention_bias", ("qkv_bias", "attention_output_bias"), True),
        Key("tie_word_embeddings", ("tie_embeddings",), False),
    ),
    fixed={"norm": "layernorm", "norm_bias": True, "mlp_bias": True, "positions": "rotary"},
    derived=lambda config, where: {"head_dim": config["hidden_size"] // config["num_attention_heads"]},
    context_key="max_position_embeddings",
    prefix="gpt_neox.",
    rotary=RotaryKeys(base="rotary_emb_base", partial="rotary_pct", default_partial=0.25),
    buffers=r"\.attention\.((masked_)?bias|rotary_emb\.inv_freq)$",
    rows=(
        Row("embedding.weight", "gpt_neox.embed_in.weight", "v d -> v d"),
        Row("norm.scale", "gpt_neox.final_layer_norm.weight", "d -> d"),
        Row("norm.bias", "gpt_neox.final_layer_norm.bias", "d -> d"),
        Row("head.weight", "embed_out.weight", "v d -> v d"),
        Row("blocks.attention_norm.scale", _BLOCK + "input_layernorm.weight", "d -> d"),
        Row("blocks.attention_norm.bias", _BLOCK + "input_layernorm.bias", "d -> d"),
        Row("blocks.attention.query.weight", _FUSED + "weight", "(h 0/3 k) d -> (h k) d"),
        Row("blocks.attention.query.bias", _FUSED + "bias", "(h 0/3 k) -> (h k)"),
        Row("blocks.attention.key.weight", _FUSED + "weight", "(n 1/3 k) d -> d n k"),
        Row("blocks.attention.key.bias", _FUSED + "bias", "(n 1/3 k) -> n k"),
        Row("blocks.attention.value.weight", _FUSED + "weight", "(n 2/3 k) d -> d n k"),
        Row("blocks.attention.value.bias", _FUSED + "bias", "(n 2/3 k) -> n k"),
        Row("blocks.attention.out.weight", _BLOCK + "attention.dense.weight", "d (h k) -> (h k) d"),
        Row("blocks.attention.out.bias", _BLOCK + "attention.dense.bias", "d -> d"),
        Row("blocks.mlp_norm.scale", _BLOCK + "post_attention_layernorm.weight", "d -> d"),
        Row("blocks.mlp_norm.bias", _BLOCK + "post_attention_layernorm.bias", "d -> d"),
        Row("blocks.mlp.up.weight", _BLOCK + "mlp.dense_h_to_4h.weight", "f d -> f d"),
        Row("blocks.mlp.up.bias", _BLOCK + "mlp.dense_h_to_4h.bias", "f -> f"),
        Row("blocks.mlp.down.weight", _BLOCK + "mlp.dense_4h_to_h.weight", "d f -> f d"),
        Row("blocks.mlp.down.bias", _BLOCK + "mlp.dense_4h_to_h.bias", "d -> d"),
    ),
)
