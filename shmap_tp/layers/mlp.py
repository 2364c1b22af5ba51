"""The MLP, its hidden dim sharded over mp.

Shoeybi et al. 2019, "Megatron-LM", section 3, https://arxiv.org/abs/1909.08053

B batch, T time, D model width, F hidden width.  F/mp: dim F sharded over mp.  {+mp}: a partial sum, not yet reduced.

    x  --column_parallel: up-->  [B T F/mp]  --activation-->  [B T F/mp]  --row_parallel: down {+mp}, reduced-->  y

A parallel block shares one `column_parallel` and one `row_parallel` with attention, and so uses `inputs`, `activate`
and `down` apart; a sequential block calls the MLP.
"""

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from shmap_tp.config.activation_names import GATE, UP
from shmap_tp.config.schema import Mlp
from shmap_tp.layers.linear import ColumnParallelLinear, RowParallelLinear
from shmap_tp.parallel.tensor_parallel import Activation, TensorParallel


class GeluMlp(eqx.Module):
    """y = gelu(x @ up) @ down, GELU in its tanh form.  Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415

    Communication  what `tp` does for one column-parallel and one row-parallel product.
    """

    up: ColumnParallelLinear
    down: RowParallelLinear

    def __init__(self, width: int, hidden: int, *, std: float, std_out: float, key: PRNGKeyArray):
        key_up, key_down = jax.random.split(key)
        self.up = ColumnParallelLinear(width, hidden, std=std, key=key_up)
        self.down = RowParallelLinear(hidden, width, std=std_out, key=key_down)

    def __call__(self, x_BTD: Float[Array, "B _ D"], tp: TensorParallel) -> Float[Array, "B _ D"]:
        (up_BTF,) = tp.column_parallel(x_BTD, self.up)
        return tp.row_parallel((self.activate(up_BTF), self.down))

    @property
    def inputs(self) -> tuple[ColumnParallelLinear, ...]:
        return (self.up,)

    def activate(self, up_BTF: Activation) -> Activation:
        return jax.tree.map(lambda up: jax.nn.gelu(checkpoint_name(up, UP)), up_BTF)


class SwigluMlp(eqx.Module):
    """y = (silu(x @ gate) * (x @ up)) @ down.  Shazeer 2020, https://arxiv.org/abs/2002.05202

    Communication  what `tp` does for one column-parallel and one row-parallel product.
    """

    gate: ColumnParallelLinear
    up: ColumnParallelLinear
    down: RowParallelLinear

    def __init__(self, width: int, hidden: int, *, std: float, std_out: float, key: PRNGKeyArray):
        key_gate, key_up, key_down = jax.random.split(key, 3)
        self.gate = ColumnParallelLinear(width, hidden, std=std, key=key_gate)
        self.up = ColumnParallelLinear(width, hidden, std=std, key=key_up)
        self.down = RowParallelLinear(hidden, width, std=std_out, key=key_down)

    def __call__(self, x_BTD: Float[Array, "B _ D"], tp: TensorParallel) -> Float[Array, "B _ D"]:
        gate_BTF, up_BTF = tp.column_parallel(x_BTD, self.gate, self.up)
        return tp.row_parallel((self.activate(gate_BTF, up_BTF), self.down))

    @property
    def inputs(self) -> tuple[ColumnParallelLinear, ...]:
        return self.gate, self.up

    def activate(self, gate_BTF: Activation, up_BTF: Activation) -> Activation:
        return jax.tree.map(_swiglu, gate_BTF, up_BTF)


def _swiglu(gate_BTF: Float[Array, "B T F"], up_BTF: Float[Array, "B T F"]) -> Float[Array, "B T F"]:
    return jax.nn.silu(checkpoint_name(gate_BTF, GATE)) * checkpoint_name(up_BTF, UP)


MLPS = {Mlp.gelu: GeluMlp, Mlp.swiglu: SwigluMlp}
"""The MLPs that `model.mlp` names."""
