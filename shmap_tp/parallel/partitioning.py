"""Partitioning: a parameter declares what it is, and its PartitionSpec, on the line that declares the weight.

    weight: Float[Array, "F D"] = param(MP, None)      F/mp: dim 0 sharded over mp, dim 1 not sharded
    blocks: ParallelBlock       = stacked()            every array inside has a leading dim of L layers, never sharded

The rest is derived: the PartitionSpecs of the parameters, over which axes their gradients are summed, over which ZeRO
shards them (`fsdp.py`), and the partitioning of the optimizer's state.  Arrays are named by their paths, such as
params/blocks/attention/query/weight.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import equinox as eqx
import jax
import optax
from jax import tree_util
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import GetAttrKey

from shmap_tp.parallel.mesh import AXES, spec_axes
from shmap_tp.parallel.weights import is_int8


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


class ParameterKind(Enum):
    """What the array of one layer is, for an optimizer that treats them differently."""

    matrix = auto()
    """Multiplies an activation."""
    experts = auto()
    """A matrix for each expert, along the first dim."""
    embedding = auto()
    """A row per token or position: of the embedding, learned positions."""
    head = auto()
    """A row per token, of a head that is not the embedding."""
    vector = auto()
    """Scales and biases, whatever their dims."""


@dataclass(frozen=True)
class Declaration:
    """What a parameter declares.  Dims are those of one layer."""

    axes: tuple[str | tuple[str, ...] | None, ...]
    """For each dim the mesh axis that shards it, several in the order of the mesh, or None."""
    kind: ParameterKind
    outputs: tuple[int, ...]
    """The dims of a matrix that are features of its result, counted from the last, so that they are the same for one
    layer and for a stack of layers."""
    replicate_if_fewer: bool = False
    """Whether every device holds the whole array where a sharded dim is smaller than its mesh axis."""
    trained: bool = True
    """Whether it has a gradient; else it is state of a layer, which the step changes by a rule of its own or not at
    all."""
    by_linear: bool = False
    """Whether `layers/linear.Linear` multiplies with it, so that a `Ring` or an `Int8` may stand in its place."""
    stacked: bool = False
    """Whether the array has a leading dim of layers."""

    @property
    def inputs(self) -> tuple[int, ...]:
        """The other dims of a matrix, or of the matrix of each expert: the features that it is multiplied with, counted
        from the last."""
        first = (self.kind == ParameterKind.experts) - len(self.axes)
        return tuple(dim for dim in range(first, 0) if dim not in self.outputs)

    @property
    def outputs_first(self) -> bool:
        """Whether a matrix is stored as [outputs, inputs]."""
        return -len(self.axes) in self.outputs


def declare(
    *axes: str | tuple[str, ...] | None,
    outputs: tuple[int, ...] = (-1,),
    kind: ParameterKind | None = None,
    **others: bool,
) -> Declaration:
    """The arguments are the fields of `Declaration`; without `kind` an array of two or more dims is a matrix, any other
    a vector."""
    kind = kind or (ParameterKind.matrix if len(axes) > 1 else ParameterKind.vector)
    return Declaration(axes, kind, tuple(dim if dim < 0 else dim - len(axes) for dim in outputs), **others)


def param(*axes: str | tuple[str, ...] | None, **others: Any) -> Any:
    """Declare an array field; the arguments are those of `declare`."""
    declared = declare(*axes, **others)
    return param_of(lambda module: declared)


def param_of(declared: Callable[[Any], Declaration]) -> Any:
    """Declare an array field whose declaration depends on other fields of its module."""
    return eqx.field(metadata={"declaration": declared})


def stacked() -> Any:
    """Declare a field whose arrays are stacked over layers."""
    return eqx.field(metadata={"stacked": True})


def declaration(model: eqx.Module, path: tuple) -> Declaration:
    """Follow a leaf's path down the modules to the line that declares it.  Raises TypeError if there is none."""
    node, in_stack, declared = model, False, None
    for key in path:
        if isinstance(key, tree_util.SequenceKey):  # a list of modules
            node = node[key.idx]
            continue
        metadata = type(node).__dataclass_fields__[key.name].metadata
        in_stack = in_stack or metadata.get("stacked", False)
        declared = metadata["declaration"](node) if "declaration" in metadata else None
        node = getattr(node, key.name)
    if declared is None:
        raise TypeError(f"{path_name(path, '.')} is an array that was not declared with param(...)")
    return replace(declared, stacked=in_stack)


