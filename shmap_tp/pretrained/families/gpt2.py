"""GPT-2.  Its matrices are stored [inputs, outputs], its query, key and value as three parts of one matrix."""

from shmap_tp.pretrained.family import GELUS, Family, Key, Row

_BLOCK = "transformer.h.{layer}."

GPT2 = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    keys=(
        Key("n_embd", ("width",)),
        Key("n_layer", ("layers",)),
        Key("n_head", ("heads", "kv_heads")),
        Key("n_inner", ("ffn",), lambda config: 4 * config["n_embd"]),
        Key("vocab_size", ("vocabulary",)),
        Key("layer_norm_epsilon", ("norm_epsilon",), 1e-5),
        Key(
            "activation_function",
            ("mlp",),
            "gelu_new",
            GELUS,
        ),
        Key("tie_word_embeddings", ("tie_embeddings",), True),
    ),
    fixed={
        "block": "sequential",
        "norm": "layernorm",
        "norm_bias": True,
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "positions": "learned",
    },
    derived=lambda config, where: {"head_dim": config["n_embd"] // config["n_head"]},
    context_key="n_positions",
    prefix="transformer.",
    only={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
    buffers=r"\.attn\.(masked_)?bias$",
    rows=(
        Row("embedding.weight", "transformer.wte.weight", "v d -> v d"),
        Row("positions.weight", "transformer.wpe.weight", "t d -> t d"),
        Row("norm.scale", "transformer.ln_f.weight", "d -> d"),
        Row("norm.bias", "transformer.ln_f.bias", "d -> d"),
        Row("head.weight", "lm_head.weight", "v d -> v d"),
        Row("blocks.attention_norm.scale", _BLOCK + "ln_1.weight", "d -> d"),
        Row("blocks.attention_norm.bias", _BLOCK + "ln_1.bias", "d -> d"),
        Row("blocks.attention.query.weight", _BLOCK + "attn.c_attn.weight", "d (0/3 h k) -> (h k) d"),
        Row("blocks.attention.query.bias", _BLOCK + "attn.c_attn.bias", "(0/3 h k) -> (h k)"),
        Row("blocks.attention.key.weight", _BLOCK + "attn.c_attn.weight", "d (1/3 n k) -> d n k"),
        Row("blocks.attention.key.bias", _BLOCK + "attn.c_attn.bias", "(1/3 n k) -> n k"),
        Row("blocks.attention.value.weight", _BLOCK + "attn.c_attn.weight", "d (2/3 n k) -> d n k"),
        Row("blocks.attention.value.bias", _BLOCK + "attn.c_attn.bias", "(2/3 n k) -> n k"),
        Row("blocks.attention.out.weight", _BLOCK + "attn.c_proj.weight", "(h k) d -> (h k) d"),
        Row("blocks.attention.out.bias", _BLOCK + "attn.c_proj.bias", "d -> d"),
        Row("blocks.mlp_norm.scale", _BLOCK + "ln_2.weight", "d -> d"),
        Row("blocks.mlp_norm.bias", _BLOCK + "ln_2.bias", "d -> d"),
        Row("blocks.mlp.up.weight", _BLOCK + "mlp.c_fc.weight", "d f -> f d"),
        Row("blocks.mlp.up.bias", _BLOCK + "mlp.c_fc.bias", "f -> f"),
        Row("blocks.mlp.down.weight", _BLOCK + "mlp.c_proj.weight", "f d -> f d"),
        Row("blocks.mlp.down.bias", _BLOCK + "mlp.c_proj.bias", "d -> d"),
    ),
)
