"""What the value of a single key may be: its type, its bounds, and the paths that a file system accepts.

The type is checked where OmegaConf accepts too much: digits of any script, booleans as numbers and numbers as booleans
in places, lists within lists, line breaks in names.  The bounds are checked before anything is allocated: they refuse
numbers that would overflow or fill the memory.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from functools import reduce
from pathlib import PurePath
from types import UnionType
from typing import Any, get_args, get_origin

from shmap_tp.config.schema import GATED_MLPS, Config, ModelConfig, padded_vocabulary
from shmap_tp.errors import UserError, has_control_characters, shown

NAMES = ("run.name", "model.name", "data.name", "log.wandb_project")
MAX_NAME = 200
"""Characters of a name."""
SECTIONS = {name: field.type for name, field in Config.__dataclass_fields__.items()}
"""The dataclass of each section of a configuration."""

_MAY_BE_ZERO = [
    *("run.seed", "train.check_replicas_every", "train.z_loss", "evaluate.every", "checkpoint.every"),
    *("sample.every", "sample.temperature", "optimizer.beta1", "optimizer.beta2", "optimizer.warmup_steps"),
    "optimizer.momentum",
    *("optimizer.learning_rate", "optimizer.final_learning_rate", "optimizer.weight_decay", "model.init_std"),
    *("model.norm_epsilon", "model.embedding_scale", "model.attention_softcap", "model.logit_softcap"),
    *("model.adapter.rank", "model.experts", "model.router_balance_loss", "model.router_z_loss"),
    "model.router_bias_rate",
    *("model.shared_expert_ffn", "train.dpo_label_smoothing"),
    *("model.rotary_low_frequency_factor", "model.rotary_high_frequency_factor", "model.rotary_amplitude"),
]
MINIMUM = dict.fromkeys(_MAY_BE_ZERO, 0) | {
    "run.lost_timeout_seconds": 5,
    "model.rotary_dim": 2,
    "guard.window": 2,
    "guard.max_norm_change": 1.1,
    "checkpoint.keep": 2,
}
"""What a number, which must be finite, must at least be, where that is not 1."""
OTHER_RULES = {"optimizer.decay_fraction", "optimizer.epsilon", "optimizer.clip_norm", "train.profile", "mesh.tile"} | {
    *("model.adapter.alpha", "train.dpo_beta"),
}
"""Keys that `validate.py` checks in place of a minimum."""
ZERO_IS_NULL = {"train.max_sequences_per_device", "checkpoint.keep_every"}
"""Keys for which 0 means the same as null."""
INT32 = 2**31
"""Steps, token ids and array indices are int32: no integer may reach this."""
BOUND = {
    "run.seed": 2**32,  # jax.random.key would drop the higher bits
    "run.join_timeout_seconds": 10**6,
    "run.lost_timeout_seconds": 10**6,
    "optimizer.newton_schulz_steps": 2**6,
    "mesh.dp": 2**16,
    "mesh.mp": 2**16,
    "mesh.cp": 2**16,
    "mesh.ep": 2**16,
    "mesh.slices": 2**16,
    "mesh.processes": 2**16,
    "train.batch": 2**24,
    "model.width": 2**24,
    "model.layers": 2**16,
    "model.heads": 2**16,
    "model.kv_heads": 2**16,
    "model.head_dim": 2**16,
    "model.ffn": 2**24,
    "model.experts": 2**16,
    "model.experts_per_token": 2**16,
    "model.shared_expert_ffn": 2**24,
    "model.context": 2**24,
    "model.adapter.rank": 2**16,
}
"""What the value of an integer must be below, where that is not INT32."""
MAX_WEIGHTS = 10**13
"""About six times the largest models that have been trained."""
SMALLEST_FLOAT, LARGEST_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The normal numbers of float32, in which the step computes."""
LARGEST_BETA = 1 - 2.0**-24
"""The largest float32 below 1."""

