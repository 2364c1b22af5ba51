"""Transformer blocks: from the residual stream to the residual stream.

B batch, T time, D model width.

    parallel             x + row_parallel(attention, mlp of column_parallel(norm(x)))     one pair of collectives
    parallel_two_norms   the same, each with the scale and bias of a norm of its own      one pair
    sequential           x + attention(norm(x)), then x + mlp(norm(x))                    two pairs
                         with norm_placement=both the outputs of attention and mlp are normalised as well, with
                         after instead; the MLP may be experts

Which collectives these are, and whether x is [B T D] or [B T/mp D], is decided by the tensor-parallel mode
(`parallel/tensor_parallel.py`).

A block is any module with the constructor and the call of these: (x, context) -> (x, extras), both explained in
layers/context.py.  At the end of the file stands what of a block is saved for its backward pass, and where
(`checkpointed`, `save_at_block_end`).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from shmap_tp.config.activation_names import (
    ALWAYS_ON_DEVICE,
    BLOCK_INPUT,
    CHECKPOINT_NAMES,
    QUERY_KEY_VALUE,
    SAVED_BY_REMAT,
)
from shmap_tp.config.choices import Block, NormPlacement, Remat, SavedActivation
from shmap_tp.config.schema import ModelConfig
from shmap_tp.layers.attention import AnyAttention, Attention, with_sinks
from shmap_tp.layers.context import Context, DeferredResiduals, Extras
from shmap_tp.layers.experts import Experts
from shmap_tp.layers.linear import Linear
from shmap_tp.layers.mlp import MLPS
from shmap_tp.layers.norm import AfterNorm, LayerNorm, RMSNorm, make_head_norm, make_norm
from shmap_tp.layers.xla_workarounds import join_gradients
from shmap_tp.parallel.mesh import spec_axes, token_axes
from shmap_tp.parallel.tensor_parallel import Activation

MakeMlp = Callable[..., Any]
"""(width, hidden, *, std, std_out, key) -> an MLP, as the classes of layers/mlp.py; with mlp_bias also `bias=True`."""


class ParallelBlock(eqx.Module):
    """y = x + attention(norm(x)) + mlp(norm(x)).  Wang and Komatsuzaki 2021, GPT-J; Chowdhery et al. 2022, PaLM,
    section 2

    Communication  one `column_parallel` and one `row_parallel` of `tp`; every `remat` but `none` repeats the first in
                   the backward pass.
    """

    norm: LayerNorm | RMSNorm
    attention: Attention
    mlp: eqx.Module

    def __init__(self, config: ModelConfig, attend: AnyAttention, *, key: PRNGKeyArray, mlp: MakeMlp | None = None):
        key_attention, key_mlp = jax.random.split(key)
        self.norm = make_norm(config)
        self.attention = _attention(config, attend, key_attention)
        self.mlp = _mlp(config, mlp, key_mlp)

    def __call__(self, x_BTD: Float[Array, "B _ D"], context: Context) -> tuple[Float[Array, "B _ D"], Extras]:
        q, k, v, *hidden = context.tp.column_parallel(
            self.norm(x_BTD),
            *_in_scope("attention", self.attention.inputs(context)),
            *_in_scope("mlp", self.mlp.inputs),
        )
        y_BTD, extras = _mix_and_project(self, (q, k, v), hidden, context)
        return x_BTD + y_BTD, extras


class ParallelBlockTwoNorms(eqx.Module):
    """y = x + attention(norm_a(x)) + mlp(norm_m(x)).  Black et al. 2022, GPT-NeoX-20B, section 2.1,
    https://arxiv.org/abs/2204.06745

    Both norms normalise x alike: it is normalised once, enters once, and their scales and biases are applied after.

    Communication  that of ParallelBlock; and where the residual stream is replicated over mp, backward, an all-reduce
                   over mp of the gradients of both norms (`AfterNorm`).
    """

    attention_norm: LayerNorm | RMSNorm
    attention: Attention
    mlp_norm: LayerNorm | RMSNorm
    mlp: eqx.Module

    def __init__(self, config: ModelConfig, attend: AnyAttention, *, key: PRNGKeyArray, mlp: MakeMlp | None = None):
        key_attention, key_mlp = jax.random.split(key)
        self.attention_norm = make_norm(config)
        self.attention = _attention(config, attend, key_attention)
        self.mlp_norm = make_norm(config)
        self.mlp = _mlp(config, mlp, key_mlp)

    def __call__(self, x_BTD: Float[Array, "B _ D"], context: Context) -> tuple[Float[Array, "B _ D"], Extras]:
        qkv, hidden = context.tp.column_parallel(
            self.attention_norm.normalize(x_BTD),
            AfterNorm(self.attention_norm, tuple(_in_scope("attention", self.attention.inputs(context)))),
            AfterNorm(self.mlp_norm, tuple(_in_scope("mlp", self.mlp.inputs))),
        )
        y_BTD, extras = _mix_and_project(self, qkv, hidden, context)
        return x_BTD + y_BTD, extras


class SequentialBlock(eqx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).  Radford et al. 2019, GPT-2

    With output norms x + norm(attention(norm(x))), then x + norm(mlp(norm(x))).  Gemma Team 2024, Gemma 2, section 2,
    https://arxiv.org/abs/2408.00118.  With them alone, x + norm(attention(x)), then x + norm(mlp(x)): OLMo 2, section
    3.2, https://arxiv.org/abs/2501.00656

    Communication  two `column_parallel` and two `row_parallel` of `tp`; every `remat` but `none` repeats the first two
                   in the backward pass, and those that save no sublayer outputs (`full`, `attention_output`) also the
                   `row_parallel` of attention, which the second norm reads.
    """

    attention_norm: LayerNorm | RMSNorm | None
    attention: Attention
    mlp_norm: LayerNorm | RMSNorm | None
    mlp: eqx.Module
    attention_output_norm: LayerNorm | RMSNorm | None
    mlp_output_norm: LayerNorm | RMSNorm | None

    def __init__(self, config: ModelConfig, attend: AnyAttention, *, key: PRNGKeyArray, mlp: MakeMlp | None = None):
        key_attention, key_mlp = jax.random.split(key)
        before, after = (config.norm_placement != other for other in (NormPlacement.after, NormPlacement.before))
        self.attention_norm = make_norm(config) if before else None
        self.attention = _attention(config, attend, key_attention)
        self.mlp_norm = make_norm(config) if before else None
        self.mlp = _mlp(config, mlp, key_mlp)
        self.attention_output_norm = make_norm(config) if after else None
        self.mlp_output_norm = make_norm(config) if after else None

    def __call__(self, x_BTD: Float[Array, "B _ D"], context: Context) -> tuple[Float[Array, "B _ D"], Extras]:
        with jax.named_scope("attention"):
            x_BTD = context.stored(x_BTD)
            y_BTD, extras = self.attention(_normed(self.attention_norm, x_BTD), context)
            x_BTD = x_BTD + _output_normed(self.attention_output_norm, context.stored(y_BTD))
        with jax.named_scope("mlp"):
            h_BTD, loss, statistics = _normed(self.mlp_norm, x_BTD), None, None
            if isinstance(self.mlp, Experts):
                y_BTD, loss, statistics = self.mlp(h_BTD, context)
            else:
                y_BTD = self.mlp(h_BTD, context.tp)
            x_BTD = x_BTD + _output_normed(self.mlp_output_norm, context.stored(y_BTD))
        return x_BTD, Extras(loss, extras.cache, extras.residuals, statistics)


