"""The MLP, its hidden dim cut along mp.

Shoeybi et al. 2019, "Megatron-LM", section 3, https://arxiv.org/abs/1909.08053

B batch, T time, D model width, F hidden width.  F/mp: dim F cut along mp.  {+mp}: a sum over mp still owed.

    x  --into: up-->  [B T F/mp]  --activation-->  [B T F/mp]  --out_of: down {+mp}-->  y

The activation is of each position by itself: the order in which a wire hands them over does not matter.
"""

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from shmap_tp.layers.linear import ColumnParallelLinear, RowParallelLinear
from shmap_tp.parallel.tensor_parallel import Columns, Product

GATE, UP = "gate", "up"
"""Name the first products, so that a remat policy can keep them."""


class GeluMlp(eqx.Module):
    """y = gelu(x @ up) @ down, GELU in its tanh form.  Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415"""

    up: ColumnParallelLinear
    down: RowParallelLinear

    def __init__(self, width: int, hidden: int, *, std: float, std_out: float, key: PRNGKeyArray):
        key_up, key_down = jax.random.split(key)
        self.up = ColumnParallelLinear(width, hidden, std=std, key=key_up)
        self.down = RowParallelLinear(hidden, width, std=std_out, key=key_down)

    @property
    def columns(self) -> Columns:
        return (self.up,)

    def __call__(self, up: Product) -> Product:
        return jax.tree.map(lambda up: jax.nn.gelu(checkpoint_name(up, UP)), up)


class SwigluMlp(eqx.Module):
    """y = (silu(x @ gate) * (x @ up)) @ down.  Shazeer 2020, https://arxiv.org/abs/2002.05202"""

    gate: ColumnParallelLinear
    up: ColumnParallelLinear
    down: RowParallelLinear

    def __init__(self, width: int, hidden: int, *, std: float, std_out: float, key: PRNGKeyArray):
        key_gate, key_up, key_down = jax.random.split(key, 3)
        self.gate = ColumnParallelLinear(width, hidden, std=std, key=key_gate)
        self.up = ColumnParallelLinear(width, hidden, std=std, key=key_up)
        self.down = RowParallelLinear(hidden, width, std=std_out, key=key_down)

    @property
    def columns(self) -> Columns:
        return self.gate, self.up

    def __call__(self, gate: Product, up: Product) -> Product:
        def hidden(gate: Float[Array, "B T F"], up: Float[Array, "B T F"]) -> Float[Array, "B T F"]:
            return jax.nn.silu(checkpoint_name(gate, GATE)) * checkpoint_name(up, UP)

        return jax.tree.map(hidden, gate, up)
