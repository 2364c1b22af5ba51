"""Are two trees of arrays equal?  One measure for all tests, and a message that names the worst leaf."""

from typing import Any

import jax
import numpy as np

RELATIVE = {"float32": 1e-6, "float64": 1e-12}
"""How far an array may lie from the dense reference, as a fraction of the reference's largest value."""


def by_path(tree: Any) -> dict[str, np.ndarray]:
    """The arrays of `tree` on the host, by dotted path."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.array(leaf) for path, leaf in leaves}


def distances(actual: Any, expected: Any) -> dict[str, float]:
    """max|actual - expected| / max|expected| of each array, by path.  Where all of expected is 0, max|actual|."""
    actual, expected = by_path(actual), by_path(expected)
    assert actual.keys() == expected.keys(), f"not the same arrays: {sorted(actual.keys() ^ expected.keys())}"
    found = {}
    for path, wanted in expected.items():
        got = actual[path]
        assert got.shape == wanted.shape, f"{path}: shape {got.shape}, expected {wanted.shape}"
        size = np.max(np.abs(wanted), initial=0.0)
        apart = np.max(np.abs(got.astype(np.float64) - wanted), initial=0.0)
        found[path] = float(apart / size if size else apart)
    return found


def assert_close(actual: Any, expected: Any, relative: float) -> None:
    """Every array of `actual` within `relative` of its `expected`; a value that is not a number never is."""
    found = distances(actual, expected)
    worst = max(found, key=lambda path: np.nan_to_num(found[path], nan=np.inf), default=None)
    if worst is not None and not found[worst] <= relative:
        raise AssertionError(f"{worst} is {found[worst]:.2e} from its expected value, {relative:.0e} allowed; {found}")


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Every array of `actual` is bit for bit its `expected`."""
    actual, expected = by_path(actual), by_path(expected)
    assert actual.keys() == expected.keys(), f"not the same arrays: {sorted(actual.keys() ^ expected.keys())}"
    differ = [path for path in expected if actual[path].tobytes() != expected[path].tobytes()]
    assert not differ, f"not the same bits: {differ}"