BLOCKS = {
    Block.parallel: ParallelBlock,
    Block.parallel_two_norms: ParallelBlockTwoNorms,
    Block.sequential: SequentialBlock,
}
"""The blocks that `model.block` names."""


def _normed(norm: LayerNorm | RMSNorm | None, x_BTD: Float[Array, "B _ D"]) -> Float[Array, "B _ D"]:
    return x_BTD if norm is None else norm(x_BTD)


def _output_normed(norm: LayerNorm | RMSNorm | None, y_BTD: Float[Array, "B _ D"]) -> Float[Array, "B _ D"]:
    return y_BTD if norm is None else norm(*join_gradients(y_BTD))


def _attention(config: ModelConfig, attend: AnyAttention, key: PRNGKeyArray) -> Attention:
    heads = (config.heads, config.kv_heads)
    options = {
        "biases": (config.qkv_bias, config.attention_output_bias),
        "head_norms": tuple(make_head_norm(config, n) for n in heads) if config.qk_norm else None,
    }
    made = Attention(config.width, heads, config.head_dim, attend, **_init_std(config), **options, key=key)
    return with_sinks(made, config.heads) if config.attention_sinks else made


def _mlp(config: ModelConfig, make: MakeMlp | None, key: PRNGKeyArray) -> eqx.Module:
    if config.experts and make is None:
        return Experts(config, **_init_std(config), key=key)
    bias = {"bias": True} if config.mlp_bias else {}
    return (make or MLPS[config.mlp])(config.width, config.ffn, **_init_std(config), **bias, key=key)