def declarations(model: Any) -> Any:
    """`model` (arrays or shapes) with every array replaced by its `Declaration`."""
    return tree_util.tree_map_with_path(lambda path, _: declaration(model, path), model, is_leaf=is_int8)


def partition_specs(model: eqx.Module, axis_sizes: Mapping[str, int]) -> Any:
    """`model` (arrays or shapes) with every array replaced by its PartitionSpec on a mesh of these axis sizes.

    An axis that the mesh does not have shards nothing.  Raises TypeError for one that no mesh has.
    """

    def spec(path: tuple, leaf: Any) -> P:
        declared = declaration(model, path)
        declares = [spec_axes(entry) for entry in declared.axes]
        if unknown := {axis for entry in declares for axis in entry} - {*AXES}:
            raise TypeError(f"{path_name(path, '.')} declares {sorted(unknown)}; the mesh axes are {', '.join(AXES)}")
        present = [tuple(axis for axis in entry if axis in axis_sizes) for entry in declares]
        axes = [entry if len(entry) > 1 else next(iter(entry), None) for entry in present]
        shape = leaf.shape[declared.stacked :]
        assert len(axes) == len(shape), f"{path_name(path, '.')}: {axes} declared for shape {shape}"
        over = [math.prod(axis_sizes[axis] for axis in entry) for entry in present]
        fewer = any(dim < size for dim, size in zip(shape, over, strict=True))
        if declared.replicate_if_fewer and fewer:
            axes = [None] * len(shape)
        return P(*[None] * declared.stacked, *axes)

    return tree_util.tree_map_with_path(spec, model)


def decayed(model: eqx.Module) -> Any:
    """`model` with every array replaced by whether weight decay applies to it: all but vectors."""
    return jax.tree.map(lambda declared: declared.kind != ParameterKind.vector, declarations(model))


def is_stacked(model: eqx.Module) -> Any:
    """`model` with every array replaced by whether it is stacked over layers."""
    return jax.tree.map(lambda declared: declared.stacked, declarations(model))


def optimizer_specs(optimizer: optax.GradientTransformation, model: Any, specs: Any) -> Any:
    """PartitionSpecs of the optimizer's state: what is shaped like a parameter is sharded like it, the rest
    replicated."""
    state = jax.eval_shape(optimizer.init, model)

    def is_masked(x: Any) -> bool:
        return isinstance(x, optax.MaskedNode)

    return optax.tree_map_params(
        optimizer,
        lambda leaf, spec: leaf if is_masked(leaf) else spec,
        state,
        specs,
        transform_non_params=lambda _: P(),
        is_leaf=is_masked,
    )


def shard_over(shape: tuple[int, ...], spec: P, axes: Iterable[str], axis_sizes: Mapping[str, int], first: int) -> P:
    """`spec` of an array, sharded over `axes` as well: along the first of its dims, from `first` on, whose local size
    they divide; where there is none, `spec` as it is."""
    axes = tuple(axes)
    for i in range(first, len(shape) if axes else 0):
        there = spec_axes(spec[i])
        local = shape[i] // math.prod(axis_sizes[axis] for axis in there)
        if local % math.prod(axis_sizes[axis] for axis in axes) == 0:
            return P(*spec[:i], (*there, *axes), *spec[i + 1 :])
    return spec


def sharded_dim(spec: P, axis: str) -> int | None:
    """The dim that a spec shards over `axis`, counted from the last; None where it does not."""
    return next((i - len(spec) for i, axes in enumerate(spec) if axis in spec_axes(axes)), None)


def axes_in(spec: P) -> tuple[str, ...]:
    """All axes that a spec shards some dim over."""
    return tuple(axis for entry in spec for axis in spec_axes(entry))


def named_shardings(mesh: Mesh, specs: Any) -> Any:
    """The tree of PartitionSpecs as NamedShardings on `mesh`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def shard_bytes(tree: Any) -> int:
    """Bytes of one device's shard of every array or ShapeDtypeStruct of a tree, without the padding of layouts."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
