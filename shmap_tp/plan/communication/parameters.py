"""What a step says for the sake of its weights: gathered for use, their gradients met, what was updated handed out.

The rules are those of `theory`, which puts them beside what the activations say; the owners are those of `zero`.
"""

import math
from dataclasses import dataclass, replace

from shmap_tp.config.schema import (
    Block,
    Config,
    Mlp,
    ModelConfig,
    Positions,
    TensorParallelMode,
    Zero,
    padded_vocabulary,
)
from shmap_tp.parallel.mesh import DP, MP, DataParallelGroups
from shmap_tp.plan.communication.ledger import ArrayTraffic, Direction, Entry, Operation, group_name


def passes(again: bool) -> list[Direction]:
    """Of what the forward pass says, and the backward pass once more where it needs it `again`."""
    return [Direction.forward, Direction.recompute] if again else [Direction.forward]


def summing(axis: str, what: str, x: ArrayTraffic) -> list[Entry]:
    """`sum_over(x, axis)`, after the last microbatch: one all-reduce."""
    return [x.over(axis, what, Operation.all_reduce, Direction.once)]


@dataclass(frozen=True)
class Parameter:
    """An array of one layer, as mp leaves it to a device, and of how many layers there is one."""

    shape: tuple[int, ...]
    cut_by_mp: bool
    layers: int = 1

    def is_shared(self, dp: int) -> bool:
        """A matrix, if dp divides one of its dims."""
        return len(self.shape) > 1 and any(size % dp == 0 for size in self.shape)

    def is_ring_reduced(self, dp: int) -> bool:
        """Whether its gradient goes home in a ring: that of a product in a block, cut along rows or along columns."""
        first = next(i for i, size in enumerate(self.shape) if size % dp == 0)
        return self.cut_by_mp and first < 2

    def travels(self, dtype: str, *, together: bool) -> ArrayTraffic:
        """All layers together, once, or one after the other."""
        size = math.prod(self.shape)
        return ArrayTraffic(size * self.layers, dtype, 1) if together else ArrayTraffic(size, dtype, self.layers)


