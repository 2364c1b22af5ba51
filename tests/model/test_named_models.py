"""The models of conf/model that have the name of a published model are that model: what its config.json says.

The figures are those of the config.json files on huggingface.co: openai-community/gpt2 and gpt2-xl, meta-llama/
Llama-2-70b-hf, Llama-3.1-8B and Llama-3.1-70B, mistralai/Mixtral-8x7B-v0.1, Qwen/Qwen3-30B-A3B, and the
text_config of google/gemma-3-4b-pt and gemma-3-12b-pt without its rope_scaling.
"""

import json

import pytest

from shmap_tp.config.compose import CONF, load
from shmap_tp.pretrained.configuration import derive_model

GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5, "n_ctx": 1024, "n_positions": 1024, "vocab_size": 50257,
}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False,
    "mlp_bias": False, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "num_key_value_heads": 8,
}  # fmt: skip
LLAMA3 = LLAMA | {
    "vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 131072,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
SIZES_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
SIZES_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
EXPERTS = {"hidden_act": "silu", "output_router_logits": False, "tie_word_embeddings": False}
PUBLISHED = {
    "gpt2": GPT2 | {"n_embd": 768, "n_head": 12, "n_layer": 12},
    "gpt2_xl": GPT2 | {"n_embd": 1600, "n_head": 25, "n_layer": 48},
    "llama2_70b": LLAMA | SIZES_70B | {"vocab_size": 32000, "max_position_embeddings": 4096},
    "llama3_8b": LLAMA3 | SIZES_8B,
    "llama3_70b": LLAMA3 | SIZES_70B,
    "mixtral_8x7b": EXPERTS | {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096, "vocab_size": 32000,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_experts_per_tok": 2, "num_local_experts": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
    },
    "olmoe_1b_7b": EXPERTS | {
        "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "attention_bias": False, "clip_qkv": None,
        "hidden_size": 2048, "vocab_size": 50304, "intermediate_size": 1024, "max_position_embeddings": 4096,
        "num_attention_heads": 16, "num_hidden_layers": 16, "num_key_value_heads": 16, "num_experts": 64,
        "num_experts_per_tok": 8, "norm_topk_prob": False, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 10000.0, "router_aux_loss_coef": 0.01,
    },
    "qwen3_30b_a3b": EXPERTS | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
        "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048, "vocab_size": 151936,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "num_attention_heads": 32, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "use_sliding_window": False,
    },
}  # fmt: skip
OURS = {"name", "vocabulary_multiple", "context", "remat", "offload", "attention", "attention_chunk", "from_pretrained"}
"""What is chosen for training, and is no property of the published model."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_named_model_is_the_published_one(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    derived = derive_model({"from_pretrained": str(tmp_path)})
    model = load(CONF / "base.yaml", [f"model={name}", "mesh.mp=1"]).model
    wrong = {key: (value, getattr(model, key)) for key, value in derived.items() if key not in OURS}
    assert {key: pair for key, pair in wrong.items() if pair[0] != pair[1]} == {}
    assert wrong.keys() >= {"width", "layers", "heads", "ffn", "vocabulary", "norm", "mlp", "positions"}
