"""The wires: every byte between devices goes through one of these.

                    forward                              backward
    enter_parallel  nothing                              all-reduce of dx over mp
    leave_parallel  all-reduce of x over mp              nothing
    vary            nothing                              sum over the axes, wherever the gradient meets the whole value
    sum_over        all-reduce over the axes             nothing
    scatter_sum     reduce-scatter over the axis         not differentiated
    gather_whole    all-gather over the axis             not differentiated

enter and leave are f and g of Shoeybi et al. 2019, "Megatron-LM", section 3, https://arxiv.org/abs/1909.08053.  Under
`check_vma=True` both are types and need no custom gradient: a value is either varying over mp or it is not, and JAX
derives the transpose of the cast.  A partial sum that is never left does not compile.
"""

from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from shmap_tp.mesh import MP

LEFT = "left_parallel"  # names what a collective returned, so that a remat policy can keep it


def varying(x: Array) -> frozenset[str]:
    """The mesh axes over which devices may hold different values of `x`, by its type inside shard_map."""
    return jax.typeof(x).manual_axis_type.varying


def vary(tree: Any, axis: str) -> Any:
    """Every array of `tree`, typed as varying over `axis`; those that are already stay as they are."""
    return jax.tree.map(lambda x: x if axis in varying(x) else lax.pcast(x, axis, to="varying"), tree)


def enter_parallel(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x, about to meet weights that are cut over mp.  Backward: one all-reduce of dx over mp, in x's dtype."""
    return lax.pcast(x, MP, to="varying")


def leave_parallel(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x {+mp} -> x: one all-reduce over mp, in x's dtype.  Backward: nothing."""
    return checkpoint_name(lax.psum(x, MP), LEFT)


def sum_over(tree: Any, axis: str) -> Any:
    """Every array of `tree` {+axis} summed over `axis`; all arrays travel in as few all-reduces as XLA can make."""
    return lax.psum(tree, axis)


def scatter_sum(x: Float[Array, "..."], axis: str, dim: int) -> Float[Array, "..."]:
    """x {+axis} -> the part of the sum along `dim` that is this device's: one reduce-scatter over `axis`, of x."""
    return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def own_part(x: Float[Array, "..."], axis: str, dim: int) -> Float[Array, "..."]:
    """x, whole over `axis` -> its part along `dim` that is this device's.  Nothing travels."""
    size = x.shape[dim] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(vary(x, axis), lax.axis_index(axis) * size, size, dim)


def gather_whole(x: Float[Array, "..."], axis: str, dim: int) -> Float[Array, "..."]:
    """The parts of x along `dim` -> x, typed as whole over `axis`: one all-gather over it, of x."""
    return lax.all_gather(x, axis, axis=dim, tiled=True, to="invarying")
