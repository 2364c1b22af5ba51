"""From a YAML file and `key=value` overrides to a checked Config, by Hydra's compose API over the dataclass schema."""

import difflib
import json
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import get_args, get_origin

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from shmap_tp.config import (
    AUTO,
    KEPT,
    Block,
    Config,
    Gradients,
    InputError,
    Kept,
    MeshConfig,
    Mlp,
    ModelConfig,
    OptimizerConfig,
    Positions,
    Wire,
    Zero,
    padded_vocabulary,
)

CONF = Path(__file__).resolve().parent.parent / "conf"
"""The project's own configuration; its groups (model=..., data=...) are found from a file anywhere else, too."""


def load(file: str, overrides: list[str]) -> Config:
    """The configuration in `file` with `overrides` applied, checked as far as it can be without devices.

    Raises InputError: no such file, unknown group or key, wrong type, missing value, sizes that do not divide.
    """
    path = Path(file).resolve()
    if not path.is_file():
        raise InputError(f"--cfg {file}: no such file; the first run's is conf/config.yaml")
    if path.suffix != ".yaml":
        raise InputError(f"--cfg {file}: the name of a configuration ends in .yaml; rename it")
    search = [] if path.parent == CONF else [f"hydra.searchpath=[{json.dumps(f'file://{CONF}', ensure_ascii=False)}]"]
    try:
        with initialize_config_dir(str(path.parent), version_base="1.3"):
            values = compose(path.stem, overrides=search + [_override(given, path.parent) for given in overrides])
        merged = OmegaConf.merge(OmegaConf.structured(Config), values)
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise InputError(f"{file}: no value for {', '.join(missing)}; give each in the file or as key=value")
        config = OmegaConf.to_object(merged)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(_explain(error, file)) from error
    check(config)
    return config


def _override(given: str, directory: Path) -> str:
    """`key=value` as Hydra reads it.  A key need not be in the file (++), only in the schema; `load` checks it."""
    if given.startswith(("+", "~")):
        raise InputError(f"{given}: keys cannot be added or deleted; write key=value")
    key, equals, _ = given.partition("=")
    if not key or not equals:
        raise InputError(f"{given!r} is not key=value; write it as in train.steps=400")
    is_group = (CONF / key).is_dir() or (directory / key).is_dir()
    return given if is_group else f"++{given}"


def save(config: Config, file: Path) -> None:
    """Write `config`, every value resolved, so that `--cfg FILE` gives it back; until all is there, the old one is."""
    written = file.with_suffix(".tmp")
    written.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    written.replace(file)


def to_dict(config: object) -> dict:
    """A configuration as plain JSON-able values."""
    return OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)


def check(config: Config) -> None:
    """Every rule that a configuration must keep on any machine.  Raises InputError naming the first that is broken."""
    model, mesh, train = config.model, config.mesh, config.train
    if isinstance(mesh.dp, str) and mesh.dp != AUTO:
        raise InputError(f"mesh.dp={mesh.dp} must be a whole number, or {AUTO}")
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
    if mesh.wire != Wire.all_reduce:
        _check_divides(mesh.mp, f"context={model.context} (model {model.name}, mesh.wire={mesh.wire})", model.context)
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
        ("run.join_seconds", config.run.join_seconds, 1),
        ("run.lost_seconds", config.run.lost_seconds, 5),
        ("mesh.dp", 1 if mesh.dp == AUTO else mesh.dp, 1),
        ("mesh.mp", mesh.mp, 1),
        ("mesh.slices", mesh.slices, 1),
        ("mesh.processes", mesh.processes, 1),
        ("train.steps", train.steps, 1),
        ("train.batch", train.batch, 1),
        ("train.microbatches", train.microbatches, 1),
        ("train.device_windows", train.device_windows or 1, 1),
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
        ("guard.spike", 1 if config.guard.spike is None else config.guard.spike, 1),
        ("guard.window", config.guard.window, 2),
        ("guard.stop_after", 1 if config.guard.stop_after is None else config.guard.stop_after, 1),
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
            raise InputError(f"{name}={value} is too small; it must be {least} or more")
    if config.run.seed >= 2**32:  # the rest of its bits would be dropped
        raise InputError(f"run.seed={config.run.seed} is too large; it must be below 2^32 = {2**32}")


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    if optimizer.decay_steps <= optimizer.warmup_steps:
        raise InputError(
            f"optimizer.decay_steps={optimizer.decay_steps} must be above optimizer.warmup_steps="
            f"{optimizer.warmup_steps}: the decay follows the warm-up, and both count from the first step"
        )
    if not optimizer.clip_norm > 0:
        raise InputError(f"optimizer.clip_norm={optimizer.clip_norm} must be above 0; 1.0 is usual")


