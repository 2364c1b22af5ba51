"""Who keeps, uses and updates what of a parameter, among the parts of dp that could all hold it.

A parameter's owner is a value; `shared_out` makes a tree of them, shaped like the parameters.  D a dim of a matrix that
dp divides.  D/dp: dim D cut along dp.  {+dp}: a sum over dp still owed.

    Everyone       keeps the weight and its optimizer state, and makes the same update
                       step      dw {+dp}   --all-reduce-->  dw
    SharedUpdate   keeps the weight, and updates 1/dp of it: ZeRO stage 1
                       step      dw[D] {+dp}  --reduce-scatter-->  dw[D/dp]  --update-->  w[D/dp]  --all-gather-->  w[D]
    SharedWeight   keeps 1/dp of the weight, too: ZeRO stage 3, fully sharded data parallelism
                       each use  w[D/dp] in the dtype of the products  --all-gather-->  w[D]
                       backward  dw[D] {+dp} in that dtype  --reduce-scatter-->  dw[D/dp], added up in float32
                       step      nothing: gradient and update are where the weight is

Rajbhandari et al. 2020, "ZeRO", sections 5.1 and 5.3, https://arxiv.org/abs/1910.02054.  A ring carries as many bytes
for a reduce-scatter and an all-gather as for one all-reduce.  Memory of a parameter, in bytes, with AdamW and what
gradients are added up in: 16, 8 + 8 / dp, 16 / dp, and with the last one layer's weight, gathered, while it is used.

Which dim is cut is derived: of a matrix the first that dp divides, as it lies on a device, and never the one that
layers are stacked along.  What is no matrix, or has no such dim, is everyone's.
"""

from dataclasses import dataclass
from typing import Any

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from shmap_tp.collectives import gather, gather_whole, own_part, scatter_sum, sum_over
from shmap_tp.config import Zero
from shmap_tp.mesh import DP
from shmap_tp.sharding import cut_dim, cut_further


@dataclass(frozen=True)
class Everyone:
    """Every part of dp keeps and updates all of it."""

    def use(self, w: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
        """What the layer computes with.  Nothing travels."""
        return w

    def meet(self, dw: Float[Array, "..."]) -> Float[Array, "..."]:
        """Gradient {+dp} -> what this device updates of it, summed over dp."""
        return sum_over(dw, DP)

    def own(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        """The weight as it is kept -> what this device updates of it.  Nothing travels."""
        return w

    def keep(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        """What this device has updated -> the weight as it is kept."""
        return w


@dataclass(frozen=True)
class SharedUpdate:
    """Every part of dp keeps all of it, and updates its own part along `dim`.  The methods are Everyone's."""

    dim: int
    """Counted from the last, so that it is the same of one layer and of a stack."""

    def use(self, w: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
        return w

    def meet(self, dw: Float[Array, "..."]) -> Float[Array, "..."]:
        return scatter_sum(dw, DP, self.dim)

    def own(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        return own_part(w, DP, self.dim)

    def keep(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        return gather_whole(w, DP, self.dim)


@dataclass(frozen=True)
class SharedWeight:
    """Every part of dp keeps and updates its own part along `dim`, and gathers the rest for each use, in `dtype`."""

    dim: int
    """Counted from the last."""

    def use(self, w: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
        return gather(w.astype(dtype), DP, self.dim)

    def meet(self, dw: Float[Array, "..."]) -> Float[Array, "..."]:
        return dw

    def own(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        return w

    def keep(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        return w


AnyOwner = Everyone | SharedUpdate | SharedWeight


def use(owners: Any, module: Any, dtype: DTypeLike) -> Any:
    """`module`, a part of the model or one layer of a stack, as its layers compute with it."""
    return jax.tree.map(lambda owner, w: owner.use(w, dtype), owners, module)


def are_gathered(owners: Any) -> bool:
    """Whether anything of this part of the model is gathered for its use."""
    return any(isinstance(owner, SharedWeight) for owner in jax.tree.leaves(owners))


def shared_out(zero: Zero, model: Any, specs: Any, axis_sizes: dict[str, int]) -> tuple[Any, Any, Any]:
    """(PartitionSpecs of what a device keeps of each parameter, of what it updates, the owners), from its own specs."""
    if zero == Zero.none:
        return specs, specs, jax.tree.map(lambda _: Everyone(), specs)
    updated = cut_further(model, specs, DP, axis_sizes)
    kept, shared = (updated, SharedWeight) if zero == Zero.parameters else (specs, SharedUpdate)
    dims = jax.tree.map(lambda spec: Everyone() if (dim := cut_dim(spec, DP)) is None else shared(dim), updated)
    return kept, updated, dims
