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
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    GrammarParseError,
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    OmegaConfBaseException,
    ValidationError,
)

from shmap_tp.config.packaged import CONF, as_installed
from shmap_tp.config.run_directory import in_its_place
from shmap_tp.config.schema import Config
from shmap_tp.config.validate import validate
from shmap_tp.config.values import SECTIONS, check_sections, check_values, expected_type, keys
from shmap_tp.config.yaml_source import check_files, read_text
from shmap_tp.errors import UserError, first_line, has_control_characters, shown

KEY = re.compile(r"[A-Za-z_][A-Za-z_0-9]*(\.[A-Za-z_0-9]+)*")
MAX_OVERRIDE = 3000
"""Characters of one key=value."""
MAX_KEY = 200
"""Characters of the key in it."""
MAX_BRACKETS = 50
"""Opening brackets of one key=value."""
IN_TOKENS = ("train.steps", "optimizer.warmup_steps", "optimizer.decay_steps")
"""Keys that may be given as a number of tokens instead of steps."""
TOKENS = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([KMBT]?) tokens")


DeriveModel = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""The given keys of the `model` section -> the keys that follow from model.from_pretrained."""


def load(file: str | PathLike, overrides: list[str], derive_model: DeriveModel | None = None) -> Config:
    """Load the configuration in `file`, apply `overrides` and validate the result.

    `derive_model` (pretrained/configuration.py) is for commands that support model.from_pretrained.  The config.yaml of
    a run that was moved or copied is that of its new place (`run_directory`).
    Raises UserError: the file cannot be read, a key or option is unknown, a value has the wrong type or is missing, or
    a rule of `validate` is broken.
    """
    path, name = _resolved(os.fspath(file)), shown(file)
    search = [] if path.parent == CONF else [f"hydra.searchpath=[{quoted(f'file://{CONF}')}]"]
    given = [_to_hydra(item, path.parent) for item in overrides]
    groups = (item.partition("=") for item in given if not item.startswith("++"))
    try:
        check_files(path, [path.parent, CONF], {group: json.loads(option) for group, _, option in groups})
        os.getcwd()  # which Hydra asks for
        with warnings.catch_warnings(), initialize_config_dir(str(path.parent), version_base="1.3"):
            # without _self_ the file's own values come last, as they should
            warnings.filterwarnings("ignore", "(?s)In .* Defaults list is missing `_self_`", UserWarning)
            values = compose(path.name, overrides=search + given)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_explain(error, name, overrides)) from error
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError("the working directory does not exist any more; change to another: cd DIRECTORY") from error
    except ValueError as error:  # such as of a header "# @package" without a value
        raise UserError(f"{name}: {shown(first_line(error))}; correct that value") from error
    except RecursionError:
        raise UserError(f"{name}: its defaults list names files that name each other; end the circle") from None
    config = from_values(_in_steps(_with_derived_model(values, derive_model, name)), name, overrides)
    config = in_its_place(config, Path(file), overrides)
    validate(config)
    return config


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
    try:
        return _to_config(OmegaConf.create(values), file)
    except OmegaConfBaseException as error:
        raise UserError(_explain(error, file, overrides)) from error


def _to_config(values: Any, file: str) -> Config:
    """As `from_values`, but raises also the errors of OmegaConf."""
    check_sections(OmegaConf.to_container(values), file)
    named = [section for section in ("run", "model", "data", "train", "optimizer") if section in values]
    merged = OmegaConf.merge(_schema(*named), values)
    missing = sorted(OmegaConf.missing_keys(merged))
    if missing:
        raise UserError(f"{file}: no value for {', '.join(missing)}; give each in the file or as key=value")
    check_values(OmegaConf.to_container(values, resolve=True), file)
    config = OmegaConf.to_object(merged)
    dp = config.mesh.dp
    if isinstance(dp, str) and dp.isascii() and dp.isdecimal() and len(dp) < 20:  # a number in quotes, or of oc.env
        config.mesh.dp = int(dp)
    return config


@cache
def _schema(*named: str) -> Any:
    """The types of all keys, and the default values of the sections `named`; not to be changed."""
    defaults = {section: OmegaConf.load(CONF / f"{section}_defaults.yaml") for section in named}
    return OmegaConf.merge(OmegaConf.structured(Config), defaults)


def _resolved(file: str) -> Path:
    """The absolute path of the --cfg `file`, which can be read."""
    if has_control_characters(file) or "://" in file:
        example = as_installed("conf/config.yaml")
        raise UserError(f"--cfg {shown(file)} is not a path of this machine; name a file such as {example}")
    try:
        path = Path(file).resolve()
    except (OSError, RuntimeError) as error:  # a loop of symbolic links
        raise UserError(f"--cfg {shown(file)} cannot be read: {shown(error)}; name another file") from error
    read_text(path, f"--cfg {shown(file)}")
    if path.suffix != ".yaml":
        raise UserError(f"--cfg {shown(file)}: the file name must end in .yaml; rename it")
    return path


def to_yaml(config: Config) -> str:
    """A configuration as a file that `--cfg FILE` loads again, with every value resolved."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def to_dict(config: object) -> dict:
    """A configuration as values that JSON can represent."""
    return OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)


