"""GPT-2, GPT-J and GPT-NeoX (Pythia, GPT-NeoX-20B and others).

GPT-2 stores its matrices [inputs, outputs], and its query, key and value as three parts of one matrix.  GPT-J rotates
neighbouring elements (model.rotary_pairing), so its weights stay as they are.  The fused matrix of GPT-NeoX has q, k
and v of the first head, then of the second.
"""

from shmap_tp.pretrained.config_json import RotaryKeys
from shmap_tp.pretrained.family import GELUS, Family, Key, TensorRow, layer_norm, with_bias

_BLOCK = "transformer.h.{layer}."
_KEYS = (
    Key("n_embd", ("width",)),
    Key("n_layer", ("layers",)),
    Key("n_head", ("heads", "kv_heads")),
    Key("n_inner", ("ffn",), lambda config: 4 * config["n_embd"]),
    Key("vocab_size", ("vocabulary",)),
    Key("layer_norm_epsilon", ("norm_epsilon",), 1e-5),
    Key("activation_function", ("mlp",), "gelu_new", GELUS),
)
_FIXED = {"norm": "layernorm", "norm_bias": True, "mlp_bias": True}

GPT2 = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    keys=(*_KEYS, Key("tie_word_embeddings", ("tie_embeddings",), True)),
    fixed=_FIXED
    | {"block": "sequential", "positions": "learned"}
    | dict.fromkeys(("qkv_bias", "attention_output_bias"), True),
    derived=lambda config, where: {"head_dim": config["n_embd"] // config["n_head"]},
    context_key="n_positions",
    prefix="transformer.",
    only={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
    buffers=r"\.attn\.(masked_)?bias$",
    rows=(
        TensorRow("embedding.weight", "transformer.wte.weight", "v d -> v d"),
        TensorRow("positions.weight", "transformer.wpe.weight", "t d -> t d"),
        *layer_norm("norm", "transformer.ln_f"),
        TensorRow("head.weight", "lm_head.weight", "v d -> v d"),
        *layer_norm("blocks.attention_norm", _BLOCK + "ln_1"),
        *with_bias("blocks.attention.query", _BLOCK + "attn.c_attn", "d (0/3 h k) -> (h k) d", "(0/3 h k) -> (h k)"),
        *with_bias("blocks.attention.key", _BLOCK + "attn.c_attn", "d (1/3 n k) -> d n k", "(1/3 n k) -> n k"),
        *with_bias("blocks.attention.value", _BLOCK + "attn.c_attn", "d (2/3 n k) -> d n k", "(2/3 n k) -> n k"),
        *with_bias("blocks.attention.out", _BLOCK + "attn.c_proj", "(h k) d -> (h k) d", "d -> d"),
        *layer_norm("blocks.mlp_norm", _BLOCK + "ln_2"),
        *with_bias("blocks.mlp.up", _BLOCK + "mlp.c_fc", "d f -> f d", "f -> f"),
        *with_bias("blocks.mlp.down", _BLOCK + "mlp.c_proj", "f d -> f d", "d -> d"),
    ),
)


GPTJ = Family(
    architecture="GPTJForCausalLM",
    model_type="gptj",
    keys=(
        *_KEYS,
        Key("rotary_dim", ("rotary_dim",), lambda config: config["n_embd"] // config["n_head"]),
        Key("tie_word_embeddings", ("tie_embeddings",), False, {False: False}),
    ),
    fixed=_FIXED
    | {"block": "parallel", "head_bias": True, "positions": "rotary"}
    | {"rotary_base": 10_000.0, "rotary_pairing": "neighbouring"},
    derived=lambda config, where: {"head_dim": config["n_embd"] // config["n_head"]},
    context_key="n_positions",
    prefix="transformer.",
    only={"scale_attn_weights": (True,), "rotary": (True,)},
    buffers=r"\.attn\.((masked_)?bias|embed_positions)$",
    rows=(
        TensorRow("embedding.weight", "transformer.wte.weight", "v d -> v d"),
        *layer_norm("norm", "transformer.ln_f"),
        *with_bias("head", "lm_head", "v d -> v d", "v -> v"),
        *layer_norm("blocks.norm", _BLOCK + "ln_1"),
        TensorRow("blocks.attention.query.weight", _BLOCK + "attn.q_proj.weight", "(h k) d -> (h k) d"),
        TensorRow("blocks.attention.key.weight", _BLOCK + "attn.k_proj.weight", "(n k) d -> d n k"),
        TensorRow("blocks.attention.value.weight", _BLOCK + "attn.v_proj.weight", "(n k) d -> d n k"),
        TensorRow("blocks.attention.out.weight", _BLOCK + "attn.out_proj.weight", "d (h k) -> (h k) d"),
        *with_bias("blocks.mlp.up", _BLOCK + "mlp.fc_in", "f d -> f d", "f -> f"),
        *with_bias("blocks.mlp.down", _BLOCK + "mlp.fc_out", "d f -> f d", "d -> d"),
    ),
)


_LAYER = "gpt_neox.layers.{layer}."
_FUSED = _LAYER + "attention.query_key_value"

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
    fixed=_FIXED | {"positions": "rotary"},
    derived=lambda config, where: {"head_dim": config["hidden_size"] // config["num_attention_heads"]},
    prefix="gpt_neox.",
    rotary=RotaryKeys(base="rotary_emb_base", partial="rotary_pct", default_partial=0.25),
    buffers=r"\.attention\.((masked_)?bias|rotary_emb\.inv_freq)$",
    rows=(
        TensorRow("embedding.weight", "gpt_neox.embed_in.weight", "v d -> v d"),
        *layer_norm("norm", "gpt_neox.final_layer_norm"),
        TensorRow("head.weight", "embed_out.weight", "v d -> v d"),
        *layer_norm("blocks.attention_norm", _LAYER + "input_layernorm"),
        *with_bias("blocks.attention.query", _FUSED, "(h 0/3 k) d -> (h k) d", "(h 0/3 k) -> (h k)"),
        *with_bias("blocks.attention.key", _FUSED, "(n 1/3 k) d -> d n k", "(n 1/3 k) -> n k"),
        *with_bias("blocks.attention.value", _FUSED, "(n 2/3 k) d -> d n k", "(n 2/3 k) -> n k"),
        *with_bias("blocks.attention.out", _LAYER + "attention.dense", "d (h k) -> (h k) d", "d -> d"),
        *layer_norm("blocks.mlp_norm", _LAYER + "post_attention_layernorm"),
        *with_bias("blocks.mlp.up", _LAYER + "mlp.dense_h_to_4h", "f d -> f d", "f -> f"),
        *with_bias("blocks.mlp.down", _LAYER + "mlp.dense_4h_to_h", "d f -> f d", "d -> d"),
    ),
)
