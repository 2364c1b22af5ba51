"""Primitive collectives over mesh axes, and the type that says over which axes a value differs between devices.

Under `check_vma=True` (the default of `jax.shard_map`) every value has a type that names the mesh axes over which it
*varies*: over which devices may hold different values.  A value that does not vary over an axis is *replicated*
(invariant) over it.  The type decides which collective the transpose of an operation contains, so every cast is
explicit.

                            forward                        backward
    mark_varying            nothing                        reduced later, by `reduce_partial_gradients`
    all_reduce              all-reduce                     nothing
    all_gather              all-gather                     reduce-scatter of the gradient, in its dtype
    reduce_partial_gradients  all-reduce of partial ones     not differentiated
    reduce_scatter          reduce-scatter                 not differentiated
    all_gather_invariant    all-gather                     not differentiated
    local_shard             nothing                        not differentiated

`axes` is one mesh axis or several, in the order of the mesh; several act as one axis whose last counts fastest.
{+dp}: a partial sum, not yet reduced over dp.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Shaped

from shmap_tp.parallel.mesh import spec_axes

Axes = str | tuple[str, ...]


def varying_axes(x: Array) -> frozenset[str]:
    """The mesh axes over which devices may hold different values of `x`, by its type inside shard_map."""
    return jax.typeof(x).manual_axis_type.varying


def mark_varying(tree: Any, axes: Axes) -> Any:
    """Every array of `tree`, typed as varying over `axes`, where it does not vary already.

    The transpose of the cast is an all-reduce: gradients with respect to the argument are summed over `axes`,
    gradients with respect to the result are local partial sums.
    """

    def mark(x: Array) -> Array:
        missing = tuple(axis for axis in spec_axes(axes) if axis not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree)


def all_reduce(tree: Any, axes: Axes) -> Any:
    """Every array of `tree` {+axes}, summed over `axes`.  Communication: one all-reduce, as XLA combines them."""
    return lax.psum(tree, axes) if axes else tree


def reduce_partial_gradients(axes: Axes, gradients: Any, params: Any) -> Any:
    """Each gradient that varies over `axes` while its parameter is replicated, summed over them; the rest as they are.

    Communication: one all-reduce of those gradients.
    """

    def is_partial(dw: Array, w: Array) -> bool:
        return set(spec_axes(axes)) <= varying_axes(dw) - varying_axes(w)

    partial, complete = eqx.partition(gradients, jax.tree.map(is_partial, gradients, params))
    return eqx.combine(all_reduce(partial, axes), complete)


def reduce_scatter(x: Float[Array, "..."], axes: Axes, dim: int) -> Float[Array, "..."]:
    """x {+axes} -> this device's shard, along `dim`, of the sum.  Communication: one reduce-scatter of x."""
    return lax.psum_scatter(x, axes, scatter_dimension=dim % x.ndim, tiled=True)


def all_gather(x: Shaped[Array, "..."], axes: Axes, dim: int) -> Shaped[Array, "..."]:
    """Shards of x along `dim` -> x, typed as varying: devices will use it differently.  Communication: one all-gather
    of x; backward one reduce-scatter of dx, in x's dtype."""
    return lax.all_gather(x, axes, axis=dim % x.ndim, tiled=True)


def local_shard(x: Shaped[Array, "..."], axes: Axes, dim: int) -> Shaped[Array, "..."]:
    """x, replicated over `axes` -> this device's shard of it along `dim`.  Communication: none."""
    size = x.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(mark_varying(x, axes), lax.axis_index(axes) * size, size, dim % x.ndim)


def all_gather_invariant(x: Shaped[Array, "..."], axes: Axes, dim: int) -> Shaped[Array, "..."]:
    """Shards of x along `dim` -> x, typed as replicated over `axes`.  Communication: one all-gather of x."""
    return lax.all_gather(x, axes, axis=dim % x.ndim, tiled=True, to="invarying")


def without_vma_check(run: Callable[..., Any], *args: Any) -> Any:
    """run(*args), for operations that know no varying types; every result varies over the axes that any argument does.

    All mesh axes are manual around it already, so the inner shard_map makes none manual, shards nothing and moves
    nothing: it only switches off, for these lines, a check that Pallas operations do not pass.  The types of the
    results are asserted by this function, and the transposes of its casts would be reductions that no gradient needs:
    the caller must not let JAX differentiate it.
    """

    def untyped(x: Array) -> Array:
        """x, typed as replicated, which unchecked operations return; these two are free."""
        return lax.squeeze(lax.expand_dims(x, (0,)), (0,))

    def inner(*args: Any) -> Any:
        return run(*jax.tree.map(untyped, args))

    axes = sorted(frozenset[str]().union(*[varying_axes(x) for x in jax.tree.leaves(args)]))
    results = jax.shard_map(inner, in_specs=P(), out_specs=P(), check_vma=False)(*args)
    return mark_varying(results, tuple(axes))
