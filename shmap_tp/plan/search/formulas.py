"""Memory and time of a training step from formulas, without tracing or compiling it: to rank and prune candidates.

Per device and step.  A microbatches of n = B T tokens on a dp rank; D width, L layers, H and N query and key/value
heads of K, F the MLP's width, V the padded vocabulary.

Memory (bytes)
    state        4 P parameters, 8 P of AdamW's moments, 4 P of gradients; 2 P of frozen matrices; P as mp and the ZeRO
                 stage leave it to a device (Rajbhandari et al. 2019, https://arxiv.org/abs/1910.02054, section 3)
    saved        2 L n times the values that the remat policy saves (Korthikanti et al. 2022,
                 https://arxiv.org/abs/2205.05198, section 4, split as in model/blocks.py), less what is offloaded
    working set  one layer's activations and their gradients; two gathered FSDP layers; bfloat16 copies of unsharded
                 weights; the logits and the gradient of the head; the scores of chunked attention
Time (seconds)
    matmuls      FLOPs with recomputation (model/flops.py) / peak, of blocks, or of train.matmul_scope, that of
                 train.matmul_precision; of experts more (below)
    attention    FLOPs / peak; for the chunked kernel without the causal half, and its scores through memory
    memory       activations read and written, rows of experts more often (below), weights once per pass and
                 microbatch, the optimizer's update / bandwidth
    collectives  each by the link model, by kind of overlap; of FSDP's gathers and rings, which are mostly overlapped
                 with matmuls, the constant is the share that is not
    host         offloaded bytes / host rate, in each direction; what exceeds the computation is waited for

The time is the sum of these terms, each times a constant of `TIME`, fitted to the compiled steps of benchmarks/results
(`python benchmarks/formula_calibration.py`, which prints the error on models that were left out).  Not modelled: small
matmuls, eight bits in what FSDP gathers, what XLA fuses or spills, contention of collectives, fragmentation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp

from shmap_tp.config.activation_names import SAVED_BY_REMAT
from shmap_tp.config.choices import (
    AttentionKernel,
    Block,
    Documents,
    MatmulRounding,
    MatmulScope,
    PositionKind,
    Remat,
    SavedActivation,
    TensorParallelMode,
)
from shmap_tp.config.schema import Config, MeshConfig, ModelConfig
from shmap_tp.config.validate import GATED_MLPS
from shmap_tp.config.values import padded_vocabulary
from shmap_tp.hardware.devices import DEVICES, generation
from shmap_tp.layers.attention_selection import kernel_name, select_attention
from shmap_tp.layers.experts import rows_of_a_token
from shmap_tp.layers.grouped_matmul import contracted_tile, row_tile
from shmap_tp.layers.head_kernels import Heads
from shmap_tp.layers.positions import make_rotation
from shmap_tp.model.flops import flops_per_token, forward_terms, recomputed_terms
from shmap_tp.model.transformer import layer_options
from shmap_tp.parallel.fsdp import Fsdp
from shmap_tp.plan.search.collective_seconds import (
    LocalParameter,
    collective_seconds,
    local_parameters,
    planned_state_bytes,
)
from shmap_tp.plan.targets import Target, devices_of, machine_of
from shmap_tp.plan.tpu_instructions import GROUPED_EFFICIENCY, KERNEL_EFFICIENCY, grouped_peak

WIDE, NARROW = 4, 2
"""Bytes of a float32 and of a bfloat16."""


@dataclass(frozen=True)
class Estimate:
    """What the formulas say of a step on one device."""

    seconds: float
    peak_bytes: float
    host_bytes: float
    time_terms: dict[str, float]
    """Seconds of each term, before its constant."""
    memory_terms: dict[str, float]
    """Bytes of each term, before its constant."""


def estimate(config: Config, target: Target) -> Estimate:
    """Memory and time of the step of `config` on `target`, in bfloat16.  Raises UserError where the model cannot be
    sharded so."""
    return estimates(config, target, [tuple(config.model.offload)])[0]


def estimates(config: Config, target: Target, offloads: Sequence[tuple[SavedActivation, ...]]) -> list[Estimate]:
    """As `estimate`, of `config` with each of these for model.offload: all but two terms of each are the same."""
    model = replace(config.model, attention=_kernel(config, target), offload=[])
    every, saved = _weights(config), saved_values(config)
    memory, time = memory_terms(config, model, every), time_terms(config, model, every, target)
    compute = time["matmuls"] + time["kernel"] / KERNEL_EFFICIENCY + time["chunked"]
    made, scale = [], SCALE.get(machine_of(target).kind, 1.0)
    for offload in offloads:
        values = sum((saved.get(name, 0.0) for name in offload), 0.0)
        on_host = NARROW * microbatch_tokens(config) * model.layers * values
        host = config.train.microbatches * on_host / machine_of(target).host_rate
        excess = max(0.0, host - compute / 3) + max(0.0, host - compute * 2 / 3)
        of_memory = memory | {"saved": memory["saved"] - on_host}
        of_time = time | {"host": host, "host_excess": excess}
        seconds = scale * combined(TIME, of_time)
        made.append(Estimate(seconds, combined(MEMORY, of_memory), on_host, of_time, of_memory))
    return made


_WEIGHTS: dict[str, list[LocalParameter]] = {}


def _weights(config: Config) -> list[LocalParameter]:
    """The parameters of a mesh, read from the model once."""
    model = replace(config.model, remat=Remat.full, offload=[])
    key = repr((model, config.mesh))
    if key not in _WEIGHTS:
        _WEIGHTS[key] = local_parameters(model, config.mesh, jnp.bfloat16)
    return _WEIGHTS[key]


def combined(constants: Mapping[str, float], terms: Mapping[str, float]) -> float:
    """The sum of the terms, each times its constant."""
    return sum(constants[name] * value for name, value in terms.items())


def _kernel(config: Config, target: Target) -> AttentionKernel:
    isolated = config.data.documents == Documents.isolated
    device, bfloat16 = devices_of(target)[0], jnp.dtype("bfloat16")
    return kernel_name(select_attention(config.model, device, bfloat16, isolated, config.mesh.cp))


# Memory


def memory_terms(config: Config, model: ModelConfig, every: list[LocalParameter]) -> dict[str, float]:
    """Bytes of each term of MEMORY, without offload."""
    tokens = microbatch_tokens(config)
    per_layer = NARROW * tokens
    layer = sum(p.values for p in every if p.in_block)
    dense = sum(p.values * p.layers for p in every if not isinstance(p.placement, Fsdp) and p.dtype == "float32")
    is_fsdp = any(isinstance(p.placement, Fsdp) for p in every)
    head = padded_vocabulary(model) // config.mesh.mp
    trains_head = next(p for p in reversed(every) if p.name in ("head", "embedding")).trained
    chunk = min(config.train.loss_chunk, tokens)
    scores = 0.0
    if model.attention == AttentionKernel.chunked:
        rows = min(model.attention_chunk, model.context) * tokens / model.context
        scores = WIDE * rows * max(_score_keys(model)) * model.heads / config.mesh.mp
    return {
        "state": planned_state_bytes(every, jnp.dtype(str(config.optimizer.momentum_dtype)).itemsize),
        "saved": per_layer * model.layers * sum(saved_values(config).values()),
        "layer": per_layer * layer_values(config),
        "gathered": 2 * NARROW * layer if is_fsdp else 0.0,
        "copies": 0.0 if is_fsdp else NARROW * dense,
        "head": WIDE * head * (chunk + (model.width if trains_head else 0)),
        "scores": scores,
    }


def microbatch_tokens(config: Config) -> int:
    """Tokens of a microbatch on one device, those of an mp group counted once."""
    return config.train.batch // (config.train.microbatches * config.mesh.dp) * config.model.context // config.mesh.cp


def activation_values(config: Config) -> dict[SavedActivation, float]:
    """Values per token and layer of each activation with a name, on one device."""
    model, mesh = config.model, config.mesh
    residual = model.width / (1 if mesh.tensor_parallel == TensorParallelMode.all_reduce else mesh.mp)
    query = model.heads * model.head_dim / mesh.mp
    key_value = 2 * max(model.kv_heads / mesh.mp, 1) * model.head_dim
    gated = model.mlp in GATED_MLPS
    return {
        SavedActivation.input: residual,
        SavedActivation.sublayer_output: residual if model.block == Block.sequential else 0.0,
        SavedActivation.query_key_value: query + key_value,
        SavedActivation.attention_output: query,
        SavedActivation.gate: _hidden_values(model, mesh) if gated else 0.0,
        SavedActivation.up: _hidden_values(model, mesh),
    }


def _hidden_values(model: ModelConfig, mesh: MeshConfig) -> float:
    """Hidden values of the MLP, or of the rows that a device has room for: those of experts that are chosen as often as
    possible."""
    if not model.experts:
        return model.ffn / mesh.mp
    return rows_of_a_token(model, mesh) * model.ffn + model.shared_expert_ffn / mesh.mp


def saved_values(config: Config) -> dict[SavedActivation, float]:
    """Values per token and layer that the remat policy saves, by name; without a policy, every intermediate array."""
    values = activation_values(config)
    if config.model.remat != Remat.none:
        return {name: values[name] for name in SAVED_BY_REMAT[config.model.remat]}
    more = 3 * config.model.width + 2 * (values[SavedActivation.up] + values[SavedActivation.gate])
    return values | {SavedActivation.input: values[SavedActivation.input] + more}


def layer_values(config: Config) -> float:
    """Values per token of the working set of one layer: its activations and as many gradients, and x gathered; of rows
    that are split along time also the keys and values that other devices send to the layer which needs most, and their
    gradients."""
    model, mesh = config.model, config.mesh
    chunk, patterns = model.context // (2 * mesh.cp), [options.pattern for options in layer_options(model)]
    is_near = all(pattern.window is not None and pattern.window - 1 <= chunk for pattern in patterns)
    parts = min(mesh.cp - 1, 1) if is_near else mesh.cp - 1  # near: the chunk before each of two, as large as one part
    gathered = 2 * parts * 2 * max(model.kv_heads / mesh.mp, 1) * model.head_dim
    return 2 * sum(activation_values(config).values()) + 2 * model.width + gathered


# Time


def time_terms(config: Config, model: ModelConfig, every: list[LocalParameter], target: Target) -> dict[str, float]:
    """Seconds of each term of TIME but those of the host."""
    device, microbatches, tokens = machine_of(target), config.train.microbatches, microbatch_tokens(config)
    all_tokens = microbatches * tokens
    share = all_tokens / config.mesh.mp / device.flops
    attention = _attention_flops(model) * share
    flops = flops_per_token(model) + sum(recomputed_terms(model).values())
    excess = grouped_excess(model, tokens, config.mesh, device.kind)
    matmuls = (flops + excess) * share - attention
    eight_bit = DEVICES[device.kind].eight_bit.get(config.train.matmul_precision)
    rounded = _share_of_mlp(model) if config.train.matmul_scope == MatmulScope.mlp else 1.0
    if eight_bit:
        grouped = _expert_flops(model)
        products = flops - 3 * forward_terms(model)["head"] - grouped
        matmuls -= rounded * (products * share - attention) * (1 - device.flops / eight_bit)
        to_nearest = config.train.matmul_rounding == MatmulRounding.nearest
        if excess and eight_bit > device.flops and to_nearest:  # of experts all but the gradients of weights
            by_rows = grouped - 6 * model.experts_per_token * model.width * model.ffn * model.layers
            gain = 1 - grouped_peak(device.flops, None) / grouped_peak(device.flops, eight_bit)
            matmuls -= by_rows * (1 + excess / grouped) * share * gain
    is_chunked = model.attention == AttentionKernel.chunked
    score_bytes = WIDE * sum(_score_keys(model)) * model.heads / config.mesh.mp * all_tokens if is_chunked else 0.0
    passes = 1 + rounded * ROUNDING if eight_bit else 1
    activations = NARROW * all_tokens * model.layers * (passes * layer_values(config) + row_values(model, config.mesh))
    return {
        "matmuls": matmuls,
        "kernel": 0.0 if is_chunked else attention,
        "chunked": 2 * attention if is_chunked else 0.0,
        "heads": 0.0 if is_chunked else head_flops(model, config.mesh.cp, device.kind) * share,
        "scores": score_bytes / device.memory_rate,
        "activations": activations / device.memory_rate,
        "weights": microbatches * 3 * NARROW * sum(p.values * p.layers for p in every) / device.memory_rate,
        "update": 7 * WIDE * sum(p.values * p.layers / p.shards for p in every if p.trained) / device.memory_rate,
        **collective_seconds(config, every, target),
    }


def _score_keys(model: ModelConfig) -> list[int]:
    """The keys with which chunked attention computes the scores of a query, for each layer: a local layer has the
    blocks of `causal_attention`."""
    period = layer_options(model)
    keys = (2 * (period[layer % len(period)].pattern.window or model.context) for layer in range(model.layers))
    return [min(of_layer, model.context) for of_layer in keys]


def _attention_flops(model: ModelConfig) -> int | float:
    """Scores and values per token, forward, backward and recomputed, under the causal mask."""
    forward, again = forward_terms(model), recomputed_terms(model)
    return sum(3 * forward[name] + again[name] for name in ("scores", "values"))


def head_flops(model: ModelConfig, cp: int, kind: str) -> int:
    """FLOPs per token of the projections of attention, where kernels bring heads to it that would fill part of an
    MXU of devices of `kind` (layers/head_kernels.py); three times as many where these kernels compute norms."""
    made = generation(kind)
    rotates = model.positions == PositionKind.rotary and Heads(model.head_dim, make_rotation(model)).is_suited
    is_plain = rotates and cp == 1 and not model.qk_norm_across_heads
    if made is None or made.mxu_side <= model.head_dim or not is_plain:
        return 0
    passes = 3 + (SavedActivation.query_key_value not in SAVED_BY_REMAT[model.remat])
    features = 2 * (model.heads + model.kv_heads) * model.head_dim
    return 2 * passes * features * model.width * model.layers * (3 if model.qk_norm else 1)


ROUNDING = 0.3
"""The time that rounding to eight bits takes, beside that of the other passes over activations.  As shares of their
steps in bfloat16, compiled ones take 0.97 (8B on v5p) and 0.87 (70B on TPU7x) of what the formulas say
(docs/precision.md)."""


# Experts: what they cost beyond matmuls with as many FLOPs

VALUES_OF_A_ROW = 2.9, 4.6
"""How often each value of a row counts among the activations of a layer, where rows stay on their device and where they
are sent to others: with the constant of `TIME` for activations 19 and 30 passes over memory, those of the compiled
layer (docs/performance-notes.d/layers.md), and five gathers more where rows are sent."""


def row_values(model: ModelConfig, mesh: MeshConfig) -> float:
    """Values per token and layer of the rows that a device brings to its experts and back."""
    if not model.experts:
        return 0.0
    return VALUES_OF_A_ROW[mesh.ep > 1] * rows_of_a_token(model, mesh) * model.width


def grouped_excess(model: ModelConfig, tokens: int, mesh: MeshConfig, kind: str) -> float:
    """FLOPs per token, at the peak, whose time the kernels for experts of a TPU take beyond the FLOPs of the chosen
    experts: they compute tiles that two experts share twice, and reach GROUPED_EFFICIENCY.  0 for other devices, of
    `kind`.  `tokens`: those of a microbatch on one dp rank.

    Three products of D F weights, each forward and twice backward; gate and up once more where they are not saved.
    """
    made = generation(kind)
    if not model.experts or made is None or not made.has_kernels:
        return 0.0
    experts, chosen = model.experts // (mesh.ep * mesh.mp), tokens * model.experts_per_token / mesh.mp
    is_whole = contracted_tile(model.width, NARROW) == model.width
    tile = row_tile(int(tokens * rows_of_a_token(model, mesh)), experts, is_whole)
    excess = (chosen + (experts - 1) * tile) / chosen / GROUPED_EFFICIENCY - 1
    return _expert_flops(model) * excess


def _share_of_mlp(model: ModelConfig) -> float:
    """The fraction of the weights of linear layers that an MLP has; with experts, the one that all tokens share."""
    features = model.shared_expert_ffn if model.experts else model.ffn
    mlp = model.width * features * (3 if model.mlp in GATED_MLPS else 2)
    return mlp / (mlp + 2 * model.width * model.head_dim * (model.heads + model.kv_heads))


def _expert_flops(model: ModelConfig) -> int:
    """FLOPs per token of the products of experts, forward, backward and recomputed."""
    saved = (
        2
        if model.remat == Remat.none
        else len({SavedActivation.gate, SavedActivation.up}.intersection(SAVED_BY_REMAT[model.remat]))
    )
    return 2 * (11 - saved) * model.experts_per_token * model.width * model.ffn * model.layers if model.experts else 0


# The constants.  On models that were left out of the fit the time is off by 5 % in the median and 35 % at most, the
# memory by 2 % in the median (0.86 to 1.13 times the compiled peak).  A constant is no efficiency: terms that grow
# together share what they explain.  Three are not fitted (docs/performance-notes.d/planning.md): `host`, copies between
# layouts and waiting for the host, and `heads`, what the kernels save, are from pairs of compiled steps; `host_excess`
# is waiting that no compiled step of the fit has, so its constant is 1 by assumption.

TIME = {
    "matmuls": 0.903,
    "kernel": 3.77,
    "chunked": 1.28,
    "heads": -0.5,
    "scores": 12.0,
    "activations": 6.54,
    "weights": 0.0,
    "update": 7.81,
    "all_reduce": 2.91,
    "sequence": 1.27,
    "collective_matmul": 0.232,
    "scatters": 1.74,
    "once": 0.767,
    "overlapped": 0.282,
    "host": 0.3,
    "host_excess": 1.0,
}
"""By term of `formulas.time_terms`."""

MEMORY = {
    "state": 1.11,
    "saved": 0.987,
    "layer": 1.2,
    "gathered": 0.44,
    "copies": 0.603,
    "head": 0.224,
    "scores": 0.525,
}
"""By term of `formulas.memory_terms`."""

SCALE = {
    "TPU v3": 1.01,
    "TPU v4": 1.04,
    "TPU v5 lite": 0.961,
    "TPU v5": 0.978,
    "TPU v6 lite": 0.975,
    "NVIDIA H100 80GB HBM3": 1.05,
    "NVIDIA H200": 0.972,
}
"""What the time is multiplied by besides, by jax.Device.device_kind."""
