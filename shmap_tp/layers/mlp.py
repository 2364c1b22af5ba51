"""The MLP, its hidden dim sharded over mp.

Shoeybi et al. 2019, "Megatron-LM", section 3, https://arxiv.org/abs/1909.08053

B batch, T time, D model width, F hidden width.  F/mp: dim F sharded over mp.  {+mp}: a partial sum, not yet reduced.

    x  --column_parallel: up-->  [B T F/mp]  --activation-->  [B T F/mp]  --row_parallel: down {+mp}, reduced-->  y

A parallel block shares one `column_parallel` and one `row_parallel` with attention, and so uses `inputs`, `activate`
and `down` apart; a sequential block calls the MLP.
"""

from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from shmap_tp.config.activation_names import GATE, UP
from shmap_tp.config.choices import Mlp
from shmap_tp.layers.linear import Linear
from shmap_tp.layers.xla_workarounds import exact_gelu
from shmap_tp.parallel.tensor_parallel import Activation, TensorParallel

Gate = Callable[[Array, Array], Array]
"""(gate, up) -> hidden, element by element."""


def swiglu(gate: Array, up: Array) -> Array:
    """SiLU(gate) * up.  Shazeer 2020, https://arxiv.org/abs/2002.05202"""
    return jax.nn.silu(gate) * up


def geglu(gate: Array, up: Array) -> Array:
    """GELU(gate) * up, in its tanh form."""
    return jax.nn.gelu(gate) * up


def clamped_swiglu(gate: Array, up: Array) -> Array:
    """g sigmoid(1.702 g) * (u + 1), with g = min(gate, 7) and u = up clipped to +-7.  OpenAI 2025, gpt-oss-120b and
    gpt-oss-20b model card, section 2.1, https://arxiv.org/abs/2508.10925, and the code released with it"""
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


GATES: dict[Mlp, Gate] = {Mlp.swiglu: swiglu, Mlp.geglu: geglu, Mlp.clamped_swiglu: clamped_swiglu}
"""The activations of gated MLPs and of experts, by the name of `model.mlp`."""


class MlpLayer(eqx.Module):
    """y = activation(x @ up + b) @ down + b, or gated, y = activation(x @ gate + b, x @ up + b) @ down + b.

    Communication  what `tp` does for one column-parallel and one row-parallel product.
    """

    gate: Linear | None
    up: Linear
    down: Linear
    activation: Callable[..., Array] = eqx.field(static=True)

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        std: float,
        std_out: float,
        key: PRNGKeyArray,
        bias: bool = False,
        activation: Callable[..., Array] = swiglu,
        gated: bool = True,
    ):
        """`activation` is given the gate and up if the MLP is `gated`, else up."""
        *key_gate, key_up, key_down = jax.random.split(key, 2 + gated)
        self.gate = Linear.column(width, hidden, std=std, key=key_gate[0], bias=bias) if gated else None
        self.up = Linear.column(width, hidden, std=std, key=key_up, bias=bias)
        self.down = Linear.row(hidden, width, std=std_out, key=key_down, bias=bias)
        self.activation = activation

    def __call__(self, x_BTD: Float[Array, "B _ D"], tp: TensorParallel) -> Float[Array, "B _ D"]:
        products_BTF = tp.column_parallel(x_BTD, *self.inputs)
        return tp.row_parallel((self.activate(*products_BTF), self.down))

    @property
    def inputs(self) -> tuple[Linear, ...]:
        return (self.up,) if self.gate is None else (self.gate, self.up)

    def activate(self, *products_BTF: Activation) -> Activation:
        """The hidden units, from the products of `inputs`."""
        names = (GATE, UP)[-len(products_BTF) :]
        return jax.tree.map(lambda *each: self.activation(*map(checkpoint_name, each, names)), *products_BTF)


MLPS = {
    Mlp.gelu: partial(MlpLayer, activation=jax.nn.gelu, gated=False),
    Mlp.gelu_erf: partial(MlpLayer, activation=exact_gelu, gated=False),
    **{mlp: partial(MlpLayer, activation=gate) for mlp, gate in GATES.items()},
}
"""The MLPs that `model.mlp` names.  GELU, in its tanh form or exact: Hendrycks and Gimpel 2016,
https://arxiv.org/abs/1606.08415"""
