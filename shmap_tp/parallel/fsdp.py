"""Who keeps, uses and updates what of a parameter, among the parts of dp that could all hold it.

A parameter's owner is a value; `shared_out` makes a tree of them, shaped like the parameters.  D a dim of a matrix that
dp divides.  D/dp: dim D cut along dp.  D/slice: cut along the parts of dp of one slice.  {+dp}: a sum over dp still
owed.

    Everyone       keeps the weight and its optimizer state, and makes the same update
                       step      dw {+dp}   --all-reduce-->  dw
    SharedUpdate   keeps the weight, and updates 1/dp of it: ZeRO stage 1
                       step      dw[D] {+dp}  --reduce-scatter-->  dw[D/dp]  --update-->  w[D/dp]  --all-gather-->  w[D]
    SharedWeight   keeps 1/dp of the weight, too: ZeRO stage 3, fully sharded data parallelism
                       each use  w[D/dp] in the dtype of the products  --all-gather-->  w[D]
                       backward  dw[D] {+dp} in that dtype  --reduce-scatter, or a ring (`shared`)-->  dw[D/dp], added
                                 up in float32
                       step      nothing: gradient and update are where the weight is

Where dp spans slices, gradients of matrices cross the slow network in between once per step, by the smallest shard
there is, and so do shared weights.  (What SharedUpdate has updated is gathered over all of dp at once, and Everyone's
gradients are summed so: what of these crosses, the compiler decides.)

    SharedUpdate       step      the reduce-scatter within each slice, then one between them: dw[D/slice] -> dw[D/dp]
    SharedWeight       step      first w[D/dp]  --all-gather between slices-->  w[D/slice], gathered within the slice
                                 for each use; last dw[D/slice] {+dp}  --reduce-scatter between slices-->  dw[D/dp]

Rajbhandari et al. 2020, "ZeRO", sections 5.1 and 5.3, https://arxiv.org/abs/1910.02054.  A ring carries as many bytes
for a reduce-scatter and an all-gather as for one all-reduce.  Memory of a parameter, in bytes, with AdamW and what
gradients are added up in: 16, 8 + 8 / dp, 16 / dp, and with the last one layer's weight, gathered, while it is used;
over several slices 4 for what a slice holds of it during a step, and 4 for its gradient, by dp / slices.

Which dim is cut is derived: of a matrix the first that dp divides, as it lies on a device, and never the one that
layers are stacked along.  What is no matrix, or has no such dim, is everyone's.
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
from shmap_tp.parallel.collectives import all_gather_invariant, all_reduce, gather, own_part, reduce_scatter
from shmap_tp.parallel.fsdp_overlap import RingWeight, Weight
from shmap_tp.parallel.mesh import DP, MP, DataParallelGroups
from shmap_tp.parallel.partitioning import in_layers, shard_over, sharded_dim


class Ahead(eqx.Module):
    """What a device keeps of a shared weight, and all of it, gathered before its turn (`SharedWeight.whole`)."""

    part: Float[Array, "..."]
    whole: Float[Array, "..."]


@dataclass(frozen=True)
class Replicated:
    """Every part of dp keeps and updates all of it."""

    def hold(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        """The weight as it is kept -> what this device holds of it during a step, and has the gradient of."""
        return w

    def use(self, w: Float[Array, "..."], dtype: DTypeLike) -> Weight:
        """What this device holds -> what the layer computes with.  Nothing travels."""
        return w

    def meet(self, dw: Float[Array, "..."]) -> Float[Array, "..."]:
        """Gradient {+dp} of what this device holds -> of what it updates, summed over dp."""
        return all_reduce(dw, DP)

    def own(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        """The weight as it is kept -> what this device updates of it.  Nothing travels."""
        return w

    def keep(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        """What this device has updated -> the weight as it is kept."""
        return w


@dataclass(frozen=True)
class Zero1:
    """Every part of dp keeps all of it, and updates its own part along `dim`.  The methods are Everyone's."""

    dim: int
    """Counted from the last, so that it is the same of one layer and of a stack."""
    parts: DataParallelGroups

    def hold(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        return w

    def use(self, w: Float[Array, "..."], dtype: DTypeLike) -> Weight:
        return w

    def meet(self, dw: Float[Array, "..."]) -> Float[Array, "..."]:
        within = reduce_scatter(dw, DP, self.dim, self.parts.inside)
        return _met_between(within, self.dim, self.parts)

    def own(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        return own_part(w, DP, self.dim)

    def keep(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        return all_gather_invariant(w, DP, self.dim)


@dataclass(frozen=True)
class Fsdp:
    """Every part of dp keeps and updates its own part along `dim`, and gathers the rest for each use, in the dtype of
    the products."""

    dim: int
    """Counted from the last."""
    parts: DataParallelGroups
    around: str | None
    """Where its gradients go home in a ring: whether the weight is cut along its "rows" or its "columns"."""

    def hold(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        return w if self.parts.slices == 1 else gather(w, DP, self.dim, self.parts.between)

    def use(self, w: Float[Array, "..."] | Ahead, dtype: DTypeLike) -> Weight:
        if self.around is None:
            return gather(w.astype(dtype), DP, self.dim, self.parts.inside)
        part, whole = (w.part, w.whole) if isinstance(w, Ahead) else (w, self.whole(w, dtype))
        return RingWeight(whole, part.astype(dtype), self.around == "rows", self.parts)

    def whole(self, w: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
        """What this device holds of it -> all of it, as a product takes it whose gradient goes home in a ring."""
        return gather(lax.stop_gradient(w.astype(dtype)), DP, self.dim, self.parts.inside)

    def meet(self, dw: Float[Array, "..."]) -> Float[Array, "..."]:
        return _met_between(dw, self.dim, self.parts)

    def own(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        return w

    def keep(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        return w


Placement = Replicated | Zero1 | Fsdp


def _met_between(dw: Float[Array, "..."], dim: int, parts: DataParallelGroups) -> Float[Array, "..."]:
    return dw if parts.slices == 1 else reduce_scatter(dw, DP, dim, parts.between)


def held(placements: Any, params: Any) -> Any:
    """All parameters, as a device holds them during a step."""
    return jax.tree.map(lambda owner, w: owner.hold(w), placements, params)


def use(placements: Any, module: Any, dtype: DTypeLike) -> Any:
    """`module`, a part of the model or one layer of a stack, as its layers compute with it."""
    return jax.tree.map(lambda owner, w: owner.use(w, dtype), placements, module)


def are_gathered(placements: Any) -> bool:
    """Whether anything of this part of the model is gathered for its use."""
    return any(isinstance(owner, Fsdp) for owner in jax.tree.leaves(placements))


def is_ring_reduced(owner: Placement) -> bool:
    """Whether this weight is gathered for its use, and its gradient goes home in a ring."""
    return isinstance(owner, Fsdp) and owner.around is not None


def without_ring(placements: Any) -> Any:
    """The same owners, but that no gradient goes home in a ring: by one reduce-scatter."""
    return jax.tree.map(lambda owner: replace(owner, around=None) if is_ring_reduced(owner) else owner, placements)


def place_parameters(
    zero: Zero, model: Any, specs: Any, axis_sizes: dict[str, int], parts: DataParallelGroups
) -> tuple[Any, Any, Any]:
    """(PartitionSpecs of what a device keeps of each parameter, of what it updates, the owners), from its own specs."""
    if zero == Zero.none:
        return specs, specs, jax.tree.map(lambda _: Replicated(), specs)
    updated = shard_over(model, specs, DP, axis_sizes)

    def owner(spec: P, own: P, in_layer: bool) -> Placement:
        dim = sharded_dim(spec, DP)
        if dim is None:
            return Replicated()
        if zero == Zero.zero1:
            return Zero1(dim, parts)
        of_product = in_layer and sharded_dim(own, MP) is not None
        return Fsdp(dim, parts, _around(spec, dim, parts) if of_product else None)

    placements = jax.tree.map(owner, updated, specs, in_layers(model))
    return updated if zero == Zero.fsdp else specs, updated, placements


def _around(spec: P, dim: int, parts: DataParallelGroups) -> str | None:
    """How `shared` sends the gradient of a product's weight home, which a layer's is if mp cuts it.  The columns of
    [rows, heads, head] are heads."""
    if parts.ring == 1:
        return None
    return {1: "rows", 2: "columns"}.get(len(spec) + dim)
