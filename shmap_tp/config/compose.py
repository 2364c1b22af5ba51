"""Composes a validated `Config` from a YAML file and `key=value` overrides.

Hydra's compose API resolves the defaults list, config groups and interpolations; OmegaConf checks names and types
against the dataclasses of `schema.py`.  Options that a model does not name have the values of conf/model_defaults.yaml.
"""

import difflib
import json
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from shmap_tp.config.schema import Config
from shmap_tp.config.validate import validate
from shmap_tp.errors import UserError

_PACKAGE = Path(__file__).resolve().parents[1]

CONF = next(found for found in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if (found / "config.yaml").is_file())
"""The configuration directory of this project: shmap_tp/conf in an installed wheel, conf/ next to shmap_tp in a clone.
Files elsewhere can use its groups (model, data), too."""


DeriveModel = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""From the keys of the `model` section that are given, others that follow from model.from_pretrained."""


def load(file: str, overrides: list[str], derive_model: DeriveModel | None = None) -> Config:
    """Load the configuration in `file`, apply `overrides` and validate the result.

    `derive_model` (pretrained/configuration.py) is for commands that support model.from_pretrained.
    Raises UserError: the file does not exist, a key or option is unknown, a value has the wrong type or is missing, or
    a rule of `validate` is broken.
    """
    path = Path(file).resolve()
    if not path.is_file():
        raise UserError(f"--cfg {file}: no such file; start with conf/config.yaml")
    if path.suffix != ".yaml":
        raise UserError(f"--cfg {file}: the file name must end in .yaml; rename it")
    search = [] if path.parent == CONF else [f"hydra.searchpath=[{json.dumps(f'file://{CONF}', ensure_ascii=False)}]"]
    try:
        with initialize_config_dir(str(path.parent), version_base="1.3"):
            values = compose(path.stem, overrides=search + [_to_hydra(item, path.parent) for item in overrides])
        defaults = {"model": OmegaConf.load(CONF / "model_defaults.yaml")} if "model" in values else {}
        derived = {"model": _derived_model(values, derive_model)} if defaults else {}
        merged = OmegaConf.merge(OmegaConf.structured(Config), defaults, derived, values)
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise UserError(f"{file}: no value for {', '.join(missing)}; give each in the file or as key=value")
        config = OmegaConf.to_object(merged)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(_explain(error, file)) from error
    validate(config)
    return config


def _derived_model(values: Any, derive: DeriveModel | None) -> Mapping[str, Any]:
    """Keys of the `model` section that follow from model.from_pretrained."""
    given = OmegaConf.select(values, "model.from_pretrained")
    if given is None:
        return {}
    if derive is None:
        raise UserError(f"model.from_pretrained={given} is not supported by this command; name a model of conf/model")
    return derive(OmegaConf.to_container(values.model, resolve=True))


def save(config: Config, file: Path) -> None:
    """Write `config` with every value resolved, so that `--cfg FILE` loads it again.  The write is atomic."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    temporary.replace(file)


def to_dict(config: object) -> dict:
    """A configuration as values that JSON can represent."""
    return OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)


def quoted(value: object) -> str:
    """A value of an override as text that Hydra's grammar takes literally, whatever characters it has."""
    return json.dumps(str(value), ensure_ascii=False)


def _to_hydra(override: str, directory: Path) -> str:
    """Translate `key=value` to Hydra's grammar.  The prefix ++ allows keys that are in the schema but not in the file;
    `load` rejects those that are in neither."""
    if override.startswith(("+", "~")):
        raise UserError(f"{override}: keys cannot be added or deleted; write key=value")
    key, equals, _ = override.partition("=")
    if not key or not equals:
        raise UserError(f"{override!r} is not key=value; write for example train.steps=400")
    is_group = (CONF / key).is_dir() or (directory / key).is_dir()
    return override if is_group else f"++{override}"


def _explain(error: Exception, file: str) -> str:
    """One line for the user about an error of the YAML reader, Hydra or OmegaConf: place, cause, way out."""
    if isinstance(error, UnicodeDecodeError | yaml.YAMLError):
        return _explain_yaml(error, file)
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return f"{group}={option}: there is no such {group}; use one of {', '.join(error.options)}"
    if isinstance(error, HydraException) and isinstance(error.__cause__, OmegaConfBaseException):
        error = error.__cause__
    if getattr(error, "full_key", None):
        return f"{file}: {_explain_key(error)}"
    message = _first_line(error)
    if "No match in the defaults list" in message:
        return f"{file}: has no defaults list to override ({message}); use conf/config.yaml, or set single keys"
    override = getattr(error, "override", None)
    if override or message.startswith(("Ambiguous", "Sweep")):  # Hydra's grammar gives commas, brackets, = a meaning
        what = f"{override.lstrip('+')}: {message}" if override else message.replace("++", "")
        return f"""{what}; quote a value that has special characters: 'key="a,b"'"""
    return f"{file}: {message}"


def _explain_yaml(error: Exception, file: str) -> str:
    if isinstance(error, UnicodeDecodeError | yaml.reader.ReaderError):
        return f"{file}: not UTF-8 text ({error.reason}); save it as UTF-8"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: invalid YAML, {error.problem}; correct that line or the one before"
    return f"{file}: {_first_line(error)}"


def _explain_key(error: OmegaConfBaseException) -> str:
    """What is wrong with the key or value that OmegaConf rejected."""
    key = error.full_key
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return f"unknown key {key}; {_suggest(key)}"
    if key in Config.__dataclass_fields__:
        return f"{key} is a group of keys, not a value; set one of them, for example {_keys(key)[0]}=..."
    if isinstance(error, ValidationError):
        return f"{key}={error.value} must be {_expected_type(key)}"
    return f"{key}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]


def _expected_type(key: str) -> str:
    """The type of `key` in the schema, in words."""
    field, _, item = key.partition("[")
    section, _, name = field.partition(".")
    kind = Config.__dataclass_fields__[section].type.__dataclass_fields__[name].type
    if item and get_origin(kind) is list:
        (kind,) = get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(kind)}"
    if not item and get_origin(kind) is list:
        return "a list, for example [a,b]"
    return f"of type {getattr(kind, '__name__', kind)}"


def _keys(section: str) -> list[str]:
    """All keys of a section, such as train.steps."""
    return [f"{section}.{key}" for key in Config.__dataclass_fields__[section].type.__dataclass_fields__]


def _suggest(unknown: str) -> str:
    """The known key whose spelling is closest to `unknown`, by its full name or else by its last part."""
    sections = list(Config.__dataclass_fields__)
    full_names = {name: name for section in sections for name in [section, *_keys(section)]}
    last_parts = {name.rpartition(".")[2]: name for name in full_names}
    for names, word in [(full_names, unknown), (last_parts, unknown.rpartition(".")[2])]:
        if close := difflib.get_close_matches(word, names, n=1, cutoff=0.7):
            return f"did you mean {names[close[0]]}?"
    return "shmap_tp/config/schema.py lists all keys"
