"""A stack of square matmuls with FSDP weights, gathered layer by layer in four ways.

B rows over all devices, D width, L layers, n devices on one mesh axis.

    x[B/n D]   w_i[D/n D]  --all-gather-->  w_i[D D]   x @ w_i -> x[B/n D]      L times
    backward   dx = dy @ w_i^T, the weight gathered again;  dw_i = x^T @ dy {+n}  --reduce-scatter-->  dw_i[D/n D]

    naive   gathers layer i, then multiplies by it
    ahead   gathers layer i + 1 during the matmul of layer i; backward, layer i - 1 during the two matmuls of layer i
    ring    as ahead, and in the backward pass the reduce-scatter is a ring of ppermutes that overlaps the matmul whose
            result it reduces; layers alternate the direction of the ring, so that two rings do not share links
    jit     shardings of x, w_i and the result only; the compiler inserts the collectives

Communication per layer: naive, ahead and ring gather D^2 forward, and backward gather D^2 (ahead and ring: except the
last layer, which is kept from the forward pass) and reduce-scatter D^2.

Every layer has its own array of weights, sharded over rows: the shards are contiguous, so that a gather needs no
transposition, and no layer has to be sliced out of a stack.
"""

from collections.abc import Callable
from functools import partial
from itertools import cycle

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shmap_tp.hardware.torus import Torus
from shmap_tp.parallel.mesh import DP

ROWS = PartitionSpec(DP, None)
"""Sharding of activations, weights and gradients."""

Layers = tuple[Array, ...]
Program = Callable[[Array, Layers], Array]


def gather(w: Array) -> Array:
    """w[D/n D] -> w[D D]: one all-gather.  Backward: one reduce-scatter."""
    return lax.all_gather(w, DP, axis=0, tiled=True)


def naive(x: Array, weights: Layers) -> Array:
    """Gather a layer, then multiply by it.  The backward pass gathers again: no full weight is saved."""
    for w in weights:
        x = jax.checkpoint(lambda x, w: x @ gather(w))(x, w)
    return x


def scattered_matmul(x: Array, dy: Array) -> Array:
    """x^T @ dy {+n}, then one reduce-scatter over rows."""
    return lax.psum_scatter(x.T @ dy, DP, scatter_dimension=0, tiled=True)


def ring_matmul(x: Array, dy: Array, *, direction: int) -> Array:
    """The same with a ring reduce-scatter: n - 1 ppermutes of one shard, up the ring (direction 1) or down (-1).

    The partial sum for each device passes through all others, and each adds its own term, which it computes while the
    partial sum is received.
    """
    n, rank, rows = lax.axis_size(DP), lax.axis_index(DP), x.shape[1] // lax.axis_size(DP)
    ring = [(i, (i + direction) % n) for i in range(n)]
    partial_sum = None
    for step in range(1, n + 1):
        target = (rank - direction * step) % n
        term = lax.dynamic_slice_in_dim(x, target * rows, rows, axis=1).T @ dy
        partial_sum = term if partial_sum is None else lax.ppermute(partial_sum, DP, ring) + term
    return partial_sum


def prefetched(*weight_gradients: Callable[[Array, Array], Array]) -> Program:
    """Both passes by hand, with the gather of the next layer issued before the matmuls of the current one.

    The last layer's gathered weight is saved for the backward pass.  Layers use the `weight_gradients` in turn.
    """

    def forward(x: Array, weights: Layers) -> tuple[Array, tuple]:
        inputs, prefetch = [], gather(weights[0])
        for following in (*weights[1:], None):
            inputs.append(x)
            w, prefetch = prefetch, None if following is None else gather(following)
            x = x @ w
        return x, (inputs, weights[:-1], w)

    def backward(residuals: tuple, dy: Array) -> tuple[Array, Layers]:
        inputs, weights, prefetch = residuals
        gradients, functions = [], cycle(weight_gradients)
        for x, following in zip(reversed(inputs), (*reversed(weights), None), strict=True):
            # without the barrier XLA saves the weights gathered in the forward pass
            x, dy, following = lax.optimization_barrier((x, dy, following))
            w, prefetch = prefetch, None if following is None else gather(following)
            gradients.append(next(functions)(x, dy))
            dy = dy @ w.T
        return dy, tuple(reversed(gradients))

    program = jax.custom_vjp(lambda x, weights: forward(x, weights)[0])
    program.defvjp(forward, backward)
    return program


def without_communication(x: Array, weights: Layers) -> Array:
    for w in weights:
        x = x @ w
    return x


def with_backward(program: Program) -> Callable[[Array, Layers], tuple[Array, Layers]]:
    """(dx, dw) of |y|^2 / 2, whose dy is y."""

    def passes(x: Array, weights: Layers) -> tuple[Array, Layers]:
        y, transpose = jax.vjp(program, x, weights)
        return transpose(y)

    return passes


EXPLICIT = {
    "naive": naive,
    "ahead": prefetched(scattered_matmul),
    "ring": prefetched(partial(ring_matmul, direction=1), partial(ring_matmul, direction=-1)),
}
PROGRAMS = [*EXPLICIT, "jit"]


def build(name: str, mesh: Mesh, layers: int, backward: bool) -> jax.stages.Wrapped:
    """The program `name`, jitted, as a function of (x, weights): forward, or forward and backward."""
    program = EXPLICIT.get(name, without_communication)
    function = with_backward(program) if backward else program
    in_specs = (ROWS, (ROWS,) * layers)
    out_specs = in_specs if backward else ROWS
    if name == "jit":
        shardings = [jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs) for specs in (in_specs, out_specs)]
        return jax.jit(function, in_shardings=shardings[0], out_shardings=shardings[1])
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def ring_mesh(devices: list[jax.Device]) -> Mesh:
    """A mesh of one axis, along a ring of the torus if there is one."""
    return Mesh(np.array(ring_order(devices), object), (DP,), axis_types=(AxisType.Auto,))


def ring_order(devices: list[jax.Device]) -> list[jax.Device]:
    """The devices in the order of a ring of their torus (`Torus.ring_order`); as they are if they are on none."""
    torus = Torus.of(devices)
    if torus is None:
        return devices
    (row,) = torus.arrange(torus.sides, len(devices))
    return [row[i] for i in torus.ring_order(torus.sides)]