def settled(config: Config, devices: int | None = None) -> Config:
    """`config` with mesh.dp=auto as a number and as many microbatches as train.device_windows asks for, on `devices`.

    The batch, and so what is learnt from which step, stays.  Raises InputError where the devices cannot be cut so, or
    their number is None: where only a number will do.
    """
    mesh, train = config.mesh, config.train
    if mesh.dp == AUTO:
        if devices is None:
            raise InputError(f"mesh.dp={AUTO} is for training on the devices there are; here give its number")
        _check_divides(mesh.mp, f"the {devices} devices there are (mesh.dp={AUTO})", devices)
        mesh = replace(mesh, dp=devices // mesh.mp)
        try:
            check(replace(config, mesh=mesh))
        except InputError as error:
            raise InputError(f"mesh.dp={AUTO} is {mesh.dp} on {devices} devices, and {error}") from error
    at_a_time = train.batch // train.microbatches // mesh.dp
    limit = train.device_windows or at_a_time
    times = next(n for n in range(1, at_a_time + 1) if at_a_time % n == 0 and at_a_time // n <= limit)
    return replace(config, mesh=mesh, train=replace(train, microbatches=train.microbatches * times))


def check_place(coordinator: str | None, process: int | None, processes: int) -> None:
    """Raises InputError where --coordinator and --process-id do not say which of `processes` this is, or only half."""
    if coordinator is None and process is None:
        return
    if coordinator is None or process is None:
        missing = "--coordinator HOST:PORT" if coordinator is None else "--process-id I"
        raise InputError(f"--coordinator and --process-id go together; give {missing}, too")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"--coordinator {coordinator} is not HOST:PORT; write it as in --coordinator 10.0.0.2:8476")
    if processes == 1:
        raise InputError("--coordinator is for several processes, and mesh.processes=1; give --processes N, too")
    if not 0 <= process < processes:
        raise InputError(f"--process-id {process} of --processes {processes}: they are 0 to {processes - 1}")


def _check_profile(profile: list[int], steps: int) -> None:
    two = len(profile) == 2 and all(isinstance(step, int) for step in profile)
    if not (two and 1 <= profile[0] <= profile[1] <= steps):
        raise InputError(
            f"train.profile={profile} must be [first, last], two steps from 1 to train.steps={steps}, "
            f"such as [{min(10, steps)},{min(12, steps)}]; null takes no profile"
        )


def _check_divides(divisor: int, what: str, size: int, name: str = "mesh.mp") -> None:
    if size % divisor:
        fit = ", ".join(map(str, _divisors(size)))
        raise InputError(f"{name}={divisor} does not divide {what}; use {name} in {{{fit}}}")


def _divisors(size: int) -> list[int]:
    return [n for n in range(1, min(size, 1024) + 1) if size % n == 0]


def _check_gradients(mesh: MeshConfig) -> None:
    if mesh.gradients == Gradients.ring and mesh.zero != Zero.parameters:
        raise InputError(
            f"mesh.gradients=ring is of weights that dp shares, but mesh.zero={mesh.zero}; set mesh.zero=parameters"
        )
    if mesh.gradients == Gradients.ring and mesh.wire == Wire.ring:
        raise InputError(
            "mesh.gradients=ring goes around once for each product, and mesh.wire=ring makes mp products of each; "
            "use mesh.wire=sequence, or mesh.gradients=scatter"
        )


def _check_heads(model: ModelConfig, mp: int) -> None:
    if model.heads % model.kv_heads:
        raise InputError(f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads}; choose a divisor")
    if model.kv_heads % mp and mp % model.kv_heads:
        fit = [n for n in _divisors(model.heads) if model.kv_heads % n == 0 or n % model.kv_heads == 0]
        raise InputError(
            f"mesh.mp={mp} neither divides kv_heads={model.kv_heads} (model {model.name}) nor is a multiple of it; "
            f"use mesh.mp in {{{', '.join(map(str, fit))}}}"
        )
    if model.positions == Positions.rotary and model.head_dim % 2:
        raise InputError(f"rotary positions turn pairs: model.head_dim={model.head_dim} must be even")


def _check_offload(model: ModelConfig) -> None:
    for name in model.offload:
        if name not in KEPT[model.remat]:
            keep = ", ".join(remat for remat, kept in KEPT.items() if name in kept)
            raise InputError(f"model.offload has {name}, which model.remat={model.remat} does not keep; {keep} would")
    if Kept.gate in model.offload and model.mlp != Mlp.swiglu:
        raise InputError(f"model.offload has gate, but model.mlp={model.mlp} has none; leave it out")
    if Kept.left in model.offload and model.block == Block.parallel:
        raise InputError("model.offload has left, but in a parallel block nothing reads that again; leave it out")
    if len(set(model.offload)) < len(model.offload):
        raise InputError(f"model.offload=[{','.join(model.offload)}] names one twice; name each once")


def _explain(error: Exception, file: str) -> str:
    """One line on what the YAML reader, Hydra or OmegaConf found: where, what, and the way out."""
    if isinstance(error, UnicodeDecodeError | yaml.reader.ReaderError):
        return f"{file}: not text in UTF-8 ({error.reason}); save it as that"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: not YAML, {error.problem}; mend that line or the one before"
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return f"{group}={option}: there is no such {group}; use one of {', '.join(error.options)}"
    if isinstance(error, HydraException) and isinstance(error.__cause__, OmegaConfBaseException):
        error = error.__cause__
    key, first = getattr(error, "full_key", None), (str(error).strip().splitlines() or [repr(error)])[0]
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return f"{file}: unknown key {key}; {_nearest(key)}"
    if key in Config.__dataclass_fields__:
        return f"{file}: {key} is not a value but a group of them; set one, such as {_keys(key)[0]}=..."
    if isinstance(error, ValidationError) and key:
        return f"{file}: {key}={error.value} must be {_kind(key)}"
    if key:
        return f"{file}: {key}: {first}"
    if "No match in the defaults list" in first:
        return f"{file}: names no default to replace ({first}); start from conf/config.yaml, or set single keys"
    given = getattr(error, "override", None)
    if given or first.startswith(("Ambiguous", "Sweep")):  # commas, brackets, = and the like mean something to Hydra
        what = f"{given.lstrip('+')}: {first}" if given else first.replace("++", "")
        return f"""{what}; quote a value that has special characters: 'key="a,b"'"""
    return f"{file}: {first}"


def _kind(key: str) -> str:
    """What the schema says the value of `key` is."""
    whole, _, item = key.partition("[")
    section, _, name = whole.partition(".")
    kind = Config.__dataclass_fields__[section].type.__dataclass_fields__[name].type
    if item and get_origin(kind) is list:
        (kind,) = get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(kind)}"
    if not item and get_origin(kind) is list:
        return "a list, as in [a,b]"
    return f"of type {getattr(kind, '__name__', kind)}"


def _keys(section: str) -> list[str]:
    return [f"{section}.{key}" for key in Config.__dataclass_fields__[section].type.__dataclass_fields__]


def _nearest(unknown: str) -> str:
    """The known key that is spelt most like `unknown`, by its whole name or by its last part."""
    sections = list(Config.__dataclass_fields__)
    known = {name: name for section in sections for name in [section, *_keys(section)]}
    last = {name.rpartition(".")[2]: name for name in known}
    for names, word in [(known, unknown), (last, unknown.rpartition(".")[2])]:
        if near := difflib.get_close_matches(word, names, n=1, cutoff=0.7):
            return f"did you mean {names[near[0]]}?"
    return "shmap_tp/config.py names them all"
