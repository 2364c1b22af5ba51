"""From a YAML file and `key=value` overrides to a checked Config, by Hydra's compose API over the dataclass schema."""

import difflib
import re
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from shmap_tp.config import Config, InputError, ModelConfig, Positions, padded_vocabulary

CONF = Path(__file__).resolve().parent.parent / "conf"
"""The project's own configuration; its groups (model=..., data=...) are found from a file anywhere else, too."""


def load(file: str, overrides: list[str]) -> Config:
    """The configuration in `file` with `overrides` applied, checked as far as it can be without devices.

    Raises InputError: no such file, unknown group or key, wrong type, missing value, sizes that do not divide.
    """
    path = Path(file).resolve()
    if not path.is_file():
        raise InputError(f"--cfg {file}: no such file; the first run's is conf/config.yaml")
    try:
        for override in OverridesParser.create().parse_overrides(overrides):
            if override.is_add() or override.is_delete():
                raise InputError(f"{override.input_line}: keys cannot be added or deleted; write key=value")
        search = [] if path.parent == CONF else [f"hydra.searchpath=[file://{CONF}]"]
        with initialize_config_dir(str(path.parent), version_base="1.3"):
            values = compose(path.stem, overrides=[*search, *overrides])
        merged = OmegaConf.merge(OmegaConf.structured(Config), values)
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise InputError(f"{file}: no value for {', '.join(missing)}; give each in the file or as key=value")
        config = OmegaConf.to_object(merged)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise InputError(_explain(error, file)) from error
    check(config)
    return config


def save(config: Config, file: Path) -> None:
    """Write `config`, every value resolved, so that `--cfg FILE` gives it back."""
    file.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))


def to_dict(config: object) -> dict:
    """A configuration as plain JSON-able values."""
    return OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)


def check(config: Config) -> None:
    """Every rule that a configuration must keep on any machine.  Raises InputError naming the first that is broken."""
    model, mesh, train = config.model, config.mesh, config.train
    for name, value, least in [
        ("mesh.dp", mesh.dp, 1),
        ("mesh.mp", mesh.mp, 1),
        ("mesh.processes", mesh.processes, 1),
        ("train.steps", train.steps, 1),
        ("train.batch", train.batch, 1),
        ("train.microbatches", train.microbatches, 1),
        ("model.layers", model.layers, 1),
        ("model.context", model.context, 1),
        ("model.attention_chunk", model.attention_chunk, 1),
        ("evaluate.every", config.evaluate.every, 0),
        ("evaluate.batches", config.evaluate.batches, 1),
        ("checkpoint.every", config.checkpoint.every, 0),
        ("checkpoint.keep", config.checkpoint.keep, 2),
        ("log.every", config.log.every, 1),
        ("optimizer.warmup_steps", config.optimizer.warmup_steps, 0),
        ("optimizer.decay_steps", config.optimizer.decay_steps, config.optimizer.warmup_steps + 1),
    ]:
        if value < least:
            raise InputError(f"{name}={value} is too small; it must be {least} or more")
    if config.optimizer.clip_norm <= 0:
        raise InputError(f"optimizer.clip_norm={config.optimizer.clip_norm} must be above 0; 1.0 is usual")
    _check_heads(model, mesh.mp)
    for what, size in [
        ("heads", model.heads),
        ("ffn", model.ffn),
        ("the padded vocabulary", padded_vocabulary(model)),
    ]:
        _check_divides(mesh.mp, f"{what}={size} (model {model.name})", size)
    _check_divides(train.microbatches, f"train.batch={train.batch}", train.batch, "train.microbatches")
    part = train.batch // train.microbatches
    _check_divides(mesh.dp, f"a microbatch of {part} windows (train.batch / train.microbatches)", part, "mesh.dp")


def _check_divides(divisor: int, what: str, size: int, name: str = "mesh.mp") -> None:
    if size % divisor:
        fit = ", ".join(str(n) for n in range(1, min(size, 1024) + 1) if size % n == 0)
        raise InputError(f"{name}={divisor} does not divide {what}; use {name} in {{{fit}}}")


def _check_heads(model: ModelConfig, mp: int) -> None:
    if model.heads % model.kv_heads:
        raise InputError(f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads}; choose a divisor")
    if model.kv_heads % mp and mp % model.kv_heads:
        raise InputError(
            f"mesh.mp={mp} neither divides kv_heads={model.kv_heads} (model {model.name}) nor is a multiple of it; "
            f"choose one that is"
        )
    if model.positions == Positions.rotary and model.head_dim % 2:
        raise InputError(f"rotary positions turn pairs: model.head_dim={model.head_dim} must be even")


def _explain(error: Exception, file: str) -> str:
    """One line of what Hydra or OmegaConf found, with the nearest key where one is unknown."""
    text = str(error).strip()
    cause = str(error.__cause__ or "").strip()
    if isinstance(error, MissingConfigException) or "Could not find" in text:
        return re.sub(r"\s*\n\s*", " ", text.split("Config search path")[0].split("Search path")[0]).strip()
    unknown = re.search(r"(?:Key|key) '([^']+)' (?:is )?not in", f"{text} {cause}")
    full = re.search(r"full_key: (\S+)|Could not override '([^']+)'", f"{text} {cause}")
    name = (full.group(1) or full.group(2)) if full else None
    if unknown:
        name = name or unknown.group(1)
        near = difflib.get_close_matches(name, _known_keys(), n=1, cutoff=0.5)
        return f"{file}: unknown key {name}" + (f"; did you mean {near[0]}?" if near else "; see --help")
    first = (text.splitlines() or [repr(error)])[0].replace(
        " (see https://hydra.cc/docs/1.2/advanced/override_grammar/basic)", ""
    )
    return f"{file}: {first}" + (f" ({name})" if name and name not in first else "")


def _known_keys() -> list[str]:
    sections = {name: field.type for name, field in Config.__dataclass_fields__.items()}
    return [f"{name}.{key}" for name, section in sections.items() for key in section.__dataclass_fields__]
