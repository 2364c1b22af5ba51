"""What the backward pass of a block finds kept, and where; the rest it computes again.

    remat       kept of a block's work                         computed again
    none        all that the gradients read                    nothing
    dots        all that has a name                            norms from their means, activations, positions, scores
    up          all but gate                                   these, and the MLP's gate, if it has one
    attention   all but gate, up                               these, and the first products of the MLP
    mlp         input, left, gate, up                          these, and instead of the products q, k, v, and attention
    full        input                                          all

    input             x[B T D], or the part of it that the wire keeps
    left              what each region left with, as large, where anything reads it (in a parallel block nothing does):
                      of mp's collectives only the wire's `into` is said again; and the norms' means, a number or two
                      of a position, which stay on the device
    query_key_value   q, k, v, head by head
    attended          what attention made of them, as large as q
    gate, up          the first products of the MLP, [B T F/mp] each

None of them keeps a weight that dp shares: it is gathered again.  What `offload` names is kept in the memory of the
host: written while the forward pass goes on, and read back before the backward pass comes to it.  q, k and v of a
kernel are then kept in the order that it takes them in, in copies made at the end of the block (`layers.later`).  Where
gradients go home in a ring, the last block keeps it on the device (`through`).
"""

from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from shmap_tp.config.remat_policies import SAVED_BY_REMAT
from shmap_tp.config.schema import Remat, SavedActivation
from shmap_tp.layers.flash_attention import ATTENTION_OUTPUT, SOFTMAX_DENOMINATORS
from shmap_tp.layers.later import QUERY_KEY_VALUE
from shmap_tp.layers.mlp import GATE, UP
from shmap_tp.layers.norm import NORM_STATISTICS
from shmap_tp.parallel.mesh import DP
from shmap_tp.parallel.tensor_parallel import SUBLAYER_OUTPUT

BLOCK_INPUT = "input"


NAMES = {
    SavedActivation.input: (BLOCK_INPUT,),
    SavedActivation.sublayer_output: (SUBLAYER_OUTPUT, NORM_STATISTICS),
    SavedActivation.query_key_value: (QUERY_KEY_VALUE,),
    SavedActivation.attention_output: (ATTENTION_OUTPUT, SOFTMAX_DENOMINATORS),
    SavedActivation.gate: (GATE,),
    SavedActivation.up: (UP,),
}


STAYS = (SOFTMAX_DENOMINATORS, NORM_STATISTICS)
"""So small that a place in the queue of large ones costs more than the memory: 11.4 s a step instead of 10.75 (16B on a
v5e-256, remat attention, q, k, v and attended on the host, predicted)."""


LAYOUT = {
    *("reshape", "transpose", "squeeze", "broadcast_in_dim", "convert_element_type", "dynamic_slice", "slice"),
    *("pvary", "pcast", "bitcast_convert_type"),
}
"""Operations that compute nothing: what one of them made of a gathered weight is that weight."""

Layer = Callable[[Array, Any], tuple[Array, None]]
"""(x, the block) -> (what it makes of x, None), as lax.scan takes it."""


def all_but_weights(primitive: Any, *_: Any, **params: Any) -> bool:
    """Keep everything but weights that were gathered over dp, and what is only another view of an array."""
    gathered = primitive.name == "all_gather" and DP in params["axis_name"]
    return not gathered and primitive.name not in LAYOUT


def checkpointed(layer: Layer, remat: Remat, offload: Collection[SavedActivation]) -> Layer:
    """`layer`, its backward pass computing again what `remat` does not keep."""

    def named(x: Array, block: Any) -> tuple[Array, None]:
        return layer(checkpoint_name(x, BLOCK_INPUT), block)

    return jax.checkpoint(named, policy=_policy(remat, offload), prevent_cse=False)


def _policy(remat: Remat, offload: Collection[SavedActivation]) -> Callable[..., Any]:
    if remat == Remat.none:
        return all_but_weights
    there = [name for kept in offload for name in NAMES[kept] if name not in STAYS]
    here = [name for kept in SAVED_BY_REMAT[remat] for name in NAMES[kept] if name not in there and name != BLOCK_INPUT]
    if not there:
        return jax.checkpoint_policies.save_only_these_names(*here)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=here,
        names_which_can_be_offloaded=there,
        offload_src="device",
        offload_dst="pinned_host",
    )
