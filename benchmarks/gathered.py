"""A stack of square products whose weights are cut over all devices and gathered layer by layer, in four ways.

B rows on all devices together, D width, L layers, n devices on one mesh axis.

    x[B/n D]   w_i[D/n D]  --all-gather-->  w_i[D D]   x @ w_i -> x[B/n D]      L times
    backward   dx = dy @ w_i^T, the weight gathered again;  dw_i = x^T @ dy {+n}  --reduce-scatter-->  dw_i[D/n D]

    naive   gathers layer i, then multiplies by it
    ahead   gathers layer i + 1 while it multiplies by layer i; backward, layer i - 1 during layer i's two products
    ring    the same, and backward the reduce-scatter is a ring of ppermutes under the product that it sums, every other
            layer's the other way round, so that two of them never wait for each other's links
    jit     x, w_i and the result say how they lie, nothing else; the compiler chooses what travels

Wire, each layer: naive, ahead and ring gather D^2 forward, and backward gather D^2 (ahead and ring: not the last layer,
still whole from the forward pass) and reduce-scatter D^2.

Every layer has its own array of weights, cut along the rows: parts of rows lie one after the other in the whole, so a
gather needs no transposition, and nothing has to be sliced out of a stack (a pass over all
of it: 1.4 ms, predicted for a v4-8).
"""

from collections.abc import Callable
from functools import partial
from itertools import cycle

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shmap_tp.parallel.mesh import DP

ROWS = PartitionSpec(DP, None)
"""How activations, weights and their gradients are cut."""

Layers = tuple[Array, ...]
Program = Callable[[Array, Layers], Array]


def gather(w: Array) -> Array:
    """w[D/n D] -> w[D D]: one all-gather.  Backward: one reduce-scatter."""
    return lax.all_gather(w, DP, axis=0, tiled=True)


def naive(x: Array, weights: Layers) -> Array:
    """A layer is gathered, then multiplied by.  Backward gathers again: no whole weight is kept."""
    for w in weights:
        x = jax.checkpoint(lambda x, w: x @ gather(w))(x, w)
    return x


def scattered_product(x: Array, dy: Array) -> Array:
    """x^T @ dy {+n}, of which each device keeps its rows: one reduce-scatter after the product."""
    return lax.psum_scatter(x.T @ dy, DP, scatter_dimension=0, tiled=True)


def ring_product(x: Array, dy: Array, *, way: int) -> Array:
    """The same by n - 1 ppermutes of a part each, up the ring or (way -1) down: the sum for a device passes by all
    others on its way there, and each adds its own product, which it computes while the sum comes in."""
    n, me, part = lax.axis_size(DP), lax.axis_index(DP), x.shape[1] // lax.axis_size(DP)
    around = [(i, (i + way) % n) for i in range(n)]
    owed = None
    for step in range(1, n + 1):
        owner = (me - way * step) % n
        product = lax.dynamic_slice_in_dim(x, owner * part, part, axis=1).T @ dy
        owed = product if owed is None else lax.ppermute(owed, DP, around) + product
    return owed


def one_ahead(*weight_gradients: Callable[[Array, Array], Array]) -> Program:
    """Both passes by hand: the next layer's gather is asked for before the products of this one.  The last layer's
    weight stays whole from the one pass to the other.  Layers take the `weight_gradients` in turn."""

    def forward(x: Array, weights: Layers) -> tuple[Array, tuple]:
        inputs, coming = [], gather(weights[0])
        for following in (*weights[1:], None):
            inputs.append(x)
            whole, coming = coming, None if following is None else gather(following)
            x = x @ whole
        return x, (inputs, weights[:-1], whole)

    def backward(kept: tuple, dy: Array) -> tuple[Array, Layers]:
        inputs, weights, coming = kept
        gradients, turns = [], cycle(weight_gradients)
        for x, following in zip(reversed(inputs), (*reversed(weights), None), strict=True):
            x, dy, following = lax.optimization_barrier(
                (x, dy, following)
            )  # else XLA keeps what the forward pass gathered
            whole, coming = coming, None if following is None else gather(following)
            gradients.append(next(turns)(x, dy))
            dy = dy @ whole.T
        return dy, tuple(reversed(gradients))

    program = jax.custom_vjp(lambda x, weights: forward(x, weights)[0])
    program.defvjp(forward, backward)
    return program


def plain(x: Array, weights: Layers) -> Array:
    for w in weights:
        x = x @ w
    return x


def both_passes(program: Program) -> Callable[[Array, Layers], tuple[Array, Layers]]:
    """(dx, dw) of |y|^2 / 2, whose dy is y."""

    def passes(x: Array, weights: Layers) -> tuple[Array, Layers]:
        y, transpose = jax.vjp(program, x, weights)
        return transpose(y)

    return passes


BY_HAND = {
    "naive": naive,
    "ahead": one_ahead(scattered_product),
    "ring": one_ahead(partial(ring_product, way=1), partial(ring_product, way=-1)),
}
PROGRAMS = [*BY_HAND, "jit"]


def build(name: str, mesh: Mesh, layers: int, backward: bool) -> jax.stages.Wrapped:
    """The program called `name`, jitted, of (x, weights): forward, or forward and backward."""
    program = BY_HAND.get(name, plain)
    function = both_passes(program) if backward else program
    into = (ROWS, (ROWS,) * layers)
    out = into if backward else ROWS
    if name == "jit":
        shardings = [jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs) for specs in (into, out)]
        return jax.jit(function, in_shardings=shardings[0], out_shardings=shardings[1])
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=into, out_specs=out))


def ring_mesh(devices: list[jax.Device]) -> Mesh:
    """One axis, round the torus where there is one."""
    return Mesh(np.array(ring_order(devices), object), (DP,), axis_types=(AxisType.Auto,))


def ring_order(devices: list[jax.Device]) -> list[jax.Device]:
    """TPUs so that each is one link from the next and the last from the first, on any slice with an even side but x:
    out through all chips with x > 0, to and fro along x, and back through those with x = 0.  Others as they come."""
    if not hasattr(devices[0], "coords"):
        return devices
    height = max(device.coords[1] for device in devices) + 1

    def place(device: jax.Device) -> tuple[int, ...]:
        x, y, z = device.coords
        row = z * height + (height - 1 - y if z % 2 else y)
        out = (0, row, -x if row % 2 else x)
        return (*(out if x else (1, -row, 0)), device.core_on_chip)

    return sorted(devices, key=place)
