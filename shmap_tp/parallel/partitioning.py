"""Partitioning: a parameter declares its PartitionSpec on the line that declares the weight; the rest is derived.

    weight: Float[Array, "F D"] = param(MP, None)      F/mp: dim 0 sharded over mp, dim 1 not sharded
    blocks: ParallelBlock       = stacked()            every array inside has a leading dim of L layers, never sharded

Optimizer state is partitioned like the parameters that it belongs to.
"""

import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import optax
from jax import tree_util
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shmap_tp.parallel.key_paths import path_name


def param(*axes: str | None, replicate_if_fewer: bool = False, is_bias: bool = False) -> Any:
    """Declare an array field: for each dim the mesh axis that shards it, or None.

    `replicate_if_fewer`: every device holds the whole array where a sharded dim is smaller than its mesh axis
    (key/value heads).  `is_bias`: it is no matrix, whatever its dims.
    """
    return eqx.field(metadata={"axes": axes, "replicate_if_fewer": replicate_if_fewer, "is_bias": is_bias})


def stacked() -> Any:
    """Declare a field whose arrays are stacked over layers."""
    return eqx.field(metadata={"stacked": True})


def _declaration(model: eqx.Module, path: tuple) -> tuple[Mapping[str, Any], bool]:
    """Follow a leaf's path down the modules to the line that declares it: (its metadata, whether it is stacked)."""
    node, in_stack = model, False
    metadata: Mapping[str, Any] = {}
    for key in path:
        if isinstance(key, tree_util.SequenceKey):  # a list of modules
            node = node[key.idx]
            continue
        metadata = type(node).__dataclass_fields__[key.name].metadata
        in_stack = in_stack or metadata.get("stacked", False)
        node = getattr(node, key.name)
    if "axes" not in metadata:
        raise TypeError(f"{path_name(path, '.')} is an array that was not declared with param(...)")
    return metadata, in_stack


def partition_specs(model: eqx.Module, axis_sizes: Mapping[str, int]) -> Any:
    """`model` (arrays or shapes) with every array replaced by its PartitionSpec on a mesh of these axis sizes."""

    def spec(path: tuple, leaf: Any) -> P:
        metadata, in_stack = _declaration(model, path)
        axes, shape = metadata["axes"], leaf.shape[in_stack:]
        assert len(axes) == len(shape), f"{path_name(path, '.')}: {axes} declared for shape {shape}"
        fewer = any(axis is not None and dim < axis_sizes[axis] for axis, dim in zip(axes, shape, strict=True))
        if metadata["replicate_if_fewer"] and fewer:
            axes = (None,) * len(shape)
        return P(None, *axes) if in_stack else P(*axes)

    return tree_util.tree_map_with_path(spec, model)


def is_matrix(model: eqx.Module) -> Any:
    """`model` with every array replaced by whether, in one layer, it is a matrix: what weight decay applies to."""
    return tree_util.tree_map_with_path(lambda path, _: _declares_matrix(_declaration(model, path)[0]), model)


def _declares_matrix(metadata: Mapping[str, Any]) -> bool:
    return len(metadata["axes"]) > 1 and not metadata["is_bias"]


def is_stacked(model: eqx.Module) -> Any:
    """`model` with every array replaced by whether it is stacked over layers."""
    return tree_util.tree_map_with_path(lambda path, _: _declaration(model, path)[1], model)


def optimizer_specs(optimizer: optax.GradientTransformation, model: Any, specs: Any) -> Any:
    """PartitionSpecs of the optimizer's state: what is shaped like a parameter is sharded like it, the rest
    replicated."""
    state = jax.eval_shape(optimizer.init, model)
    return optax.tree_map_params(optimizer, lambda _, spec: spec, state, specs, transform_non_params=lambda _: P())


def shard_over(model: eqx.Module, specs: Any, axis: str, axis_sizes: Mapping[str, int]) -> Any:
    """`specs` of `model` (arrays or shapes), each matrix sharded over `axis` as well: along the first of its dims whose
    local size `axis` divides, the dim of stacked layers excepted; where there is none, its spec as it is."""

    def further(path: tuple, leaf: Any, spec: P) -> P:
        metadata, in_stack = _declaration(model, path)
        for i in range(in_stack, len(leaf.shape) if _declares_matrix(metadata) else 0):
            axes = spec_axes(spec[i])
            if leaf.shape[i] // math.prod(axis_sizes[a] for a in axes) % axis_sizes[axis] == 0:
                return P(*spec[:i], (*axes, axis), *spec[i + 1 :])
        return spec

    return tree_util.tree_map_with_path(further, model, specs)


def sharded_dim(spec: P, axis: str) -> int | None:
    """The dim that a spec shards over `axis`, counted from the last; None where it does not."""
    return next((i - len(spec) for i, axes in enumerate(spec) if axis in spec_axes(axes)), None)


def spec_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """One entry of a PartitionSpec as the axes that shard its dim."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def named_shardings(mesh: Mesh, specs: Any) -> Any:
    """The tree of PartitionSpecs as NamedShardings on `mesh`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
