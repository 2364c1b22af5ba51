"""Composes a validated `Config` from a YAML file and `key=value` overrides.

Hydra's compose API resolves the defaults list, config groups and interpolations; OmegaConf checks names and types
against the dataclasses of `schema.py`.  Options that a section does not name have the values of
conf/SECTION_defaults.yaml, where there is one.
"""

import difflib
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf, errors

from shmap_tp.config.schema import Config
from shmap_tp.config.validate import validate
from shmap_tp.config.values import RULES, SECTIONS, expected_type
from shmap_tp.config.yaml_files import CONF, as_installed, in_its_place
from shmap_tp.errors import UserError, first_line, has_control_characters, shown

KEY = re.compile(r"[A-Za-z_][A-Za-z_0-9]*(\.[A-Za-z_0-9]+)*")
IN_TOKENS = ("train.steps", "optimizer.warmup_steps", "optimizer.decay_steps")
"""Keys that may be given as a number of tokens instead of steps."""
TOKENS = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([KMBT]?) tokens")

DeriveModel = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""The given keys of the `model` section -> the keys that follow from model.from_pretrained."""


def load(file: str | PathLike, overrides: list[str], derive_model: DeriveModel | None = None) -> Config:
    """Load the configuration in `file`, apply `overrides` and validate the result.

    `derive_model` (pretrained/configuration.py) is for commands that support model.from_pretrained.  The config.yaml of
    a run that was moved or copied has its new place (`yaml_files.py`).
    Raises UserError: the file cannot be read, a key or option is unknown, a value has the wrong type or is missing, or
    a rule of `schema.py` or `validate.py` is broken.
    """
    path, name = Path(file).absolute(), os.fspath(file)
    if path.suffix != ".yaml" or not path.is_file():
        example = as_installed("conf/config.yaml")
        raise UserError(f"--cfg {name}: there is no such file that ends in .yaml; name one such as {example}")
    values = _composed(path, name, overrides)
    config = from_values(_in_steps(_with_derived_model(values, derive_model, name)), name, overrides)
    config = in_its_place(config, Path(file), overrides)
    validate(config)
    return config


def _composed(path: Path, name: str, overrides: Sequence[str]) -> Any:
    """The values of a file and its groups, with `overrides`, as Hydra composes them."""
    given = [_to_hydra(item, path.parent) for item in overrides]
    search = [] if path.parent == CONF else [f"hydra.searchpath=[{quoted(f'file://{CONF}')}]"]
    try:
        with warnings.catch_warnings(), initialize_config_dir(str(path.parent), version_base="1.3"):
            # without _self_ the file's own values come last, as they should
            warnings.filterwarnings("ignore", "(?s)In .* Defaults list is missing `_self_`", UserWarning)
            return compose(path.name, overrides=search + given)
    except Exception as error:  # of Hydra, OmegaConf and the YAML reader, for whatever a file holds
        raise UserError(_explain(error, name, overrides)) from error


def _with_derived_model(values: Any, derive: DeriveModel | None, file: str) -> Any:
    """`values`, and the keys of the `model` section that follow from model.from_pretrained and are not given."""
    model = values.get("model")
    if not OmegaConf.is_dict(model):
        return values
    if OmegaConf.is_missing(model, "from_pretrained"):
        raise UserError(f"{file}: model.from_pretrained has no value; give a directory with config.json and weights")
    if model.get("from_pretrained") is None:
        return values
    if derive is None:
        raise UserError(f"model.from_pretrained={model.from_pretrained} is not supported here; name a model=...")
    return OmegaConf.merge({"model": dict(derive(OmegaConf.to_container(model, resolve=True)))}, values)


def _in_steps(values: Any) -> Any:
    """`values`, with numbers of tokens, such as train.steps=10B tokens, as the steps that read at least so many."""

    def given(key: str) -> Any:
        select = partial(OmegaConf.select, values, throw_on_resolution_failure=False)
        return select(key) if OmegaConf.is_dict(select(key.partition(".")[0])) else None

    steps: dict[str, dict[str, int]] = {}
    for key in IN_TOKENS:
        if not (match := TOKENS.fullmatch(str(given(key)))):
            continue
        sizes = [given("train.batch"), given("model.context")]
        if not all(type(size) is int and size > 0 for size in sizes):
            raise UserError(f"{key}={match[0]} needs train.batch and model.context; give each an integer above 0")
        section, _, name = key.partition(".")
        tokens = Fraction(match[1]) * 1000 ** " KMBT".index(match[2] or " ")
        steps.setdefault(section, {})[name] = math.ceil(tokens / math.prod(sizes))
    return OmegaConf.merge(values, steps)


def from_values(values: Any, file: str, overrides: Sequence[str] = ()) -> Config:
    """The Config of `values`, a dict or DictConfig that was read from `file` and has `overrides`.

    Raises UserError if a key is missing or unknown, or a value has the wrong type.
    """
    sections = "run", "model", "data", "train", "optimizer"
    try:
        values = OmegaConf.create(values)
        named = [section for section in sections if OmegaConf.is_dict(values.get(section))]
        merged = OmegaConf.merge(_schema(*named), values)
        if missing := sorted(OmegaConf.missing_keys(merged)):
            raise UserError(f"{file}: no value for {', '.join(missing)}; give each in the file or as key=value")
        config = OmegaConf.to_object(merged)
    except errors.OmegaConfBaseException as error:
        raise UserError(_explain(error, file, overrides)) from error
    if isinstance(config.mesh.dp, str) and config.mesh.dp.isdecimal():  # a number in quotes, or of oc.env
        config.mesh.dp = int(config.mesh.dp)
    return config


@cache
def _schema(*named: str) -> Any:
    """The types of all keys, and the default values of the sections `named`; not to be changed."""
    defaults = {section: OmegaConf.load(CONF / f"{section}_defaults.yaml") for section in named}
    return OmegaConf.merge(OmegaConf.structured(Config), defaults)


def to_yaml(config: Config) -> str:
    """A configuration as a file that `--cfg FILE` loads again, with every value resolved."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def to_dict(config: object) -> dict:
    """A configuration as values that JSON can represent."""
    return OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)


