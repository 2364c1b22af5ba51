"""What a step says on the wire, by the rules in the docstrings: from the configuration, before anything is traced.

Nothing here looks at the program; what was traced and what was compiled are held to this.

A microbatches, B windows of a microbatch on this device, T time, D model width, N key/value heads, K head dim, L
layers.

    embedding        leaves with x[B T D]                                                              A times
    parallel block   goes into its region with h[B T D], and out of it with y[B T D]                   A L times
    sequential       the same, twice; with remat full out of the attention's once more                 A L times
    remat            any but none goes once more into whatever a block goes into                       A L times
    key, value       where mp > N: backward all-reduce of dw[D N K] over mp, float32, each;            A L times
                     in the dtype of the activations where dp shares the weight
    head             enters with h[B T D]                                                              A times
    cross entropy    forward, of each chunk of the B T, an all-gather of [3 chunk] over mp, float32    A chunks times
    step             over dp the count of targets, the loss, and every gradient; over mp the norm      once
    zero: optimizer  a matrix's gradient is reduce-scattered instead, its update all-gathered          once
    zero: parameters a matrix is all-gathered, that of a block in the backward pass again              A times a layer
                     and its gradient reduce-scattered, both in the dtype of the activations           A times a layer
    gradients: ring  of a block's matrix goes around a ring of dp, and is reduce-scattered between     A times a layer
                     the rings
    slices           all of that within a slice; between slices, float32: what `zero` keeps is         once
                     all-gathered, and the gradient of what it updates reduce-scattered

What these are, by wire, is said by `entering` and `leaving`, `into` and `out_of`, and by nothing else.  Where the wire
cuts time the step sums over mp, once, every gradient of what is whole there: norms, learned positions, and key and
value where mp > N, which then are not summed A L times.
"""

import math
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax.typing import DTypeLike

from shmap_tp.config import (
    Block,
    Config,
    MeshConfig,
    Mlp,
    ModelConfig,
    Positions,
    Remat,
    Wire,
    Zero,
    padded_vocabulary,
)
from shmap_tp.mesh import DP, MP, DpParts
from shmap_tp.plan.ledger import Direction, Entry, Operation, among


@dataclass(frozen=True)
class Travels:
    """An array as one device holds it, and how often it travels in a step."""

    values: int
    dtype: str
    count: int

    def over(self, axis: str, what: str, operation: Operation, direction: Direction) -> Entry:
        size = self.values * jnp.dtype(self.dtype).itemsize
        return Entry(what, operation, axis, self.dtype, size, self.count, direction)


# The wires


