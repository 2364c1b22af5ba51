"""The values of a config.json, which any program may have written: of the type that is needed, or a UserError."""

import math
from collections.abc import Mapping
from typing import Any

from shmap_tp.config.values import kinds_of
from shmap_tp.errors import UserError, shown


def size(value: Any, key: str, where: str) -> int:
    """`value`, of `key` in `where`, if it is an integer above 0."""
    if type(value) is not int or value < 1:
        raise UserError(f"{where}: {key}={shown(value)} must be an integer above 0; copy the file again")
    return value


def number(value: Any, key: str, where: str) -> float:
    """`value`, of `key` in `where`, if it is a finite number."""
    if type(value) not in (int, float) or not math.isfinite(value):
        raise UserError(f"{where}: {key}={shown(value)} must be a finite number; copy the file again")
    return float(value)


def section(value: Any, key: str, where: str) -> Mapping[str, Any]:
    """`value`, of `key` in `where`, if it is an object; {} for null."""
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{where}: {key}={shown(value)} must be an object; copy the file again")
    return value or {}


def value_for(ours: str, value: Any, key: str, where: str) -> Any:
    """`value`, of `key` in `where`, if the key `ours` of the `model` section can have it."""
    kinds = kinds_of(f"model.{ours}")
    if int in kinds:
        return size(value, key, where)
    if float in kinds:
        return number(value, key, where)
    if bool in kinds and type(value) is not bool:
        raise UserError(f"{where}: {key}={shown(value)} must be true or false; copy the file again")
    return value
