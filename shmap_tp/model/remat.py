"""Activation checkpointing and host offload: what the backward pass of a block finds saved, and where.

    remat              saved                                recomputed
    none               everything that gradients read       nothing
    all_matmuls        everything with a name               norms from their means, activation functions, scores
    attention_and_up   all but gate                         the above, and the gate of the MLP, if it has one
    attention          all but gate, up                     the above, and the MLP's column-parallel products
    mlp                input, sublayer_output, gate, up     norms, activation functions, q, k, v and attention
    attention_output   input, attention_output              everything but scores times v; scores only once
    full               input                                everything

    input             x[B T D] as it enters the block, or this device's T/mp positions of it
    sublayer_output   the output of each sublayer after its reduction over mp, where anything reads it (in a parallel
                      block nothing does): of the collectives over mp only `enter` is repeated; and the norms' means
    query_key_value   q, k, v, head by head
    attention_output  softmax(q k') v, as large as q
    gate, up          the MLP's column-parallel products, [B T F/mp] each

No policy saves a gathered FSDP weight: it is gathered again.  What `offload` names is saved in host memory instead:
written during the forward pass, and read back before its block's backward pass.  q, k and v of a kernel are then saved
in the kernel's layout, as copies made at the end of the block:

    mixed, residuals = attend(q, k, v)          early in a block; residuals = q, k, v, three dims each
    y = save_at_block_end(y, residuals)         at its end: y

The plain version is `checkpoint_name` on q, k and v where they are computed, which `Attention` uses without offload.
XLA for TPU starts all writes to the host of one block together, at the beginning of the next block, which then waits
before it overwrites q, k and v (docs/performance-notes.md).  A copy made at the end of a block is not overwritten
before the end of the next one, so its write has the time of a whole block.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174
"""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from shmap_tp.config.activation_names import (
    ALWAYS_ON_DEVICE,
    BLOCK_INPUT,
    CHECKPOINT_NAMES,
    QUERY_KEY_VALUE,
    SAVED_BY_REMAT,
)
from shmap_tp.config.schema import Remat, SavedActivation
from shmap_tp.layers.context import DeferredResiduals
from shmap_tp.parallel.mesh import token_axes
from shmap_tp.parallel.partitioning import spec_axes

LAYOUT_PRIMITIVES = {
    *("reshape", "transpose", "squeeze", "broadcast_in_dim", "convert_element_type", "dynamic_slice", "slice"),
    *("pvary", "pcast", "bitcast_convert_type"),
}
"""Primitives that compute nothing: their result is another view of their operand, here of a gathered weight."""

Layer = Callable[[Array, Any], tuple[Array, Any]]
"""(x, block) -> (x, its auxiliary loss and statistics), as lax.scan takes it."""


def all_but_gathered_weights(primitive: Any, *_: Any, **params: Any) -> bool:
    """A policy that saves everything but weights gathered over token axes and views of arrays."""
    is_gathered = primitive.name == "all_gather" and not set(token_axes()).isdisjoint(spec_axes(params["axis_name"]))
    return not is_gathered and primitive.name not in LAYOUT_PRIMITIVES


def checkpointed(layer: Layer, remat: Remat, offload: Collection[SavedActivation], *, in_loop: bool = True) -> Layer:
    """`layer`, its backward pass recomputing what `remat` does not save; of what it saves, `offload` is on the host.

    Not `in_loop`, both passes are in one computation, in which XLA would compute once, and keep, what they have in
    common; barriers before the recomputation prevent that.
    """

    def named(x: Array, block: Any) -> tuple[Array, Any]:
        return layer(checkpoint_name(x, BLOCK_INPUT), block)

    return jax.checkpoint(named, policy=_policy(remat, offload), prevent_cse=not in_loop)


def _policy(remat: Remat, offload: Collection[SavedActivation]) -> Callable[..., Any]:
    if remat == Remat.none:
        return all_but_gathered_weights
    on_host = [name for saved in offload for name in CHECKPOINT_NAMES[saved] if name not in ALWAYS_ON_DEVICE]
    saved = [name for saved in SAVED_BY_REMAT[remat] for name in CHECKPOINT_NAMES[saved]]
    on_device = [name for name in saved if name not in on_host and name != BLOCK_INPUT]
    if not on_host:
        return jax.checkpoint_policies.save_only_these_names(*on_device)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=on_device,
        names_which_can_be_offloaded=on_host,
        offload_src="device",
        offload_dst="pinned_host",
    )


# q, k and v on the host


def save_at_block_end(y_BTD: Float[Array, "B T D"], residuals: DeferredResiduals) -> Float[Array, "B T D"]:
    """y.  Its backward pass saves `residuals` under the name QUERY_KEY_VALUE, as copies made when y is available.
    Communication: none.

    It returns, in the place of gradients of the residuals, the saved copies themselves; they reach the backward pass of
    `attend`, which reads them.  So residuals must be passed here, once, and used nowhere else.
    """
    return _save(y_BTD, residuals) if residuals else y_BTD


@jax.custom_vjp
def _save(y: Array, residuals: DeferredResiduals) -> Array:
    return y


def _save_forward(y: Array, residuals: DeferredResiduals) -> tuple[Array, DeferredResiduals]:
    return y, tuple(checkpoint_name(_copy_after(y, x), QUERY_KEY_VALUE) for x in residuals)


def _save_backward(saved: DeferredResiduals, dy: Array) -> tuple[Array, DeferredResiduals]:
    """k and v are copied when dy is available, which frees the buffers they were read into for the block before."""
    q, *rest = saved
    return dy, (q, *(_copy_after(dy, x) for x in rest))


_save.defvjp(_save_forward, _save_backward)


def _copy_after(y: Array, x: Array) -> Array:
    """A copy of x, made when y is available: selected by a condition whose value is hidden from the compiler."""
    y, x, true = lax.optimization_barrier((y, x, jnp.array(True)))
    return jnp.where(true, x, 0)