def parameters(model: ModelConfig, mp: int) -> dict[str, Parameter]:
    width, layers, heads_are_cut = model.width, model.layers, mp <= model.kv_heads
    table = Parameter((padded_vocabulary(model) // mp, width), cut_by_mp=True)
    query, ffn = model.heads * model.head_dim // mp, model.ffn // mp
    key_or_value = width, model.kv_heads // (mp if heads_are_cut else 1), model.head_dim
    found = {"embedding": table, "query": Parameter((query, width), cut_by_mp=True, layers=layers)}
    found |= dict.fromkeys(("key", "value"), Parameter(key_or_value, heads_are_cut, layers))
    found |= {"out": Parameter((query, width), cut_by_mp=True, layers=layers)}
    ups = ("up", "gate") if model.mlp == Mlp.swiglu else ("up",)
    found |= dict.fromkeys((*ups, "down"), Parameter((ffn, width), cut_by_mp=True, layers=layers))
    norms = ["norm"] if model.block == Block.parallel else ["attention norm", "MLP norm"]
    found |= dict.fromkeys(norms, Parameter((width,), cut_by_mp=False, layers=layers))
    found |= {"final norm": Parameter((width,), cut_by_mp=False)}
    if model.positions == Positions.learned:
        found |= {"positions": Parameter((model.context, width), cut_by_mp=False)}
    return found if model.tie_embeddings else found | {"head": table}


def using(config: Config, dtype: str) -> list[Entry]:
    """What dp keeps in parts, gathered within a slice for each use: of a block in the backward pass once more, of a
    tied embedding as the head, too; and its gradient on the way home."""
    if config.mesh.zero != Zero.fsdp:
        return []
    entries, parts = [], DataParallelGroups.of(config.mesh)
    dp, inside = config.mesh.dp, group_name(DP, parts.inside)
    uses = list(parameters(config.model, config.mesh.mp).items())
    uses += [(name, table) for name, table in uses if name == "embedding" and config.model.tie_embeddings]
    through = _goes_through(config, parts)
    for name, parameter in uses:
        if not parameter.is_shared(dp):
            continue
        of_block = name not in ("embedding", "positions", "head")
        around = of_block and parts.ring > 1 and parameter.is_ring_reduced(dp)
        pieces = [(parameter.layers, around)]
        if around and through:
            pieces = [(parameter.layers - 1, True), (1, False)]
        for layers, ring in pieces:
            whole = parameter.travels(dtype, together=False)
            whole = replace(whole, count=layers * config.train.microbatches)
            part = replace(whole, values=whole.values // dp * parts.slices)
            if through and ring and name == "down":  # one before the way back, one on each trip, the last in vain
                ahead = replace(part, count=parameter.layers * config.train.microbatches)
                entries.append(part.over(inside, name, Operation.all_gather, Direction.forward))
                entries.append(ahead.over(inside, name, Operation.all_gather, Direction.backward))
            else:
                entries += [part.over(inside, name, Operation.all_gather, again) for again in passes(of_block)]
            entries += _home(whole, f"gradient of {name}", parts, around=ring)
    return entries


def _goes_through(config: Config, parts: DataParallelGroups) -> bool:
    """Whether the layers are gone through by `through`: the last one as if no gradient went in a ring."""
    down = parameters(config.model, config.mesh.mp)["down"]
    rings = parts.ring > 1 and down.is_shared(config.mesh.dp) and down.is_ring_reduced(config.mesh.dp)
    return bool(config.model.offload) and rings and config.model.layers > 1


def _home(whole: ArrayTraffic, what: str, parts: DataParallelGroups, *, around: bool) -> list[Entry]:
    """One reduce-scatter within the slice, or ring - 1 ppermutes of a part, and one between the rings of that."""
    if not around:
        return [whole.over(group_name(DP, parts.inside), what, Operation.reduce_scatter, Direction.backward)]
    part = replace(whole, values=whole.values // parts.ring)
    steps = replace(part, count=part.count * (parts.ring - 1))
    entries = [steps.over(DP, what, Operation.ppermute, Direction.backward)]
    if parts.beside is not None:
        entries.append(part.over(group_name(DP, parts.beside), what, Operation.reduce_scatter, Direction.backward))
    return entries


def holding(config: Config) -> list[Entry]:
    """What dp keeps in parts, gathered between slices once."""
    parts, entries = DataParallelGroups.of(config.mesh), []
    if config.mesh.zero != Zero.fsdp or parts.slices == 1:
        return []
    for name, parameter in parameters(config.model, config.mesh.mp).items():
        if parameter.is_shared(parts.count):
            whole = parameter.travels("float32", together=True)
            part = replace(whole, values=whole.values // parts.count)
            entries.append(part.over(group_name(DP, parts.between), name, Operation.all_gather, Direction.once))
    return entries


def update(config: Config) -> list[Entry]:
    """The gradients over dp, the norm, and where dp shares the update, what has been updated; gradients of shared
    weights have met.

    Where the wire cuts time, over mp after that, the gradients of what mp does not cut: of what is shared, the parts.
    The squares of the norm are summed over just the axes that cut a gradient: one all-reduce for each such set of axes.
    """
    entries, axes, dp, parts = [], set(), config.mesh.dp, DataParallelGroups.of(config.mesh)
    for name, parameter in parameters(config.model, config.mesh.mp).items():
        is_shared = config.mesh.zero != Zero.none and parameter.is_shared(dp)
        axes.add((DP,) * is_shared + (MP,) * parameter.cut_by_mp)
        whole = parameter.travels("float32", together=True)
        own = replace(whole, values=whole.values // dp) if is_shared else whole
        if is_shared and parts.slices > 1:
            held = replace(whole, values=whole.values // dp * parts.slices)
            between = group_name(DP, parts.between)
            entries.append(held.over(between, f"gradient of {name}", Operation.reduce_scatter, Direction.once))
        if is_shared and config.mesh.zero == Zero.zero1:
            inside = group_name(DP, parts.inside)
            entries.append(whole.over(inside, f"gradient of {name}", Operation.reduce_scatter, Direction.once))
            entries.append(own.over(DP, f"update of {name}", Operation.all_gather, Direction.once))
        if not is_shared:
            entries += summing(DP, f"gradient of {name}", whole)
        if config.mesh.tensor_parallel != TensorParallelMode.all_reduce and not parameter.cut_by_mp:
            entries += summing(MP, f"gradient of {name}", own)
    norms = [
        summing(" ".join(each), "norm of gradients", ArrayTraffic(1, "float32", 1)) for each in sorted(axes) if each
    ]
    return entries + [entry for norm in norms for entry in norm]
