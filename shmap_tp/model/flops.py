"""Parameter count of a model, and FLOPs of a training step, from its modules.

Nothing here knows a layer: parameters are those of the model's own tree, and matmuls are counted in its forward and
backward pass, traced without devices or arrays (`tracing.py`).  A block or an MLP that is given as a component
is therefore counted like those that the configuration names, and what cannot be counted raises UncountedError.

A matmul of [a, b] with [b, c] is a*b*c multiplications and as many additions: 2abc FLOPs.  For one token that is two
FLOPs per weight in the forward pass and four in the backward pass (one matmul for the gradient of the input, one for
the gradient of the weight).  A training step therefore costs three forward passes; with adapters (LoRA) about two,
since the matrices beside them are frozen.

Model FLOPs, the basis of MFU: the work that the mathematics requires, without recomputation.
    Chowdhery et al. 2022, "PaLM", appendix B, https://arxiv.org/abs/2204.02311
Hardware FLOPs, the basis of HFU: model FLOPs and the recomputation by activation checkpointing.
    Korthikanti et al. 2022, "Reducing Activation Recomputation", https://arxiv.org/abs/2205.05198

Norms, softmax, activations, position encodings and the optimizer are not counted: with AdamW they are elementwise work,
well under one percent of the total for models whose MFU is worth stating.  The embedding is a lookup without a matmul.

D width, L layers, H query heads, K head dim, V vocabulary, T context.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import equinox as eqx

from shmap_tp.config.choices import AttentionKernel, Remat
from shmap_tp.config.schema import ModelConfig
from shmap_tp.config.values import padded_vocabulary
from shmap_tp.errors import UserError
from shmap_tp.model.sharded_model import CONFIGURED_MODEL, ModelComponents, parameter_shapes
from shmap_tp.model.tracing import (
    SCORES,
    VALUES,
    WINDOW,
    TracedAttention,
    Visit,
    bodies,
    equations,
    trace_gradients,
)
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.partitioning import leaves_by_path
from shmap_tp.parallel.tensor_parallel import AllReduce

Terms = dict[str, int]
"""blocks: the matmuls of all blocks with weights, and others of a block's own.  scores, values: the matmuls of
attention.  head: the output projection."""


def parameter_terms(
    model: ModelConfig, *, padded: bool = False, components: ModelComponents = CONFIGURED_MODEL
) -> Terms:
    """Parameters by module, such as embedding, blocks.attention, blocks.mlp, norm; of all layers together.

    `padded` also counts the padding rows of the vocabulary in embedding and head, which the arrays have.
    """
    return _terms(model, parameter_shapes(model, components), padded=padded)


def _terms(model: ModelConfig, shapes: Transformer, *, padded: bool) -> Terms:
    terms: Terms = {}
    for path, leaf in leaves_by_path(shapes, ".").items():
        module, *inside = path.split(".")
        name = f"{module}.{inside[0]}" if module == "blocks" else module
        size, rows = math.prod(leaf.shape), padded_vocabulary(model)
        if not padded and module in ("embedding", "head") and leaf.shape[0] == rows:
            size = size // rows * model.vocabulary
        terms[name] = terms.get(name, 0) + size
    return terms


def parameters(model: ModelConfig, *, padded: bool = False, components: ModelComponents = CONFIGURED_MODEL) -> int:
    """Total number of parameters: the sum of `parameter_terms`."""
    return sum(parameter_terms(model, padded=padded, components=components).values())


def frozen_parameters(model: ModelConfig, *, components: ModelComponents = CONFIGURED_MODEL) -> int:
    """How many of the `parameters` are not trained."""
    shapes = parameter_shapes(model, components)
    trained = eqx.filter(shapes, components.trained(model, shapes))
    return sum(_terms(model, shapes, padded=False).values()) - sum(_terms(model, trained, padded=False).values())


def forward_terms(model: ModelConfig, *, causal: bool = True, components: ModelComponents = CONFIGURED_MODEL) -> Terms:
    """FLOPs of the forward pass for one token, by matmul.

    blocks    2 per weight of a matmul
    scores    L 2 HK T     each query times T keys, whatever the number of key/value heads; min(W, T) in a window of W
    values    L 2 HK T     T attention weights times the values; min(W, T) of them
    head      2 D V        tied or not; without padding of the vocabulary

    `causal` counts half of scores and values, since a query attends to T / 2 keys on average (exactly T / 2 + 1/2); in
    a window to W - W (W - 1) / 2T.
    PaLM's appendix B and most published figures count them in full: causal=False.
    """
    return _count(model, components, causal).forward | {"head": 2 * model.width * model.vocabulary}


def recomputed_terms(
    model: ModelConfig, *, causal: bool = True, components: ModelComponents = CONFIGURED_MODEL
) -> Terms:
    """FLOPs for one token of recomputation in the backward pass, by matmul: results that a gradient reads and the
    policy does not save.

    `model.attention` must name a kernel: which one `auto` selects depends on the devices.  For the blocks of
    model/blocks.py:

    remat                scores               values   blocks                                      head
    none                 0 (kernel: 1)        0        0                                           0
    all_matmuls          1                    0        0                                           0
    attention_and_up     1                    0        gate                                        0
    attention            1                    0        gate and up                                 0
    attention_output     1                    0        all but down; in parallel blocks not out    0
    mlp                  1 (kernel: 2)        1        query, key and value                        0
    full                 1 (kernel: 2)        1        all                                         0

    1 is one forward computation of that term; "kernel" stands for a flash attention kernel, and also for chunked
    attention with attention_chunk < context.  A flash attention kernel recomputes the scores in its backward pass.
    Chunked attention checkpoints each chunk of queries and recomputes its scores too, but not the values matmul, whose
    result no gradient reads.  No remat policy saves scores.
    The head is never recomputed: its gradients are taken while the logits of its chunk exist (see `loss`).

    The full forward pass of remat=full is the convention of Korthikanti et al. and an upper bound here: JAX removes a
    recomputed matmul whose result no gradient reads, such as the last one of a block.
    """
    assert model.attention != AttentionKernel.auto, "attention=auto does not determine what is recomputed"
    count = _count(model, components, causal)
    recomputed = count.recomputed
    if model.remat == Remat.full:
        recomputed = recomputed | {"blocks": count.forward["blocks"]}
    return recomputed | {"head": 0}


def flops_per_token(model: ModelConfig, *, causal: bool = True, components: ModelComponents = CONFIGURED_MODEL) -> int:
    """Model FLOPs of a training step per token: three forward passes, but for matmuls with a constant.  A frozen
    matrix has no gradient, only its input has one."""
    count = _count(model, components, causal)
    products = 2 if count.trains_head else 1
    backward = count.backward | {"head": 2 * products * model.width * model.vocabulary}
    return sum(forward_terms(model, causal=causal, components=components).values()) + sum(backward.values())


def hardware_flops_per_token(
    model: ModelConfig, *, causal: bool = True, components: ModelComponents = CONFIGURED_MODEL
) -> int:
    """Model FLOPs and recomputed FLOPs of a training step per token.  Padding and masked-out keys are not counted."""
    recomputed = recomputed_terms(model, causal=causal, components=components)
    return flops_per_token(model, causal=causal, components=components) + sum(recomputed.values())


@dataclass(frozen=True)
class _Count:
    """FLOPs of all blocks for one token, by the pass that they belong to."""

    forward: Terms
    backward: Terms
    """FLOPs of the backward pass, without recomputation."""
    recomputed: Terms
    trains_head: bool


_COUNTS: dict[tuple[str, ModelComponents, bool], _Count] = {}
"""What was counted before: a trace takes some tenths of a second."""


def _count(model: ModelConfig, components: ModelComponents, causal: bool) -> _Count:
    key = repr(model), components, causal
    if key not in _COUNTS:
        shapes = parameter_shapes(model, components, TracedAttention(model.context, _recomputes_scores(model)))
        terms, names = ("blocks", "scores", "values"), ("forward", "backward", "recomputed")
        passes = {name: dict.fromkeys(terms, 0) for name in names}
        trained = components.trained(model, shapes)
        for visit in equations(trace_gradients(shapes, AllReduce(), (1, model.context), is_trained=trained)):
            if not (flops := matmul_flops(visit)):
                continue
            name = "recomputed" if visit.is_recomputed else "backward" if visit.is_backward else "forward"
            passes[name][_term(visit)] += _visible(flops, visit, model.context, causal)
        counted = {name: _per_token(terms, model.context) for name, terms in passes.items()}
        head = trained.embedding if trained.head is None else trained.head
        _COUNTS[key] = _Count(**counted, trains_head=head.weight)
    return _COUNTS[key]


def _per_token(terms: Terms, tokens: int) -> Terms:
    return {name: flops // tokens for name, flops in terms.items()}


def _term(visit: Visit) -> str:
    return next((term for term, scope in (("scores", SCORES), ("values", VALUES)) if scope in visit.scope), "blocks")


def _recomputes_scores(model: ModelConfig) -> bool:
    """Whether attention's backward pass does; for `auto`, which determines only what is recomputed, it is open."""
    return model.attention != AttentionKernel.chunked or model.attention_chunk < model.context


