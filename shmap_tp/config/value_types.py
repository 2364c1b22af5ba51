"""Checks of composed values that OmegaConf leaves out: it accepts digits of any script, booleans as numbers and numbers
as booleans in places, lists within lists, and line breaks in names."""

from enum import Enum
from types import UnionType
from typing import Any, get_args, get_origin

from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError, has_control_characters, shown

NAMES = ("run.name", "model.name", "data.name", "log.wandb_project")
MAX_NAME = 200
"""Characters of a name."""
SECTIONS = {name: field.type for name, field in Config.__dataclass_fields__.items()}
"""The dataclass of each section of a configuration."""


def keys(section: str) -> list[str]:
    """All keys of a section, such as train.steps."""
    return [f"{section}.{key}" for key in SECTIONS[section].__dataclass_fields__]


def check_sections(values: dict[str, Any], file: str) -> None:
    """Raise UserError if a section in `values`, the contents of `file`, is a single value or a list."""
    for section in (name for name in SECTIONS if name in values):
        if not isinstance(values[section], dict):
            raise UserError(
                f"{file}: {section} is a group of keys, not a value; set one of them, for example "
                f"{keys(section)[0]}=..."
            )


def check_values(values: dict[str, Any], file: str) -> None:
    """Raise UserError if a value in `values`, which OmegaConf has accepted for the schema, is not of its key's type."""
    for section in (name for name in SECTIONS if name in values):
        for name, value in values[section].items():
            key = f"{section}.{name}"
            kinds = kinds_of(key)
            parts = [value]
            if isinstance(value, dict):
                parts = [*value, *value.values()]
            elif isinstance(value, list):
                parts = value
            for part in parts:
                if isinstance(part, str) and has_control_characters(part):
                    raise UserError(f"{file}: {key}={shown(part)} has a line break or a control character; remove it")
            is_nested = any(isinstance(part, list | dict) for part in parts)
            if key in NAMES and not 0 < len(str(value)) <= MAX_NAME:
                raise UserError(f"{file}: {key}={shown(value)} must have 1 to {MAX_NAME} characters; choose a name")
            if is_nested or not all(_is_plain(part, kinds) for part in parts):
                raise UserError(f"{file}: {key}={shown(value)} must be {expected_type(key)}")


def _is_plain(part: Any, kinds: set[type]) -> bool:
    """Whether `part` is written as a value of one of `kinds` is: numbers with ASCII digits, booleans not as numbers."""
    if bool in kinds:
        return not isinstance(part, int | float) or isinstance(part, bool)
    if kinds & {int, float}:
        return not isinstance(part, str) or part.isascii()
    return True


def expected_type(key: str) -> str:
    """The type of `key` in the schema, in words.  `key` may have an index, as in model.offload[0]."""
    field, _, item = key.partition("[")
    kind = _annotation(field)
    if get_origin(kind) is dict:
        return "a mapping of names to text, for example {name: text}"
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
        if not item:
            return "a list, for example [a,b]"
    options = [option for option in kinds_of(key) if issubclass(option, Enum)]
    if options:
        return f"one of {', '.join(options[0])}" + (", or null" if type(None) in get_args(kind) else "")
    return f"of type {getattr(kind, '__name__', kind)}"


def kinds_of(key: str) -> set[type]:
    """The types that a value of `key`, or an item of it if it is a list or a dict, may have."""
    found, open_ = set(), [_annotation(key.partition("[")[0])]
    while open_:
        kind = open_.pop()
        if isinstance(kind, UnionType) or get_origin(kind):
            open_ += get_args(kind)
        else:
            found.add(kind)
    return found


def _annotation(key: str) -> Any:
    """The annotation of the field that `key` names; its parts after the second are keys of a dict."""
    section, name = key.split(".")[:2]
    return SECTIONS[section].__dataclass_fields__[name].type
