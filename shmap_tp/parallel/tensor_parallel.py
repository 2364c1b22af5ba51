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

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PyTree

from shmap_tp.parallel.collectives import mark_varying
from shmap_tp.parallel.mesh import DP, MP

SUBLAYER_OUTPUT = "left_parallel"  # names what a collective returned, so that a remat policy can keep it

Product = PyTree[Float[Array, "B _ ..."]]
"""y[B T F/mp] or y[B T H/mp K], or where a wire computes it so, its parts along time: what is done to each position is
done to each."""


Columns = tuple[Callable[[Array], Array], ...]
"""The column-parallel layers at the entrance of a region: x[B any D] -> x @ w, one of all the Product's forms.  Each is
a pytree of its weight, and linear in both."""


Rows = tuple[Product, Callable[[Array], Array]]
"""What stands before a region's exit, and the row-parallel layer there: y[B any ...] -> y @ w {+mp}."""


def products_of(x_BTD: Float[Array, "B T D"], regions: Mapping[str, Columns]) -> list[tuple[Array, ...]]:
    """x, entered, times each region's weights, in a scope of the region's name."""
    found = []
    for name, columns in regions.items():
        with jax.named_scope(name):
            found.append(tuple(column(x_BTD) for column in columns))
    return found


def owed_by(regions: Mapping[str, tuple[Array, Callable[[Array], Array]]]) -> Float[Array, "B T D"]:
    """The sum {+mp} of all regions' y @ w, each product in a scope of the region's name."""
    owed = []
    for name, (y, rows) in regions.items():
        with jax.named_scope(name):
            owed.append(rows(y))
    return functools.reduce(operator.add, owed)


@dataclass(frozen=True)
class AllReduce:
    """The residual stream is whole on every device of mp.  Shoeybi et al. 2019"""

    def enter(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """x, about to meet weights that are cut over mp.  Backward: one all-reduce of dx over mp, in x's dtype."""
        return lax.pcast(x_BTD, MP, to="varying")

    def leave(self, y_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """y {+mp} -> y: one all-reduce over mp, in y's dtype.  Backward: nothing."""
        return checkpoint_name(lax.psum(y_BTD, MP), SUBLAYER_OUTPUT)

    def into(self, x_BTD: Float[Array, "B T D"], **regions: Columns) -> list[tuple[Product, ...]]:
        """For every region its products of the entered x: `enter`, once."""
        return products_of(self.enter(x_BTD), regions)

    def out_of(self, **regions: Rows) -> Float[Array, "B T D"]:
        """The sum of all y @ w: `leave`, once."""
        return self.leave(owed_by(regions))

    def in_time(self, y: Product) -> Float[Array, "B T ..."]:
        """A product, whatever the order of its positions -> y[B T ...].  Nothing travels."""
        return y

    def in_parts(self, y: Float[Array, "B T ..."]) -> Product:
        """y[B T ...] -> as `out_of` takes it.  Nothing travels."""
        return y

    def beside(self, w_TD: Float[Array, "T D"], time: int) -> Float[Array, "time D"]:
        """Those rows of w, one for each position, that stand beside x[B time D] in the residual stream: the first."""
        return w_TD[:time]

    def at_home(self, params: Any) -> Any:
        """Parameters whose gradients stay on the device that computes them until they meet over dp."""
        return mark_varying(params, DP)


@dataclass(frozen=True)
class SequenceParallel:
    """Each device of mp has its own T/mp positions of the residual stream.  Korthikanti et al. 2022, section 4.2

    A norm's scale, or learned positions, whole over mp, meet other positions on every device.  Their gradient is a sum
    over mp, once per step; so is that of key/value heads fewer than mp.
    """

    def enter(self, x_BTD: Float[Array, "B part D"]) -> Float[Array, "B T D"]:
        """x[B T/mp D] -> x[B T D]: one all-gather over mp.  Backward: one reduce-scatter of dx[B T D], in x's dtype."""
        return _along_time(lambda x, dim: lax.all_gather(x, MP, axis=dim, tiled=True), x_BTD)

    def leave(self, y_BTD: Float[Array, "B T D"]) -> Float[Array, "B part D"]:
        """y[B T D] {+mp} -> y[B T/mp D]: one reduce-scatter over mp.  Backward: one all-gather to dy[B T D]."""
        part_BTD = _along_time(lambda y, dim: lax.psum_scatter(y, MP, scatter_dimension=dim, tiled=True), y_BTD)
        return checkpoint_name(part_BTD, SUBLAYER_OUTPUT)

    def into(self, x_BTD: Float[Array, "B part D"], **regions: Columns) -> list[tuple[Product, ...]]:
        """For every region its products of the entered x: `enter`, once."""
        return products_of(self.enter(x_BTD), regions)

    def out_of(self, **regions: Rows) -> Float[Array, "B part D"]:
        """The sum of all y @ w: `leave`, once."""
        return self.leave(owed_by(regions))

    def in_time(self, y: Product) -> Float[Array, "B T ..."]:
        """A product, whatever the order of its positions -> y[B T ...].  Nothing travels."""
        return y

    def in_parts(self, y: Float[Array, "B T ..."]) -> Product:
        """y[B T ...] -> as `out_of` takes it.  Nothing travels."""
        return y

    def beside(self, w_TD: Float[Array, "T D"], time: int) -> Float[Array, "time D"]:
        """Those rows of w, one for each position, that stand beside x[B time D] in the residual stream: this part's."""
        return lax.dynamic_slice_in_dim(w_TD, lax.axis_index(MP) * time, time)

    def at_home(self, params: Any) -> Any:
        """Parameters whose gradients stay on the device that computes them until they meet over mp and dp."""
        return mark_varying(mark_varying(params, MP), DP)


def _along_time(move: Callable[[Array, int], Array], x_BTD: Float[Array, "B T D"]) -> Float[Array, "B part D"]:
    """`move` of (x, which of its dims is T).  A single window goes as a matrix: of a reduce-scatter along T of
    [1 T D] the compiler for TPU makes an all-reduce of the whole (libtpu 0.0.42)."""
    return move(jnp.squeeze(x_BTD, 0), 0)[None] if x_BTD.shape[0] == 1 else move(x_BTD, 1)
