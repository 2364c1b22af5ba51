"""GPT-J.  Its rotary encoding rotates neighbouring elements (model.rotary_pairing), so its weights stay as they are."""

from shmap_tp.pretrained.family import GELUS, Family, Key, Row

_BLOCK = "transformer.h.{layer}."

GPTJ = Family(
    architecture="GPTJForCausalLM",
    model_type="gptj",
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
        Key("rotary_dim", ("rotary_dim",), lambda config: config["n_embd"] // config["n_head"]),
        Key("tie_word_embeddings", ("tie_embeddings",), False, {False: False}),
    ),
    fixed={
        "block": "parallel",
        "norm": "layernorm",
        "norm_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        "positions": "rotary",
        "rotary_base": 10_000.0,
        "rotary_pairing": "neighbouring",
    },
    derived=lambda config, where: {"head_dim": config["n_embd"] // config["n_head"]},
    context_key="n_positions",
    prefix="transformer.",
    only={"scale_attn_weights": (True,), "rotary": (True,)},
    buffers=r"\.attn\.((masked_)?bias|embed_positions)$",
    rows=(
        Row("embedding.weight", "transformer.wte.weight", "v d -> v d"),
        Row("norm.scale", "transformer.ln_f.weight", "d -> d"),
        Row("norm.bias", "transformer.ln_f.bias", "d -> d"),
        Row("head.weight", "lm_head.weight", "v d -> v d"),
        Row("head.bias", "lm_head.bias", "v -> v"),
        Row("blocks.norm.scale", _BLOCK + "ln_1.weight", "d -> d"),
        Row("blocks.norm.bias", _BLOCK + "ln_1.bias", "d -> d"),
        Row("blocks.attention.query.weight", _BLOCK + "attn.q_proj.weight", "(h k) d -> (h k) d"),
        Row("blocks.attention.key.weight", _BLOCK + "attn.k_proj.weight", "(n k) d -> d n k"),
        Row("blocks.attention.value.weight", _BLOCK + "attn.v_proj.weight", "(n k) d -> d n k"),
        Row("blocks.attention.out.weight", _BLOCK + "attn.out_proj.weight", "d (h k) -> (h k) d"),
        Row("blocks.mlp.up.weight", _BLOCK + "mlp.fc_in.weight", "f d -> f d"),
        Row("blocks.mlp.up.bias", _BLOCK + "mlp.fc_in.bias", "f -> f"),
        Row("blocks.mlp.down.weight", _BLOCK + "mlp.fc_out.weight", "d f -> f d"),
        Row("blocks.mlp.down.bias", _BLOCK + "mlp.fc_out.bias", "d -> d"),
    ),
)
