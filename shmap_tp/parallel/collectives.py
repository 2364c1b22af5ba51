"""Primitive collectives over one mesh axis, and the type that says over which axes a value differs between devices.

Under `check_vma=True` (the default of `jax.shard_map`) every value has a type that names the mesh axes over which it
*varies*: over which devices may hold different values.  A value that does not vary over an axis is *replicated*
(invariant) over it.  The type decides which collective the transpose of an operation contains, so every cast is
explicit.

                            forward                        backward
    mark_varying            nothing                        reduced later, by `reduce_partial_gradients`
    all_reduce              all-reduce                     nothing
    all_gather              all-gather                     reduce-scatter of the gradient, in its dtype
    reduce_partial_gradients  all-reduce of what is partial  not differentiated
    reduce_scatter          reduce-scatter                 not differentiated
    all_gather_invariant    all-gather                     not differentiated
    local_shard             nothing                        not differentiated

{+dp}: a partial sum, not yet reduced over dp.
"""

from typing import Any

import equinox as eqx
import jax
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from shmap_tp.parallel.mesh import Groups
from shmap_tp.parallel.partitioning import spec_axes


def varying_axes(x: Array) -> frozenset[str]:
    """The mesh axes over which devices may hold different values of `x`, by its type inside shard_map."""
    return jax.typeof(x).manual_axis_type.varying


def mark_varying(tree: Any, axis: str) -> Any:
    """Every array of `tree`, typed as varying over `axis`; those that vary already stay as they are.

    The transpose of the cast is an all-reduce: gradients with respect to the argument are summed over `axis`,
    gradients with respect to the result are local partial sums.
    """
    return jax.tree.map(lambda x: x if axis in varying_axes(x) else lax.pcast(x, axis, to="varying"), tree)


def all_reduce(tree: Any, axis: str) -> Any:
    """Every array of `tree` {+axis}, summed over `axis`.  Communication: one all-reduce, as XLA combines them."""
    return lax.psum(tree, axis)


def reduce_partial_gradients(axis: str, gradients: Any, params: Any) -> Any:
    """Each gradient that varies over `axis` while its parameter is replicated, summed over it; the rest as they are.

    Communication: one all-reduce of those gradients.
    """
    is_partial = jax.tree.map(lambda dw, w: axis in varying_axes(dw) - varying_axes(w), gradients, params)
    partial, complete = eqx.partition(gradients, is_partial)
    return eqx.combine(all_reduce(partial, axis), complete)


def reduce_scatter(x: Float[Array, "..."], axis: str, dim: int, groups: Groups | None = None) -> Float[Array, "..."]:
    """x {+axis} -> this device's shard, along `dim`, of the sum.  Communication: one reduce-scatter of x.

    With `groups`, disjoint sets of ranks along `axis`, each group does so for itself.
    """
    return lax.psum_scatter(x, axis, scatter_dimension=dim % x.ndim, tiled=True, axis_index_groups=groups)


def all_gather(x: Float[Array, "..."], axis: str, dim: int, groups: Groups | None = None) -> Float[Array, "..."]:
    """Shards of x along `dim` -> x, typed as varying: devices will use it differently.  Communication: one all-gather
    of x; backward one reduce-scatter of dx, in x's dtype.  `groups` as in `reduce_scatter`."""
    return lax.all_gather(x, axis, axis=dim % x.ndim, tiled=True, axis_index_groups=groups)


def local_shard(x: Float[Array, "..."], axis: str, dim: int) -> Float[Array, "..."]:
    """x, replicated over `axis` -> this device's shard of it along `dim`.  Communication: none."""
    size = x.shape[dim] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(mark_varying(x, axis), lax.axis_index(axis) * size, size, dim % x.ndim)


def all_gather_invariant(x: Float[Array, "..."], axis: str, dim: int) -> Float[Array, "..."]:
    """Shards of x along `dim` -> x, typed as replicated over `axis`.  Communication: one all-gather of x."""
    return lax.all_gather(x, axis, axis=dim % x.ndim, tiled=True, to="invarying")


def unshard(x: Float[Array, "..."], spec: P) -> Float[Array, "..."]:
    """This device's shard, partitioned as `spec` says -> the whole array, replicated.  Communication: one all-gather
    for every axis in `spec`."""
    for dim, entry in enumerate(spec):
        for axis in reversed(spec_axes(entry)):
            x = all_gather_invariant(x, axis, dim)
    return x


def shard(x: Float[Array, "..."], spec: P) -> Float[Array, "..."]:
    """The inverse of `unshard`.  Communication: none."""
    for dim, entry in enumerate(spec):
        for axis in spec_axes(entry):
            x = local_shard(x, axis, dim)
    return x
