"""Low-rank adapters beside the frozen matrices of a block: which matrices have one, and what their factors start from.

Hu et al. 2021, "LoRA", https://arxiv.org/abs/2106.09685
Kalajdzievski 2023, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", https://arxiv.org/abs/2312.03732

The product itself is `layers/linear.Adapter`, and how its factors are sharded `with_adapter` there.
"""

import zlib
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PRNGKeyArray

from shmap_tp.config.choices import AdapterScale
from shmap_tp.config.schema import AdapterConfig
from shmap_tp.errors import UserError
from shmap_tp.layers.linear import DECLARED, Linear, with_adapter
from shmap_tp.parallel.partitioning import is_factor, path_name
from shmap_tp.parallel.weights import is_int8

ALL = "all"


def is_linear(node: Any) -> bool:
    return isinstance(node, Linear)


def split_factors(tree: Any) -> tuple[Any, Any]:
    """(the factors of a tree like the parameters, the rest of it); what belongs to the other is None."""
    of_which = jax.tree_util.tree_map_with_path(lambda path, _: is_factor(path), tree, is_leaf=is_int8)
    return eqx.partition(tree, of_which, is_leaf=is_int8)


def without_adapters(tree: Any) -> Any:
    """A tree like the parameters, with no adapter beside any matrix."""

    def without(node: Any) -> Any:  # not `replace`: a tree of placements has no weights
        return eqx.tree_at(lambda linear: linear.adapter, node, None, is_leaf=lambda x: x is None)

    return jax.tree.map(lambda node: without(node) if is_linear(node) else node, tree, is_leaf=is_linear)


def adapter_scale(config: AdapterConfig) -> float:
    """What the product of the factors is multiplied by."""
    return config.alpha / (config.rank if config.scale == AdapterScale.rank else config.rank**0.5)


def with_adapters(block: Any, config: AdapterConfig, *, key: PRNGKeyArray) -> Any:
    """`block`, with an adapter beside each matrix that the configuration names.

    The initial values of a factor depend on `key` and on the path of its matrix in the block alone.
    Raises UserError if no matrix has a name that is given, or the rank is above the sizes of one.
    """

    named, known = set(), set()

    def adapt(path: tuple, node: Any) -> Any:
        if not is_linear(node):
            return node
        names, name = {ALL, *(path_name((part,)) for part in path)}, path_name(path, ".")
        known.update(names)
        named.update(names.intersection(config.matrices))
        if names.isdisjoint(config.matrices):
            return node
        if config.rank > min(node.weight.shape[0], node.weight.size // node.weight.shape[0]):
            raise UserError(
                f"model.adapter.rank={config.rank} is above a size of {name}, {list(node.weight.shape)}, and so no "
                f"lower than its own; lower it, or leave {path_name(path[-1:])} out of model.adapter.matrices"
            )
        key_of_matrix = jax.random.fold_in(key, zlib.crc32(name.encode()))
        return with_adapter(node, config.rank, adapter_scale(config), key=key_of_matrix)

    adapted = jax.tree_util.tree_map_with_path(adapt, block, is_leaf=is_linear)
    if unknown := sorted(set(config.matrices) - named):
        raise UserError(
            f"model.adapter.matrices has {unknown[0]}, which is no matrix of {type(block).__name__}; use names in "
            f"{{{', '.join(sorted(known))}}}"
        )
    return adapted


def merged(params: Any) -> Any:
    """The same model without adapters: each is added to its matrix, in float32."""

    def merge(node: Any) -> Any:
        if not is_linear(node) or node.adapter is None:
            return node
        declared, _ = DECLARED[node.kind]
        stack, dims = "l" * (node.weight.ndim - len(declared.axes)), "def"[: len(declared.axes)]
        (inside,) = (dims[dim] for dim in declared.inputs)
        product = f"{stack}{inside}r,{stack}{dims.replace(inside, 'r')}->{stack}{dims}"
        factors = (node.adapter.a.weight, node.adapter.b.weight)
        wide = jnp.promote_types(jnp.float32, factors[0].dtype)
        added = jnp.einsum(product, *(factor.astype(wide) for factor in factors), precision=lax.Precision.HIGHEST)
        weight = node.weight.astype(added.dtype) + node.adapter.scale * added
        return replace(node, weight=weight, adapter=None)

    return jax.tree.map(merge, params, is_leaf=is_linear)
