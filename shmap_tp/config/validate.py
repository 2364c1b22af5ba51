"""The rules that a configuration must satisfy on any machine.

Composition (`compose.py`) has checked names and types; this module checks sizes, divisibility and combinations.  What
depends on the devices of the machine is checked where they are known: `parallel/mesh.py`, `layers/`.
"""

import math
from dataclasses import replace

from shmap_tp.config.activation_names import SAVED_BY_REMAT
from shmap_tp.config.context_parallel import check_context_parallel
from shmap_tp.config.experts import check_experts
from shmap_tp.config.mesh_sizes import product_in_words
from shmap_tp.config.schema import (
    AUTO,
    GATED_MLPS,
    AdapterConfig,
    Block,
    Config,
    DataConfig,
    FsdpGradients,
    LayerKind,
    MeshConfig,
    ModelConfig,
    Norm,
    NormPlacement,
    OptimizerConfig,
    PositionKind,
    RotaryPairing,
    RotaryScaling,
    SampleConfig,
    SavedActivation,
    Schedule,
    TensorParallelMode,
    TrainConfig,
    Zero,
    padded_vocabulary,
)
from shmap_tp.config.sources import check_sources
from shmap_tp.config.values import check_bounds, check_paths
from shmap_tp.errors import UserError, shown


def validate(config: Config) -> None:
    """Check every rule that does not depend on the machine.  Raises UserError naming the first that is broken."""
    mesh, model = config.mesh, config.model
    if isinstance(mesh.dp, str) and mesh.dp != AUTO:
        raise UserError(f"mesh.dp={mesh.dp} must be an integer or {AUTO}")
    check_paths(config)
    _check_source(config.data)
    check_sources(config.data)
    check_bounds(config)
    _check_optimizer(config.optimizer, config.train.steps)
    _check_prompts(config.sample)
    _check_profile(config.train)
    _check_mp_divides_model(mesh, model)
    check_context_parallel(config)
    _validate_model(mesh, model)
    _check_preferences(config.train, model.adapter)
    _check_fsdp_gradients(mesh, model)
    _check_batch(mesh, config.train)


