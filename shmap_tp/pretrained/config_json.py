"""Reading config.json, which any program may have written: values of the type that is needed, or a UserError; and the
keys of the rotary encoding, by the names of transformers 4 and 5.

transformers 4     rope_theta, rope_scaling = {"rope_type" or "type": ..., "factor": ...}, and a partial factor
transformers 5     rope_parameters = {"rope_theta": ..., "rope_type": ..., "partial_rotary_factor": ...}
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from shmap_tp.config.schema import ModelConfig, RotaryScaling
from shmap_tp.config.values import kinds_of
from shmap_tp.errors import UserError, shown
from shmap_tp.layers.positions import yarn_amplitude

LLAMA3 = {
    "factor": "rotary_scaling_factor",
    "low_freq_factor": "rotary_low_frequency_factor",
    "high_freq_factor": "rotary_high_frequency_factor",
    "original_max_position_embeddings": "rotary_original_context",
}
"""Keys of llama3 scaling, and ours."""
_YARN = {
    "factor": "rotary_scaling_factor",
    "beta_slow": "rotary_low_frequency_factor",
    "beta_fast": "rotary_high_frequency_factor",
    "original_max_position_embeddings": "rotary_original_context",
}
_LINEAR = {"factor": "rotary_scaling_factor"}
SCALINGS = {"llama3": LLAMA3, "linear": _LINEAR, "yarn": _YARN, "yarn_unrounded": _YARN}
"""Kinds of scaling: their keys, and ours.  yarn_unrounded is their yarn with truncate=false."""
_AMPLITUDE = ("attention_factor", "mscale", "mscale_all_dim")
_DEFAULTS = {"beta_slow": 1.0, "beta_fast": 32.0}


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
    if value is None and NoneType in kinds:
        return None
    if int in kinds:
        return size(value, key, where)
    if float in kinds:
        return number(value, key, where)
    if bool in kinds and type(value) is not bool:
        raise UserError(f"{where}: {key}={shown(value)} must be true or false; copy the file again")
    return value


@dataclass(frozen=True)
class RotaryKeys:
    """How a family names its rotary keys."""

    base: str = "rope_theta"
    default_base: float = 10_000.0
    partial: str | None = None
    """The fraction of each head that is rotated; None where it is always the whole head."""
    default_partial: float = 1.0
    scalings: tuple[str, ...] = tuple(SCALINGS)
    """The scalings that the family can have."""

    @property
    def names(self) -> set[str]:
        names = {self.base, "rope_theta", "rope_scaling", "rope_parameters"}
        names |= {"original_max_position_embeddings"} if self.scalings else set()
        return names | {self.partial, "partial_rotary_factor"} if self.partial else names

    def read(self, config: Mapping[str, Any], head_dim: int, where: str) -> dict[str, Any]:
        """The `rotary_` keys of the `model` section."""
        name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"  # as transformers prefers them
        scaling = section(config.get(name), name, where)
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        base = scaling.get("rope_theta", config.get(self.base))
        base = number(self.default_base if base is None else base, self.base, where)
        self._refuse_unread("rope_theta", self.base, base, config, where)
        if base <= 0:
            raise UserError(f"{where}: {self.base}={base:g} must be a number above 0; copy the file again")
        found = {"rotary_base": base}
        extra = set(scaling) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        if kind == "yarn" and scaling.get("truncate") is False:
            kind = "yarn_unrounded"
        if kind not in ("default", *self.scalings) or (kind == "default" and extra):
            supported = " or ".join(("default", *self.scalings))
            raise UserError(f"{where}: {name}={shown(config[name])} is not supported; supported is {supported}")
        if kind in SCALINGS:
            found |= _read_scaling(kind, scaling, extra, config, where)
        return found | self._read_partial(config, scaling, head_dim, where)

    def _read_partial(
        self, config: Mapping[str, Any], scaling: Mapping[str, Any], head_dim: int, where: str
    ) -> dict[str, Any]:
        name = "partial_rotary_factor"
        given = scaling.get(name, config.get(self.partial or name))
        if not self.partial:
            if given not in (None, 1.0):
                raise UserError(f"{where}: {name}={shown(given)} is not supported for this architecture")
            return {}
        name = name if name in scaling else self.partial
        given = number(self.default_partial if given is None else given, name, where)
        self._refuse_unread("partial_rotary_factor", self.partial, given, config, where)
        if not 0 < given <= 1:
            raise UserError(f"{where}: {name}={given:g} must be a number above 0 and at most 1; copy the file again")
        rotated = int(head_dim * given)
        return {"rotary_dim": None if rotated == head_dim else rotated}

    def _refuse_unread(self, name: str, read: str, value: float, config: Mapping[str, Any], where: str) -> None:
        """Raise UserError where `name` has another value than `read`, which transformers reads in this family."""
        given = config.get(name)
        if name != read and given not in (None, value):
            raise UserError(
                f"{where}: {name}={shown(given)}, which transformers does not read in this architecture; it reads "
                f"{read}, here {value:g}.  Give {read}={shown(given)}, or remove {name} from a copy of the file"
            )

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Keys of config.json, by the names of transformers 4, which 5 reads as well."""
        config: dict[str, Any] = {self.base: model.rotary_base}
        if self.partial:
            config[self.partial] = (model.rotary_dim or model.head_dim) / model.head_dim
        if model.rotary_scaling != RotaryScaling.none:
            kind, _, is_unrounded = model.rotary_scaling.value.partition("_")
            values = {theirs: getattr(model, ours) for theirs, ours in SCALINGS[kind].items()}
            if kind == "yarn" and model.rotary_amplitude is not None:
                values["attention_factor"] = model.rotary_amplitude
            config["rope_scaling"] = {"rope_type": kind} | values | ({"truncate": False} if is_unrounded else {})
        return config


