"""data.sources: the directories that a run reads in turn, and the weight of each, as exact fractions.

A weight is a decimal number or a fraction such as 1/3, or one from each of several steps on.  Steps are counted from 0:
what begins at step N is new after N steps.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from shmap_tp.config.schema import DataConfig
from shmap_tp.config.values import INT32, check_path
from shmap_tp.errors import UserError, shown

MAX_DENOMINATOR = 10_000
"""The sources alternate with a period of the common denominator of their weights, in sequences."""
EXAMPLE = "{web: {dir: data/web, weight: 0.7}, code: {dir: data/code, weight: 0.3}}"
_KEYS = ("dir", "weight", "from_step")


@dataclass(frozen=True)
class Phase:
    """Steps in which the sources have the same shares."""

    first: int
    """Its first step; it ends where the next phase begins."""
    shares: dict[str, Fraction]
    """The share of the sequences that each source has, by name; the shares add up to 1."""


def each_source(data: DataConfig) -> dict[str, DataConfig]:
    """The settings of each source alone, by its name; of data.dir, by the name "", if it is the only source."""
    if not data.sources:
        return {"": data}
    return {
        name: replace(data, name=name, dir=source["dir"], source=None, sources={})
        for name, source in sorted(data.sources.items())
    }


def first_source(data: DataConfig) -> DataConfig:
    """The settings of the first source alone; all have the same tokenizer."""
    return next(iter(each_source(data).values()))


def phases(data: DataConfig) -> tuple[Phase, ...]:
    """The phases of a run in order, the first from step 0.  Sources without a share in a phase are left out of it.

    Where some sources do not take part yet, the weights of the others are scaled to add up to 1.
    Raises UserError if the weights of all sources do not add up to 1.
    """
    if not data.sources:
        return (Phase(0, {"": Fraction(1)}),)
    weights = {name: _weights(f"data.sources.{name}", source) for name, source in sorted(data.sources.items())}
    found: list[Phase] = []
    for first in sorted({0, *(step for steps in weights.values() for step in steps)}):
        now = {name: _at(steps, first) for name, steps in weights.items()}
        given = {name: weight for name, weight in now.items() if weight is not None}
        shares = _shares(given, first, complete=len(given) == len(now))
        if not found or found[-1].shares != shares:
            found.append(Phase(first, shares))
    return tuple(found)


def describe_shares(name: str, phases: Sequence[Phase], steps: int) -> str:
    """The shares of a source in a run of `steps` steps, in words, such as "70 %, from step 1000 on 40 %"."""
    found, before = [], None
    for phase in phases:
        if (share := phase.shares.get(name, Fraction(0))) != before:
            found.append(f"{f'from step {phase.first} on ' if phase.first else ''}{float(100 * share):.4g} %")
        before = share
    is_read = any(name in phase.shares and phase.first < steps for phase in phases)
    return ", ".join(found) + ("" if is_read else f" (never read: train.steps={steps})")


def check_sources(data: DataConfig) -> None:
    """Raise UserError, naming the key, if data.sources cannot be used, or data.dir is given beside it."""
    if not data.sources and data.dir is None:
        raise UserError("data.dir=null: name the directory of the data, or several in data.sources")
    for key in ("dir", "source"):
        if data.sources and (value := getattr(data, key)) is not None:
            raise UserError(
                f"data.{key}={value} has no effect with data.sources; use data.dir=null data.source=null\n"
                f"(the directory can be one of the sources, and `python -m shmap_tp.prepare` prepares each)"
            )
    for name, source in data.sources.items():
        key = f"data.sources.{name}"
        if not (isinstance(name, str) and name.isascii() and name.isidentifier()):
            raise UserError(f"{key}: a source's name has letters, digits and _, and begins with no digit; rename it")
        given = source if isinstance(source, dict) else {}
        if {*given} - {*_KEYS} or not isinstance(given.get("dir"), str) or given.get("weight") is None:
            raise UserError(f"{key}={shown(source)} must have dir, weight and perhaps from_step, as in {EXAMPLE}")
        check_path(f"{key}.dir", source["dir"], ("gs",))
    phases(data)


def _weights(key: str, source: dict[str, Any]) -> dict[int, Fraction]:
    """The weight of a source by the step from which on it has it, in order.  Raises UserError, naming its `key`."""
    weight, from_step = source["weight"], source.get("from_step")
    if not isinstance(weight, dict):
        return {_step(f"{key}.from_step", from_step or 0): _fraction(f"{key}.weight", weight)}
    if from_step is not None or not weight:
        raise UserError(f"{key}.weight must be a number beside from_step, or such as {{0: 0.7, 1000: 0.5}} without it")
    found = {_step(f"{key}.weight", step): _fraction(f"{key}.weight", each) for step, each in weight.items()}
    return dict(sorted(found.items()))


def _step(key: str, value: Any) -> int:
    number = int(value) if isinstance(value, str) and re.fullmatch("[0-9]{1,10}", value) else value  # a key of JSON
    if type(number) is not int or not 0 <= number < INT32:
        raise UserError(f"{key}: {shown(value)} is no step; give the number of steps before it, 0 or more")
    return number


def _fraction(key: str, value: Any) -> Fraction:
    """A weight, exactly as it is written."""
    text = repr(value) if type(value) in (int, float) and math.isfinite(value) else value
    try:
        found = Fraction(text) if isinstance(text, str) else -1
    except (ValueError, ZeroDivisionError):
        found = -1
    if not 0 <= found <= 1:
        raise UserError(f"{key}={shown(value)} must be a number from 0 to 1 such as 0.3, or a fraction such as 1/3")
    return found


def _at(weights: dict[int, Fraction], step: int) -> Fraction | None:
    """The weight at a step; None before the first."""
    return next((weight for first, weight in reversed(weights.items()) if first <= step), None)


def _shares(weights: dict[str, Fraction], first: int, complete: bool) -> dict[str, Fraction]:
    """`weights`, which hold from step `first` on, scaled to add up to 1.  Raises UserError if they are too large, or do
    not add up to 1 although they are `complete`."""
    total, denominator = sum(weights.values(), Fraction(0)), math.lcm(*(each.denominator for each in weights.values()))
    listed = " + ".join(f"{name} {_decimal(weight)}" for name, weight in weights.items())
    if denominator > MAX_DENOMINATOR:
        limit = f"above {MAX_DENOMINATOR}; use at most four decimals"
        raise UserError(f"data.sources: {listed} are fractions of {denominator}, {limit}")
    if not total:
        raise UserError(f"data.sources: no source has a weight from step {first} on; give one from_step=0")
    if total > 1 or (complete and total < 1):
        raise UserError(f"data.sources: weights add up to {_decimal(total)} from step {first} on ({listed}), not 1")
    return {name: weight / total for name, weight in weights.items() if weight}


def _decimal(fraction: Fraction) -> str:
    """As a decimal number if it has at most four decimals, else as a fraction."""
    return f"{float(fraction):g}" if MAX_DENOMINATOR % fraction.denominator == 0 else str(fraction)
