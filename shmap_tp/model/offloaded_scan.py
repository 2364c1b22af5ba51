"""The way through a stack of blocks of which the host keeps what they are differentiated by, forth and back by hand.

L blocks.  What `remat` names of each is kept, in stacks over the layers, in the host's memory and in the device's.

    forward     x -> block 0 -> ... -> block L - 2, what each keeps written under the next; -> block L - 1
    backward    all has been written; then block L - 1, and the others, what each keeps read under the one before, and
                the weight that it begins with gathered under the one before, too

It is what lax.scan would do, but for what XLA for TPU (libtpu 0.0.42) does not do by itself.  Seconds a step of 16B on
a v5e-256, predicted, of drafts of this module, each with what stands above it; by lax.scan 9.35:

    9.24    XLA takes the first trip out of a loop that writes to the host, and then fills the stacks that stay on the
            device before anything is put into them.  Here they are made with nothing in them.
    9.13    What the last block keeps stays on the device: its backward pass comes at once, and would wait until it has
            been written and read.  Before that comes, all else has been written; left free, XLA writes it too late.
    9.05    A block's first gather in the backward pass has no product before it to flow under.  So what is begun with
            is handed from trip to trip, gathered already (`Closing`).
    9.07    The last block's gradients go home at once, each by a reduce-scatter: it is one block of 32, and need not
            hide them.  Compiled in 142 s instead of 151.

Of today's program 8.47.  It all costs the gradients of all blocks, beside what they are added to: 4 bytes of each
parameter that a device keeps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from shmap_tp.model.remat import Layer
from shmap_tp.parallel.collectives import mark_varying
from shmap_tp.parallel.fsdp import Ahead


@dataclass(frozen=True)
class Closing:
    """The weight of a block that its backward pass begins with."""

    where: Callable[[Any], Any]
    """The block -> this weight."""
    gather: Callable[[Array], Array]
    """What a device keeps of it -> all of it, in the dtype of the products."""

    def of(self, block: Any) -> Array:
        """Wire: one all-gather."""
        return self.gather(self.where(block))

    def distributed_session(self, block: Any, whole: Array) -> Any:
        """The block, which does not gather this weight then."""
        return eqx.tree_at(self.where, block, Ahead(self.where(block), whole))

    def parted(self, gradients: Any) -> Any:
        """The gradients of a block that was joined -> of the block as it is kept."""
        return eqx.tree_at(self.where, gradients, self.where(gradients).part)


@dataclass(frozen=True)
class Layers:
    """One layer, as all the blocks run it, and as the last one does."""

    far: Layer
    """What it keeps is, at least in part, in the host's memory."""
    here: Layer
    """The same, on the device; and its gradients go home at once."""
    closing: Closing


def through(layers: Layers, x: Float[Array, "B T D"], blocks: Any) -> Float[Array, "B T D"]:
    """x, handed from block to block: of at least two, stacked along the first dim of every array.

    Wire    what the blocks say, but that the last one's gradients go home by reduce-scatters, and that the backward
            pass gathers `closing` once more than there are blocks: on its last trip in vain.
    """
    return _through(layers, x, blocks)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _through(layers: Layers, x: Array, blocks: Any) -> Array:
    return lax.scan(layers.far, x, blocks)[0]


def _forward(layers: Layers, x: Array, blocks: Any) -> tuple[Array, tuple]:
    last, closing = _length(blocks) - 1, layers.closing
    types: list[jax.core.ShapedArray] = []

    def look(x: Array, blocks: Any) -> Any:
        block = _at(blocks, 0)
        _, back = _differentiated(layers.far, closing, x, block, closing.of(block))
        types.extend(map(jax.typeof, jax.tree.leaves(back)))
        return back

    form = jax.tree.structure(jax.eval_shape(look, x, blocks))
    on_host = [_on_host(one) for one in types]

    def trip(carry: tuple[Array, list[Array], Int[Array, ""]], _: None) -> tuple[tuple, list[Array]]:
        x, near, i = carry
        block = _at(blocks, i)
        y, back = _differentiated(layers.far, closing, x, block, closing.of(block))
        leaves = jax.tree.leaves(back)
        here = [leaf for leaf, there in zip(leaves, on_host, strict=True) if not there]
        return (y, _put(near, here, i), i + 1), [leaf for leaf, there in zip(leaves, on_host, strict=True) if there]

    room = [_room(one, last) for one, there in zip(types, on_host, strict=True) if not there]
    # x apart from what made it, and the last block at the loop's own counter: then less of what stands beside the loop
    # differs from what is in it, and is compiled for itself (32B over 8 slices in 163 and 168 s, with neither in 186
    # and 194)
    start = lax.optimization_barrier(x), room, jnp.int32(0)
    (x, near, i), far = lax.scan(trip, start, length=last)
    here, away = iter(near), iter(far)
    backs = jax.tree.unflatten(form, [next(away if there else here) for there in on_host])
    y, back = jax.vjp(lambda x, block: layers.here(x, block)[0], x, _at(blocks, i))
    return y, (backs, back, blocks)


