"""Transformer blocks: from the residual stream to the residual stream.

B batch, T time, D model width.

    parallel     x + row_parallel(attention, mlp of column_parallel(norm(x)))        one pair of collectives
    sequential   x + attention(norm(x)), then x + mlp(norm(x))                        two pairs

Which collectives these are, and whether x is [B T D] or [B T/mp D], is decided by the tensor-parallel mode
(`parallel/tensor_parallel.py`).

A block is any module with the constructor and the call of these two.  Its call returns (x, residuals): what its caller
has to take care of beside x: residuals of attention for host offload, the key/value cache where it is called with one
(only generation does), else an empty tuple.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from shmap_tp.config.schema import Block, ModelConfig
from shmap_tp.layers.attention import AnyAttention, Attention, Cache
from shmap_tp.layers.flash_attention import DeferredResiduals
from shmap_tp.layers.mlp import MLPS
from shmap_tp.layers.norm import NORMS, LayerNorm, RMSNorm
from shmap_tp.layers.positions import PositionEncoding, Positions
from shmap_tp.parallel.tensor_parallel import InScope, Linear, TensorParallel

MakeMlp = Callable[..., Any]
"""(width, hidden, *, std, std_out, key) -> an MLP, as the classes of layers/mlp.py."""


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
        self.norm = NORMS[config.norm](config.width)
        self.attention = _attention(config, attend, key_attention)
        self.mlp = _mlp(config, mlp, key_mlp)

    def __call__(
        self,
        x_BTD: Float[Array, "B _ D"],
        encoding: PositionEncoding,
        tp: TensorParallel,
        positions: Positions = None,
        cache: Cache | None = None,
    ) -> tuple[Float[Array, "B _ D"], DeferredResiduals | Cache]:
        attention, mlp = self.attention, self.mlp
        q, k, v, *hidden = tp.column_parallel(
            self.norm(x_BTD), *_in_scope("attention", attention.inputs), *_in_scope("mlp", mlp.inputs)
        )
        with jax.named_scope("attention"):
            mixed_BTHK, residuals = attention.mix(q, k, v, encoding, tp, positions, cache)
        with jax.named_scope("mlp"):
            hidden_BTF = mlp.activate(*hidden)
        (out,), (down,) = _in_scope("attention", [attention.out]), _in_scope("mlp", [mlp.down])
        return x_BTD + tp.row_parallel((mixed_BTHK, out), (hidden_BTF, down)), residuals

    @property
    def last_weight(self) -> Any:
        """The last weight of the forward pass: the first that the backward pass reads."""
        return self.mlp.down.weight


class SequentialBlock(eqx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).  Radford et al. 2019, GPT-2

    Communication  two `column_parallel` and two `row_parallel` of `tp`; every `remat` but `none` repeats the first two
                   in the backward pass, and `full` also the `row_parallel` of attention, which the second norm reads.
    """

    attention_norm: LayerNorm | RMSNorm
    attention: Attention
    mlp_norm: LayerNorm | RMSNorm
    mlp: eqx.Module

    def __init__(self, config: ModelConfig, attend: AnyAttention, *, key: PRNGKeyArray, mlp: MakeMlp | None = None):
        key_attention, key_mlp = jax.random.split(key)
        self.attention_norm = NORMS[config.norm](config.width)
        self.attention = _attention(config, attend, key_attention)
        self.mlp_norm = NORMS[config.norm](config.width)
        self.mlp = _mlp(config, mlp, key_mlp)

    def __call__(
        self,
        x_BTD: Float[Array, "B _ D"],
        encoding: PositionEncoding,
        tp: TensorParallel,
        positions: Positions = None,
        cache: Cache | None = None,
    ) -> tuple[Float[Array, "B _ D"], DeferredResiduals | Cache]:
        with jax.named_scope("attention"):
            y_BTD, residuals = self.attention(self.attention_norm(x_BTD), encoding, tp, positions, cache)
            x_BTD = x_BTD + y_BTD
        with jax.named_scope("mlp"):
            x_BTD = x_BTD + self.mlp(self.mlp_norm(x_BTD), tp)
        return x_BTD, residuals

    @property
    def last_weight(self) -> Any:
        """The last weight of the forward pass: the first that the backward pass reads."""
        return self.mlp.down.weight


BLOCKS = {Block.parallel: ParallelBlock, Block.sequential: SequentialBlock}


def _attention(config: ModelConfig, attend: AnyAttention, key: PRNGKeyArray) -> Attention:
    heads = (config.heads, config.kv_heads)
    return Attention(config.width, heads, config.head_dim, attend, **_init_std(config), key=key)


def _mlp(config: ModelConfig, make: MakeMlp | None, key: PRNGKeyArray) -> eqx.Module:
    return (make or MLPS[config.mlp])(config.width, config.ffn, **_init_std(config), key=key)


def _init_std(config: ModelConfig) -> dict[str, float]:
    """Standard deviations of initial weights; those that write to the residual stream are scaled by (2 layers)^-1/2.
    Radford et al. 2019, GPT-2, section 2.3"""
    return {"std": config.init_std, "std_out": config.init_std * (2 * config.layers) ** -0.5}


def _in_scope(name: str, layers: Sequence[Linear]) -> list[InScope]:
    return [InScope(name, layer) for layer in layers]