def _mix_and_project(
    block: ParallelBlock | ParallelBlockTwoNorms,
    qkv: Sequence[Activation],
    hidden: Sequence[Activation],
    context: Context,
) -> tuple[Float[Array, "B _ D"], Extras]:
    """(the sum of the outputs of attention and MLP, with one reduction; attention's extras), from the column-parallel
    products of both."""
    with jax.named_scope("attention"):
        mixed_BTHK, extras = block.attention.mix(*qkv, context)
    with jax.named_scope("mlp"):
        hidden_BTF = block.mlp.activate(*hidden)
    (out,), (down,) = _in_scope("attention", [block.attention.out]), _in_scope("mlp", [block.mlp.down])
    return context.tp.row_parallel((mixed_BTHK, out), (hidden_BTF, down)), extras


def _init_std(config: ModelConfig) -> dict[str, float]:
    """Standard deviations of initial weights; those that write to the residual stream are scaled by (2 layers)^-1/2.
    Radford et al. 2019, GPT-2, section 2.3"""
    return {"std": config.init_std, "std_out": config.init_std * (2 * config.layers) ** -0.5}


def _in_scope(name: str, layers: Sequence[Linear]) -> list[Linear]:
    return [replace(layer, scope=name) for layer in layers]


# Activation checkpointing: what the backward pass of a block finds saved

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
    """`layer`, its backward pass recomputing what `remat` does not save.  Chen et al. 2016, "Training Deep Nets with
    Sublinear Memory Cost", https://arxiv.org/abs/1604.06174

        remat              saved                                recomputed
        none               everything that gradients read       nothing
        all_matmuls        everything with a name               norms from their means, activation functions, scores
        attention_and_up   all but gate                         the above, and the gate of the MLP, if it has one
        attention          all but gate, up                     the above, and the MLP's column-parallel products
        mlp                input, sublayer_output, gate, up     norms, activation functions, q, k, v and attention
        attention_output   input, attention_output              everything but scores times v; scores only once
        full               input                                everything

        input             x[B T D] as it enters the block, or this device's T/mp positions of it
        sublayer_output   the output of each sublayer after its reduction over mp, where anything reads it (in a
                          parallel block nothing does): `enter` is the only collective over mp that is repeated; and the
                          norms' means
        query_key_value   q, k, v, head by head
        attention_output  softmax(q k') v, as large as q
        gate, up          the MLP's column-parallel products, [B T F/mp] each

    No policy saves a gathered FSDP weight: it is gathered again.  What `offload` names is saved in host memory instead:
    written during the forward pass, and read back before its block's backward pass.

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

        mixed, residuals = attend(q, k, v)          early in a block; residuals = q, k, v in the kernel's layout
        y = save_at_block_end(y, residuals)         at its end: y

    The plain version is `checkpoint_name` on q, k and v where they are computed, which `Attention` uses without
    offload.  XLA for TPU starts all writes to the host of one block together, at the beginning of the next block, which
    then waits before it overwrites q, k and v (docs/performance-notes.md).  A copy made at the end of a block is not
    overwritten before the end of the next one, so its write has the time of a whole block.

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
