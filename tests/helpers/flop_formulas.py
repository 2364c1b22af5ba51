"""Parameters and FLOPs of the models that a configuration can name, as formulas: an independent reference for what
`model/flops.py` derives from the modules.

D width, L layers, H query heads, N key/value heads, K head dim, F ffn, V vocabulary, T context.
"""

from shmap_tp.config.activation_names import SAVED_BY_REMAT
from shmap_tp.config.schema import (
    GATED_MLPS,
    AttentionKernel,
    Block,
    ModelConfig,
    NormPlacement,
    PositionKind,
    Remat,
    SavedActivation,
    padded_vocabulary,
)


def projection_weights(model: ModelConfig) -> int:
    """Attention weights of one block: query and output [D, HK] each, key and value [D, NK] each."""
    return 2 * model.width * (model.heads + model.kv_heads) * model.head_dim


def mlp_weights(model: ModelConfig) -> int:
    """MLP weights of one block: two matrices of D F, three with a gate; of each expert, with a router [D, E]."""
    return _mlp_weights(model, model.experts)


def active_mlp_weights(model: ModelConfig) -> int:
    """Those that a token is multiplied with."""
    return _mlp_weights(model, model.experts_per_token)


def _mlp_weights(model: ModelConfig, experts: int) -> int:
    each = (3 if model.mlp in GATED_MLPS else 2) * model.width
    if not model.experts:
        return each * model.ffn
    return each * (experts * model.ffn + model.shared_expert_ffn) + model.width * model.experts


def biases(model: ModelConfig) -> int:
    """Biases of one block except those of its norms."""
    qkv = (model.heads + 2 * model.kv_heads) * model.head_dim
    mlp = (2 if model.mlp in GATED_MLPS else 1) * model.ffn + model.width
    return model.qkv_bias * qkv + model.attention_output_bias * model.width + model.mlp_bias * mlp


def parameters(model: ModelConfig, *, padded: bool) -> int:
    vocabulary = padded_vocabulary(model) if padded else model.vocabulary
    norms_per_block = 1 if model.block == Block.parallel else 4 if model.norm_placement == NormPlacement.both else 2
    norm = (2 if model.norm_bias else 1) * model.width
    heads = model.heads + model.kv_heads if model.qk_norm_across_heads else 2
    head_norms = heads * model.head_dim if model.qk_norm else 0
    return (
        (1 if model.tie_embeddings else 2) * vocabulary * model.width
        + (model.context * model.width if model.positions == PositionKind.learned else 0)
        + model.layers * (projection_weights(model) + mlp_weights(model) + biases(model))
        + model.layers * (norms_per_block * norm + head_norms)
        + norm
    )


def active_parameters(model: ModelConfig) -> int:
    """Those that a token is multiplied with."""
    return parameters(model, padded=False) - model.layers * (mlp_weights(model) - active_mlp_weights(model))


def keys_of_a_token(model: ModelConfig, *, causal: bool) -> float:
    """How many keys a query sees on average, summed over layers: T / 2, in a window W - W (W - 1) / 2T; all T and W
    where the mask is not counted."""
    kinds, total = model.layer_pattern or ["local"], 0.0
    for layer in range(model.layers):
        window = model.window if kinds[layer % len(kinds)] == "local" else None
        if window is None:
            total += model.context / 2 if causal else model.context
        else:
            total += window - causal * window * (window - 1) / (2 * model.context)
    return total


def forward(model: ModelConfig) -> dict[str, int]:
    """Of one token, by matmul, with causal attention counted at half."""
    attention = int(2 * model.heads * model.head_dim * keys_of_a_token(model, causal=True))
    return {
        "projections": 2 * model.layers * projection_weights(model),
        "scores": attention,
        "values": attention,
        "mlp": 2 * model.layers * active_mlp_weights(model),
        "head": 2 * model.width * model.vocabulary,
    }


def recomputed(model: ModelConfig) -> int:
    """Of one token: what each rematerialisation policy repeats."""
    terms = forward(model)
    up = 2 * model.layers * model.width * model.ffn
    output = 2 * model.layers * model.width * model.heads * model.head_dim
    unread = output if model.block == Block.parallel else 0
    attention = terms["scores"] + terms["values"]
    repeated = {
        Remat.none: 0,
        Remat.all_matmuls: 0,
        Remat.attention_and_up: up if model.mlp in GATED_MLPS else 0,
        Remat.attention: terms["mlp"] - up,
        Remat.mlp: attention + terms["projections"] - output,
        Remat.attention_output: terms["projections"] + terms["mlp"] - up - unread,
        Remat.full: attention + terms["projections"] + terms["mlp"],
    }[model.remat]
    single_chunk = model.attention == AttentionKernel.chunked and model.attention_chunk >= model.context
    saves_attention = SavedActivation.attention_output in SAVED_BY_REMAT[model.remat]
    return repeated + (terms["scores"] if saves_attention or not single_chunk else 0)


def flops_per_token(model: ModelConfig) -> int:
    return 3 * sum(forward(model).values())
