"""ZeRO-1 and FSDP: how each parameter, its gradient and its optimizer state are placed over the token axes.

A `Placement` is a value; `place_parameters` makes a tree of them, shaped like the parameters.  dp stands for the token
axes that a parameter does not declare (usually all of them: `mesh.token_axes`).  D: a dim of a matrix that dp divides.
D/dp: dim D sharded over dp.  D/slice: sharded over the ranks of dp in one slice.  {+dp}: a partial sum, not yet reduced
over dp.

    Replicated   weight and optimizer state on every rank; every rank computes the same update
                     step      dw {+dp}   --all-reduce-->  dw
    Zero1        weight on every rank, optimizer state and update sharded: ZeRO stage 1
                     step      dw[D] {+dp}  --reduce-scatter-->  dw[D/dp]  --update-->  w[D/dp]  --all-gather-->  w[D]
    Fsdp         weight, too, is sharded: ZeRO stage 3, fully sharded data parallelism
                     each use  w[D/dp] in the dtype of the activations  --all-gather-->  w[D]
                     backward  dw[D] {+dp} in that dtype  --reduce-scatter or ring-->  dw[D/dp], accumulated in float32
                     step      no further communication: gradient, weight and update are sharded alike

A parameter that declares a token axis itself (experts) has a complete gradient over that axis, and is only reduced and
sharded over the others.

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

The sharded dim is derived: the first dim of a matrix whose local size dp divides, never the one that layers are stacked
along.  Anything else is Replicated.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from shmap_tp.config.choices import Zero
from shmap_tp.config.schema import MeshConfig
from shmap_tp.parallel.collectives import all_gather, all_gather_invariant, all_reduce, local_shard, reduce_scatter
from shmap_tp.parallel.eight_bit import EightBit
from shmap_tp.parallel.mesh import DP_SLICE, Role, axes_of, axis_sizes, has_rings, token_axes
from shmap_tp.parallel.partitioning import (
    Declaration,
    ParameterKind,
    axes_in,
    declarations,
    partition_specs,
    shard_over,
    sharded_dim,
)
from shmap_tp.parallel.weights import Int8, Ring, RingSide, WeightLayout, is_int8

Weight = Float[Array, "..."] | Int8 | EightBit | Ring
"""What a layer multiplies with.  An array and an `Int8` are stored; a step makes an `EightBit`, `gather` a `Ring`."""


@dataclass(frozen=True)
class Placement:
    """How a parameter is placed over the token axes.  What a placement does not define changes nothing, and
    communicates nothing."""

    axes: tuple[str, ...]
    """dp."""

    def gather_between_slices(self, w: Weight) -> Weight:
        """The weight as stored -> what this device holds during a step, and has the gradient of."""
        return w

    def gather(self, w: Weight, dtype: DTypeLike) -> Weight:
        """What this device holds -> the weight that the layer multiplies with."""
        return w

    def local_shard(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        """The weight as stored -> what this device updates.  Communication: none."""
        return w

    def all_gather_updated(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        """What this device updated -> the weight as stored."""
        return w


@dataclass(frozen=True)
class Replicated(Placement):
    """Every rank of dp stores and updates the whole parameter."""

    def reduce_gradient(self, dw: Float[Array, "..."]) -> Float[Array, "..."]:
        """The gradient {+dp} of all that this device holds -> the gradient of what it updates, summed over dp."""
        return all_reduce(dw, self.axes)


@dataclass(frozen=True)
class Zero1(Placement):
    """Every rank of dp stores the whole parameter, and updates its shard along `dim`."""

    dim: int
    """The sharded dim, counted from the last, so that it is the same for one layer and for a stack of layers."""

    def reduce_gradient(self, dw: Float[Array, "..."]) -> Float[Array, "..."]:
        within = within_slice(self.axes)
        return _reduce_between_slices(reduce_scatter(dw, within, self.dim) if within else dw, self)

    def local_shard(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        return local_shard(w, self.axes, self.dim)

    def all_gather_updated(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        return all_gather_invariant(w, self.axes, self.dim)


@dataclass(frozen=True)
class Fsdp(Placement):
    """Every rank of dp stores and updates its shard along `dim`, and gathers the rest for each use, in the dtype of the
    activations."""

    dim: int
    """The sharded dim, counted from the last."""
    ring: WeightLayout | None
    """None: the gradient is reduced by one reduce-scatter.  Else in a ring (`Ring`), for a weight in this layout."""
    trained: bool = True
    """Whether there is a gradient."""

    def gather_between_slices(self, w: Weight) -> Weight:
        w = w.with_scale_gathered(self.axes, self.dim) if isinstance(w, EightBit) else w
        if DP_SLICE not in self.axes:
            return w
        if isinstance(w, EightBit):
            return w.gathered(DP_SLICE, self.dim)
        return all_gather(w.astype(jnp.float32) if is_int8(w) else w, DP_SLICE, self.dim)

    def gather(self, w: Weight, dtype: DTypeLike) -> Weight:
        """Backward: one reduce-scatter of the gradient, in `dtype`; of a `Ring`, when it is multiplied with."""
        within = within_slice(self.axes)
        if isinstance(w, EightBit):
            shard = None if w.weight is None else w.weight.astype(dtype)
            w = replace(w, weight=shard if self.ring is None else None)
            full = w.gathered(within, self.dim) if within else w
            return full if self.ring is None else Ring(full, shard, self.ring)
        shard = w.astype(dtype)
        has_gradient = self.trained and self.ring is None
        full = shard if has_gradient else lax.stop_gradient(shard)
        full = all_gather(full, within, self.dim) if within else full
        return full if self.ring is None else Ring(full, shard, self.ring)

    def reduce_gradient(self, dw: Float[Array, "..."]) -> Float[Array, "..."]:
        return _reduce_between_slices(dw, self)


def within_slice(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of dp that do not leave a slice."""
    return tuple(axis for axis in axes if axis != DP_SLICE)


