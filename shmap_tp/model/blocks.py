"""The model: embedding, a scan over stacked blocks, the final norm; what comes of it the loss scores (`loss`).

B batch, T time, D model width, V vocabulary rows, L layers.  V/mp: dim V cut along mp.  {+mp}: a sum over mp still
owed.

A block goes into the parallel region after a norm, through the columns of its layers, and out of it before the residual
sum, through their rows:

    parallel     x + out_of(attention(into(norm(x))) + mlp(into(norm(x))))            one region, one `into`
    sequential   x + out_of(attention(into(norm(x)))), then the same with the MLP     two

What the residual stream is between regions, and what travels, says the wire that is handed down (`collectives`).
Forward and backward, a region costs

    AllReduce          x[B T D]       out_of: an all-reduce                           into: an all-reduce
    SequenceParallel   x[B T/mp D]    into: an all-gather, out_of: a reduce-scatter   the same, the other way around
    Ring               x[B T/mp D]    each: mp - 1 ppermutes of a part                the same

where an all-reduce is as much as the two others together, and so are 2 (mp - 1) ppermutes.
"""

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from shmap_tp.config.schema import Block, Mlp, ModelConfig, Norm
from shmap_tp.layers.attention import AnyAttention, Attention
from shmap_tp.layers.later import save_at_block_end
from shmap_tp.layers.mlp import GeluMlp, SwigluMlp
from shmap_tp.layers.norm import LayerNorm, RMSNorm
from shmap_tp.layers.positions import AnyPositions
from shmap_tp.parallel.modes import TensorParallel

NORMS = {Norm.layernorm: LayerNorm, Norm.rmsnorm: RMSNorm}


MLPS = {Mlp.gelu: GeluMlp, Mlp.swiglu: SwigluMlp}


def _attention(config: ModelConfig, attend: AnyAttention, key: PRNGKeyArray) -> Attention:
    heads, std_out = (config.heads, config.kv_heads), config.init_std * (2 * config.layers) ** -0.5
    return Attention(config.width, heads, config.head_dim, attend, std=config.init_std, std_out=std_out, key=key)


def _mlp(config: ModelConfig, key: PRNGKeyArray) -> GeluMlp | SwigluMlp:
    std_out = config.init_std * (2 * config.layers) ** -0.5
    return MLPS[config.mlp](config.width, config.ffn, std=config.init_std, std_out=std_out, key=key)


class ParallelBlock(eqx.Module):
    """y = x + attention(norm(x)) + mlp(norm(x)).  Wang and Komatsuzaki 2021, GPT-J; Chowdhery et al. 2022, PaLM,
    section 2

    Wire    one region; every `remat` but `none` enters it again.
    """

    norm: LayerNorm | RMSNorm
    attention: Attention
    mlp: GeluMlp | SwigluMlp

    def __init__(self, config: ModelConfig, attend: AnyAttention, *, key: PRNGKeyArray):
        key_attention, key_mlp = jax.random.split(key)
        self.norm = NORMS[config.norm](config.width)
        self.attention = _attention(config, attend, key_attention)
        self.mlp = _mlp(config, key_mlp)

    def __call__(
        self, x_BTD: Float[Array, "B T D"], positions: AnyPositions, wire: TensorParallel, *, copied: bool = True
    ) -> Float[Array, "B T D"]:
        heads, hidden = wire.into(self.norm(x_BTD), attention=self.attention.columns, mlp=self.mlp.columns)
        with jax.named_scope("attention"):
            mixed, handed = self.attention(*heads, positions, wire)
        with jax.named_scope("mlp"):
            hidden = self.mlp(*hidden)
        x_BTD = x_BTD + wire.out_of(attention=(mixed, self.attention.out), mlp=(hidden, self.mlp.down))
        return save_at_block_end(x_BTD, handed, copied=copied)


class SequentialBlock(eqx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).  Radford et al. 2019, GPT-2

    Wire    two regions; every `remat` but `none` enters both again, `full` leaves the attention's again, too.
    """

    attention_norm: LayerNorm | RMSNorm
    attention: Attention
    mlp_norm: LayerNorm | RMSNorm
    mlp: GeluMlp | SwigluMlp

    def __init__(self, config: ModelConfig, attend: AnyAttention, *, key: PRNGKeyArray):
        key_attention, key_mlp = jax.random.split(key)
        self.attention_norm = NORMS[config.norm](config.width)
        self.attention = _attention(config, attend, key_attention)
        self.mlp_norm = NORMS[config.norm](config.width)
        self.mlp = _mlp(config, key_mlp)

    def __call__(
        self, x_BTD: Float[Array, "B T D"], positions: AnyPositions, wire: TensorParallel, *, copied: bool = True
    ) -> Float[Array, "B T D"]:
        with jax.named_scope("attention"):
            (heads,) = wire.into(self.attention_norm(x_BTD), attention=self.attention.columns)
            mixed, handed = self.attention(*heads, positions, wire)
            x_BTD = x_BTD + wire.out_of(attention=(mixed, self.attention.out))
        with jax.named_scope("mlp"):
            (hidden,) = wire.into(self.mlp_norm(x_BTD), mlp=self.mlp.columns)
            x_BTD = x_BTD + wire.out_of(mlp=(self.mlp(*hidden), self.mlp.down))
        return save_at_block_end(x_BTD, handed, copied=copied)


BLOCKS = {Block.parallel: ParallelBlock, Block.sequential: SequentialBlock}
