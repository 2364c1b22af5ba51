"""A parameter knows its PartitionSpec: declared on the line that declares the weight, derived everywhere else.

    weight: Float[Array, "F D"] = param(MP, None)      F/mp: the rows are cut along mp, the columns are whole
    blocks: ParallelBlock       = stacked()            every array inside has a leading dim more, L layers, never cut

What is made of parameters, the optimizer's state above all, is cut as they are.
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


def param(*axes: str | None, whole_if_fewer: bool = False) -> Any:
    """Declare an array field: for each dim the mesh axis that cuts it, or None.

    `whole_if_fewer` leaves every device the whole array where a cut dim is smaller than its mesh axis (key/value
    heads).
    """
    return eqx.field(metadata={"axes": axes, "whole_if_fewer": whole_if_fewer})


def stacked() -> Any:
    """Declare a field whose arrays are stacked over layers."""
    return eqx.field(metadata={"stacked": True})


def _declaration(model: eqx.Module, path: tuple) -> tuple[Mapping[str, Any], bool]:
    """Follow a leaf's path down the modules to the line that declares it: (its metadata, whether it is stacked)."""
    node, is_stacked = model, False
    for key in path:
        metadata = type(node).__dataclass_fields__[key.name].metadata
        is_stacked = is_stacked or metadata.get("stacked", False)
        node = getattr(node, key.name)
    if "axes" not in metadata:
        raise TypeError(f"{tree_util.keystr(path)} is an array that was not declared with param(...)")
    return metadata, is_stacked


def partition_specs(model: eqx.Module, axis_sizes: dict[str, int]) -> Any:
    """`model` (arrays or shapes) with every array replaced by its PartitionSpec on a mesh of these axis sizes."""

    def spec(path: tuple, leaf: Any) -> P:
        metadata, is_stacked = _declaration(model, path)
        axes, shape = metadata["axes"], leaf.shape[is_stacked:]
        assert len(axes) == len(shape), f"{tree_util.keystr(path)}: {axes} declared for shape {shape}"
        fewer = any(axis is not None and dim < axis_sizes[axis] for axis, dim in zip(axes, shape, strict=True))
        if metadata["whole_if_fewer"] and fewer:
            axes = (None,) * len(shape)
        return P(None, *axes) if is_stacked else P(*axes)

    return tree_util.tree_map_with_path(spec, model)


def matrices(model: eqx.Module) -> Any:
    """`model` with every array replaced by whether, in one layer, it is a matrix: what weight decay is for."""
    return tree_util.tree_map_with_path(lambda path, _: len(_declaration(model, path)[0]["axes"]) > 1, model)


def in_layers(model: eqx.Module) -> Any:
    """`model` with every array replaced by whether it is stacked over layers."""
    return tree_util.tree_map_with_path(lambda path, _: _declaration(model, path)[1], model)


def optimizer_specs(optimizer: optax.GradientTransformation, model: Any, specs: Any) -> Any:
    """PartitionSpecs of the optimizer's state: what is shaped like a parameter is cut like it, the rest is whole."""
    state = jax.eval_shape(optimizer.init, model)
    return optax.tree_map_params(optimizer, lambda _, spec: spec, state, specs, transform_non_params=lambda _: P())


def shard_over(model: eqx.Module, specs: Any, axis: str, axis_sizes: dict[str, int]) -> Any:
    """`specs` of `model` (arrays or shapes), each matrix cut along `axis`, too: along the first of its dims whose part
    on a device `axis` divides, the layers of a stack being no such dim; where there is none, its spec as it is."""

    def further(path: tuple, leaf: Any, spec: P) -> P:
        metadata, is_stacked = _declaration(model, path)
        for i in range(is_stacked, len(leaf.shape) if len(metadata["axes"]) > 1 else 0):
            axes = _together(spec[i])
            if leaf.shape[i] // math.prod(axis_sizes[a] for a in axes) % axis_sizes[axis] == 0:
                return P(*spec[:i], (*axes, axis), *spec[i + 1 :])
        return spec

    return tree_util.tree_map_with_path(further, model, specs)


def sharded_dim(spec: P, axis: str) -> int | None:
    """The dim that a spec cuts along `axis`, counted from the last."""
    return next((i - len(spec) for i, axes in enumerate(spec) if axis in _together(axes)), None)


def _together(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """One entry of a PartitionSpec, as the axes that cut its dim."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def named(mesh: Mesh, specs: Any) -> Any:
    """The tree of PartitionSpecs as NamedShardings on `mesh`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
