"""Parameter count of a model, and FLOPs of a training step, from the configuration.

A matmul of [a, b] with [b, c] is a*b*c multiplications and as many additions: 2abc FLOPs.  For one token that is two
FLOPs per weight in the forward pass and four in the backward pass (one matmul for the gradient of the input, one for
the gradient of the weight).  A training step therefore costs three forward passes.

Model FLOPs, the basis of MFU: the work that the mathematics requires, without recomputation.
    Chowdhery et al. 2022, "PaLM", appendix B, https://arxiv.org/abs/2204.02311
Hardware FLOPs, the basis of HFU: model FLOPs and the recomputation by activation checkpointing.
    Korthikanti et al. 2022, "Reducing Activation Recomputation", https://arxiv.org/abs/2205.05198

Norms, softmax, activations, position biases and the optimizer are not counted: they are elementwise work, well under
one percent of the total for models whose MFU is worth stating.  The embedding is a lookup without a matmul.

D width, L layers, H query heads, N key/value heads, K head dim, F ffn, V vocabulary, T context.
"""

from shmap_tp.config.schema import AttentionKernel, Block, Mlp, ModelConfig, Positions, Remat, padded_vocabulary


def parameter_terms(model: ModelConfig, *, padded: bool = False) -> dict[str, int]:
    """Parameters by kind; `padded` also counts the padding rows of the vocabulary, which the arrays have.

    projections  L (D HK + 2 D NK + HK D)   query, key and value, out
    mlp          L m D F                    m = 2 (up, down), with swiglu 3 (gate, up, down)
    norms        L n D + D                  scales only; n = 1 in a parallel block, 2 in a sequential one
    embedding    V D
    positions    T D                        if learned, else 0
    head         D V                        0 if tied to the embedding
    """
    vocabulary = padded_vocabulary(model) if padded else model.vocabulary
    norms_per_block = 1 if model.block == Block.parallel else 2
    return {
        "embedding": vocabulary * model.width,
        "positions": model.context * model.width if model.positions == Positions.learned else 0,
        "projections": model.layers * _projection_weights(model),
        "mlp": model.layers * _mlp_weights(model),
        "norms": (model.layers * norms_per_block + 1) * model.width,
        "head": 0 if model.tie_embeddings else model.width * vocabulary,
    }


def parameters(model: ModelConfig, *, padded: bool = False) -> int:
    """Total number of parameters: the sum of `parameter_terms`."""
    return sum(parameter_terms(model, padded=padded).values())


def forward_terms(model: ModelConfig, *, causal: bool = True) -> dict[str, int]:
    """FLOPs of the forward pass for one token, by matmul.

    projections  2 per weight
    scores       L 2 HK T     each query times T keys, whatever the number of key/value heads
    values       L 2 HK T     T attention weights times the values
    mlp          2 per weight
    head         2 D V        tied or not; without padding of the vocabulary

    `causal` counts half of scores and values, since a query attends to T / 2 keys on average (exactly T / 2 + 1/2).
    PaLM's appendix B and most published figures count them in full: causal=False.
    """
    twice_the_keys = model.context if causal else 2 * model.context
    attention = model.layers * model.heads * model.head_dim * twice_the_keys
    return {
        "projections": 2 * model.layers * _projection_weights(model),
        "scores": attention,
        "values": attention,
        "mlp": 2 * model.layers * _mlp_weights(model),
        "head": 2 * model.width * model.vocabulary,
    }


def recomputed_terms(model: ModelConfig, *, causal: bool = True) -> dict[str, int]:
    """FLOPs for one token of recomputation in the backward pass, by matmul.

    `model.attention` must name a kernel: which one `auto` selects depends on the devices.

    remat                scores               values   projections               mlp                        head
    none                 0 (kernel: 1)        0        0                         0                          0
    all_matmuls          1                    0        0                         0                          0
    attention_and_up     1                    0        0                         gate                       0
    attention            1                    0        0                         gate and up                0
    mlp                  1 (kernel: 2)        1        all but the output one    0                          0
    full                 1 (kernel: 2)        1        all                       all                        0

    1 is one forward computation of that term; "kernel" stands for a flash attention kernel, and also for chunked
    attention with attention_chunk < context.  A flash attention kernel recomputes the scores in its backward pass.
    Chunked attention checkpoints each chunk of queries and recomputes its scores too, but not the values matmul, whose
    result no gradient reads.  No remat policy saves scores.
    The head is never recomputed: its gradients are taken while the logits of its chunk exist (see `loss`).

    The full forward pass of remat=full is the convention of Korthikanti et al. and an upper bound here: JAX removes a
    recomputed matmul whose result no gradient reads, such as the last one of a block.
    """
    assert model.attention != AttentionKernel.auto, "attention=auto does not determine what is recomputed"
    single_chunk = model.attention == AttentionKernel.chunked and model.attention_chunk >= model.context
    forward = forward_terms(model, causal=causal)
    recomputed = dict.fromkeys(forward, 0)
    if model.remat == Remat.full:
        recomputed |= {name: flops for name, flops in forward.items() if name != "head"}
    if model.remat == Remat.attention:
        recomputed["mlp"] = forward["mlp"] - 2 * model.layers * model.width * model.ffn
    if model.remat == Remat.attention_and_up and model.mlp == Mlp.swiglu:
        recomputed["mlp"] = 2 * model.layers * model.width * model.ffn
    if model.remat == Remat.mlp:
        output = 2 * model.layers * model.width * model.heads * model.head_dim
        recomputed |= {name: forward[name] for name in ("scores", "values")}
        recomputed["projections"] = forward["projections"] - output
    if not single_chunk or model.remat in (Remat.attention, Remat.attention_and_up, Remat.all_matmuls):
        recomputed["scores"] += forward["scores"]
    return recomputed


def flops_per_token(model: ModelConfig, *, causal: bool = True) -> int:
    """Model FLOPs of a training step per token: three forward passes."""
    return 3 * sum(forward_terms(model, causal=causal).values())


def hardware_flops_per_token(model: ModelConfig, *, causal: bool = True) -> int:
    """Model FLOPs and recomputed FLOPs of a training step per token.  Padding and masked-out keys are not counted."""
    return flops_per_token(model, causal=causal) + sum(recomputed_terms(model, causal=causal).values())


def _projection_weights(model: ModelConfig) -> int:
    """Attention weights of one block: query and output [D, HK] each, key and value [D, NK] each."""
    return 2 * model.width * (model.heads + model.kv_heads) * model.head_dim


def _mlp_weights(model: ModelConfig) -> int:
    """MLP weights of one block: two matrices of D F, three with a gate."""
    return (3 if model.mlp == Mlp.swiglu else 2) * model.width * model.ffn
