"""What a model costs: its parameters, and the floating-point operations of one training step, from the configuration.

A product of [a, b] with [b, c] is a*b*c multiplications and as many additions, 2abc FLOPs.  For one token that is two
per weight it meets in the forward pass, and four in the backward pass (one product for the gradient of the input, one
for the gradient of the weight): a step costs three forwards.

Model FLOPs (what the mathematics asks for, however it is run; MFU divides them):
    Chowdhery et al. 2022, "PaLM", appendix B, https://arxiv.org/abs/2204.02311
Hardware FLOPs (with what is recomputed to save memory; HFU divides them):
    Korthikanti et al. 2022, "Reducing Activation Recomputation", https://arxiv.org/abs/2205.05198

Norms, softmax, activations, position biases and the optimizer are left out everywhere: they are vector work, well
under a percent of the whole at sizes where MFU is worth stating.  The embedding is a lookup and costs no product.

D width, L layers, H query heads, N key/value heads, K head dim, F ffn, V vocabulary, T context.
"""

from shmap_tp.config.schema import AttentionKernel, Block, Mlp, ModelConfig, Positions, Remat, padded_vocabulary


def parameter_terms(model: ModelConfig, *, padded: bool = False) -> dict[str, int]:
    """Parameters by where they live; `padded` counts the vocabulary rows that the real arrays hold.

    projections  L (D HK + 2 D NK + HK D)   query, key and value, out
    mlp          L m D F                    m = 2 (up, down), with swiglu 3 (gate, up, down)
    norms        L n D + D                  scales only; n = 1 in a parallel block, 2 in a sequential one
    embedding    V D
    positions    T D                        where they are learned
    head         D V                        none of its own where it is tied
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
    """The sum of `parameter_terms`."""
    return sum(parameter_terms(model, padded=padded).values())


def forward_terms(model: ModelConfig, *, causal: bool = True) -> dict[str, int]:
    """FLOPs of the forward pass for one token, by matrix product.

    projections  2 per weight
    scores       L 2 HK T     a query against T keys; fewer key/value heads make it no cheaper
    values       L 2 HK T     T weights against the values
    mlp          2 per weight
    head         2 D V        the true vocabulary, tied or not: padding is nobody's model

    `causal` takes scores and values at half, T / 2 keys being what a query sees on average (T / 2 + 1/2, to be exact).
    PaLM's appendix B and most published figures count them whole: causal=False.
    """
    keys_seen_twice = model.context if causal else 2 * model.context
    attend = model.layers * model.heads * model.head_dim * keys_seen_twice
    return {
        "projections": 2 * model.layers * _projection_weights(model),
        "scores": attend,
        "values": attend,
        "mlp": 2 * model.layers * _mlp_weights(model),
        "head": 2 * model.width * model.vocabulary,
    }


def recomputed_terms(model: ModelConfig, *, causal: bool = True) -> dict[str, int]:
    """FLOPs for one token that the backward pass spends on computing again what the forward pass did not keep.

    `model.attention` must say which it is: what `auto` is, only the devices tell.

    Scores: a kernel's backward pass is flash attention's and begins with them; chunked, where attention_chunk <
    context, each chunk of queries is checkpointed, and its gradient needs them again (not the values product, which
    nothing in it reads); and wherever anything is recomputed, since no policy keeps them.
    With remat full: one more forward of every block, but not of the head.  With full and mlp neither chunks nor a
    kernel find anything kept, so that their scores are computed a third time.
    With remat attention: the first products of the MLP; with up: its gate; with mlp: all of attention but its last
    product.  With dots, or none: nothing else.
    The head is computed once whatever `remat` says: its gradients are taken while its logits are there (`loss`).

    A whole forward is the convention of Korthikanti et al., and an upper bound here: JAX drops a recomputed product
    whose result no gradient reads, which is the last one of a block (the down projection; in a parallel block the
    attention's out projection as well).
    """
    assert model.attention != AttentionKernel.auto, "how much is computed again is not told by auto"
    in_one = model.attention == AttentionKernel.chunked and model.attention_chunk >= model.context
    forward = forward_terms(model, causal=causal)
    again = dict.fromkeys(forward, 0)
    if model.remat == Remat.full:
        again |= {name: flops for name, flops in forward.items() if name != "head"}
    if model.remat == Remat.attention:
        again["mlp"] = forward["mlp"] - 2 * model.layers * model.width * model.ffn
    if model.remat == Remat.attention_and_up and model.mlp == Mlp.swiglu:
        again["mlp"] = 2 * model.layers * model.width * model.ffn
    if model.remat == Remat.mlp:
        last = 2 * model.layers * model.width * model.heads * model.head_dim
        again |= {name: forward[name] for name in ("scores", "values")}
        again["projections"] = forward["projections"] - last
    if not in_one or model.remat in (Remat.attention, Remat.attention_and_up, Remat.all_matmuls):
        again["scores"] += forward["scores"]
    return again


def flops_per_token(model: ModelConfig, *, causal: bool = True) -> int:
    """Model FLOPs of a training step for each of its tokens: three forwards."""
    return 3 * sum(forward_terms(model, causal=causal).values())


def hardware_flops_per_token(model: ModelConfig, *, causal: bool = True) -> int:
    """Model FLOPs and the recomputed ones.  Padded vocabulary and masked-out keys are waste, and not counted."""
    return flops_per_token(model, causal=causal) + sum(recomputed_terms(model, causal=causal).values())


def _projection_weights(model: ModelConfig) -> int:
    """Of one block: query and out [D, HK] each, key and value [D, NK] each."""
    return 2 * model.width * (model.heads + model.kv_heads) * model.head_dim


def _mlp_weights(model: ModelConfig) -> int:
    """Of one block: two matrices of D F, with a gate three."""
    return (3 if model.mlp == Mlp.swiglu else 2) * model.width * model.ffn