SCHEMES = {"run.dir": (), "run.compilation_cache": (), "data.dir": ("gs",), "data.cache": (), "checkpoint.dir": ("gs",)}
"""The directories of a configuration, and the URLs that each may be besides a path."""
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4000
"""What Linux file systems allow for one name and, with some room for the files within, for a whole path."""


def keys(section: str) -> list[str]:
    """All keys of a section, such as train.steps."""
    return list(_fields(SECTIONS[section], section))


def _fields(kind: type, name: str) -> Iterator[str]:
    """The keys of the dataclass `kind`, whose own key is `name`, and of those inside it."""
    for key, field in kind.__dataclass_fields__.items():
        inside = f"{name}.{key}"
        yield from _fields(field.type, inside) if is_dataclass(field.type) else [inside]


def _given(values: dict[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    """Each key in `values`, those of the key `name`, with its value."""
    for key, value in values.items():
        inside = f"{name}.{key}"
        is_group = is_dataclass(_annotation(inside)) and isinstance(value, dict)
        yield from _given(value, inside) if is_group else [(inside, value)]


def check_sections(values: dict[str, Any], file: str) -> None:
    """Raise UserError if a section in `values`, the contents of `file`, or a group in one is a value or a list."""
    given = {name: values[name] for name in SECTIONS if name in values}
    groups = {name: list(_fields(SECTIONS[name], name)) for name in given}
    for section in [name for name in given if isinstance(given[name], dict)]:
        for key, field in SECTIONS[section].__dataclass_fields__.items():
            if key in given[section] and is_dataclass(field.type):
                name = f"{section}.{key}"
                given[name], groups[name] = given[section][key], list(_fields(field.type, name))
    for name, value in given.items():
        if not isinstance(value, dict):
            raise UserError(
                f"{file}: {name} is a group of keys, not a value; set one of them, for example {groups[name][0]}=..."
            )


def check_values(values: dict[str, Any], file: str) -> None:
    """Raise UserError if a value in `values`, which OmegaConf has accepted for the schema, is not of its key's type."""
    for section in (name for name in SECTIONS if name in values):
        for key, value in _given(values[section], section):
            kinds = kinds_of(key)
            parts = [value]
            if isinstance(value, dict):
                parts = [*value, *value.values()]
            elif isinstance(value, list):
                parts = value
            for part in parts:
                if isinstance(part, str) and has_control_characters(part):
                    raise UserError(f"{file}: {key}={shown(part)} has a line break or a control character; remove it")
            is_nested = Any not in kinds and any(isinstance(part, list | dict) for part in parts)
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
    if field == "data.sources":
        return "a mapping of names to sources, for example {web: {dir: data/web, weight: 1}}"
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
    """The annotation of the field that `key` names; its parts after a field that is no group are keys of a dict."""
    kind: Any = Config
    for part in key.split("."):
        kind = kind.__dataclass_fields__[part].type if is_dataclass(kind) else kind
    return kind


def check_bounds(config: Config) -> None:
    """Raise UserError if a number is too large or too small to be computed with."""
    for key, value in _numbers(config):
        if key not in OTHER_RULES and not (value == 0 and key in ZERO_IS_NULL):
            _check_minimum(key, value, MINIMUM.get(key, 1))
        if isinstance(value, float):
            _check_float(key, value)
        elif value >= (bound := BOUND.get(key, INT32)):
            raise UserError(f"{key}={shown(value)} is too large; it must be below {_in_words(bound)}")
    for key in ("optimizer.beta1", "optimizer.beta2", "optimizer.momentum"):
        if value_of(config, key) >= 1:
            raise UserError(f"{key}={value_of(config, key)} is too large; it must be below 1")
        if value_of(config, key) > LARGEST_BETA:
            raise UserError(f"{key}={value_of(config, key)} is 1 in float32, which divides by 0; use 0.9999999 or less")
    if (weights := _weights(config.model)) > MAX_WEIGHTS:
        raise UserError(
            f"model {shown(config.model.name)} has {weights:.1e} weights, more than {MAX_WEIGHTS:.0e}; lower "
            f"model.layers={config.model.layers}, model.width={config.model.width}, model.ffn={config.model.ffn} or "
            f"model.vocabulary={config.model.vocabulary}"
        )


def check_paths(config: Config) -> None:
    """Raise UserError if a directory of `config` cannot exist on any machine."""
    for key, schemes in SCHEMES.items():
        path = value_of(config, key)
        if path is not None:
            check_path(key, path, schemes)


def value_of(config: Config, key: str) -> object:
    return reduce(getattr, key.split("."), config)


def _numbers(config: Config) -> Iterator[tuple[str, int | float]]:
    """Every key that has a number with it, or with each number of its list."""
    for key in (key for section in SECTIONS for key in keys(section)):
        value = value_of(config, key)
        items = value if isinstance(value, list) else [value]
        yield from ((key, item) for item in items if isinstance(item, int | float) and not isinstance(item, bool))


def _check_minimum(key: str, value: int | float, minimum: int | float) -> None:
    if isinstance(value, float) and math.isnan(value):
        raise UserError(f"{key}={value} is not a number; give one of {minimum} or more")
    if value < minimum:
        raise UserError(f"{key}={value} is too small; it must be {minimum} or more")
    if value == math.inf:
        raise UserError(f"{key}={value} is not finite; give a number")


def _check_float(key: str, value: float) -> None:
    if math.isfinite(value) and value and not SMALLEST_FLOAT <= abs(value) <= LARGEST_FLOAT:
        rounded = "0" if abs(value) < 1 else "infinity"
        raise UserError(
            f"{key}={value} is {rounded} in float32; give 0 or a number from {SMALLEST_FLOAT:.1e} to "
            f"{LARGEST_FLOAT:.1e}"
        )


def _weights(model: ModelConfig) -> int:
    """Elements of all matrices; `model/flops.py` counts them by kind, with the norms."""
    attention = 2 * (model.heads + model.kv_heads) * model.head_dim
    hidden = max(model.experts, 1) * model.ffn + model.shared_expert_ffn
    mlp = (3 if model.mlp in GATED_MLPS else 2) * hidden
    return model.width * (model.layers * (attention + mlp) + 2 * padded_vocabulary(model) + model.context)


def check_path(key: str, path: str, schemes: tuple[str, ...]) -> None:
    """Raise UserError if `path`, the value of `key`, is neither a possible directory nor a URL of `schemes`."""
    name = f"{key}={shown(path)}"
    if not path:
        other = "null disables the cache" if key == "run.compilation_cache" else "name one, or . for that"
        raise UserError(f"{key} is empty, which would be the working directory; {other}")
    if path.startswith("~"):
        raise UserError(f"{name}: only a shell replaces ~; write $HOME on the command line, ${{oc.env:HOME}} in a file")
    allowed = " or ".join(["a path of this machine", *(f"{scheme}://BUCKET/..." for scheme in schemes)])
    if url := re.match(r"([A-Za-z][A-Za-z0-9+.-]*):/", path):
        if url[1] not in schemes or not re.match(r"://[^/]+", path[len(url[1]) :]):
            raise UserError(f"{name} is not {allowed}; name another directory")
        path = path[len(url[0]) :]
    longest = max(len(part.encode(errors="replace")) for part in PurePath(path).parts or [""])
    if longest > MAX_NAME_BYTES:
        raise UserError(
            f"{name} has a name of {longest} bytes; file systems allow {MAX_NAME_BYTES}, choose a shorter one"
        )
    if (length := len(path.encode(errors="replace"))) > MAX_PATH_BYTES:
        raise UserError(f"{name} has {length} bytes; {MAX_PATH_BYTES} are allowed, choose a shorter one")
    if "\0" in path:
        raise UserError(f"{name} has a NUL, which no path can have; remove it")


def _in_words(bound: int) -> str:
    exponent = bound.bit_length() - 1
    return f"2^{exponent} = {bound}" if bound == 2**exponent else str(bound)
