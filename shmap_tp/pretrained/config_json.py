"""Reading config.json, which any program may have written: values of the type that is needed, or a UserError; and the
keys of the rotary encoding, by the names of transformers 4 and 5.

transformers 4     rope_theta, rope_scaling = {"rope_type" or "type": ..., "factor": ...}, and a partial factor
transformers 5     rope_parameters = {"rope_theta": ..., "rope_type": ..., "partial_rotary_factor": ...}
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

from shmap_tp.config.schema import ModelConfig, RotaryScaling
from shmap_tp.config.values import kinds_of
from shmap_tp.errors import UserError, shown
from shmap_tp.layers.rotation import yarn_amplitude

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
    """Those that the family can have."""

    @property
    def names(self) -> set[str]:
        names = {self.base, "rope_theta", "rope_scaling", "rope_parameters"}
        return names | {self.partial, "partial_rotary_factor"} if self.partial else names

    def read(self, config: Mapping[str, Any], head_dim: int, where: str) -> dict[str, Any]:
        """The `rotary_` keys of the `model` section."""
        name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"  # as transformers prefers them
        scaling = section(config.get(name), name, where)
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        base = scaling.get("rope_theta", config.get(self.base, config.get("rope_theta")))
        base = number(self.default_base if base is None else base, self.base, where)
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
            found |= _read_scaling(kind, scaling, extra, where)
        return found | self._read_partial(config, scaling, head_dim, where)

    def _read_partial(
        self, config: Mapping[str, Any], scaling: Mapping[str, Any], head_dim: int, where: str
    ) -> dict[str, Any]:
        name = "partial_rotary_factor"
        given = scaling.get(name, config.get(name))
        if not self.partial:
            if given not in (None, 1.0):
                raise UserError(f"{where}: {name}={shown(given)} is not supported for this architecture")
            return {}
        if given is None:
            name, given = self.partial, config.get(self.partial, self.default_partial)
        given = number(given, name, where)
        if not 0 < given <= 1:
            raise UserError(f"{where}: {name}={given:g} must be a number above 0 and at most 1; copy the file again")
        rotated = int(head_dim * given)
        return {"rotary_dim": None if rotated == head_dim else rotated}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Keys of config.json, by the names of transformers 4, which 5 reads as well."""
        config: dict[str, Any] = {self.base: model.rotary_base}
        if self.partial:
            config[self.partial] = (model.rotary_dim or model.head_dim) / model.head_dim
        if model.rotary_scaling != RotaryScaling.none:
            kind, _, is_unrounded = model.rotary_scaling.value.partition("_")
            values = {theirs: getattr(model, ours) for theirs, ours in SCALINGS[kind].items()}
            config["rope_scaling"] = {"rope_type": kind} | values | ({"truncate": False} if is_unrounded else {})
        return config


def _read_scaling(kind: str, scaling: Mapping[str, Any], extra: set[str], where: str) -> dict[str, Any]:
    """The keys of a scaling; of YaRN's others only values that say what it does without them are supported."""
    found: dict[str, Any] = {"rotary_scaling": kind}
    for theirs, ours in SCALINGS[kind].items():
        value = scaling.get(theirs)
        if value is None and theirs not in _DEFAULTS:
            raise UserError(f"{where}: the {kind} scaling of the rotary encoding has no {theirs}")
        found[ours] = value_for(ours, _DEFAULTS[theirs] if value is None else value, theirs, where)
    neutral = {}
    if kind.startswith("yarn"):
        amplitude, rounded = yarn_amplitude(found["rotary_scaling_factor"]), kind == "yarn"
        neutral = {"attention_factor": (amplitude,), "truncate": (rounded,)}
    for key in sorted(extra - SCALINGS[kind].keys()):
        if scaling[key] is not None and scaling[key] not in neutral.get(key, ()):
            raise UserError(f"{where}: {shown(key)}={shown(scaling[key])} of the rotary scaling is not supported")
    return found


@dataclass(frozen=True)
class LocalRotaryKeys:
    """Those of a family whose local layers have another base.

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
        return self.of_global.names | ({self.local} if self.local else set())

    def read(self, config: Mapping[str, Any], head_dim: int, where: str) -> dict[str, Any]:
        """The `rotary_` keys of the `model` section.  Local layers have no scaling."""
        given = section(config.get("rope_parameters"), "rope_parameters", where)
        nested, local = {"full_attention", "sliding_attention"}, config.get(self.local or "")
        if nested & given.keys() or not given:
            if unknown := sorted(given.keys() - nested):
                raise UserError(f"{where}: rope_parameters.{shown(unknown[0])} is not supported")
            of_local = section(given.get("sliding_attention"), "rope_parameters.sliding_attention", where)
            config = {**config, "rope_parameters": given.get("full_attention")}
            if of_local:
                found = RotaryKeys(default_base=self.default_local).read({"rope_parameters": of_local}, head_dim, where)
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
