"""The key layer_types of config.json, which has the kind of every layer, and `model.layer_pattern`."""

from collections.abc import Sequence


def shortest_pattern(kinds: Sequence[str]) -> list[str]:
    """The first of `kinds`, as few as give all of them when they are repeated; [] for local ones alone."""
    kinds = list(kinds)
    repeats = (n for n in range(1, len(kinds)) if kinds[n:] == kinds[:-n])
    shortest = kinds[: next(repeats, len(kinds))]
    return [] if shortest == ["local"] else shortest