def _backward(layers: Layers, kept: tuple, dy: Array) -> tuple[Array, Any]:
    backs, back, blocks = kept
    last, closing = _length(blocks) - 1, layers.closing
    backs, back = _written(backs, back)
    dx, gradients = back(dy)
    room = jax.tree.map(lambda dw: _put(_room(jax.typeof(dw), last + 1), dw, last), gradients)

    def trip(
        carry: tuple[Array, Any, Array], each: tuple[Int[Array, ""], Any]
    ) -> tuple[tuple[Array, Any, Array], None]:
        (dy, stacks, whole), (i, back) = carry, each
        dx, gradients = _pulled(back, closing, _at(blocks, i), whole, dy)
        return (dx, _put(stacks, gradients, i), closing.of(_at(blocks, jnp.maximum(i - 1, 0)))), None

    start = dx, room, closing.of(_at(blocks, last - 1))
    (dx, gradients, _), _ = lax.scan(trip, start, (jnp.arange(last), backs), reverse=True)
    return dx, gradients


_through.defvjp(_forward, _backward)


def _written(backs: Any, back: Any) -> tuple[Any, Any]:
    """Both, there once all that is in the host's memory has been written.  Tied to each other is what varies over the
    same axes, so that its type stays."""
    leaves, form = jax.tree.flatten((backs, back))
    types = [jax.typeof(leaf) for leaf in leaves]
    first_of_back = len(jax.tree.leaves(backs))
    # in one order in every process: all hosts must run one program
    for axes in sorted({one.manual_axis_type.varying for one in types if _on_host(one)}, key=sorted):
        alike = [i for i, one in enumerate(types) if one.manual_axis_type.varying == axes]
        tie_embeddings = [i for i in alike if i >= first_of_back or _on_host(types[i])]
        for i, leaf in zip(tie_embeddings, lax.optimization_barrier([leaves[i] for i in tie_embeddings]), strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(form, leaves)


def _on_host(one: jax.core.ShapedArray) -> bool:
    return "host" in str(one.memory_space).lower()


def _differentiated(layer: Layer, closing: Closing, x: Array, block: Any, whole: Array) -> tuple[Array, Any]:
    """(what the layer makes of x, its backward pass, which is an array for each of what it keeps).  The block, which is
    kept anyway, it goes without until it is `_pulled`."""
    y, back = jax.vjp(lambda x, block: layer(x, block)[0], x, closing.distributed_session(block, whole))
    back.args_res[1] = None
    return y, back


def _pulled(back: Any, closing: Closing, block: Any, whole: Array, dy: Array) -> tuple[Array, Any]:
    """(dx, the gradients of the block)."""
    back = jax.tree.map(lambda leaf: leaf, back)  # of its own: it is changed
    back.args_res[1] = closing.distributed_session(block, whole)
    dx, gradients = back(dy)
    return dx, closing.parted(gradients)


def _length(blocks: Any) -> int:
    return jax.tree.leaves(blocks)[0].shape[0]


def _at(stacks: Any, i: Int[Array, ""] | int) -> Any:
    return jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, i, keepdims=False), stacks)


def _put(stacks: Any, found: Any, i: Int[Array, ""] | int) -> Any:
    return jax.tree.map(lambda stack, x: lax.dynamic_update_index_in_dim(stack, x, i, 0), stacks, found)


def _room(one: jax.core.ShapedArray, length: int) -> Array:
    """A stack for so many of `one`, nothing in it."""
    room = lax.empty((length, *one.shape), one.dtype)
    for axis in sorted(one.manual_axis_type.varying):
        room = mark_varying(room, axis)
    return room
