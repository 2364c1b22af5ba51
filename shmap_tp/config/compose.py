"""From a YAML file and `key=value` overrides to a checked Config, by Hydra's compose API over the dataclass schema."""

import difflib
import json
from enum import Enum
from pathlib import Path
from typing import get_args, get_origin

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from shmap_tp.config.schema import (
    Config,
)
from shmap_tp.config.validate import check
from shmap_tp.errors import UserError

_PACKAGE = Path(__file__).resolve().parents[1]

CONF = next(found for found in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if (found / "config.yaml").is_file())
"""The packaged configuration: shmap_tp/conf in an installed wheel, conf/ beside shmap_tp in a checkout.

Its groups (model=..., data=...) are also found from a configuration file elsewhere.
"""


def load(file: str, overrides: list[str]) -> Config:
    """The configuration in `file` with `overrides` applied, checked as far as it can be without devices.

    Raises InputError: no such file, unknown group or key, wrong type, missing value, sizes that do not divide.
    """
    path = Path(file).resolve()
    if not path.is_file():
        raise UserError(f"--cfg {file}: no such file; the first run's is conf/config.yaml")
    if path.suffix != ".yaml":
        raise UserError(f"--cfg {file}: the name of a configuration ends in .yaml; rename it")
    search = [] if path.parent == CONF else [f"hydra.searchpath=[{json.dumps(f'file://{CONF}', ensure_ascii=False)}]"]
    try:
        with initialize_config_dir(str(path.parent), version_base="1.3"):
            values = compose(path.stem, overrides=search + [_override(given, path.parent) for given in overrides])
        merged = OmegaConf.merge(OmegaConf.structured(Config), values)
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise UserError(f"{file}: no value for {', '.join(missing)}; give each in the file or as key=value")
        config = OmegaConf.to_object(merged)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(_explain(error, file)) from error
    check(config)
    return config


def _override(given: str, directory: Path) -> str:
    """`key=value` as Hydra reads it.  A key need not be in the file (++), only in the schema; `load` checks it."""
    if given.startswith(("+", "~")):
        raise UserError(f"{given}: keys cannot be added or deleted; write key=value")
    key, equals, _ = given.partition("=")
    if not key or not equals:
        raise UserError(f"{given!r} is not key=value; write it as in train.steps=400")
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
