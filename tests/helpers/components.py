"""An MLP and a block that no configuration names, for tests of what is derived from modules."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shmap_tp.config.activation_names import GATE, UP
from shmap_tp.layers.attention import Attention
from shmap_tp.layers.linear import Linear
from shmap_tp.layers.mlp import MLPS
from shmap_tp.layers.norm import RMSNorm
from shmap_tp.training.step import Components


class ReGluMlp(eqx.Module):
    """y = (relu(x @ gate) * (x @ up)) @ down: three matrices.  Shazeer 2020, https://arxiv.org/abs/2002.05202"""

    gate: Linear
    up: Linear
    down: Linear

    def __init__(self, width, hidden, *, std, std_out, key):
        keys = jax.random.split(key, 3)
        self.gate = Linear.column(width, hidden, std=std, key=keys[0])
        self.up = Linear.column(width, hidden, std=std, key=keys[1])
        self.down = Linear.row(hidden, width, std=std_out, key=keys[2])

    def __call__(self, x_BTD, tp):
        return tp.row_parallel((self.activate(*tp.column_parallel(x_BTD, *self.inputs)), self.down))

    @property
    def inputs(self):
        return self.gate, self.up

    def activate(self, gate, up):
        def one(gate_BTF, up_BTF):
            return jax.nn.relu(checkpoint_name(gate_BTF, GATE)) * checkpoint_name(up_BTF, UP)

        return jax.tree.map(one, gate, up)


class LoopMlp(ReGluMlp):
    """Its activation multiplies in a loop that ends when the data says so."""

    def activate(self, gate, up):
        def smaller(x_BTF):
            return x_BTF @ jnp.zeros((x_BTF.shape[-1], x_BTF.shape[-1]), x_BTF.dtype) + 0 * x_BTF

        return jax.lax.stop_gradient(jax.lax.while_loop(lambda x_BTF: jnp.max(x_BTF) > 1, smaller, gate * up))


ADAPTER = 8
"""The hidden size of the adapter of `AdapterBlock`."""


class AdapterBlock(eqx.Module):
    """x + norm(attention(norm(x))), the same with the MLP, and a third sublayer: relu(x @ adapter_in) @ adapter_out,
    neither normalised nor named for rematerialisation."""

    norms: list[RMSNorm]
    attention: Attention
    mlp: eqx.Module
    adapter_in: Linear
    adapter_out: Linear

    def __init__(self, config, attend, *, key, mlp=None):
        keys, std = jax.random.split(key, 4), {"std": config.init_std, "std_out": config.init_std}
        self.norms = [RMSNorm(config.width) for _ in range(4)]
        heads = (config.heads, config.kv_heads)
        self.attention = Attention(config.width, heads, config.head_dim, attend, **std, key=keys[0])
        self.mlp = (mlp or MLPS[config.mlp])(config.width, config.ffn, **std, key=keys[1])
        self.adapter_in = Linear.column(config.width, ADAPTER, std=config.init_std, key=keys[2])
        self.adapter_out = Linear.row(ADAPTER, config.width, std=config.init_std, key=keys[3])

    def __call__(self, x_BTD, context):
        before_attention, after_attention, before_mlp, after_mlp = self.norms
        y_BTD, extras = self.attention(before_attention(x_BTD), context)
        x_BTD = x_BTD + after_attention(y_BTD)
        x_BTD = x_BTD + after_mlp(self.mlp(before_mlp(x_BTD), context.tp))
        (hidden,) = context.tp.column_parallel(x_BTD, self.adapter_in)
        return x_BTD + context.tp.row_parallel((jax.tree.map(jax.nn.relu, hidden), self.adapter_out)), extras


COMPONENTS = {
    "mlp": Components(mlp=ReGluMlp),
    "block": Components(block=AdapterBlock),
    "block and mlp": Components(block=AdapterBlock, mlp=ReGluMlp),
}
