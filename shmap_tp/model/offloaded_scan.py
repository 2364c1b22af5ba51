"""A hand-written scan over layers whose saved activations are offloaded to host memory, forward and backward.

L blocks.  What the rematerialisation policy saves of each is stacked over layers, in host memory and on the device.

    forward     x -> block 0 -> ... -> block L - 2, the saved activations of each written during the next -> block L - 1
    backward    wait until everything is written; block L - 1; then the others, the activations of each read during the
                one before it, and the weight that its backward pass reads first prefetched during the one before it

The plain version is `lax.scan(layer, x, blocks)`, which the model uses without offload or without gradient rings.  This
one works around four properties of XLA for TPU (docs/performance-notes.md): it peels the first iteration of a loop that
writes to the host, and then initialises the stacks that stay on the device; the activations of the last block would be
written and read back at once; a block's first all-gather in the backward pass has no matmul before it to overlap; and
reducing the last block's gradients in rings compiles longer for nothing.  It holds the gradients of all blocks beside
the accumulators that they are added to: 4 bytes per parameter stored on the device.
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
from shmap_tp.parallel.fsdp import PrefetchedWeight


@dataclass(frozen=True)
class PrefetchSpec:
    """The FSDP weight of a block that its backward pass reads first, gathered one iteration ahead."""

    where: Callable[[Any], Any]
    """The block -> this weight."""
    gather: Callable[[Array], Array]
    """This device's shard of it -> the full weight, in the dtype of the activations."""

    def gather_from(self, block: Any) -> Array:
        """Communication: one all-gather."""
        return self.gather(self.where(block))

    def with_prefetched(self, block: Any, full: Array) -> Any:
        """The block, which then does not gather this weight."""
        return eqx.tree_at(self.where, block, PrefetchedWeight(self.where(block), full))

    def without_prefetched(self, gradients: Any) -> Any:
        """The gradients of such a block -> of the block as it is stored."""
        return eqx.tree_at(self.where, gradients, self.where(gradients).shard)


@dataclass(frozen=True)
class OffloadedLayers:
    """One layer, as all blocks but the last run it, and as the last one does."""

    offloaded: Layer
    """Saves activations, at least in part, in host memory."""
    on_device: Layer
    """Saves them on the device, and reduces its gradients by reduce-scatters."""
    prefetch: PrefetchSpec


def scan_with_offload(layers: OffloadedLayers, x: Float[Array, "B T D"], blocks: Any) -> Float[Array, "B T D"]:
    """x after all blocks: at least two, stacked along the first dim of every array.

    Communication  the blocks' own; the last one reduces its gradients by reduce-scatters; the backward pass gathers the
                   prefetched weight once more than there are blocks but the last: the last prefetch is unused.
    """
    return _scan(layers, x, blocks)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(layers: OffloadedLayers, x: Array, blocks: Any) -> Array:
    return lax.scan(layers.offloaded, x, blocks)[0]


def _forward(layers: OffloadedLayers, x: Array, blocks: Any) -> tuple[Array, tuple]:
    last, prefetch = _count(blocks) - 1, layers.prefetch
    types, structure = _residual_types(layers, x, blocks)
    on_host = [_is_on_host(one) for one in types]

    def iteration(carry: tuple[Array, list[Array], Int[Array, ""]], _: None) -> tuple[tuple, list[Array]]:
        x, device_stacks, i = carry
        block = _layer_of(blocks, i)
        y, pull = _vjp_without_block(layers.offloaded, prefetch, x, block, prefetch.gather_from(block))
        leaves = jax.tree.leaves(pull)
        device = [leaf for leaf, offloaded in zip(leaves, on_host, strict=True) if not offloaded]
        host = [leaf for leaf, offloaded in zip(leaves, on_host, strict=True) if offloaded]
        return (y, _set_layer(device_stacks, device, i), i + 1), host

    device_stacks = [_empty_stack(one, last) for one, offloaded in zip(types, on_host, strict=True) if not offloaded]
    # the barrier on x, and indexing the last block with the loop's own counter, make the code beside the loop more like
    # the code in it, so that XLA compiles less of it separately
    start = lax.optimization_barrier(x), device_stacks, jnp.int32(0)
    (x, device_stacks, i), host_stacks = lax.scan(iteration, start, length=last)
    device, host = iter(device_stacks), iter(host_stacks)
    pulls = jax.tree.unflatten(structure, [next(host if offloaded else device) for offloaded in on_host])
    y, last_pull = jax.vjp(lambda x, block: layers.on_device(x, block)[0], x, _layer_of(blocks, i))
    return y, (pulls, last_pull, blocks)


