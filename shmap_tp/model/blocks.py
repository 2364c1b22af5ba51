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
layers/context.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from shmap_tp.config.schema import Block, ModelConfig, NormPlacement
from shmap_tp.layers.attention import AnyAttention, Attention, with_sinks
from shmap_tp.layers.context import Context, Extras
from shmap_tp.layers.experts import Experts
from shmap_tp.layers.linear import Linear
from shmap_tp.layers.mlp import MLPS
from shmap_tp.layers.norm import AfterNorm, LayerNorm, RMSNorm, make_head_norm, make_norm
from shmap_tp.layers.xla_workarounds import join_gradients
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
            self.norm(x_BTD), *_in_scope("attention", self.attention.inputs), *_in_scope("mlp", self.mlp.inputs)
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
            AfterNorm(self.attention_norm, tuple(_in_scope("attention", self.attention.inputs))),
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
