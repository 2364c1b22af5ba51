"""The MLP, its hidden dim cut along mp.

Shoeybi et al. 2019, "Megatron-LM", section 3, https://arxiv.org/abs/1909.08053

B batch, T time, D model width, F hidden width.  F/mp: dim F cut along mp.  {+mp}: a sum over mp still owed.

    h[B T D] (entered)  --up-->  [B T F/mp]  --activation-->  [B T F/mp]  --down-->  y[B T D] {+mp}
"""

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from shmap_tp.layers.linear import ColumnParallelLinear, RowParallelLinear


class GeluMlp(eqx.Module):
    """y = gelu(h @ up) @ down, GELU in its tanh form.  Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415"""

    up: ColumnParallelLinear
    down: RowParallelLinear

    def __init__(self, width: int, hidden: int, *, std: float, std_out: float, key: PRNGKeyArray):
        key_up, key_down = jax.random.split(key)
        self.up = ColumnParallelLinear(width, hidden, std=std, key=key_up)
        self.down = RowParallelLinear(hidden, width, std=std_out, key=key_down)

    def __call__(self, h_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(jax.nn.gelu(self.up(h_BTD)))


class SwigluMlp(eqx.Module):
    """y = (silu(h @ gate) * (h @ up)) @ down.  Shazeer 2020, https://arxiv.org/abs/2002.05202"""

    gate: ColumnParallelLinear
    up: ColumnParallelLinear
    down: RowParallelLinear

    def __init__(self, width: int, hidden: int, *, std: float, std_out: float, key: PRNGKeyArray):
        key_gate, key_up, key_down = jax.random.split(key, 3)
        self.gate = ColumnParallelLinear(width, hidden, std=std, key=key_gate)
        self.up = ColumnParallelLinear(width, hidden, std=std, key=key_up)
        self.down = RowParallelLinear(hidden, width, std=std_out, key=key_down)

    def __call__(self, h_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(jax.nn.silu(self.gate(h_BTD)) * self.up(h_BTD))
