"""Memory and time of a training step from formulas, without tracing or compiling it: to rank and prune candidates.

Per device and step.  A microbatches of n = B T tokens on a dp rank; D width, L layers, H and N query and key/value
heads of K, F the MLP's width, V the padded vocabulary.

Memory (bytes)
    state        4 P parameters, 8 P of AdamW's moments, 4 P of gradients; P as mp and the ZeRO stage leave it to a
                 device (Rajbhandari et al. 2019, https://arxiv.org/abs/1910.02054, section 3)
    saved        2 L n times the values that the remat policy saves (Korthikanti et al. 2022,
                 https://arxiv.org/abs/2205.05198, section 4, split as in model/remat.py), less what is offloaded
    working set  one layer's activations and their gradients; two gathered FSDP layers; bfloat16 copies of unsharded
                 weights; the logits and the gradient of the head; the scores of chunked attention
Time (seconds)
    matmuls      FLOPs with recomputation (model/flops.py) / peak
    attention    FLOPs / peak; for the chunked kernel without the causal half, and its scores through memory
    memory       activations read and written, weights once per pass and microbatch, the optimizer's update / bandwidth
    collectives  those of the analytic ledger, each by the link model, by kind of overlap; of FSDP's gathers and
                 rings, which are mostly overlapped with matmuls, the constant is the share that is not
    host         offloaded bytes / host rate, in each direction; what exceeds the computation is waited for

The time is the sum of these terms, each times a constant of `TIME`, fitted to the compiled steps of benchmarks/results
(`python benchmarks/formula_calibration.py` fits, and prints the error on models that were left out).  Not modelled: the
efficiency of small matmuls, what XLA fuses or spills, contention between collectives, fragmentation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp

from shmap_tp.config.activation_names import SAVED_BY_REMAT
from shmap_tp.config.schema import (
    AttentionKernel,
    Block,
    Config,
    Mlp,
    ModelConfig,
    Remat,
    SavedActivation,
    TensorParallelMode,
    padded_vocabulary,
)
from shmap_tp.layers.attention_selection import kernel_name, select_attention
from shmap_tp.model.flops import flops_per_token, forward_terms, recomputed_terms
from shmap_tp.parallel.fsdp import Fsdp, Zero1
from shmap_tp.plan.communication.parameters import Parameter, parameters
from shmap_tp.plan.instruction_costs import KERNEL_EFFICIENCY
from shmap_tp.plan.search.collective_time import collective_seconds
from shmap_tp.plan.search.fitted import MEMORY, SCALE, TIME
from shmap_tp.plan.search.machine import devices_of, machine_of
from shmap_tp.plan.targets import Target

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
    every, saved = _parameters(config), saved_values(config)
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


_PARAMETERS: dict[str, list[Parameter]] = {}


def _parameters(config: Config) -> list[Parameter]:
    """The parameters of a mesh, read from the model once."""
    model = replace(config.model, remat=Remat.full, offload=[])
    key = repr((model, config.mesh))
    if key not in _PARAMETERS:
        _PARAMETERS[key] = parameters(model, config.mesh)
    return _PARAMETERS[key]


def combined(constants: Mapping[str, float], terms: Mapping[str, float]) -> float:
    """The sum of the terms, each times its constant."""
    return sum(constants[name] * value for name, value in terms.items())


def _kernel(config: Config, target: Target) -> AttentionKernel:
    return kernel_name(select_attention(config.model, devices_of(target)[0], jnp.dtype("bfloat16")))


# Memory


def memory_terms(config: Config, model: ModelConfig, every: list[Parameter]) -> dict[str, float]:
    """Bytes of each term of MEMORY, without offload."""
    tokens = microbatch_tokens(config)
    per_layer = NARROW * tokens
    layer = sum(p.values for p in every if p.in_block)
    dense = sum(p.values * p.layers for p in every if not isinstance(p.placement, Fsdp))
    is_fsdp = any(isinstance(p.placement, Fsdp) for p in every)
    head = padded_vocabulary(model) // config.mesh.mp
    chunk = min(config.train.loss_chunk, tokens)
    scores = 0.0
    if model.attention == AttentionKernel.chunked:
        rows = min(model.attention_chunk, model.context) * tokens / model.context
        scores = WIDE * rows * model.context * model.heads / config.mesh.mp
    return {
        "state": state_bytes(every),
        "saved": per_layer * model.layers * sum(saved_values(config).values()),
        "layer": per_layer * layer_values(config),
        "gathered": 2 * NARROW * layer if is_fsdp else 0.0,
        "copies": 0.0 if is_fsdp else NARROW * dense,
        "head": WIDE * head * (chunk + model.width),
        "scores": scores,
    }


def state_bytes(every: list[Parameter]) -> float:
    """Parameters, moments and gradients of one device."""
    total = 0.0
    for parameter in every:
        size, dp = parameter.values * parameter.layers, _dp_shards(parameter)
        is_fsdp = isinstance(parameter.placement, Fsdp)
        total += 8 * size / dp + (4 + 4) * size / (dp if is_fsdp else 1)
    return total


def _dp_shards(parameter: Parameter) -> int:
    """Over how many dp ranks the optimizer state of a parameter is sharded."""
    placement = parameter.placement
    return placement.groups.count if isinstance(placement, Fsdp | Zero1) else 1


def microbatch_tokens(config: Config) -> int:
    """Tokens of a microbatch on one dp rank."""
    return config.train.batch // (config.train.microbatches * config.mesh.dp) * config.model.context


def activation_values(config: Config) -> dict[SavedActivation, float]:
    """Values per token and layer of each activation with a name, on one device."""
    model, mesh = config.model, config.mesh
    residual = model.width / (1 if mesh.tensor_parallel == TensorParallelMode.all_reduce else mesh.mp)
    query = model.heads * model.head_dim / mesh.mp
    key_value = 2 * max(model.kv_heads / mesh.mp, 1) * model.head_dim
    gated = model.mlp in (Mlp.swiglu, Mlp.geglu)
    return {
        SavedActivation.input: residual,
        SavedActivation.sublayer_output: residual if model.block == Block.sequential else 0.0,
        SavedActivation.query_key_value: query + key_value,
        SavedActivation.attention_output: query,
        SavedActivation.gate: model.ffn / mesh.mp if gated else 0.0,
        SavedActivation.up: model.ffn / mesh.mp,
    }


def saved_values(config: Config) -> dict[SavedActivation, float]:
    """Values per token and layer that the remat policy saves, by name; without a policy, every intermediate array."""
    values = activation_values(config)
    if config.model.remat != Remat.none:
        return {name: values[name] for name in SAVED_BY_REMAT[config.model.remat]}
    more = 3 * config.model.width + 2 * (values[SavedActivation.up] + values[SavedActivation.gate])
    return values | {SavedActivation.input: values[SavedActivation.input] + more}


def layer_values(config: Config) -> float:
    """Values per token of the working set of one layer: its activations and as many gradients, and x gathered."""
    return 2 * sum(activation_values(config).values()) + 2 * config.model.width


# Time


def time_terms(config: Config, model: ModelConfig, every: list[Parameter], target: Target) -> dict[str, float]:
    """Seconds of each term of TIME but those of the host."""
    device = machine_of(target)
    microbatches, tokens = config.train.microbatches, microbatch_tokens(config)
    all_tokens = microbatches * tokens
    share = all_tokens / config.mesh.mp / device.flops
    attention = _attention_flops(model) * share
    matmuls = (flops_per_token(model) + sum(recomputed_terms(model).values())) * share - attention
    is_chunked = model.attention == AttentionKernel.chunked
    score_bytes = WIDE * model.layers * model.heads / config.mesh.mp * model.context * all_tokens if is_chunked else 0.0
    weights = sum(p.values * p.layers for p in every)
    activations = NARROW * all_tokens * model.layers * layer_values(config)
    return {
        "matmuls": matmuls,
        "kernel": 0.0 if is_chunked else attention,
        "chunked": 2 * attention if is_chunked else 0.0,
        "scores": score_bytes / device.memory_rate,
        "activations": activations / device.memory_rate,
        "weights": microbatches * 3 * NARROW * weights / device.memory_rate,
        "update": 7 * WIDE * sum(p.values * p.layers / _dp_shards(p) for p in every) / device.memory_rate,
        **collective_seconds(config, every, target),
    }


def _attention_flops(model: ModelConfig) -> int | float:
    """Scores and values per token, forward, backward and recomputed, under the causal mask."""
    forward, again = forward_terms(model), recomputed_terms(model)
    return sum(3 * forward[name] + again[name] for name in ("scores", "values"))