def entering(mesh: MeshConfig, what: str, x: Travels, *, again: bool = False) -> list[Entry]:
    """`enter` to a whole x, and once more where a recomputation needs it `again`.

    all_reduce   forward nothing; backward one all-reduce of dx over mp
    the others   forward one all-gather over mp of the parts of x; backward one reduce-scatter of dx
    """
    what = f"{what} enter"
    if mesh.wire == Wire.all_reduce:
        return [x.over(MP, what, Operation.all_reduce, Direction.backward)]
    part = replace(x, values=x.values // mesh.mp)
    forward = [part.over(MP, what, Operation.all_gather, direction) for direction in _forward(again)]
    return [*forward, x.over(MP, what, Operation.reduce_scatter, Direction.backward)]


def leaving(mesh: MeshConfig, what: str, x: Travels, *, again: bool = False) -> list[Entry]:
    """`leave` with a whole x {+mp}, and once more where a recomputation needs it `again`.

    all_reduce   forward one all-reduce of x over mp; backward nothing
    the others   forward one reduce-scatter of x over mp; backward one all-gather of the parts of dx
    """
    what = f"{what} leave"
    if mesh.wire == Wire.all_reduce:
        return [x.over(MP, what, Operation.all_reduce, direction) for direction in _forward(again)]
    part = replace(x, values=x.values // mesh.mp)
    forward = [x.over(MP, what, Operation.reduce_scatter, direction) for direction in _forward(again)]
    return [*forward, part.over(MP, what, Operation.all_gather, Direction.backward)]


def into(mesh: MeshConfig, what: str, x: Travels, *, again: bool = False) -> list[Entry]:
    """`into` a region with a whole x, and once more where a recomputation needs it `again`.

    ring         forward mp - 1 ppermutes over mp of a part of x; backward as many of a part of dx
    the others   `entering`
    """
    if mesh.wire != Wire.ring:
        return entering(mesh, what, x, again=again)
    return _around(mesh, f"{what} into", x, [*_forward(again), Direction.backward])


def out_of(mesh: MeshConfig, what: str, x: Travels, *, again: bool = False) -> list[Entry]:
    """`out_of` a region with a whole x {+mp}, and once more where a recomputation needs it `again`.

    ring         forward mp - 1 ppermutes over mp of a part of the sum; backward as many of a part of its gradient
    the others   `leaving`
    """
    if mesh.wire != Wire.ring:
        return leaving(mesh, what, x, again=again)
    return _around(mesh, f"{what} out of", x, [*_forward(again), Direction.backward])


def _around(mesh: MeshConfig, what: str, x: Travels, directions: list[Direction]) -> list[Entry]:
    part = replace(x, values=x.values // mesh.mp, count=x.count * (mesh.mp - 1))
    return [part.over(MP, what, Operation.ppermute, direction) for direction in directions if part.count]


def _forward(again: bool) -> list[Direction]:
    return [Direction.forward, Direction.recompute] if again else [Direction.forward]


def summing(axis: str, what: str, x: Travels) -> list[Entry]:
    """`sum_over(x, axis)`, after the last microbatch: one all-reduce."""
    return [x.over(axis, what, Operation.all_reduce, Direction.once)]


# The parts of a model


def key_value(model: ModelConfig, mesh: MeshConfig, count: int, dtype: DTypeLike = jnp.float32) -> list[Entry]:
    """Of one projection, key or value: where mp > N its weight is whole on every device of mp, and its gradient, in the
    `dtype` that it is used in, summed: here, or where the wire cuts time after the last microbatch."""
    if mesh.mp <= model.kv_heads or mesh.wire != Wire.all_reduce:
        return []
    weight = Travels(model.width * model.kv_heads * model.head_dim, jnp.dtype(dtype).name, count)
    return [weight.over(MP, "key/value weight", Operation.all_reduce, Direction.backward)]


def attention(model: ModelConfig, mesh: MeshConfig, x: Travels) -> list[Entry]:
    """In a region with x."""
    weight = parameters(model, mesh.mp)["key"]
    gathered = mesh.zero == Zero.parameters and weight.is_shared(mesh.dp)
    return 2 * key_value(model, mesh, x.count, x.dtype if gathered else jnp.float32)


def block(model: ModelConfig, mesh: MeshConfig, x: Travels) -> list[Entry]:
    """A block, from x to x.

    What it entered with is never kept where anything is recomputed.  With remat full a sequential block sums the
    attention again, because the norm of the MLP reads it; what a block leaves with at its end is read by nothing in it.
    The other policies keep whatever left.
    """
    within, again = attention(model, mesh, x), model.remat != Remat.none
    if model.block == Block.parallel:
        return [*within, *into(mesh, "block", x, again=again), *out_of(mesh, "block", x)]
    return [
        *within,
        *into(mesh, "attention", x, again=again),
        *out_of(mesh, "attention", x, again=model.remat == Remat.full),
        *into(mesh, "MLP", x, again=again),
        *out_of(mesh, "MLP", x),
    ]


def cross_entropy(positions: Travels, chunk: int) -> list[Entry]:
    """Of each chunk together: the greatest logit, the sum of exponentials and the target's own logit, as each device
    has them of its columns.  As few chunks as it takes, of as even a size as there is."""
    chunks = math.ceil(positions.values / chunk)
    each = replace(positions, values=3 * math.ceil(positions.values / chunks), count=positions.count * chunks)
    return [each.over(MP, "loss", Operation.all_gather, Direction.forward)]


@dataclass(frozen=True)
class Parameter:
    """An array of one layer, as mp leaves it to a device, and of how many layers there is one."""

    shape: tuple[int, ...]
    cut_by_mp: bool
    layers: int = 1

    def is_shared(self, dp: int) -> bool:
        """A matrix, if dp divides one of its dims."""
        return len(self.shape) > 1 and any(size % dp == 0 for size in self.shape)

    def goes_around(self, dp: int) -> bool:
        """Whether its gradient goes home in a ring: that of a product in a block, cut along rows or along columns."""
        first = next(i for i, size in enumerate(self.shape) if size % dp == 0)
        return self.cut_by_mp and first < 2

    def travels(self, dtype: str, *, together: bool) -> Travels:
        """All layers together, once, or one after the other."""
        size = math.prod(self.shape)
        return Travels(size * self.layers, dtype, 1) if together else Travels(size, dtype, self.layers)


def parameters(model: ModelConfig, mp: int) -> dict[str, Parameter]:
    width, layers, heads_are_cut = model.width, model.layers, mp <= model.kv_heads
    table = Parameter((padded_vocabulary(model) // mp, width), cut_by_mp=True)
    query, ffn = model.heads * model.head_dim // mp, model.ffn // mp
    key_or_value = width, model.kv_heads // (mp if heads_are_cut else 1), model.head_dim
    found = {"embedding": table, "query": Parameter((width, query), cut_by_mp=True, layers=layers)}
    found |= dict.fromkeys(("key", "value"), Parameter(key_or_value, heads_are_cut, layers))
    found |= {"out": Parameter((query, width), cut_by_mp=True, layers=layers)}
    ups = ("up", "gate") if model.mlp == Mlp.swiglu else ("up",)
    found |= dict.fromkeys(ups, Parameter((width, ffn), cut_by_mp=True, layers=layers))
    found |= {"down": Parameter((ffn, width), cut_by_mp=True, layers=layers)}
    norms = ["norm"] if model.block == Block.parallel else ["attention norm", "MLP norm"]
    found |= dict.fromkeys(norms, Parameter((width,), cut_by_mp=False, layers=layers))
    found |= {"final norm": Parameter((width,), cut_by_mp=False)}
    if model.positions == Positions.learned:
        found |= {"positions": Parameter((model.context, width), cut_by_mp=False)}
    return found if model.tied else found | {"head": table}


def using(config: Config, dtype: str) -> list[Entry]:
    """What dp keeps in parts, gathered within a slice for each use: of a block in the backward pass once more, of a
    tied embedding as the head, too; and its gradient on the way home."""
    if config.mesh.zero != Zero.parameters:
        return []
    entries, parts = [], DpParts.of(config.mesh)
    dp, inside = config.mesh.dp, among(DP, parts.inside)
    uses = list(parameters(config.model, config.mesh.mp).items())
    uses += [(name, table) for name, table in uses if name == "embedding" and config.model.tied]
    for name, parameter in uses:
        if parameter.is_shared(dp):
            whole = parameter.travels(dtype, together=False)
            whole = replace(whole, count=whole.count * config.train.microbatches)
            again = name not in ("embedding", "positions", "head")
            part = replace(whole, values=whole.values // dp * parts.slices)
            entries += [part.over(inside, name, Operation.all_gather, direction) for direction in _forward(again)]
            around = again and parts.ring > 1 and parameter.goes_around(dp)
            entries += _home(whole, f"gradient of {name}", parts, around=around)
    return entries


def _home(whole: Travels, what: str, parts: DpParts, *, around: bool) -> list[Entry]:
    """One reduce-scatter within the slice, or ring - 1 ppermutes of a part, and one between the rings of that."""
    if not around:
        return [whole.over(among(DP, parts.inside), what, Operation.reduce_scatter, Direction.backward)]
    part = replace(whole, values=whole.values // parts.ring)
    steps = replace(part, count=part.count * (parts.ring - 1))
    entries = [steps.over(DP, what, Operation.ppermute, Direction.backward)]
    if parts.beside is not None:
        entries.append(part.over(among(DP, parts.beside), what, Operation.reduce_scatter, Direction.backward))
    return entries


def holding(config: Config) -> list[Entry]:
    """What dp keeps in parts, gathered between slices once."""
    parts, entries = DpParts.of(config.mesh), []
    if config.mesh.zero != Zero.parameters or parts.slices == 1:
        return []
    for name, parameter in parameters(config.model, config.mesh.mp).items():
        if parameter.is_shared(parts.count):
            whole = parameter.travels("float32", together=True)
            part = replace(whole, values=whole.values // parts.count)
            entries.append(part.over(among(DP, parts.between), name, Operation.all_gather, Direction.once))
    return entries


def update(config: Config) -> list[Entry]:
    """The gradients over dp, the norm, and where dp shares the update, what has been updated; gradients of shared
    weights have met.

    Where the wire cuts time, over mp after that, the gradients of what mp does not cut: of what is shared, the parts.
    The squares of the norm are summed over just the axes that cut a gradient: one all-reduce for each such set of axes.
    """
    entries, axes, dp, parts = [], set(), config.mesh.dp, DpParts.of(config.mesh)
    for name, parameter in parameters(config.model, config.mesh.mp).items():
        is_shared = config.mesh.zero != Zero.none and parameter.is_shared(dp)
        axes.add((DP,) * is_shared + (MP,) * parameter.cut_by_mp)
        whole = parameter.travels("float32", together=True)
        own = replace(whole, values=whole.values // dp) if is_shared else whole
        if is_shared and parts.slices > 1:
            held = replace(whole, values=whole.values // dp * parts.slices)
            between = among(DP, parts.between)
            entries.append(held.over(between, f"gradient of {name}", Operation.reduce_scatter, Direction.once))
        if is_shared and config.mesh.zero == Zero.optimizer:
            inside = among(DP, parts.inside)
            entries.append(whole.over(inside, f"gradient of {name}", Operation.reduce_scatter, Direction.once))
            entries.append(own.over(DP, f"update of {name}", Operation.all_gather, Direction.once))
        if not is_shared:
            entries += summing(DP, f"gradient of {name}", whole)
        if config.mesh.wire != Wire.all_reduce and not parameter.cut_by_mp:
            entries += summing(MP, f"gradient of {name}", own)
    norms = [summing(" ".join(each), "norm of gradients", Travels(1, "float32", 1)) for each in sorted(axes) if each]
    return entries + [entry for norm in norms for entry in norm]


# The programs


def _forward_and_backward(config: Config, dtype: DTypeLike) -> list[Entry]:
    """All that travels for the sake of the microbatches, in a step."""
    model, mesh, times = config.model, config.mesh, config.train.microbatches
    positions = config.train.batch // (times * mesh.dp) * model.context
    x = Travels(positions * model.width, jnp.dtype(dtype).name, times)
    wide = jnp.promote_types(dtype, jnp.float32).name
    return [
        *using(config, x.dtype),
        *leaving(mesh, "embedding", x),
        *block(model, mesh, replace(x, count=times * model.layers)),
        *entering(mesh, "head", x),
        *cross_entropy(Travels(positions, wide, times), config.train.loss_chunk),
    ]


def _counts() -> list[Entry]:
    targets, loss = Travels(1, "int32", 1), Travels(1, "float32", 1)
    return [*summing(DP, "count of targets", targets), *summing(DP, "loss", loss)]


def theory(config: Config, dtype: DTypeLike) -> list[Entry]:
    """All that one optimizer step of `config` says on the wire, computing in `dtype`, by the rules above.

    A mesh axis of one device is there too, since it stands in the program: see `ledger.travelling`.
    """
    return [*holding(config), *_forward_and_backward(config, dtype), *_counts(), *update(config)]


def theory_of_evaluation(config: Config, dtype: DTypeLike) -> list[Entry]:
    """The same of one evaluation of as many tokens: the forward half of it."""
    forward = [entry for entry in _forward_and_backward(config, dtype) if entry.direction == Direction.forward]
    return [*holding(config), *forward, *_counts()]