def _reduce_between_slices(dw: Float[Array, "..."], placement: Zero1 | Fsdp) -> Float[Array, "..."]:
    return reduce_scatter(dw, DP_SLICE, placement.dim) if DP_SLICE in placement.axes else dw


def gather_between_slices(placements: Any, params: Any) -> Any:
    """All parameters, as this device holds them during a step."""
    return jax.tree.map(lambda placement, w: placement.gather_between_slices(w), placements, params)


def gather(placements: Any, module: Any, dtype: DTypeLike) -> Any:
    """`module`, a part of the model or one layer of a stack, ready to be called: FSDP weights gathered, in `dtype`."""
    return jax.tree.map(lambda placement, w: placement.gather(w, dtype), placements, module)


def has_gathered(placements: Any) -> bool:
    """Whether any weight of this part of the model is gathered for its use."""
    return any(isinstance(placement, Fsdp) for placement in jax.tree.leaves(placements))


def reduces_gradient(placements: Any) -> bool:
    """Whether the gradient of any weight of this part of the model is reduced by the transpose of its gather."""
    return any(isinstance(placement, Fsdp) and placement.trained for placement in jax.tree.leaves(placements))


def is_ring_reduced(placement: Any) -> bool:
    """Whether this is the placement of an FSDP weight whose gradient is reduced in a ring."""
    return isinstance(placement, Fsdp) and placement.ring is not None


class PlacedParameters(NamedTuple):
    """How the parameters of a model are placed on a mesh: trees shaped like the parameters."""

    stored: Any
    """PartitionSpecs of what each device stores."""
    updated: Any
    """PartitionSpecs of what it updates, and so has the reduced gradient of."""
    placements: Any


def place_parameters(config: MeshConfig, model: Any, trained: Any = None) -> PlacedParameters:
    """The placement of every parameter on the mesh of `config`; `model` are the parameters (arrays or shapes), and
    `trained` a tree like them that says which are (None: all)."""
    sizes = axis_sizes(config)
    trained = jax.tree.map(lambda _: True, model) if trained is None else trained
    declared, described = partition_specs(model, sizes), declarations(model)

    def undeclared(spec: P) -> tuple[str, ...]:
        return tuple(axis for axis in token_axes(sizes) if axis not in axes_in(spec))

    def further(leaf: Any, spec: P, about: Declaration) -> P:
        if config.zero == Zero.none or about.kind == ParameterKind.vector:
            return spec
        return shard_over(leaf.shape, spec, undeclared(spec), sizes, first=about.stacked)

    updated = jax.tree.map(further, model, declared, described)

    def place(spec: P, before: P, about: Declaration, is_trained: bool) -> Placement:
        axes = undeclared(before)
        if spec == before:
            return Replicated(axes)
        dim = sharded_dim(spec, axes[0])
        if config.zero == Zero.zero1:
            return Zero1(axes, dim)
        in_ring = about.by_linear and about.stacked and is_trained and has_rings(config)
        in_ring = in_ring and not set(axes_of(Role.features, sizes)).isdisjoint(axes_in(before))
        return Fsdp(axes, dim, _ring_layout(about, spec, dim) if in_ring else None, is_trained)

    placements = jax.tree.map(place, updated, declared, described, trained)
    return PlacedParameters(updated if config.zero == Zero.fsdp else declared, updated, placements)


def _ring_layout(about: Declaration, spec: P, dim: int) -> WeightLayout | None:
    """How a linear layer's weight [L rows columns ...] lies, where its gradient can be reduced in a ring; the columns
    of [rows, heads, head] are the heads."""
    side = {1: RingSide.rows, 2: RingSide.columns}.get(len(spec) + dim)
    return None if side is None else WeightLayout(about.outputs_first, side)