def _backward(layers: OffloadedLayers, saved: tuple, dy: Array) -> tuple[Array, Any]:
    pulls, last_pull, blocks = saved
    last, prefetch = _count(blocks) - 1, layers.prefetch
    pulls, last_pull = _after_writes(pulls, last_pull)
    dx, gradients = last_pull(dy)
    stacks = jax.tree.map(lambda dw: _set_layer(_empty_stack(jax.typeof(dw), last + 1), dw, last), gradients)

    def iteration(
        carry: tuple[Array, Any, Array], each: tuple[Int[Array, ""], Any]
    ) -> tuple[tuple[Array, Any, Array], None]:
        (dy, stacks, full), (i, pull) = carry, each
        dx, gradients = _pull_with_block(pull, prefetch, _layer_of(blocks, i), full, dy)
        stacks = _set_layer(stacks, gradients, i)
        return (dx, stacks, prefetch.gather_from(_layer_of(blocks, jnp.maximum(i - 1, 0)))), None

    start = dx, stacks, prefetch.gather_from(_layer_of(blocks, last - 1))
    (dx, gradients, _), _ = lax.scan(iteration, start, (jnp.arange(last), pulls), reverse=True)
    return dx, gradients


_scan.defvjp(_forward, _backward)


def _residual_types(layers: OffloadedLayers, x: Array, blocks: Any) -> tuple[list[jax.core.ShapedArray], Any]:
    """(the type of every array that the backward pass of one block needs, the structure of its pull function)."""
    types: list[jax.core.ShapedArray] = []

    def trace(x: Array, blocks: Any) -> Any:
        block = _layer_of(blocks, 0)
        _, pull = _vjp_without_block(layers.offloaded, layers.prefetch, x, block, layers.prefetch.gather_from(block))
        types.extend(map(jax.typeof, jax.tree.leaves(pull)))
        return pull

    structure = jax.tree.structure(jax.eval_shape(trace, x, blocks))
    return types, structure


def _after_writes(pulls: Any, last_pull: Any) -> tuple[Any, Any]:
    """Both, available once everything that goes to host memory has been written.  A barrier ties arrays that vary over
    the same axes, so that their types stay."""
    leaves, structure = jax.tree.flatten((pulls, last_pull))
    types = [jax.typeof(leaf) for leaf in leaves]
    first_of_last = len(jax.tree.leaves(pulls))
    # sorted: every process must lower the same program
    for axes in sorted({one.manual_axis_type.varying for one in types if _is_on_host(one)}, key=sorted):
        alike = [i for i, one in enumerate(types) if one.manual_axis_type.varying == axes]
        tied = [i for i in alike if i >= first_of_last or _is_on_host(types[i])]
        for i, leaf in zip(tied, lax.optimization_barrier([leaves[i] for i in tied]), strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def _is_on_host(one: jax.core.ShapedArray) -> bool:
    return "host" in str(one.memory_space).lower()


def _vjp_without_block(layer: Layer, prefetch: PrefetchSpec, x: Array, block: Any, full: Array) -> tuple[Array, Any]:
    """(y, the pull function, a pytree of the saved arrays without the block itself, which is stored anyway)."""
    y, pull = jax.vjp(lambda x, block: layer(x, block)[0], x, prefetch.with_prefetched(block, full))
    pull.args_res[1] = None
    return y, pull


def _pull_with_block(pull: Any, prefetch: PrefetchSpec, block: Any, full: Array, dy: Array) -> tuple[Array, Any]:
    """(dx, the gradients of the block)."""
    pull = jax.tree.map(lambda leaf: leaf, pull)  # a copy, which is modified
    pull.args_res[1] = prefetch.with_prefetched(block, full)
    dx, gradients = pull(dy)
    return dx, prefetch.without_prefetched(gradients)


def _count(blocks: Any) -> int:
    return jax.tree.leaves(blocks)[0].shape[0]


def _layer_of(stacks: Any, i: Int[Array, ""] | int) -> Any:
    return jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, i, keepdims=False), stacks)


def _set_layer(stacks: Any, values: Any, i: Int[Array, ""] | int) -> Any:
    return jax.tree.map(lambda stack, x: lax.dynamic_update_index_in_dim(stack, x, i, 0), stacks, values)


def _empty_stack(one: jax.core.ShapedArray, length: int) -> Array:
    """An uninitialised stack of `length` arrays like `one`."""
    stack = lax.empty((length, *one.shape), one.dtype)
    return mark_varying(stack, tuple(sorted(one.manual_axis_type.varying)))
