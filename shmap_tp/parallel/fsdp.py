"""ZeRO-1 and FSDP: how each parameter, its gradient and its optimizer state are placed over dp.

A `Placement` is a value; `place_parameters` makes a tree of them, shaped like the parameters.  D: a dim of a matrix
that dp divides.  D/dp: dim D sharded over dp.  D/slice: sharded over the dp ranks of one slice.  {+dp}: a partial sum,
not yet reduced over dp.

    Replicated   weight and optimizer state on every rank; every rank computes the same update
                     step      dw {+dp}   --all-reduce-->  dw
    Zero1        weight on every rank, optimizer state and update sharded: ZeRO stage 1
                     step      dw[D] {+dp}  --reduce-scatter-->  dw[D/dp]  --update-->  w[D/dp]  --all-gather-->  w[D]
    Fsdp         weight, too, is sharded: ZeRO stage 3, fully sharded data parallelism
                     each use  w[D/dp] in the dtype of the activations  --all-gather-->  w[D]
                     backward  dw[D] {+dp} in that dtype  --reduce-scatter or ring-->  dw[D/dp], accumulated in float32
                     step      no further communication: gradient, weight and update are sharded alike

Where dp spans slices, gradients of matrices cross the network between slices once per step, as shards, and so do FSDP
weights.  (The update of Zero1 is gathered over all of dp at once, and gradients of Replicated are summed so: how these
cross is XLA's decision.)

    Zero1        step      reduce-scatter within each slice, then between slices:  dw[D/slice] -> dw[D/dp]
    Fsdp         step      first w[D/dp]  --all-gather between slices-->  w[D/slice], gathered within the slice for each
                           use; last dw[D/slice] {+dp}  --reduce-scatter between slices-->  dw[D/dp]

Rajbhandari et al. 2020, "ZeRO", sections 5.1 and 5.3, https://arxiv.org/abs/1910.02054.  On a ring network a
reduce-scatter and an all-gather transfer as many bytes as one all-reduce.  Bytes of memory per parameter with AdamW and
gradient accumulation: 16, 8 + 8 / dp, 16 / dp; Fsdp also needs one layer's gathered weights, and over several slices
8 slices / dp more for weights and gradients gathered within a slice.

The sharded dim is derived: of a matrix the first dim whose local size dp divides, never the one that layers are stacked
along.  Anything else is Replicated.
"""

from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from shmap_tp.config.schema import Zero
from shmap_tp.parallel.collectives import all_gather, all_gather_invariant, all_reduce, local_shard, reduce_scatter
from shmap_tp.parallel.fsdp_overlap import OverlappedLinear, WeightLayout
from shmap_tp.parallel.mesh import DP, MP, DataParallelGroups
from shmap_tp.parallel.partitioning import is_stacked, shard_over, sharded_dim


class PrefetchedWeight(eqx.Module):
    """An FSDP weight that was gathered before the layer that uses it runs (`model/offloaded_scan.py`)."""

    shard: Float[Array, "..."]
    full: Float[Array, "..."]


