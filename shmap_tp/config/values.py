"""What the value of a single key may be: the rules in the metadata of its field in `schema.py` (`schema.key`).

OmegaConf checks the types.  These rules are checked before anything is allocated: they refuse numbers that would
overflow or fill the memory, paths that are a mistake, and options that would have no effect.

    least, above, most, below   bounds of a number; without them it is at least 1, and an integer is below 2^31
    usual                       what messages advise
    zero_is_null, infinite      whether 0 means null, and whether the number may be infinite
    schemes                     the value is a directory of this machine, or a URL of one of these schemes
    needs                       keys that a value other than `unless` (by default null) needs: KEY, which is then not
                                null, 0 or false, or KEY=VALUE
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import reduce
from types import UnionType
from typing import Any, get_args, get_origin

from shmap_tp.config.schema import Config, ModelConfig
from shmap_tp.errors import refuse_first, shown

SECTIONS = {name: field.type for name, field in Config.__dataclass_fields__.items()}
"""The dataclass of each section of a configuration."""
INT32 = 2**31
"""Steps, token ids and array indices are int32: no integer may reach this."""
SMALLEST_FLOAT, LARGEST_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The normal numbers of float32, in which the step computes."""
BELOW = 1 - 2.0**-24
"""Times a bound: the largest float32 below it."""


def padded_vocabulary(model: ModelConfig) -> int:
    """Rows of the embedding: the vocabulary rounded up to model.vocabulary_multiple."""
    return -(-model.vocabulary // model.vocabulary_multiple) * model.vocabulary_multiple


def keys(section: str) -> list[str]:
    """All keys of a section, such as train.steps."""
    return list(_fields(SECTIONS[section], section))


def _fields(kind: type, name: str) -> Iterator[str]:
    """The keys of the dataclass `kind`, whose own key is `name`, and of those inside it."""
    for key, field in kind.__dataclass_fields__.items():
        inside = f"{name}.{key}"
        yield from _fields(field.type, inside) if is_dataclass(field.type) else [inside]


def _field(key: str) -> Any:
    """The field that `key` names; its parts after a field that is no group are keys of a dict."""
    kind: Any = Config
    for part in key.split("."):
        if is_dataclass(kind):
            field = kind.__dataclass_fields__[part]
            kind = field.type
    return field


def kinds_of(key: str) -> set[type]:
    """The types that a value of `key`, or an item of it if it is a list or a dict, may have."""
    found, open_ = set(), [_field(key.partition("[")[0]).type]
    while open_:
        kind = open_.pop()
        if isinstance(kind, UnionType) or get_origin(kind):
            open_ += get_args(kind)
        else:
            found.add(kind)
    return found


RULES = {key: _field(key).metadata for section in SECTIONS for key in keys(section)}
"""The rules of every key; see `schema.key`."""
SCHEMES = {key: rules["schemes"] for key, rules in RULES.items() if "schemes" in rules}
"""The directories of a configuration, and the URLs that each may be besides a path."""


def expected_type(key: str) -> str:
    """The type of `key` in the schema, in words.  `key` may have an index, as in model.offload[0]."""
    field, _, item = key.partition("[")
    kind = _field(field).type
    if is_dataclass(kind):
        return f"a group of keys, such as {next(_fields(kind, key))}=..."
    if get_origin(kind) is dict:
        return f"a mapping such as {'{web: {dir: data/web, weight: 1}}' if field == 'data.sources' else '{name: text}'}"
    if get_origin(kind) is list and not item:
        return "a list, for example [a,b]"
    options = [option for option in kinds_of(key) if issubclass(option, Enum)]
    if options:
        return f"one of {', '.join(options[0])}" + (", or null" if type(None) in get_args(kind) else "")
    return f"of type {getattr(kind, '__name__', kind)}"


def value_of(config: Config, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def faults_of_values(config: Config) -> Iterator[str]:
    """What is said of each value that breaks a rule of its field."""
    for key, rules in RULES.items():
        value = value_of(config, key)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int | float) and not isinstance(item, bool):
                yield from faults_of_number(key, item, rules)
            if item == "" and "schemes" not in rules:
                what = "has an empty text" if isinstance(value, list) else "is empty"
                yield f"{key} {what}; give it a value"
        if value is not None and "schemes" in rules:
            yield from _faults_of_path(key, value, rules["schemes"])
        if value not in (None, rules.get("unless")):
            for needed in rules.get("needs", "").split():
                yield from _faults_of_needed(config, key, value, needed, rules.get("unless"))


def faults_of_number(key: str, value: int | float, rules: Mapping[str, Any]) -> Iterator[str]:
    """What is said of a number that breaks one of the `rules`, which are explained above."""
    if "zero_is_null" in rules and value == 0:
        return
    least, above, most, below = rules.get("least", 1), rules.get("above"), rules.get("most"), rules.get("below")
    within = value >= least if above is None else value > above
    words = f"{least} or more" if above is None else f"above {above}"
    if isinstance(value, int):
        below = below or INT32
        within &= value < below
        words += f" and below {f'2^{below.bit_length() - 1} = ' if below & (below - 1) == 0 else ''}{below}"
    else:
        within &= value == 0 or SMALLEST_FLOAT <= abs(value) <= (math.inf if "infinite" in rules else LARGEST_FLOAT)
        within &= (most is None or value <= most) and (below is None or value <= below * BELOW)
        words += f" and at most {most}" if most else f" and below {below}" if below else ""
        words += " in float32"
    if not within:
        usual = f"; {rules['usual']} is usual" if "usual" in rules else ""
        yield f"{key}={shown(value)} must be {words}{usual}"


def _faults_of_needed(config: Config, key: str, value: Any, needed: str, without: Any) -> Iterator[str]:
    """The fault that `needed`, such as model.positions=rotary, or model.experts, is not so."""
    other, _, wanted = needed.partition("=")
    actual = value_of(config, other)
    if shown(actual) == wanted if wanted else actual:
        return
    model = f" (model {config.model.name})" if key.startswith("model.") else ""
    yield (
        f"{key}={shown(value)} needs {needed if wanted else f'a value of {other}'}, but {other}={shown(actual)}{model};"
        f" change that, or use {key}={shown(without)}"
    )


def check_path(key: str, path: str, schemes: tuple[str, ...]) -> None:
    """Raise UserError if `path`, the value of `key`, is a URL of none of `schemes`, or has a ~ that no shell sees."""
    refuse_first(_faults_of_path(key, path, schemes))


def _faults_of_path(key: str, path: str, schemes: tuple[str, ...]) -> Iterator[str]:
    if not path:
        yield f"{key} is empty; name a directory, or . for the working directory"
    if path.startswith("~"):
        yield f"{key}={shown(path)}: only a shell replaces ~; write $HOME in a command, ${{oc.env:HOME}} in a file"
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):/", path)
    if scheme and not (scheme[1] in schemes and re.match(r"[a-z]+://[^/]+", path)):
        allowed = " or ".join(["a path of this machine", *(f"{scheme}://BUCKET/..." for scheme in schemes)])
        yield f"{key}={shown(path)} is not {allowed}; name another directory"
