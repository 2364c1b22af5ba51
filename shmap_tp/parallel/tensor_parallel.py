"""Tensor parallelism over mp: what a layer communicates before its column-parallel and after its row-parallel products.

A sublayer (attention, MLP) is column-parallel matmuls, work on this device's own heads or hidden units, and one
row-parallel matmul whose result is a partial sum.  A tensor-parallel mode performs both products together with the
communication they need, so that the two may overlap; it is chosen once (`mesh.tensor_parallel`) and passed down as a
value, and no layer asks which one it is.

B batch, T time, D model width, F features.  T/mp: dim T sharded over mp.  {+mp}: a partial sum, not yet reduced.

    column_parallel(x, a, b)          x -> enter(x) @ a, enter(x) @ b, plus the bias of each
    row_parallel((y, a), (z, b))      reduce(y @ a + z @ b), plus the bias of each, once

                        residual stream   enter                            reduce
    AllReduce           x[B T D]          forward nothing                  forward all-reduce of y[B T D]
                                          backward all-reduce of dx        backward nothing
    SequenceParallel    x[B T/mp D]       forward all-gather to [B T D]    forward reduce-scatter of y[B T D]
                                          backward reduce-scatter of dx    backward all-gather of dy
    CollectiveMatmul    x[B T/mp D]       mp - 1 ppermutes of [B T/mp D], forward and backward, each overlapped with
                                          the matmul of another chunk; embedding and head as in SequenceParallel

On a ring network an all-reduce transfers as many bytes as a reduce-scatter and an all-gather of the same array, and
mp - 1 ppermutes of a chunk as many as either.  With the residual stream sharded over time, norms, residual sums and
saved activations take 1/mp of the memory; a rematerialisation policy that saves only those repeats `enter` in the
backward pass.

AllReduce is f and g of Shoeybi et al. 2019, "Megatron-LM", section 3, https://arxiv.org/abs/1909.08053;
SequenceParallel is g and g-bar of Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4.2,
https://arxiv.org/abs/2205.05198; CollectiveMatmul is Wang et al. 2023 (`parallel/collective_matmul.py`).  Under
`check_vma=True` f and g are types and need no custom gradient; a partial sum that is never reduced does not compile.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PyTree

from shmap_tp.config.activation_names import SUBLAYER_OUTPUT
from shmap_tp.config.choices import TensorParallelMode
from shmap_tp.parallel import collective_matmul
from shmap_tp.parallel.collective_matmul import Product
from shmap_tp.parallel.mesh import MP

Activation = PyTree[Float[Array, "B _ ..."]]
"""y[B T F/mp] or y[B T H/mp K]; in CollectiveMatmul a tuple of its chunks along time.  Functions of single positions
apply to either with `jax.tree.map`; what mixes positions needs `concat_time` before and `split_time` after."""


@runtime_checkable
class TensorParallel(Protocol):
    """The interface of tensor-parallel modes, and the products of a mode whose collectives are apart from its matmuls:
    after `enter`, and before `reduce`.  The residual stream is x[B T D] or x[B T/mp D], as the mode says."""

    @property
    def time_axes(self) -> tuple[str, ...]:
        """The axes over which the time of the residual stream is sharded.  The gradients of parameters that are
        replicated over them are partial sums, which the step reduces once."""
        ...

    def enter(self, x_BTD: Float[Array, "B _ D"]) -> Float[Array, "B T D"]:
        """x of the residual stream -> all of its positions, about to be multiplied by weights sharded over mp."""
        ...

    def reduce(self, y_BTD: Float[Array, "B T D"]) -> Float[Array, "B _ D"]:
        """y {+mp} -> the residual stream."""
        ...

    def local_positions(self, w_BTD: Float[Array, "B T D"], time: int) -> Float[Array, "B time D"]:
        """The rows of w, one per position, that belong to this device's `time` positions of the residual stream."""
        ...

    def column_parallel(self, x_BTD: Float[Array, "B _ D"], *layers: Product) -> tuple[Activation, ...]:
        """x of the residual stream -> x @ w + b for each layer, whose outputs are sharded over mp."""
        x_BTD = self.enter(x_BTD)
        return tuple(layer.add_bias(layer(x_BTD)) for layer in layers)

    def row_parallel(self, *products: tuple[Activation, Product]) -> Float[Array, "B _ D"]:
        """(y, layer) pairs -> the sum over pairs and over mp of y @ w, plus every b, as it is added to the residual
        stream."""
        y_BTD = self.reduce(functools.reduce(operator.add, [layer(y) for y, layer in products]))
        return _add_biases(y_BTD, products)

    def concat_time(self, y: Activation) -> Float[Array, "B T ..."]:
        """An activation -> y[B T ...], all positions in order.  Communication: none."""
        return y

    def split_time(self, y: Float[Array, "B T ..."]) -> Activation:
        """The inverse of `concat_time`.  Communication: none."""
        return y


