"""From a YAML file and `key=value` overrides to a checked Config, by Hydra's compose API over the dataclass schema."""

from dataclasses import replace

from shmap_tp.config.schema import (
    AUTO,
    SAVED_BY_REMAT,
    Block,
    Config,
    FsdpGradients,
    MeshConfig,
    Mlp,
    ModelConfig,
    OptimizerConfig,
    Positions,
    SavedActivation,
    TensorParallelMode,
    Zero,
    padded_vocabulary,
)
from shmap_tp.errors import UserError


def check(config: Config) -> None:
    """Every rule that a configuration must keep on any machine.  Raises InputError naming the first that is broken."""
    model, mesh, train = config.model, config.mesh, config.train
    if isinstance(mesh.dp, str) and mesh.dp != AUTO:
        raise UserError(f"mesh.dp={mesh.dp} must be a whole number, or {AUTO}")
    _check_sizes(config)
    _check_optimizer(config.optimizer)
    if train.profile is not None:
        _check_profile(train.profile, train.steps)
    for what, size in [
        ("heads", model.heads),
        ("ffn", model.ffn),
        ("the padded vocabulary", padded_vocabulary(model)),
    ]:
        _check_divides(mesh.mp, f"{what}={size} (model {model.name})", size)
    if mesh.tensor_parallel != TensorParallelMode.all_reduce:
        _check_divides(
            mesh.mp,
            f"context={model.context} (model {model.name}, mesh.tensor_parallel={mesh.tensor_parallel})",
            model.context,
        )
    _check_heads(model, mesh.mp)
    _check_offload(model)
    _check_gradients(mesh)
    _check_divides(train.microbatches, f"train.batch={train.batch}", train.batch, "train.microbatches")
    part = train.batch // train.microbatches
    if mesh.dp != AUTO:
        _check_divides(mesh.slices, f"mesh.dp={mesh.dp}: mp does not reach from slice to slice", mesh.dp, "mesh.slices")
        _check_divides(mesh.dp, f"a microbatch of {part} windows (train.batch / train.microbatches)", part, "mesh.dp")


def _check_sizes(config: Config) -> None:
    model, mesh, train = config.model, config.mesh, config.train
    for name, value, least in [
        ("run.seed", config.run.seed, 0),
        ("run.join_timeout_seconds", config.run.join_timeout_seconds, 1),
        ("run.lost_timeout_seconds", config.run.lost_timeout_seconds, 5),
        ("mesh.dp", 1 if mesh.dp == AUTO else mesh.dp, 1),
        ("mesh.mp", mesh.mp, 1),
        ("mesh.slices", mesh.slices, 1),
        ("mesh.processes", mesh.processes, 1),
        ("train.steps", train.steps, 1),
        ("train.batch", train.batch, 1),
        ("train.microbatches", train.microbatches, 1),
        ("train.max_sequences_per_device", train.max_sequences_per_device or 1, 1),
        ("train.loss_chunk", train.loss_chunk, 1),
        ("train.check_replicas_every", train.check_replicas_every, 0),
        ("model.width", model.width, 1),
        ("model.layers", model.layers, 1),
        ("model.heads", model.heads, 1),
        ("model.kv_heads", model.kv_heads, 1),
        ("model.head_dim", model.head_dim, 1),
        ("model.ffn", model.ffn, 1),
        ("model.vocabulary", model.vocabulary, 1),
        ("model.vocabulary_multiple", model.vocabulary_multiple, 1),
        ("model.context", model.context, 1),
        ("model.attention_chunk", model.attention_chunk, 1),
        ("guard.loss_spike_sigmas", 1 if config.guard.loss_spike_sigmas is None else config.guard.loss_spike_sigmas, 1),
        ("guard.window", config.guard.window, 2),
        ("guard.max_consecutive", 1 if config.guard.max_consecutive is None else config.guard.max_consecutive, 1),
        ("evaluate.every", config.evaluate.every, 0),
        ("evaluate.batches", config.evaluate.batches, 1),
        ("checkpoint.every", config.checkpoint.every, 0),
        ("checkpoint.keep", config.checkpoint.keep, 2),
        ("checkpoint.keep_every", config.checkpoint.keep_every or 1, 1),
        ("log.every", config.log.every, 1),
        ("optimizer.learning_rate", config.optimizer.learning_rate, 0),
        ("optimizer.warmup_steps", config.optimizer.warmup_steps, 0),
    ]:
        if not value >= least:
            raise UserError(f"{name}={value} is too small; it must be {least} or more")
    if config.run.seed >= 2**32:  # the rest of its bits would be dropped
        raise UserError(f"run.seed={config.run.seed} is too large; it must be below 2^32 = {2**32}")


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    if optimizer.decay_steps <= optimizer.warmup_steps:
        raise UserError(
            f"optimizer.decay_steps={optimizer.decay_steps} must be above optimizer.warmup_steps="
            f"{optimizer.warmup_steps}: the decay follows the warm-up, and both count from the first step"
        )
    if not optimizer.clip_norm > 0:
        raise UserError(f"optimizer.clip_norm={optimizer.clip_norm} must be above 0; 1.0 is usual")