def _visible(flops: int, visit: Visit, time: int, causal: bool) -> int:
    """FLOPs for the pairs of queries and keys that the mask leaves, of `flops` for all; other matmuls have all."""
    if _term(visit) == "blocks":
        return flops
    if window := int(re.search(rf"{WINDOW}(\d+)", visit.scope)[1]):
        keys = window * time - window * (window - 1) // 2 if causal else window * time
        return flops * keys // time**2
    return flops // 2 if causal else flops


# FLOPs of the matmuls of a traced program

UNCOUNTED = re.compile(r"dot|conv_|call|fft|solve|cholesky|^lu$|^qr$|eig|svd|householder")
"""Primitives that do more than elementwise work, and that `matmul_flops` cannot count; not those that only contain
other equations, which are visited themselves."""


class UncountedError(UserError):
    """A program contains work whose FLOPs cannot be counted."""


def matmul_flops(visit: Visit) -> int:
    """FLOPs of an equation, as often as it runs: 0 for elementwise work, and for what only contains other equations.

    Raises UncountedError for a kernel, for another operation of linear algebra, and for a matmul in a while loop or a
    branch.
    """
    name, equation = visit.name, visit.equation
    if name == "dot_general":
        ((contracted, _), _), left = equation.params["dimension_numbers"], equation.invars[0].aval
        flops = 2 * equation.outvars[0].aval.size * math.prod(left.shape[dim] for dim in contracted)
    elif name in ("ragged_dot", "ragged_dot_general"):
        flops = _ragged_flops(equation)
    elif name == "conv_general_dilated":
        kernel, outputs = equation.invars[1].aval, equation.params["dimension_numbers"].rhs_spec[0]
        flops = 2 * equation.outvars[0].aval.size * (kernel.size // kernel.shape[outputs])
    elif UNCOUNTED.search(name) and (name == "pallas_call" or not bodies(equation.params)):
        raise UncountedError(
            f"the FLOPs of {name} in {visit.scope or 'the model'} are not known; write it with jnp.einsum, jnp.matmul "
            f"or the `attend` that a block is given"
        )
    else:
        return 0
    if visit.loop:
        raise UncountedError(
            f"a matmul in {visit.scope or 'the model'} is in a {visit.loop}, so it is unknown how often it runs; "
            f"use lax.scan instead, or jnp.where"
        )
    return flops * visit.times


def _ragged_flops(equation: Any) -> int:
    """2abc for a grouped product: every row belongs to one group, and is multiplied once."""
    left, right, out = equation.invars[0].aval, equation.invars[1].aval, equation.outvars[0].aval
    rows = left.shape[0]
    if right.ndim == 3:  # rows[a b] of the groups, each with a matrix
        return 2 * rows * math.prod(right.shape[1:])
    return 2 * rows * math.prod(out.shape[1:])  # the gradient of the matrices, [groups b c]