def _to_hydra(override: str, directory: Path) -> str:
    """Translate `key=value` to Hydra's grammar.  The prefix ++ allows keys that are in the schema but not in the file;
    `load` rejects those that are in neither."""
    name = shown(override)
    if has_control_characters(override):
        raise UserError(f"{name}: has a line break or a control character; remove it")
    if len(override) > MAX_OVERRIDE or len(re.findall(r"[\[{(]", override)) > MAX_BRACKETS:
        raise UserError(
            f"{name}: has more than {MAX_OVERRIDE} characters or {MAX_BRACKETS} brackets; write the value in a file"
        )
    if override.startswith(("+", "~")):
        raise UserError(f"{name}: keys cannot be added or deleted; write key=value")
    key, equals, value = override.partition("=")
    if not equals or not KEY.fullmatch(key):
        way_out = f"--cfg {name}" if override.endswith((".yaml", ".yml")) else "for example train.steps=400"
        raise UserError(f"{name!r} is not key=value; write {way_out}")
    if len(key) > MAX_KEY:  # Hydra looks for files of that name
        raise UserError(f"{name}: unknown key; shmap_tp/config/schema.py lists all keys")
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
    """One line for the user about an error of Hydra or OmegaConf: place, cause, way out."""
    if isinstance(error, MissingConfigException):
        group, _, option = error.missing_cfg_file.rpartition("/")
        if error.options:
            return f"{group}={option}: there is no such {group}; use one of {', '.join(error.options)}"
        return (
            f"{file}: its defaults list names {error.missing_cfg_file}.yaml, which is neither beside it nor in {CONF}"
        )
    if isinstance(error, HydraException) and isinstance(error.__cause__ or error.__context__, OmegaConfBaseException):
        error = error.__cause__ or error.__context__
    if key := getattr(error, "full_key", None):
        given = any(f"{item.partition('=')[0]}.".startswith(f"{key}.") for item in overrides)
        return _explain_key(error) if given else f"{file}: {_explain_key(error)}"
    message = shown(first_line(error))
    if message.startswith("Cannot merge"):
        return f"{file}: a list cannot be merged with keys; give the whole list, for example train.profile=[10,12]"
    if "No match in the defaults list" in message:
        use = as_installed("use conf/config.yaml, or set single keys")
        return f"{file}: has no defaults list to override ({message}); {use}"
    override = getattr(error, "override", None)
    if override or message.startswith(("Ambiguous", "Sweep")):  # Hydra's grammar gives commas, brackets, = a meaning
        if message.startswith(("LexerNoViable", "Error parsing")):
            message = "cannot be parsed"
        what = f"{shown(override.lstrip('+'))}: {message}" if override else message.replace("++", "")
        return f"""{what}; quote a value that has special characters: 'key="a,b"'"""
    return f"{file}: {message}"


def _explain_key(error: OmegaConfBaseException) -> str:
    """What is wrong with the key or value that OmegaConf rejected."""
    key = error.full_key
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return f"unknown key {key}; {_suggest(key)}"
    if isinstance(error, ValidationError) and "." in key:
        value = None if str(error.value) == "None" else error.value  # a node of OmegaConf
        return f"{key}={shown(value)} must be {expected_type(key)}"
    if isinstance(error, InterpolationToMissingValueError):
        return f"no value for {first_line(error).rpartition(': ')[2]}; give it in the file or as key=value"
    way_out = "; correct its ${...}" if isinstance(error, InterpolationResolutionError | GrammarParseError) else ""
    return f"{key}: {shown(first_line(error))}{way_out}"


def _suggest(unknown: str) -> str:
    """The known key that is meant: spelled alike in the same section, or the only one of this name in another."""
    section, _, word = unknown.rpartition(".")
    every = [name for known in SECTIONS for name in [known, *keys(known)]]
    near = [name for name in every if name.startswith(f"{section}.")] if section in SECTIONS else every
    names = {name.rpartition(".")[2]: name for name in near}
    longer = [name for name in names if f"{name}_".startswith(f"{word}_") or f"{word}_".startswith(f"{name}_")]
    same = [name for name in every if name.endswith(f".{word}")]
    alike = [(names, 0.7), (longer, 0.5)]
    if close := [
        found for some, cutoff in alike for found in difflib.get_close_matches(word, some, n=1, cutoff=cutoff)
    ]:
        return f"did you mean {names[close[0]]}?"
    return f"did you mean {same[0]}?" if len(same) == 1 else "shmap_tp/config/schema.py lists all keys"