def resolve_auto(config: Config, devices: int | None = None) -> Config:
    """`config` with mesh.dp=auto as a number and as many microbatches as train.max_sequences_per_device asks for, on `devices`.

    The batch, and so what is learnt from which step, stays.  Raises InputError where the devices cannot be cut so, or
    their number is None: where only a number will do.
    """
    mesh, train = config.mesh, config.train
    if mesh.dp == AUTO:
        if devices is None:
            raise UserError(f"mesh.dp={AUTO} is for training on the devices there are; here give its number")
        _check_divides(mesh.mp, f"the {devices} devices there are (mesh.dp={AUTO})", devices)
        mesh = replace(mesh, dp=devices // mesh.mp)
        try:
            check(replace(config, mesh=mesh))
        except UserError as error:
            raise UserError(f"mesh.dp={AUTO} is {mesh.dp} on {devices} devices, and {error}") from error
    at_a_time = train.batch // train.microbatches // mesh.dp
    limit = train.max_sequences_per_device or at_a_time
    times = next(n for n in range(1, at_a_time + 1) if at_a_time % n == 0 and at_a_time // n <= limit)
    return replace(config, mesh=mesh, train=replace(train, microbatches=train.microbatches * times))


def check_place(coordinator: str | None, process: int | None, processes: int) -> None:
    """Raises InputError where --coordinator and --process-id do not say which of `processes` this is, or only half."""
    if coordinator is None and process is None:
        return
    if coordinator is None or process is None:
        missing = "--coordinator HOST:PORT" if coordinator is None else "--process-id I"
        raise UserError(f"--coordinator and --process-id go together; give {missing}, too")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"--coordinator {coordinator} is not HOST:PORT; write it as in --coordinator 10.0.0.2:8476")
    if processes == 1:
        raise UserError("--coordinator is for several processes, and mesh.processes=1; give --processes N, too")
    if not 0 <= process < processes:
        raise UserError(f"--process-id {process} of --processes {processes}: they are 0 to {processes - 1}")


def _check_profile(profile: list[int], steps: int) -> None:
    two = len(profile) == 2 and all(isinstance(step, int) for step in profile)
    if not (two and 1 <= profile[0] <= profile[1] <= steps):
        raise UserError(
            f"train.profile={profile} must be [first, last], two steps from 1 to train.steps={steps}, "
            f"such as [{min(10, steps)},{min(12, steps)}]; null takes no profile"
        )


def _check_divides(divisor: int, what: str, size: int, name: str = "mesh.mp") -> None:
    if size % divisor:
        fit = ", ".join(map(str, _divisors(size)))
        raise UserError(f"{name}={divisor} does not divide {what}; use {name} in {{{fit}}}")


def _divisors(size: int) -> list[int]:
    return [n for n in range(1, min(size, 1024) + 1) if size % n == 0]


def _check_gradients(mesh: MeshConfig) -> None:
    if mesh.fsdp_gradients == FsdpGradients.ring and mesh.zero != Zero.fsdp:
        raise UserError(
            f"mesh.fsdp_gradients=ring is of weights that dp shares, but mesh.zero={mesh.zero}; set mesh.zero=fsdp"
        )
    if mesh.fsdp_gradients == FsdpGradients.ring and mesh.tensor_parallel == TensorParallelMode.collective_matmul:
        raise UserError(
            "mesh.fsdp_gradients=ring goes around once for each product, and mesh.tensor_parallel=collective_matmul makes mp products of each; "
            "use mesh.tensor_parallel=sequence, or mesh.fsdp_gradients=reduce_scatter"
        )


def _check_heads(model: ModelConfig, mp: int) -> None:
    if model.heads % model.kv_heads:
        raise UserError(f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads}; choose a divisor")
    if model.kv_heads % mp and mp % model.kv_heads:
        fit = [n for n in _divisors(model.heads) if model.kv_heads % n == 0 or n % model.kv_heads == 0]
        raise UserError(
            f"mesh.mp={mp} neither divides kv_heads={model.kv_heads} (model {model.name}) nor is a multiple of it; "
            f"use mesh.mp in {{{', '.join(map(str, fit))}}}"
        )
    if model.positions == Positions.rotary and model.head_dim % 2:
        raise UserError(f"rotary positions turn pairs: model.head_dim={model.head_dim} must be even")


def _check_offload(model: ModelConfig) -> None:
    for name in model.offload:
        if name not in SAVED_BY_REMAT[model.remat]:
            keep = ", ".join(remat for remat, kept in SAVED_BY_REMAT.items() if name in kept)
            raise UserError(f"model.offload has {name}, which model.remat={model.remat} does not keep; {keep} would")
    if SavedActivation.gate in model.offload and model.mlp != Mlp.swiglu:
        raise UserError(f"model.offload has gate, but model.mlp={model.mlp} has none; leave it out")
    if SavedActivation.sublayer_output in model.offload and model.block == Block.parallel:
        raise UserError("model.offload has left, but in a parallel block nothing reads that again; leave it out")
    if len(set(model.offload)) < len(model.offload):
        raise UserError(f"model.offload=[{','.join(model.offload)}] names one twice; name each once")
