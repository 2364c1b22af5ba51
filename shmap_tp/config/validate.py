"""The rules between several keys, on any machine.  The rules of one key are in its field of `schema.py`.

What depends on the devices of the machine is checked where they are known: `parallel/mesh.py`, `layers/`.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shmap_tp.config import choices
from shmap_tp.config.activation_names import SAVED_BY_REMAT
from shmap_tp.config.schema import AUTO, Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, TrainConfig
from shmap_tp.config.sources import check_sources
from shmap_tp.config.values import faults_of_values, padded_vocabulary
from shmap_tp.errors import UserError, refuse_first, shown

GATED_MLPS = (choices.Mlp.swiglu, choices.Mlp.geglu, choices.Mlp.clamped_swiglu)
EIGHT_BITS = (choices.MatmulPrecision.int8, choices.MatmulPrecision.fp8)
EXPERT_MATRICES = {"all", "mlp", "gate", "up", "down"}
"""Names in model.adapter.matrices that would be of matrices of experts."""


def validate(config: Config) -> None:
    """Check every rule that does not depend on the machine.  Raises UserError naming the first that is broken."""
    refuse_first(_faults(config))


def _faults(config: Config) -> Iterator[str]:
    """What is said of each rule that is broken, in an order in which a rule may rely on those before it."""
    mesh, model = config.mesh, config.model
    for name, value in (("mesh.dp", mesh.dp), ("checkpoint.every", config.checkpoint.every)):
        if isinstance(value, str) and value != AUTO:
            yield f"{name}={value} must be an integer or {AUTO}"
    yield from faults_of_values(config)
    yield from _faults_of_source(config.data)
    check_sources(config.data)
    yield from _faults_of_schedule(config.optimizer, config.train.steps)
    yield from _faults_of_profile(config.train)
    yield from _faults_of_mp(mesh, model)
    yield from _faults_of_time_cut(mesh, model)
    yield from _faults_of_experts(mesh, model)
    yield from _faults_of_positions(model)
    yield from _faults_of_layers(model)
    yield from _faults_of_combinations(config)
    yield from _faults_of_batch(mesh, config.train)


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
        refuse_first(_indivisible("mesh.cp", mesh.cp, what, devices))
        what = what if mesh.cp == 1 else f"{what} / mesh.cp={mesh.cp}"
        fit = [n for n in fit if devices // mesh.cp % n == 0]
        refuse_first(_indivisible("mesh.mp", mesh.mp, what, devices // mesh.cp, fit))
        mesh = replace(mesh, dp=devices // mesh.cp // mesh.mp)
        faults = _faults(replace(config, mesh=mesh))
        refuse_first(f"mesh.dp={AUTO} is {mesh.dp} on {devices} devices, and {fault}" for fault in faults)
    sequences = train.batch // train.microbatches // mesh.dp
    limit = train.max_sequences_per_device or sequences
    factor = next(n for n in range(1, sequences + 1) if sequences % n == 0 and sequences // n <= limit)
    return replace(config, mesh=mesh, train=replace(train, microbatches=train.microbatches * factor))


def validate_process_arguments(coordinator: str | None, process_id: int | None, processes: int) -> None:
    """Check --coordinator and --process-id against mesh.processes.  Raises UserError."""
    refuse_first(_faults_of_processes(coordinator, process_id, processes))


def _faults_of_processes(coordinator: str | None, process_id: int | None, processes: int) -> Iterator[str]:
    if processes < 1:
        yield f"--processes {processes} must be at least 1"
    if coordinator is None and process_id is None:
        return
    if coordinator is None or process_id is None:
        missing = "--coordinator HOST:PORT" if coordinator is None else "--process-id I"
        yield f"--coordinator and --process-id must be given together; add {missing}"
    address = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]*):([0-9]{1,5})", coordinator)
    if not address or not 0 < int(address[2]) < 2**16:
        yield (
            f"--coordinator {coordinator!r} is not HOST:PORT; use for example --coordinator 10.0.0.2:8476, or "
            f"[fd00::2]:8476 with IPv6; a port is from 1 to 65535"
        )
    if processes == 1:
        yield "--coordinator needs several processes, but mesh.processes=1; add --processes N"
    if not 0 <= process_id < processes:
        yield f"--process-id {process_id} is out of range for --processes {processes}; use 0 to {processes - 1}"


def _faults_of_source(data: DataConfig) -> Iterator[str]:
    words = ["null"] if data.source is None else data.source.split()
    if words not in (["null"], ["stdlib"]) and words[:1] not in (["--text"], ["--dataset"], ["--source"]):
        yield (
            f"data.source={data.source}: there is no such source; use stdlib, null, or the arguments of "
            f"`python -m shmap_tp.prepare`\nthat prepare data.dir, such as '--dataset NAME' or '--text FILES'"
        )


def _faults_of_schedule(optimizer: OptimizerConfig, steps: int) -> Iterator[str]:
    fraction, end, warmup = optimizer.decay_fraction, optimizer.decay_steps, optimizer.warmup_steps
    if optimizer.schedule == choices.Schedule.constant or (end <= warmup and steps <= warmup):  # the run has no decay
        return
    if end <= warmup:
        yield f"optimizer.decay_steps={end} must be above optimizer.warmup_steps={warmup}: both count from step 1"
    decay = round(fraction * end)
    if optimizer.schedule == choices.Schedule.wsd and not 1 <= decay <= end - warmup:
        yield (
            f"optimizer.decay_fraction={fraction} of optimizer.decay_steps={end} is {decay} steps, which must be from "
            f"1 to {end - warmup},\nthe steps after optimizer.warmup_steps={warmup}; change one of them, or use "
            f"optimizer.schedule=linear or constant"
        )


def _faults_of_profile(train: TrainConfig) -> Iterator[str]:
    profile, steps = train.profile, train.steps
    is_pair = profile is None or (len(profile) == 2 and all(isinstance(step, int) for step in profile))
    if not is_pair or (profile and not profile[0] <= profile[1] <= steps):
        yield (
            f"train.profile={shown(profile)} must be [first, last], two steps from 1 to train.steps={steps}, "
            f"such as [{min(10, steps)},{min(12, steps)}]; null disables profiling"
        )


def _faults_of_mp(mesh: MeshConfig, model: ModelConfig) -> Iterator[str]:
    where = {"context": f"model {model.name}, mesh.tensor_parallel={mesh.tensor_parallel}"}
    for what, size in _cut_along_mp(mesh, model).items():
        in_model = where.get(what, f"model {model.name}")
        yield from _indivisible("mesh.mp", mesh.mp, f"{what}={size} ({in_model})", size, _fitting_mp(mesh, model))
    if model.heads % model.kv_heads:
        yield f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads}; choose a divisor"
    if model.kv_heads % mesh.mp and mesh.mp % model.kv_heads:
        yield (
            f"mesh.mp={mesh.mp} neither divides kv_heads={model.kv_heads} (model {model.name}) nor is a multiple of it;"
            f" use mesh.mp in {{{', '.join(map(str, _fitting_mp(mesh, model)))}}}"
        )


def _cut_along_mp(mesh: MeshConfig, model: ModelConfig) -> dict[str, int]:
    """The sizes that mesh.mp must divide."""
    sizes = {"heads": model.heads, "ffn": model.ffn, "the padded vocabulary": padded_vocabulary(model)}
    if model.experts:  # whole experts: their hidden size is not sharded
        sizes["ffn"] = 0
        sizes |= {"experts": model.experts, "shared_expert_ffn": model.shared_expert_ffn}
    sizes = {what: size for what, size in sizes.items() if size}
    return sizes | ({} if mesh.tensor_parallel == choices.TensorParallelMode.all_reduce else {"context": model.context})


def _fitting_mp(mesh: MeshConfig, model: ModelConfig) -> list[int]:
    """What mesh.mp can be: what all sizes of the model allow."""
    sizes, kv_heads = _cut_along_mp(mesh, model).values(), model.kv_heads
    return [n for n in divisors(math.gcd(*sizes)) if kv_heads % n == 0 or n % kv_heads == 0]


def _faults_of_time_cut(mesh: MeshConfig, model: ModelConfig) -> Iterator[str]:
    """Rows are cut in two chunks for each rank of cp, and their parts again over mp where its mode does that."""
    is_cut_again = mesh.tensor_parallel != choices.TensorParallelMode.all_reduce
    parts, what = (math.lcm(2, mesh.mp), "2 and mesh.mp") if is_cut_again else (2, "2")
    if mesh.cp > 1 and model.context % (mesh.cp * parts):
        fit = [n for n in range(1, min(model.context, 1024) + 1) if model.context % (n * parts) == 0]
        advised = f"mesh.cp in {{{', '.join(map(str, fit))}}}, or " if fit else ""
        longer = -(-model.context // (mesh.cp * parts)) * mesh.cp * parts
        yield (
            f"mesh.cp={mesh.cp}: model.context={model.context} (model {model.name}) cannot be cut in {mesh.cp} parts "
            f"that {what} divide; use {advised}model.context={longer}"
        )


def _faults_of_experts(mesh: MeshConfig, model: ModelConfig) -> Iterator[str]:
    if not model.experts:
        return
    if model.experts_per_token > model.experts:
        chosen = f"model.experts_per_token={model.experts_per_token}"
        yield f"{chosen} is above model.experts={model.experts} (model {model.name})"
    if model.experts % (mesh.ep * mesh.mp):
        fit = [n for n in range(1, model.experts + 1) if model.experts % (n * mesh.mp) == 0]
        yield (
            f"mesh.ep={mesh.ep} x mesh.mp={mesh.mp} does not divide experts={model.experts} (model {model.name}); use "
            f"mesh.ep in {{{', '.join(map(str, fit))}}}"
        )
    if mesh.ep > 1 and mesh.dp != AUTO and mesh.dp % (mesh.slices * mesh.ep):
        ranks = f"mesh.dp={mesh.dp}" + (f" / mesh.slices={mesh.slices}" if mesh.slices > 1 else "")
        fit = [n for n in range(1, mesh.dp + 1) if mesh.dp % (n * mesh.slices) == 0]
        yield f"mesh.ep={mesh.ep} does not divide {ranks}; use mesh.ep in {{{', '.join(map(str, fit))}}}"


def _faults_of_positions(model: ModelConfig) -> Iterator[str]:
    rotated = model.rotary_dim or model.head_dim
    if model.positions == choices.PositionKind.rotary and (rotated % 2 or rotated > model.head_dim):
        key = "head_dim" if model.rotary_dim is None else "rotary_dim"
        yield (
            f"model.{key}={rotated} must be even for model.positions=rotary, which rotates pairs of elements, and at "
            f"most model.head_dim={model.head_dim} (model {model.name})"
        )
    low, high = model.rotary_low_frequency_factor, model.rotary_high_frequency_factor
    is_yarn = model.rotary_scaling in (choices.RotaryScaling.yarn, choices.RotaryScaling.yarn_unrounded)
    if (is_yarn or model.rotary_scaling == choices.RotaryScaling.llama3) and not 0 < low < high:
        yield (
            f"model.rotary_low_frequency_factor={low} must be above 0 and below "
            f"model.rotary_high_frequency_factor={high}; Llama 3.1 has 1 and 4, YaRN 1 and 32"
        )
    if is_yarn and model.rotary_base <= 1:
        yield (
            f"model.rotary_base={model.rotary_base} gives all pairs one rate, and "
            f"model.rotary_scaling={model.rotary_scaling} needs rates that differ; use a base above 1"
        )


def _faults_of_layers(model: ModelConfig) -> Iterator[str]:
    pattern = model.layer_pattern
    name = f"model.layer_pattern=[{','.join(pattern)}]"
    if len(pattern) > model.layers:
        yield f"{name} has {len(pattern)} elements, more than model.layers={model.layers} (model {model.name})"
    if pattern and (choices.LayerKind.local in pattern) != (model.window is not None):
        reason = "has no local layer" if model.window else "has local layers, which need a window"
        yield f"{name} {reason}, but model.window={shown(model.window)} (model {model.name}); change one of them"
    for saved in model.offload:
        if saved not in SAVED_BY_REMAT[model.remat]:
            policies = ", ".join(remat for remat, names in SAVED_BY_REMAT.items() if saved in names)
            yield f"model.offload has {saved}, which model.remat={model.remat} does not save; use one of {policies}"


def _faults_of_combinations(config: Config) -> Iterator[str]:
    """Two settings, each of which is allowed alone."""
    found: list[str] = []
    mesh, model, train, rank = config.mesh, config.model, config.train, config.model.adapter.rank

    def refuse(is_given: object, one: str, other: str, instead: str) -> None:
        if is_given:
            found.append(f"{one} cannot be combined with {other} (model {model.name}); use {instead}")

    adapter, cp, experts = f"model.adapter.rank={rank}", f"mesh.cp={mesh.cp}", f"model.experts={model.experts}"
    is_ring = mesh.fsdp_gradients == choices.FsdpGradients.ring
    is_matmul = mesh.tensor_parallel == choices.TensorParallelMode.collective_matmul
    ring, matmul = "mesh.fsdp_gradients=ring", "mesh.tensor_parallel=collective_matmul"
    refuse(is_ring and is_matmul, ring, matmul, "mesh.tensor_parallel=sequence, or mesh.fsdp_gradients=reduce_scatter")
    is_wide, scope = train.matmul_precision not in EIGHT_BITS, f"train.matmul_scope={train.matmul_scope}"
    wide = f"train.matmul_precision={train.matmul_precision}, which rounds no matrix to 8 bits"
    is_part = train.matmul_scope != choices.MatmulScope.blocks
    refuse(is_wide and is_part, scope, wide, "train.matmul_precision=int8 or fp8, or train.matmul_scope=blocks")
    if train.matmul_rounding == choices.MatmulRounding.stochastic:
        at_random = f"train.matmul_rounding={train.matmul_rounding}"
        wide = f"train.matmul_precision={train.matmul_precision}, which rounds no gradient to 8 bits"
        refuse(is_wide, at_random, wide, "train.matmul_precision=int8 or fp8, or train.matmul_rounding=nearest")
        refuse(is_matmul, at_random, matmul, "mesh.tensor_parallel=sequence, or train.matmul_rounding=nearest")
    if mesh.cp > 1:
        refuse(train.dpo_beta, "train.dpo_beta", f"{cp}, which cuts the answers of a pair apart", "mesh.cp=1")
        is_saved = choices.SavedActivation.query_key_value in model.offload
        refuse(is_saved, "model.offload with query_key_value", f"{cp}, which gathers whole rows of them", "mesh.cp=1")
    if train.dpo_beta:
        refuse(train.z_loss, "train.dpo_beta", f"train.z_loss={train.z_loss}", "train.z_loss=0")
        what = "model.adapter.rank=0: the model is compared with itself without its adapter"
        refuse(not rank, "train.dpo_beta", what, "model.adapter.rank=16, or train.dpo_beta=null")
    is_unknown = model.norm == choices.Norm.rmsnorm_unit_offset and model.qk_norm_across_heads
    refuse(is_unknown, "model.qk_norm_across_heads=true", f"norm={model.norm}", "rmsnorm")
    is_unread = choices.SavedActivation.sublayer_output in model.offload and model.block != choices.Block.sequential
    refuse(is_unread, "model.offload with sublayer_output", f"model.block={model.block}", "another model.offload")
    has_nope = choices.LayerKind.nope in model.layer_pattern and model.positions != choices.PositionKind.rotary
    refuse(has_nope, "model.layer_pattern with nope", f"model.positions={model.positions}", "model.positions=rotary")
    refuse(rank and not model.adapter.matrices, adapter, "model.adapter.matrices=[]", "model.adapter.matrices=[all]")
    if model.experts:
        refuse(model.mlp not in GATED_MLPS, experts, f"model.mlp={model.mlp}", f"one of {', '.join(GATED_MLPS)}")
        has_no_gradient = model.experts_per_token == 1 and model.router_normalize
        why = "model.router_normalize=false: one weight divided by itself is 1, so that the router has no gradient"
        refuse(has_no_gradient, "model.experts_per_token=1", "model.router_normalize=true", why)
        named = f"adapters of them, model.adapter.matrices=[{','.join(model.adapter.matrices)}]"
        is_named = rank and EXPERT_MATRICES.intersection(model.adapter.matrices)
        refuse(is_named, experts, named, "model.adapter.matrices=[attention]")
        what = f"{adapter}, whose checkpoints have adapters alone"
        bias = f"model.router_bias_rate={model.router_bias_rate}"
        refuse(rank and model.router_bias_rate, bias, what, "model.router_bias_rate=null")
    yield from found


def _faults_of_batch(mesh: MeshConfig, train: TrainConfig) -> Iterator[str]:
    yield from _indivisible("train.microbatches", train.microbatches, f"train.batch={train.batch}", train.batch)
    if mesh.dp == AUTO:
        return
    devices = f"the {mesh.devices} devices of mesh {product_in_words(mesh)}"
    yield from _indivisible("mesh.processes", mesh.processes, devices, mesh.devices)
    yield from _indivisible("mesh.slices", mesh.slices, f"mesh.dp={mesh.dp} (no row or mp group spans slices)", mesh.dp)
    microbatch = train.batch // train.microbatches
    what = f"a microbatch of {microbatch} sequences (train.batch / train.microbatches)"
    yield from _indivisible("mesh.dp", mesh.dp, what, microbatch)


def _indivisible(key: str, divisor: int, what: str, size: int, fit: list[int] | None = None) -> Iterator[str]:
    """The fault that `divisor`, the value of `key`, does not divide `size`, which the message calls `what`.  `fit`: the
    values to use instead, by default all that divide `size`."""
    if size % divisor:
        advised = ", ".join(map(str, divisors(size) if fit is None else fit))
        yield f"{key}={divisor} does not divide {what}; use {key} in {{{advised}}}"


def divisors(size: int) -> list[int]:
    """The divisors of `size` up to 1024."""
    return [n for n in range(1, min(size, 1024) + 1) if size % n == 0]


def mesh_shape(mesh: MeshConfig) -> list[int]:
    """[dp, mp], or with context parallelism [dp, cp, mp]: the sizes of a mesh as files and messages have them."""
    return [mesh.dp, mesh.mp] if mesh.cp == 1 else [mesh.dp, mesh.cp, mesh.mp]


def named_sizes(shape: Sequence[int]) -> list[str]:
    """A `mesh_shape` in words, a size each, such as dp=2."""
    names = "dp mp" if len(shape) == 2 else "dp cp mp"
    return [f"{name}={size}" for name, size in zip(names.split(), shape, strict=False)]


def product_in_words(mesh: MeshConfig) -> str:
    """Such as dp=2 x mp=4."""
    return " x ".join(named_sizes(mesh_shape(mesh)))


def keys_in_words(mesh: MeshConfig) -> str:
    """The keys of the sizes, and their product."""
    return "mesh.dp and mesh.mp with dp x mp" if mesh.cp == 1 else "mesh.dp, mesh.cp and mesh.mp with dp x cp x mp"