@dataclass(frozen=True)
class AllReduce(TensorParallel):
    """The residual stream x[B T D] is replicated over mp.  Shoeybi et al. 2019

    `column_parallel`: backward one all-reduce of dx over mp.  `row_parallel`: forward one all-reduce.  Gradients of
    replicated parameters are complete on each device of mp.
    """

    time_axes = ()

    def enter(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Megatron's f.  Backward: one all-reduce of dx over mp, in x's dtype."""
        return lax.pcast(x_BTD, MP, to="varying")

    def reduce(self, y_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Megatron's g.  Forward: one all-reduce over mp, in y's dtype.  Backward: nothing."""
        return checkpoint_name(lax.psum(y_BTD, MP), SUBLAYER_OUTPUT)

    def local_positions(self, w_BTD: Float[Array, "B T D"], time: int) -> Float[Array, "B time D"]:
        return w_BTD[:, :time]


@dataclass(frozen=True)
class SequenceParallel(TensorParallel):
    """Each device of mp holds T/mp positions of the residual stream x[B T/mp D].  Korthikanti et al. 2022, section 4.2

    `column_parallel`: forward one all-gather over mp, backward one reduce-scatter.  `row_parallel`: the reverse.

    Parameters that are replicated over mp and applied to the residual stream (norms, row-parallel biases, learned
    positions) see other positions on every device: their gradients are partial sums over mp, reduced once per step.  So
    are those of key/value heads where mp exceeds their number, and of norms of q and k.
    """

    time_axes = (MP,)

    def enter(self, x_BTD: Float[Array, "B part D"]) -> Float[Array, "B T D"]:
        """x[B T/mp D] -> x[B T D]: one all-gather over mp.  Backward: one reduce-scatter of dx[B T D], in x's dtype."""
        return _along_time(lambda x, dim: lax.all_gather(x, MP, axis=dim, tiled=True), x_BTD)

    def reduce(self, y_BTD: Float[Array, "B T D"]) -> Float[Array, "B part D"]:
        """y[B T D] {+mp} -> y[B T/mp D]: one reduce-scatter over mp.  Backward: one all-gather to dy[B T D]."""
        part_BTD = _along_time(lambda y, dim: lax.psum_scatter(y, MP, scatter_dimension=dim, tiled=True), y_BTD)
        return checkpoint_name(part_BTD, SUBLAYER_OUTPUT)

    def local_positions(self, w_BTD: Float[Array, "B T D"], time: int) -> Float[Array, "B time D"]:
        return lax.dynamic_slice_in_dim(w_BTD, lax.axis_index(MP) * time, time, axis=1)


@dataclass(frozen=True)
class CollectiveMatmul(SequenceParallel):
    """SequenceParallel with both collectives decomposed into chunks of T/mp positions, overlapped with the matmuls.

    The embedding's reduction and the head's `enter` stay single collectives: no matmul stands there to overlap them.
    """

    def column_parallel(self, x_BTD: Float[Array, "B part D"], *layers: Product) -> tuple[Activation, ...]:
        """Forward: mp - 1 ppermutes of x[B T/mp D].  Backward: mp - 1 ppermutes of dx."""
        products = collective_matmul.all_gather_matmul(x_BTD, layers)
        return tuple(_add_bias_to_chunks(layer, chunks) for layer, chunks in zip(layers, products, strict=True))

    def row_parallel(self, *products: tuple[Activation, Product]) -> Float[Array, "B part D"]:
        """Forward: mp - 1 ppermutes of a partial sum of y[B T/mp D].  Backward: mp - 1 ppermutes of dy."""
        y_BTD = checkpoint_name(collective_matmul.matmul_reduce_scatter(products), SUBLAYER_OUTPUT)
        return _add_biases(y_BTD, products)

    def concat_time(self, y: Activation) -> Float[Array, "B T ..."]:
        return collective_matmul.concat_time(y)

    def split_time(self, y: Float[Array, "B T ..."]) -> Activation:
        return collective_matmul.split_time(y)


TENSOR_PARALLEL: dict[TensorParallelMode, TensorParallel] = {
    TensorParallelMode.all_reduce: AllReduce(),
    TensorParallelMode.sequence: SequenceParallel(),
    TensorParallelMode.collective_matmul: CollectiveMatmul(),
}
"""The modes that `mesh.tensor_parallel` names."""


def prompt_tensor_parallel(time: int, mp: int) -> TensorParallel:
    """The mode in which prompts of `time` slots are read: with the residual stream sharded over time where mp divides
    it, which communicates as many bytes, and computes norms and residual sums once."""
    return AllReduce() if time % mp else SequenceParallel()


def _add_biases(y_BTD: Float[Array, "B _ D"], products: Sequence[tuple[Activation, Product]]) -> Float[Array, "B _ D"]:
    """The reduced y, plus the bias of every layer."""
    return functools.reduce(lambda y, product: product[1].add_bias(y), products, y_BTD)


def _add_bias_to_chunks(layer: Product, chunks: Sequence[Any]) -> Any:
    """The chunks of a layer's product, plus its bias; of `AfterNorm` a tuple, for each of its layers the chunks."""
    return jax.tree.map(lambda *chunks: chunks, *[layer.add_bias(y) for y in chunks])


def _along_time(move: Callable[[Array, int], Array], x_BTD: Float[Array, "B T D"]) -> Float[Array, "B part D"]:
    """`move(x, dim of T)`.  A single sequence is moved as a matrix: of a reduce-scatter along T of [1 T D] XLA for TPU
    makes an all-reduce (docs/performance-notes.md)."""
    return move(jnp.squeeze(x_BTD, 0), 0)[None] if x_BTD.shape[0] == 1 else move(x_BTD, 1)
