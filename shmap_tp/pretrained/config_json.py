"""Reading config.json, which any program may have written: values of the type that is needed, or a UserError; and the
keys of the rotary encoding, by the names of transformers 4 and 5.

transformers 4     rope_theta, rope_scaling = {"rope_type" or "type": ..., "factor": ...}, and a partial factor
transformers 5     rope_parameters = {"rope_theta": ..., "rope_type": ..., "partial_rotary_factor": ...}
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from shmap_tp.config.choices import RotaryScaling
from shmap_tp.config.schema import ModelConfig
from shmap_tp.config.values import kinds_of
from shmap_tp.errors import UserError, shown
from shmap_tp.layers.positions import yarn_amplitude

Json = Mapping[str, Any]
"""An object of a JSON file."""
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


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e308


SIZE, NUMBER, POSITIVE = "an integer above 0", "a finite number", "a number above 0"
FRACTION, FLAG = "a number above 0 and at most 1", "true or false"
OBJECT, LIST, TEXT = "an object", "a list", "a text"
KINDS = {
    SIZE: lambda value: type(value) is int and value > 0,
    NUMBER: _is_number,
    POSITIVE: lambda value: _is_number(value) and value > 0,
    FRACTION: lambda value: _is_number(value) and 0 < value <= 1,
    FLAG: lambda value: type(value) is bool,
    OBJECT: lambda value: isinstance(value, dict),
    LIST: lambda value: isinstance(value, list),
    TEXT: lambda value: isinstance(value, str),
}
"""What a value may have to be, and whether it is."""


def require(holds: bool, key: str, value: Any, rule: str, where: str) -> None:
    """Raise UserError, which says what is wrong with `value` of `key` in the file `where`, unless its `rule` holds."""
    if not holds:
        raise UserError(f"{where}: {shown(key) if value is None else f'{shown(key)}={shown(value)}'} {rule}")


def checked(kind: str, value: Any, key: str, where: str) -> Any:
    """`value`, of `key` in `where`, if it is of a kind of `KINDS`."""
    require(KINDS[kind](value), key, value, f"must be {kind}; copy the file again", where)
    return value


def require_one_of(supported: Iterable[Any], key: str, value: Any, where: str, of: str = "") -> None:
    """Raise UserError unless `value` is one of those that are supported, `of` an architecture."""
    supported = [*supported]
    rule = f"is not supported{of and f' for {of}'}; supported is {' or '.join(map(shown, supported))}"
    require(value in supported, key, value, rule, where)


def section(value: Any, key: str, where: str) -> Json:
    """`value`, of `key` in `where`, if it is an object; {} for null."""
    return {} if value is None else checked(OBJECT, value, key, where)


def value_for(ours: str, value: Any, key: str, where: str) -> Any:
    """`value`, of `key` in `where`, if the key `ours` of the `model` section can have it."""
    kinds = kinds_of(f"model.{ours}")
    if value is None and NoneType in kinds:
        return None
    kind = next((kind for type_, kind in {int: SIZE, float: NUMBER, bool: FLAG}.items() if type_ in kinds), None)
    value = value if kind is None else checked(kind, value, key, where)
    return float(value) if kind == NUMBER else value


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

    def read(self, config: Json, head_dim: int, where: str) -> dict[str, Any]:
        """The `rotary_` keys of the `model` section."""
        name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"  # as transformers prefers them
        scaling = section(config.get(name), name, where)
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        base = scaling.get("rope_theta", config.get(self.base))
        base = float(checked(POSITIVE, self.default_base if base is None else base, self.base, where))
        self._refuse_unread("rope_theta", self.base, base, config, where)
        found = {"rotary_base": base}
        extra = set(scaling) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        if kind == "yarn" and scaling.get("truncate") is False:
            kind = "yarn_unrounded"
        supported = "default", *self.scalings
        is_known = kind in supported and not (kind == "default" and extra)
        rule = f"is not supported; supported is {' or '.join(supported)}"
        require(is_known, name, config.get(name), rule, where)
        if kind in SCALINGS:
            found |= _read_scaling(kind, scaling, extra, config, where)
        return found | self._read_partial(config, scaling, head_dim, where)

    def _read_partial(self, config: Json, scaling: Json, head_dim: int, where: str) -> dict[str, Any]:
        name = "partial_rotary_factor"
        given = scaling.get(name, config.get(self.partial or name))
        if not self.partial:
            require_one_of((None, 1.0), name, given, where)
            return {}
        name = name if name in scaling else self.partial
        given = checked(FRACTION, self.default_partial if given is None else given, name, where)
        self._refuse_unread("partial_rotary_factor", self.partial, given, config, where)
        rotated = int(head_dim * given)
        return {"rotary_dim": None if rotated == head_dim else rotated}

    def _refuse_unread(self, name: str, read: str, value: float, config: Json, where: str) -> None:
        """Raise UserError where `name` has another value than `read`, which transformers reads in this family."""
        given = config.get(name)
        rule = (
            f"is not read by transformers in this architecture; it reads {read}, here {value:g}.  Give "
            f"{read}={shown(given)}, or remove {name} from a copy of the file"
        )
        require(name == read or given in (None, value), name, given, rule, where)

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


def _read_scaling(kind: str, scaling: Json, extra: set[str], config: Json, where: str) -> dict[str, Any]:
    """The keys of a scaling, whose original context may stand beside it in `config`, or is the context, as transformers
    has it."""
    found: dict[str, Any] = {"rotary_scaling": kind}
    original, beside = "original_max_position_embeddings", config.get("original_max_position_embeddings")
    contexts = beside, scaling.get(original), config.get("max_position_embeddings")
    scaling = {**scaling, original: next((each for each in contexts if each is not None), None)}
    for theirs, ours in SCALINGS[kind].items():
        value = scaling.get(theirs)
        value = _DEFAULTS.get(theirs) if value is None else value
        require(value is not None, theirs, value, f"is missing in the {kind} scaling of the rotary encoding", where)
        found[ours] = value_for(ours, value, theirs, where)
    read = SCALINGS[kind].keys()
    if kind.startswith("yarn"):
        found["rotary_amplitude"] = _read_amplitude(found["rotary_scaling_factor"], scaling, where)
        read = {*read, *_AMPLITUDE} | ({"truncate"} if type(scaling.get("truncate")) is bool else set())
    for key in sorted(extra - read):
        require(scaling[key] is None, key, scaling[key], "of the rotary scaling is not supported", where)
    return found


def _read_amplitude(factor: float, scaling: Json, where: str) -> float | None:
    """What YaRN multiplies q and k by, None where that follows from its factor: the number in the file as it is, or the
    quotient that DeepSeek's two scales give."""
    values = {key: scaling.get(key) for key in _AMPLITUDE}
    given, *scales = (v if v is None else float(checked(NUMBER, v, key, where)) for key, v in values.items())
    if given is None and all(scales):
        given = yarn_amplitude(factor, scales[0]) / yarn_amplitude(factor, scales[1])
    if given is not None:
        checked(POSITIVE, given, "attention_factor", where)
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

    def read(self, config: Json, head_dim: int, where: str) -> dict[str, Any]:
        """The `rotary_` keys of the `model` section.  Local layers have no scaling."""
        given = section(config.get("rope_parameters"), "rope_parameters", where)
        nested, local = {"full_attention", "sliding_attention"}, config.get(self.local or "")
        of_both = "give rope_parameters of full_attention and of sliding_attention"
        unknown = sorted(given.keys() - nested)
        rule = f"is not read by transformers in this architecture; {of_both}"
        require(not unknown, f"rope_parameters.{''.join(unknown[:1])}", None, rule, where)
        of_global, of_local = (section(given.get(kind), f"rope_parameters.{kind}", where) for kind in sorted(nested))
        of_global = {**of_global, **section(config.get("rope_scaling"), "rope_scaling", where)}
        require(
            of_global.get("truncate") is not False,
            "truncate",
            False,
            "is not read by transformers in this architecture; remove it from a copy of the file, or round the rates",
            where,
        )
        config = {**config, "rope_scaling": None, "rope_parameters": of_global}
        if of_local:
            beside = {"rope_parameters": of_local, "rope_theta": local}
            found = RotaryKeys(default_base=self.default_local).read(beside, head_dim, where)
            is_plain = "rotary_scaling" not in found
            require(is_plain, "rope_parameters.sliding_attention", of_local, "is not supported", where)
            local = found["rotary_base"]
        local = self.default_local if local is None else local
        local = float(checked(POSITIVE, local, self.local or "rope_theta", where))
        found = self.of_global.read(config, head_dim, where)
        rule = f"means different bases of local layers in different versions of transformers; {of_both}"
        is_clear = self.local or nested & given.keys() or found["rotary_base"] == local
        require(bool(is_clear), "rope_theta", found["rotary_base"], rule, where)
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


def pattern_in(config: Json, period: int) -> list[str]:
    """The pattern in a config.json; where layer_types is absent, all layers are local but for every `period`-th."""
    layers = range(1, config["num_hidden_layers"] + 1)
    kinds = ["sliding_attention" if i % period else "full_attention" for i in layers]
    ours = {theirs: ours for ours, theirs in TYPES.items()}
    return shortest_pattern([ours[kind] for kind in config.get("layer_types") or kinds])


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
