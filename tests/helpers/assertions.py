"""Assertions that two trees of arrays are equal: one distance for all tests, and messages that name the worst leaf."""

from typing import Any

import jax
import numpy as np

from shmap_tp.parallel.partitioning import leaves_by_path

RELATIVE = {"float32": 1e-6, "float64": 1e-12}
"""Largest distance of an array from the dense reference, as a fraction of the reference's largest value."""


def by_path(tree: Any) -> dict[str, np.ndarray]:
    """The arrays of `tree` on the host, by dotted path."""
    return {name: np.array(leaf) for name, leaf in leaves_by_path(tree, ".").items()}


def distances(actual: Any, expected: Any) -> dict[str, float]:
    """max|actual - expected| / max|expected| of each array, by path; max|actual| if all of expected is 0."""
    actual, expected = by_path(actual), by_path(expected)
    assert actual.keys() == expected.keys(), f"different arrays: {sorted(actual.keys() ^ expected.keys())}"
    found = {}
    for path, wanted in expected.items():
        got = actual[path]
        assert got.shape == wanted.shape, f"{path}: shape {got.shape}, expected {wanted.shape}"
        scale = np.max(np.abs(wanted), initial=0.0)
        difference = np.max(np.abs(got.astype(np.float64) - wanted), initial=0.0)
        found[path] = float(difference / scale if scale else difference)
    return found


def assert_close(actual: Any, expected: Any, relative: float) -> None:
    """Assert that every array of `actual` is within `relative` of the expected one; NaN never is."""
    found = distances(actual, expected)
    worst = max(found, key=lambda path: np.nan_to_num(found[path], nan=np.inf), default=None)
    if worst is not None and not found[worst] <= relative:
        raise AssertionError(f"{worst} is {found[worst]:.2e} from its expected value, {relative:.0e} allowed; {found}")


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Assert that every array of `actual` is bitwise equal to the expected one."""
    actual, expected = by_path(actual), by_path(expected)
    assert actual.keys() == expected.keys(), f"different arrays: {sorted(actual.keys() ^ expected.keys())}"
    differ = [path for path in expected if actual[path].tobytes() != expected[path].tobytes()]
    assert not differ, f"not bitwise equal: {differ}"


def assert_replicas_agree(state: Any) -> int:
    """Assert that all replicas of every part of every array are bitwise equal; return the number of extra replicas."""
    replicas = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        parts: dict[str, bytes] = {}
        for shard in leaf.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            replicas += str(shard.index) in parts
            assert parts.setdefault(str(shard.index), bits) == bits, (path, shard.device, shard.index)
    return replicas