def resolve_auto(config: Config, devices: int | None = None) -> Config:
    """Replace mesh.dp=auto by a number, and raise train.microbatches to respect train.max_sequences_per_device.

    The global batch, and with it the data of each step, stays the same.  `devices` is the number of devices; None where
    auto is not allowed.  Raises UserError if auto is not allowed or the number of devices does not suit the rest.
    """
    mesh, train = config.mesh, config.train
    if mesh.dp == AUTO:
        if devices is None:
            raise UserError(f"mesh.dp={AUTO} is only for training, on all available devices; give mesh.dp as a number")
        what, fit = f"the {devices} available devices (mesh.dp={AUTO})", _fitting_mp(mesh, config.model)
        _check_divides("mesh.cp", mesh.cp, what, devices)
        what = what if mesh.cp == 1 else f"{what} / mesh.cp={mesh.cp}"
        _check_divides("mesh.mp", mesh.mp, what, devices // mesh.cp, [n for n in fit if devices // mesh.cp % n == 0])
        mesh = replace(mesh, dp=devices // mesh.cp // mesh.mp)
        try:
            validate(replace(config, mesh=mesh))
        except UserError as error:
            raise UserError(f"mesh.dp={AUTO} is {mesh.dp} on {devices} devices, and {error}") from error
    sequences = train.batch // train.microbatches // mesh.dp
    limit = train.max_sequences_per_device or sequences
    factor = next(n for n in range(1, sequences + 1) if sequences % n == 0 and sequences // n <= limit)
    return replace(config, mesh=mesh, train=replace(train, microbatches=train.microbatches * factor))


def _check_source(data: DataConfig) -> None:
    words = ["null"] if data.source is None else data.source.split()
    if words not in (["null"], ["stdlib"]) and words[:1] not in (["--text"], ["--dataset"], ["--source"]):
        raise UserError(
            f"data.source={data.source}: there is no such source; use stdlib, null, or the arguments of "
            f"`python -m shmap_tp.prepare`\nthat prepare data.dir, such as '--dataset NAME' or '--text FILES'"
        )


def _check_optimizer(optimizer: OptimizerConfig, steps: int) -> None:
    _check_schedule(optimizer, steps)
    if not 0 < optimizer.epsilon < math.inf:
        raise UserError(f"optimizer.epsilon={optimizer.epsilon} must be above 0 and finite; 1.0e-8 is usual")
    if not optimizer.clip_norm > 0:
        raise UserError(f"optimizer.clip_norm={optimizer.clip_norm} must be above 0; 1.0 is usual")


def _check_schedule(optimizer: OptimizerConfig, steps: int) -> None:
    fraction, end, warmup = optimizer.decay_fraction, optimizer.decay_steps, optimizer.warmup_steps
    if not 0 < fraction <= 1:
        raise UserError(f"optimizer.decay_fraction={fraction} must be above 0 and at most 1; 0.1 is usual")
    if optimizer.schedule == Schedule.constant or (end <= warmup and steps <= warmup):  # the run has no decay
        return
    if end <= warmup:
        raise UserError(
            f"optimizer.decay_steps={end} must be above optimizer.warmup_steps={warmup}: the decay follows the "
            f"warm-up, and both count from the first step"
        )
    decay = round(fraction * end)
    if optimizer.schedule == Schedule.wsd and not 1 <= decay <= end - warmup:
        raise UserError(
            f"optimizer.decay_fraction={fraction} of optimizer.decay_steps={end} is {decay} steps, which must be from "
            f"1 to {end - warmup},\nthe steps after optimizer.warmup_steps={warmup}; change one of them, or use "
            f"optimizer.schedule=linear or constant"
        )


def _check_prompts(sample: SampleConfig) -> None:
    if "" in sample.prompts:
        raise UserError("sample.prompts has an empty text, which the model cannot continue; remove it")


def _check_profile(train: TrainConfig) -> None:
    profile, steps = train.profile, train.steps
    if profile is None:
        return
    is_pair = len(profile) == 2 and all(isinstance(step, int) for step in profile)
    if not (is_pair and 1 <= profile[0] <= profile[1] <= steps):
        raise UserError(
            f"train.profile={shown(profile)} must be [first, last], two steps from 1 to train.steps={steps}, "
            f"such as [{min(10, steps)},{min(12, steps)}]; null disables profiling"
        )


def _check_mp_divides_model(mesh: MeshConfig, model: ModelConfig) -> None:
    where = {"context": f"model {model.name}, mesh.tensor_parallel={mesh.tensor_parallel}"}
    for what, size in _cut_along_mp(mesh, model).items():
        in_model = where.get(what, f"model {model.name}")
        _check_divides("mesh.mp", mesh.mp, f"{what}={size} ({in_model})", size, _fitting_mp(mesh, model))


def _cut_along_mp(mesh: MeshConfig, model: ModelConfig) -> dict[str, int]:
    """The sizes that mesh.mp must divide."""
    sizes = {"heads": model.heads, "ffn": model.ffn, "the padded vocabulary": padded_vocabulary(model)}
    if model.experts:  # whole experts: their hidden size is not sharded
        sizes["ffn"] = 0
        sizes |= {"experts": model.experts, "shared_expert_ffn": model.shared_expert_ffn}
    sizes = {what: size for what, size in sizes.items() if size}
    is_time_cut = mesh.tensor_parallel != TensorParallelMode.all_reduce
    return sizes | ({"context": model.context} if is_time_cut else {})


def _fitting_mp(mesh: MeshConfig, model: ModelConfig) -> list[int]:
    """What mesh.mp can be: what all sizes of the model allow."""
    sizes, kv_heads = _cut_along_mp(mesh, model).values(), model.kv_heads
    fit = divisors(math.gcd(*sizes))
    return [n for n in fit if kv_heads % n == 0 or n % kv_heads == 0]


def _check_fsdp_gradients(mesh: MeshConfig, model: ModelConfig) -> None:
    if mesh.fsdp_gradients != FsdpGradients.ring:
        return
    if model.adapter.rank:
        raise UserError(
            f"mesh.fsdp_gradients=ring cannot be combined with model.adapter.rank={model.adapter.rank}: the gradients "
            f"of adapters are too small to overlap; use mesh.fsdp_gradients=reduce_scatter"
        )
    if mesh.zero != Zero.fsdp:
        raise UserError(f"mesh.fsdp_gradients=ring needs mesh.zero=fsdp, but mesh.zero={mesh.zero}; set mesh.zero=fsdp")
    if mesh.tensor_parallel == TensorParallelMode.collective_matmul:
        raise UserError(
            "mesh.fsdp_gradients=ring cannot be combined with mesh.tensor_parallel=collective_matmul;\n"
            "use mesh.tensor_parallel=sequence, or mesh.fsdp_gradients=reduce_scatter"
        )


def _check_batch(mesh: MeshConfig, train: TrainConfig) -> None:
    _check_divides("train.microbatches", train.microbatches, f"train.batch={train.batch}", train.batch)
    if mesh.dp == AUTO:
        return
    devices = f"the {mesh.devices} devices of mesh {product_in_words(mesh)}"
    _check_divides("mesh.processes", mesh.processes, devices, mesh.devices)
    _check_divides("mesh.slices", mesh.slices, f"mesh.dp={mesh.dp} (a row or an mp group cannot span slices)", mesh.dp)
    microbatch = train.batch // train.microbatches
    what = f"a microbatch of {microbatch} sequences (train.batch / train.microbatches)"
    _check_divides("mesh.dp", mesh.dp, what, microbatch)


def _check_divides(key: str, divisor: int, what: str, size: int, fit: list[int] | None = None) -> None:
    """Raise UserError unless `divisor`, the value of `key`, divides `size`, which the message calls `what`.  `fit`: the
    values to use instead, by default all that divide `size`."""
    if size % divisor:
        advised = ", ".join(map(str, divisors(size) if fit is None else fit))
        raise UserError(f"{key}={divisor} does not divide {what}; use {key} in {{{advised}}}")


def _validate_model(mesh: MeshConfig, model: ModelConfig) -> None:
    """Check the other rules of the model.  Raises UserError naming the first that is broken."""
    _check_heads(mesh, model)
    _check_rotary(model)
    _check_options(model)
    _check_layer_pattern(model)
    check_experts(mesh, model)
    _check_offload(model)
    _check_adapter(model.adapter)


def _check_adapter(adapter: AdapterConfig) -> None:
    if not 0 < adapter.alpha < math.inf:
        raise UserError(
            f"model.adapter.alpha={adapter.alpha} must be above 0 and finite; the rank, or twice the rank, is usual"
        )
    if adapter.rank and not adapter.matrices:
        raise UserError("model.adapter.matrices=[] names no matrix; use [all], or model.adapter.rank=0 for no adapters")


def _check_preferences(train: TrainConfig, adapter: AdapterConfig) -> None:
    beta, smoothing = train.dpo_beta, train.dpo_label_smoothing
    if beta is None:
        without_effect = {"label_smoothing": smoothing, "length_normalized": train.dpo_length_normalized}
        for key in [key for key, value in without_effect.items() if value]:
            given = str(without_effect[key]).lower()
            raise UserError(f"train.dpo_{key}={given} has no effect with train.dpo_beta=null; leave it out")
        return
    if not 0 < beta < math.inf:
        raise UserError(f"train.dpo_beta={beta} must be above 0 and finite; 0.1 is usual, and null for no preferences")
    if train.z_loss:
        raise UserError(
            f"train.z_loss={train.z_loss} cannot be combined with train.dpo_beta={beta}; use train.z_loss=0"
        )
    if smoothing >= 0.5:
        raise UserError(f"train.dpo_label_smoothing={smoothing} must be below 0.5, where neither answer is preferred")
    if not adapter.rank:
        raise UserError(
            f"train.dpo_beta={beta} compares the model with itself without its adapter, but model.adapter.rank=0; "
            f"use model.adapter.rank=16, or train.dpo_beta=null"
        )


def divisors(size: int) -> list[int]:
    """The divisors of `size` up to 1024."""
    return [n for n in range(1, min(size, 1024) + 1) if size % n == 0]


def _check_heads(mesh: MeshConfig, model: ModelConfig) -> None:
    if model.heads % model.kv_heads:
        raise UserError(f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads}; choose a divisor")
    if model.kv_heads % mesh.mp and mesh.mp % model.kv_heads:
        raise UserError(
            f"mesh.mp={mesh.mp} neither divides kv_heads={model.kv_heads} (model {model.name}) nor is a multiple of it;"
            f" use mesh.mp in {{{', '.join(map(str, _fitting_mp(mesh, model)))}}}"
        )


def _check_rotary(model: ModelConfig) -> None:
    if model.positions != PositionKind.rotary:
        given = {
            f"rotary_dim={model.rotary_dim}": model.rotary_dim is not None,
            f"rotary_pairing={model.rotary_pairing}": model.rotary_pairing != RotaryPairing.half,
            f"rotary_local_base={model.rotary_local_base}": model.rotary_local_base is not None,
            f"rotary_scaling={model.rotary_scaling}": model.rotary_scaling != RotaryScaling.none,
            f"layer_pattern=[{','.join(model.layer_pattern)}] with nope": LayerKind.nope in model.layer_pattern,
        }
        for option in [option for option, is_given in given.items() if is_given]:
            raise UserError(
                f"model.{option} has no effect with model.positions={model.positions} (model {model.name}); "
                f"use model.positions=rotary, or remove it"
            )
        return
    if model.rotary_local_base is not None and model.window is None:
        raise UserError(
            f"model.rotary_local_base={model.rotary_local_base} needs local layers, but model.window=null (model "
            f"{model.name}); use model.rotary_base, or set a window"
        )
    rotated = model.head_dim if model.rotary_dim is None else model.rotary_dim
    if rotated % 2:
        key = "head_dim" if model.rotary_dim is None else "rotary_dim"
        raise UserError(
            f"model.{key}={rotated} must be even for model.positions=rotary, which rotates pairs of elements"
        )
    if rotated > model.head_dim:
        raise UserError(
            f"model.rotary_dim={rotated} is above model.head_dim={model.head_dim} (model {model.name}); "
            f"use at most {model.head_dim}, or null for all of it"
        )
    low, high = model.rotary_low_frequency_factor, model.rotary_high_frequency_factor
    yarn = (RotaryScaling.yarn, RotaryScaling.yarn_unrounded)
    if model.rotary_scaling in (RotaryScaling.llama3, *yarn) and not 0 < low < high:
        raise UserError(
            f"model.rotary_low_frequency_factor={low} must be above 0 and below "
            f"model.rotary_high_frequency_factor={high}; Llama 3.1 has 1 and 4, YaRN 1 and 32"
        )
    if model.rotary_scaling in yarn and model.rotary_base <= 1:
        raise UserError(
            f"model.rotary_base={model.rotary_base} gives all pairs one rate, and "
            f"model.rotary_scaling={model.rotary_scaling} needs "
            f"rates that differ; use a base above 1"
        )


def _check_options(model: ModelConfig) -> None:
    if model.norm_bias and model.norm != Norm.layernorm:
        raise UserError(
            f"model.norm_bias=true needs model.norm=layernorm, but model.norm={model.norm} (model {model.name}) has no "
            f"bias; set model.norm_bias=false"
        )
    if model.head_bias and model.tie_embeddings:
        raise UserError(
            f"model.head_bias=true needs an output head of its own, but model.tie_embeddings=true (model {model.name});"
            f" set one of them to false"
        )
    if model.norm_placement != NormPlacement.before and model.block != Block.sequential:
        raise UserError(
            f"model.norm_placement={model.norm_placement} needs model.block=sequential, but model.block={model.block} "
            f"(model {model.name}); use model.norm_placement=before"
        )
    if model.qk_norm_across_heads and (not model.qk_norm or model.norm == Norm.rmsnorm_unit_offset):
        raise UserError(
            f"model.qk_norm_across_heads=true needs model.qk_norm=true and a norm without unit offset, but "
            f"model.qk_norm={str(model.qk_norm).lower()} and model.norm={model.norm} (model {model.name}); "
            f"change them, or set it to false"
        )
    for key in ("norm_epsilon", "embedding_scale", "attention_softcap", "logit_softcap"):
        if getattr(model, key) == 0:
            raise UserError(f"model.{key}=0 must be above 0")


def _check_layer_pattern(model: ModelConfig) -> None:
    pattern = model.layer_pattern
    shown_pattern = f"model.layer_pattern=[{','.join(pattern)}]"
    if len(pattern) > model.layers:
        raise UserError(
            f"{shown_pattern} has {len(pattern)} elements, more than model.layers={model.layers} (model {model.name}); "
            f"remove those that no layer has"
        )
    if pattern and (LayerKind.local in pattern) != (model.window is not None):
        reason = "has no local layer" if model.window else "has local layers, which need a window"
        raise UserError(
            f"{shown_pattern} {reason}, but model.window={'null' if model.window is None else model.window} "
            f"(model {model.name}); change one of them, or use model.layer_pattern=[]"
        )


def _check_offload(model: ModelConfig) -> None:
    for name in model.offload:
        if name not in SAVED_BY_REMAT[model.remat]:
            policies = ", ".join(remat for remat, saved in SAVED_BY_REMAT.items() if name in saved)
            raise UserError(
                f"model.offload has {name}, which model.remat={model.remat} does not save; "
                f"use model.remat in {{{policies}}}"
            )
    if SavedActivation.gate in model.offload and model.mlp not in GATED_MLPS:
        raise UserError(f"model.offload has gate, but model.mlp={model.mlp} has no gate; remove it")
    if SavedActivation.sublayer_output in model.offload and model.block != Block.sequential:
        raise UserError(
            f"model.offload has sublayer_output, which the backward pass of model.block={model.block} does not read; "
            "remove it"
        )
    if len(set(model.offload)) < len(model.offload):
        raise UserError(f"model.offload=[{','.join(model.offload)}] names an activation twice; name each once")