def _read_scaling(
    kind: str, scaling: Mapping[str, Any], extra: set[str], config: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """The keys of a scaling, whose original context may stand beside it in `config`, or is the context, as transformers
    has it."""
    found: dict[str, Any] = {"rotary_scaling": kind}
    original, beside = "original_max_position_embeddings", config.get("original_max_position_embeddings")
    contexts = beside, scaling.get(original), config.get("max_position_embeddings")
    scaling = {**scaling, original: next((each for each in contexts if each is not None), None)}
    for theirs, ours in SCALINGS[kind].items():
        value = scaling.get(theirs)
        if value is None and theirs not in _DEFAULTS:
            raise UserError(f"{where}: the {kind} scaling of the rotary encoding has no {theirs}")
        found[ours] = value_for(ours, _DEFAULTS[theirs] if value is None else value, theirs, where)
    read = SCALINGS[kind].keys()
    if kind.startswith("yarn"):
        found["rotary_amplitude"] = _read_amplitude(found["rotary_scaling_factor"], scaling, where)
        read = {*read, *_AMPLITUDE} | ({"truncate"} if type(scaling.get("truncate")) is bool else set())
    for key in sorted(extra - read):
        if scaling[key] is not None:
            raise UserError(f"{where}: {shown(key)}={shown(scaling[key])} of the rotary scaling is not supported")
    return found


def _read_amplitude(factor: float, scaling: Mapping[str, Any], where: str) -> float | None:
    """What YaRN multiplies q and k by, None where that follows from its factor: the number in the file as it is, or the
    quotient that DeepSeek's two scales give."""
    given, *scales = (None if scaling.get(key) is None else number(scaling[key], key, where) for key in _AMPLITUDE)
    if given is None and all(scales):
        given = yarn_amplitude(factor, scales[0]) / yarn_amplitude(factor, scales[1])
    if given is not None and given <= 0:
        raise UserError(f"{where}: attention_factor={given:g} must be a number above 0; copy the file again")
    return None if given == yarn_amplitude(factor) else given


@dataclass(frozen=True)
class LocalRotaryKeys:
    """The keys of a family whose local layers have another base.

    transformers 4     `local` beside the keys of the global layers
    transformers 5     rope_parameters = {"full_attention": {...}, "sliding_attention": {...}}
    """

    of_global: RotaryKeys
    local: str | None
    """None: transformers 4 has one base, which must be the default, since transformers 5 reads it for global layers
    alone."""
    default_local: float

    @property
    def names(self) -> set[str]:
        names = self.of_global.names - {"original_max_position_embeddings"}  # which is not read beside nested keys
        return names | ({self.local} if self.local else set())

    def read(self, config: Mapping[str, Any], head_dim: int, where: str) -> dict[str, Any]:
        """The `rotary_` keys of the `model` section.  Local layers have no scaling."""
        given = section(config.get("rope_parameters"), "rope_parameters", where)
        nested, local = {"full_attention", "sliding_attention"}, config.get(self.local or "")
        if unknown := sorted(given.keys() - nested):
            raise UserError(
                f"{where}: rope_parameters.{shown(unknown[0])} is not read by transformers in this architecture; give "
                f"rope_parameters of full_attention and of sliding_attention"
            )
        of_global, of_local = (section(given.get(kind), f"rope_parameters.{kind}", where) for kind in sorted(nested))
        of_global = {**of_global, **section(config.get("rope_scaling"), "rope_scaling", where)}
        if of_global.get("truncate") is False:
            raise UserError(
                f"{where}: truncate=false, which transformers does not read in this architecture; remove it from a "
                f"copy of the file, or round the rates of the model"
            )
        config = {**config, "rope_scaling": None, "rope_parameters": of_global}
        if of_local:
            beside = {"rope_parameters": of_local, "rope_theta": local}
            found = RotaryKeys(default_base=self.default_local).read(beside, head_dim, where)
            if "rotary_scaling" in found:
                raise UserError(f"{where}: rope_parameters.sliding_attention={shown(of_local)} is not supported")
            local = found["rotary_base"]
        local = number(self.default_local if local is None else local, self.local or "rope_theta", where)
        found = self.of_global.read(config, head_dim, where)
        if not self.local and not nested & given.keys() and found["rotary_base"] != local:
            raise UserError(
                f"{where}: rope_theta={found['rotary_base']:g} means different bases of local layers in different "
                f"versions of transformers; give rope_parameters of full_attention and of sliding_attention"
            )
        return found | {"rotary_local_base": local}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Keys of config.json, by the names of transformers 4, which 5 reads as well, where these have both bases."""
        local = model.rotary_base if model.rotary_local_base is None else model.rotary_local_base
        config = self.of_global.write(model)
        if self.local:
            return config | {self.local: local}
        of_global = {"rope_type": "default", "rope_theta": config["rope_theta"]} | config.get("rope_scaling", {})
        of_local = {"rope_type": "default", "rope_theta": local}
        return {"rope_parameters": {"full_attention": of_global, "sliding_attention": of_local}}


TYPES = {"local": "sliding_attention", "global": "full_attention"}
"""`model.layer_pattern` -> layer_types."""


def pattern_of(types: Sequence[str]) -> list[str]:
    """`model.layer_pattern` of the layers; types that are not known become themselves."""
    ours = {theirs: ours for ours, theirs in TYPES.items()}
    return shortest_pattern([ours.get(kind, kind) for kind in types])


def pattern_in(config: Mapping[str, Any], period: int) -> list[str]:
    """The pattern in a config.json; where layer_types is absent, all layers are local but for every `period`-th."""
    layers = range(1, config["num_hidden_layers"] + 1)
    kinds = ["sliding_attention" if i % period else "full_attention" for i in layers]
    return pattern_of(config.get("layer_types") or kinds)


def layer_types(pattern: Sequence[str], layers: int) -> list[str]:
    """The layer_types of the layers of a pattern."""
    return [TYPES.get(kind, "full_attention") for kind in repeated(pattern, layers)]


def repeated(pattern: Sequence[str], layers: int) -> list[str]:
    """The kind of every layer."""
    kinds = pattern or ["local"]
    return [kinds[i % len(kinds)] for i in range(layers)]


def shortest_pattern(kinds: Sequence[str]) -> list[str]:
    """The first of `kinds`, as few as give all of them when they are repeated; [] for local ones alone."""
    kinds = list(kinds)
    repeats = (n for n in range(1, len(kinds)) if kinds[n:] == kinds[:-n])
    shortest = kinds[: next(repeats, len(kinds))]
    return [] if shortest == ["local"] else shortest