def _to_hydra(override: str, directory: Path) -> str:
    """Translate `key=value` to Hydra's grammar.  The prefix ++ allows keys that are in the schema but not in the file;
    `load` rejects those that are in neither."""
    name, (key, equals, value) = shown(override), override.partition("=")
    if not equals or not KEY.fullmatch(key) or has_control_characters(override):
        way_out = f"--cfg {name}" if override.endswith((".yaml", ".yml")) else "for example train.steps=400"
        raise UserError(f"{name!r} is not key=value; write {way_out}")
    if key.partition(".")[0] == "hydra":
        raise UserError(f"{name}: settings of Hydra itself have no effect here; leave it out")
    groups = [place / key for place in (CONF, directory)] if key.isidentifier() else []
    options = {file.stem for group in groups for file in group.glob("*.yaml") if file.is_file()}
    if not options:
        return f"++{override}"
    option = value.strip("\"'")
    if option not in options:
        raise UserError(f"{name}: there is no such {key}; use one of {', '.join(sorted(options))}")
    return f"{key}={quoted(option)}"


def quoted(text: str) -> str:
    """A value of an override that Hydra's grammar takes literally, whatever characters it has."""
    return json.dumps(text, ensure_ascii=False)


def _explain(error: Exception, file: str, overrides: Sequence[str]) -> str:
    """One line for the user about an error of Hydra, OmegaConf or YAML: place, cause, way out."""
    cause = error.__cause__ or error.__context__
    if isinstance(error, HydraException) and isinstance(cause, errors.OmegaConfBaseException):
        error = cause
    if key := getattr(error, "full_key", None):
        given = any(f"{item.partition('=')[0]}.".startswith(f"{key}.") for item in overrides)
        return _explain_key(error) if given else f"{file}: {_explain_key(error)}"
    if override := getattr(error, "override", None):  # Hydra's grammar gives commas, brackets, = a meaning
        return f"""{shown(override.lstrip("+"))} cannot be parsed; quote special characters: 'key="a,b"'"""
    is_known = isinstance(error, HydraException | errors.OmegaConfBaseException)
    message = shown(first_line(error) if is_known else " ".join(str(error).split())).replace("++", "")
    if message.startswith("Merge error"):  # a value in the place of a section within one
        for key, _, value in (item.partition("=") for item in overrides):
            if any(rule.startswith(f"{key}.") for rule in RULES):
                return f"{key}={shown(value)} must be {expected_type(key)}"
    if message.startswith(("Ambiguous", "Sweep")):
        return f"""{message}; quote a value that has special characters: 'key="a,b"'"""
    return f"{file}: {message}; correct that"


def _explain_key(error: errors.OmegaConfBaseException) -> str:
    """What is wrong with the key or value that OmegaConf rejected."""
    key = error.full_key
    if isinstance(error, errors.ConfigKeyError | errors.ConfigAttributeError):
        return f"unknown key {key}; {_suggest(key)}"
    if isinstance(error, errors.ValidationError):
        value = None if str(error.value) == "None" else error.value  # a node of OmegaConf
        return f"{key}={shown(value)} must be {expected_type(key)}"
    if isinstance(error, errors.InterpolationToMissingValueError):
        return f"no value for {first_line(error).rpartition(': ')[2]}; give it in the file or as key=value"
    return f"{key}: {shown(first_line(error))}; correct that value"


def _suggest(unknown: str) -> str:
    """The known key that is meant: spelled alike in the same section, or the only one of this name in another."""
    section, _, word = unknown.rpartition(".")
    every = [*SECTIONS, *RULES]
    there = [name for name in every if section not in SECTIONS or name.startswith(f"{section}.")]
    names = {name.rpartition(".")[2]: name for name in there}
    longer = [name for name in names if f"{name}_".startswith(f"{word}_") or f"{word}_".startswith(f"{name}_")]
    close = [*difflib.get_close_matches(word, names, 1, 0.7), *difflib.get_close_matches(word, longer, 1, 0.5)]
    meant = [names[name] for name in close[:1]] or [name for name in every if name.endswith(f".{word}")]
    return f"did you mean {meant[0]}?" if len(meant) == 1 else "shmap_tp/config/schema.py lists all keys"
