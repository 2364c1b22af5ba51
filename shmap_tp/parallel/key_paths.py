"""Names of the arrays of a tree by their paths, such as params/blocks/attention/query/weight."""

from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import GetAttrKey


def path_name(path: tuple, separator: str = "/") -> str:
    """The name of a path of jax.tree_util, its keys joined by `separator`."""
    return jax.tree_util.keystr(path, simple=True, separator=separator)


def is_factor(path: tuple) -> bool:
    """Whether this is the path of a factor of an adapter, the field `adapter` of a linear layer."""
    return GetAttrKey("adapter") in path


def leaves_by_path(tree: Any, separator: str = "/", is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Every leaf of `tree` by the name of its path, in the order of the tree."""
    return {path_name(path, separator): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf)}


def types_by_path(tree: Any) -> dict[str, str]:
    """dtype and shape of every array of `tree`, such as float32[2, 3], by the name of its path."""
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in leaves_by_path(tree).items()}
