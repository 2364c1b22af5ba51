"""Who keeps and updates what of a parameter, among the parts of dp that all hold it.

    everyone   keeps the whole optimizer state, and makes the same update       dp: an all-reduce of the gradient
    shares     keeps and updates its own part of it, ZeRO stage 1               dp: a reduce-scatter, an all-gather

Rajbhandari et al. 2020, "ZeRO", section 5.1, https://arxiv.org/abs/1910.02054.  A ring carries as many bytes for the
two halves as for the whole all-reduce; what is saved is memory, 8 / dp bytes a parameter instead of 8, and all but
1 / dp of the update's work.

Which dim is cut is derived: the first whose part on a device dp divides.  A leaf that has none is everyone's.
"""

from typing import Any

import equinox as eqx
import jax

from shmap_tp.collectives import gather_whole, own_part, scatter_sum, sum_over
from shmap_tp.config import Zero
from shmap_tp.mesh import DP
from shmap_tp.sharding import cut_dim, cut_further


class Owners(eqx.Module):
    """The parts of dp that own a parameter, by the dim that they cut it along; None where all own all of it."""

    dims: tuple[int | None, ...]
    """One for each leaf, in the order of the tree."""

    def meet(self, gradients: Any) -> Any:
        """Gradients {+dp} -> what this device updates of them, summed over dp."""
        return self._each(lambda g, dim: scatter_sum(g, DP, dim), lambda g: sum_over(g, DP), gradients)

    def own(self, params: Any) -> Any:
        """Whole parameters -> what this device updates of them.  Nothing travels."""
        return self._each(lambda p, dim: own_part(p, DP, dim), lambda p: p, params)

    def whole(self, params: Any) -> Any:
        """What each device has updated -> the whole parameters."""
        return self._each(lambda p, dim: gather_whole(p, DP, dim), lambda p: p, params)

    def _each(self, shared: Any, everyone: Any, tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        pairs = zip(leaves, self.dims, strict=True)
        return jax.tree.unflatten(structure, [everyone(x) if dim is None else shared(x, dim) for x, dim in pairs])


def owned_specs(zero: Zero, shapes: Any, specs: Any, axis_sizes: dict[str, int]) -> Any:
    """PartitionSpecs of what each device updates: the parameters' own, cut along dp as well where they are shared."""
    return specs if zero == Zero.none else cut_further(shapes, specs, DP, axis_sizes)


def owners(specs: Any) -> Owners:
    """By the specs of what each device updates."""
    return Owners(tuple(cut_dim(spec, DP) for spec in jax.tree.leaves(specs)))
