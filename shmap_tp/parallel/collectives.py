"""The wires: every byte between devices goes through one of these.

A tensor-parallel region is entered with the residual stream and left with a sum over mp still owed.  Column-parallel
products stand at its entrance, row-parallel ones at its exit, and a wire makes both, so that what travels may do so
while they are computed:

    into(x, region=columns)       x -> enter(x) @ w, for every w of the columns
    out_of(region=(y, rows))      leave(the sum of all y @ w)

How, a wire says; one is chosen for the whole program and handed down as a value, and no layer knows which it is.  What
happens in between is position by position, but for attention, which asks for its products `in_time`.

B batch, T time, D model width.  T/mp: dim T cut along mp.  {+mp}: a sum over mp still owed.

                     forward                                          backward
    AllReduce        between regions x[B T D], whole on every device of mp
      enter          nothing                                          all-reduce of dx[B T D]
      leave          all-reduce of x[B T D]                           nothing
    SequenceParallel between regions x[B T/mp D]: norms and sums are of 1/mp of the positions, and so is what is saved
      enter          all-gather to h[B T D]                           reduce-scatter of dh[B T D]
      leave          reduce-scatter of y[B T D]                       all-gather of dy to [B T D]
    Ring (`ring`)    the same stream; each ppermute flows under the products of another part
      into           mp - 1 ppermutes of h[B T/mp D]                  mp - 1 ppermutes of dh[B T/mp D]
      out_of         mp - 1 ppermutes of y[B T/mp D]                  mp - 1 ppermutes of dy[B T/mp D]
    vary, at_home    nothing                                          whatever is owed then, `meet_over` sums
    sum_over         all-reduce over the axis                         nothing
    meet_over        all-reduce over the axis, where owed             not differentiated
    scatter_sum      reduce-scatter over the axis                     not differentiated
    gather           all-gather over the axis                         reduce-scatter of the gradient
    gather_whole     all-gather over the axis                         not differentiated

In a ring an all-reduce sends as much as a reduce-scatter and an all-gather of the same whole array, and mp - 1
ppermutes of a part as much as either.  So the wires cost the same, and what lies between regions takes 1/mp of the
memory in all but the first; but where a remat policy keeps just that, `enter` or `into` gathers once more in the
backward pass.  What was gathered, mp times as large, none of them keeps: to write and to read it takes longer (6.9B on
V3-32, dots, predicted: 32.9 s a step instead of 30.4; 11B on v4-512 1.84 instead of 1.73).

AllReduce is f and g of Shoeybi et al. 2019, "Megatron-LM", section 3, https://arxiv.org/abs/1909.08053, and
SequenceParallel g and g-bar of Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4.2,
https://arxiv.org/abs/2205.05198.  Under `check_vma=True` they are types and need no custom gradient: a value is either
varying over mp or it is not, and JAX derives the transpose.  A partial sum that is never left does not compile: by its
type where the stream is whole, by its shape where it is cut.
"""

from typing import Any

import equinox as eqx
import jax
from jax import lax
from jaxtyping import Array, Float

from shmap_tp.parallel.mesh import Groups


def varying_axes(x: Array) -> frozenset[str]:
    """The mesh axes over which devices may hold different values of `x`, by its type inside shard_map."""
    return jax.typeof(x).manual_axis_type.varying


def mark_varying(tree: Any, axis: str) -> Any:
    """Every array of `tree`, typed as varying over `axis`; those that are already stay as they are."""
    return jax.tree.map(lambda x: x if axis in varying_axes(x) else lax.pcast(x, axis, to="varying"), tree)


def all_reduce(tree: Any, axis: str) -> Any:
    """Every array of `tree` {+axis} summed over `axis`; all arrays travel in as few all-reduces as XLA can make."""
    return lax.psum(tree, axis)


def reduce_partial_gradients(axis: str, gradients: Any, params: Any) -> Any:
    """Each gradient summed over `axis`, where it varies over it and its parameter does not."""
    owing = jax.tree.map(lambda dw, w: axis in varying_axes(dw) - varying_axes(w), gradients, params)
    owed, complete = eqx.partition(gradients, owing)
    return eqx.combine(all_reduce(owed, axis), complete)


def reduce_scatter(x: Float[Array, "..."], axis: str, dim: int, groups: Groups | None = None) -> Float[Array, "..."]:
    """x {+axis} -> the part of the sum along `dim` that is this device's: one reduce-scatter over `axis`, of x.
    `groups` of the axis each do so for themselves."""
    return lax.psum_scatter(x, axis, scatter_dimension=dim % x.ndim, tiled=True, axis_index_groups=groups)


def gather(x: Float[Array, "..."], axis: str, dim: int, groups: Groups | None = None) -> Float[Array, "..."]:
    """The parts of x along `dim` -> x, about to be used differently on each device: one all-gather over `axis`, of x.
    `groups` of the axis each do so for themselves.  Backward: one reduce-scatter of dx, in x's dtype."""
    return lax.all_gather(x, axis, axis=dim % x.ndim, tiled=True, axis_index_groups=groups)


def own_part(x: Float[Array, "..."], axis: str, dim: int) -> Float[Array, "..."]:
    """x, whole over `axis` -> its part along `dim` that is this device's.  Nothing travels."""
    size = x.shape[dim] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(mark_varying(x, axis), lax.axis_index(axis) * size, size, dim % x.ndim)


def all_gather_invariant(x: Float[Array, "..."], axis: str, dim: int) -> Float[Array, "..."]:
    """The parts of x along `dim` -> x, typed as whole over `axis`: one all-gather over it, of x."""
    return lax.all_gather(x, axis, axis=dim % x.ndim, tiled=True, to="invarying")
