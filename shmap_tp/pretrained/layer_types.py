"""The key layer_types of config.json, which has the kind of every layer, and `model.layer_pattern`."""

from collections.abc import Mapping, Sequence
from typing import Any

TYPES = {"local": "sliding_attention", "global": "full_attention"}
"""`model.layer_pattern` -> layer_types."""


def pattern_of(types: Sequence[str]) -> list[str]:
    """`model.layer_pattern` of the layers; types that are not known become themselves."""
    ours = {theirs: ours for ours, theirs in TYPES.items()}
    return shortest_pattern([ours.get(kind, kind) for kind in types])


def pattern_in(config: Mapping[str, Any], period: int) -> list[str]:
    """That of a config.json; where layer_types is absent, all layers are local but for every `period`-th."""
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