@dataclass(frozen=True)
class Replicated:
    """Every dp rank stores and updates the whole parameter."""

    def gather_between_slices(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        """The weight as stored -> what this device holds during a step, and has the gradient of."""
        return w

    def gather(self, w: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
        """What this device holds -> the weight that the layer multiplies with."""
        return w

    def reduce_gradient(self, dw: Float[Array, "..."]) -> Float[Array, "..."]:
        """The gradient {+dp} of what this device holds -> of what it updates, summed over dp."""
        return all_reduce(dw, DP)

    def local_shard(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        """The weight as stored -> what this device updates.  Communication: none."""
        return w

    def all_gather_updated(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        """What this device updated -> the weight as stored."""
        return w


@dataclass(frozen=True)
class Zero1:
    """Every dp rank stores the whole parameter, and updates its shard along `dim`.  Methods as of Replicated."""

    dim: int
    """The sharded dim, counted from the last, so that it is the same for one layer and for a stack of layers."""
    groups: DataParallelGroups

    def gather_between_slices(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        return w

    def gather(self, w: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
        return w

    def reduce_gradient(self, dw: Float[Array, "..."]) -> Float[Array, "..."]:
        return _reduce_between_slices(reduce_scatter(dw, DP, self.dim, self.groups.intra_slice), self.dim, self.groups)

    def local_shard(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        return local_shard(w, DP, self.dim)

    def all_gather_updated(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        return all_gather_invariant(w, DP, self.dim)


@dataclass(frozen=True)
class Fsdp:
    """Every dp rank stores and updates its shard along `dim`, and gathers the rest for each use, in the dtype of the
    activations.  Methods as of Replicated."""

    dim: int
    """The sharded dim, counted from the last."""
    groups: DataParallelGroups
    ring_sharded_rows: bool | None
    """None: the gradient is reduced by one reduce-scatter.  Else in a ring (`fsdp_overlap`), and whether dp shards the
    features that the weight stores first."""

    def gather_between_slices(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        return w if self.groups.slices == 1 else all_gather(w, DP, self.dim, self.groups.inter_slice)

    def gather(self, w: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
        """Backward: one reduce-scatter of the gradient, in `dtype`."""
        return all_gather(w.astype(dtype), DP, self.dim, self.groups.intra_slice)

    def gather_without_gradient(self, w: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
        return all_gather(lax.stop_gradient(w.astype(dtype)), DP, self.dim, self.groups.intra_slice)

    def overlap(self, layer: Any, dtype: DTypeLike) -> OverlappedLinear:
        """A linear layer with what this device holds of its weight -> the layer to call, its gradient reduced in a
        ring."""
        w = layer.weight
        shard, full = (
            (w.shard, w.full) if isinstance(w, PrefetchedWeight) else (w, self.gather_without_gradient(w, dtype))
        )
        layout = WeightLayout(layer.outputs_first, self.ring_sharded_rows, self.groups)
        gathered = eqx.tree_at(lambda layer: layer.weight, layer, full, is_leaf=lambda x: x is w)
        return OverlappedLinear(gathered, shard.astype(dtype), layout)

    def reduce_gradient(self, dw: Float[Array, "..."]) -> Float[Array, "..."]:
        return _reduce_between_slices(dw, self.dim, self.groups)

    def local_shard(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        return w

    def all_gather_updated(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        return w


Placement = Replicated | Zero1 | Fsdp


def _reduce_between_slices(dw: Float[Array, "..."], dim: int, groups: DataParallelGroups) -> Float[Array, "..."]:
    return dw if groups.slices == 1 else reduce_scatter(dw, DP, dim, groups.inter_slice)


def gather_between_slices(placements: Any, params: Any) -> Any:
    """All parameters, as this device holds them during a step."""
    return jax.tree.map(lambda placement, w: placement.gather_between_slices(w), placements, params)


def gather(placements: Any, module: Any, dtype: DTypeLike) -> Any:
    """`module`, a part of the model or one layer of a stack, ready to be called: FSDP weights gathered, in `dtype`.

    Linear layers whose weight gradient is reduced in a ring become `OverlappedLinear`, which is called alike.
    """

    def gathered(placement: Any, part: Any) -> Any:
        if isinstance(placement, eqx.Module):
            return placement.weight.overlap(part, dtype)
        return placement.gather(part, dtype)

    return jax.tree.map(
        gathered, placements, module, is_leaf=lambda node: is_ring_reduced(getattr(node, "weight", None))
    )


def has_gathered(placements: Any) -> bool:
    """Whether any weight of this part of the model is gathered for its use."""
    return any(isinstance(placement, Fsdp) for placement in jax.tree.leaves(placements))


def is_ring_reduced(placement: Any) -> bool:
    """Whether this is the placement of an FSDP weight whose gradient is reduced in a ring."""
    return isinstance(placement, Fsdp) and placement.ring_sharded_rows is not None


def without_ring(placements: Any) -> Any:
    """The same placements, every gradient reduced by one reduce-scatter."""
    return jax.tree.map(
        lambda placement: replace(placement, ring_sharded_rows=None) if is_ring_reduced(placement) else placement,
        placements,
    )


def place_parameters(
    zero: Zero, model: Any, specs: Any, axis_sizes: dict[str, int], groups: DataParallelGroups
) -> tuple[Any, Any, Any]:
    """(PartitionSpecs of what a device stores of each parameter, of what it updates, the placements).

    `model` are the parameters (arrays or shapes) and `specs` their PartitionSpecs as the layers declare them.
    """
    if zero == Zero.none:
        return specs, specs, jax.tree.map(lambda _: Replicated(), specs)
    updated = shard_over(model, specs, DP, axis_sizes)

    def place(spec: P, declared: P, in_layer: bool) -> Placement:
        dim = sharded_dim(spec, DP)
        if dim is None:
            return Replicated()
        if zero == Zero.zero1:
            return Zero1(dim, groups)
        is_linear = in_layer and sharded_dim(declared, MP) is not None
        return Fsdp(dim, groups, _ring_sharded_rows(spec, dim, groups) if is_linear else None)

    placements = jax.tree.map(place, updated, specs, is_stacked(model))
    return updated if zero == Zero.fsdp else specs, updated, placements


def _ring_sharded_rows(spec: P, dim: int, groups: DataParallelGroups) -> bool | None:
    """Whether the gradient of a linear layer's weight [L rows columns ...] is reduced in a ring, and of what: True the
    rows, False the columns, which of [rows, heads, head] are the heads.  None where there is no ring."""
    if groups.ring == 1:
        return None
    return {1: True, 2: False}.get(len(spec) + dim)
