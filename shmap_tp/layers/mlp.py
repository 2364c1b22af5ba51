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
from shmap_tp.config.schema import Mlp
from shmap_tp.layers.linear import Linear
from shmap_tp.layers.xla_workarounds import exact_gelu
from shmap_tp.parallel.tensor_parallel import Activation, TensorParallel


class GeluMlp(eqx.Module):
    """y = gelu(x @ up + b) @ down + b.  Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415

    Communication  what `tp` does for one column-parallel and one row-parallel product.
    """

    up: Linear
    down: Linear
    exact: bool = eqx.field(static=True)
    """Whether GELU is computed by the error function; else in its tanh form."""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        std: float,
        std_out: float,
        key: PRNGKeyArray,
        bias: bool = False,
        exact: bool = False,
    ):
        key_up, key_down = jax.random.split(key)
        self.up = Linear.column(width, hidden, std=std, key=key_up, bias=bias)
        self.down = Linear.row(hidden, width, std=std_out, key=key_down, bias=bias)
        self.exact = exact

    def __call__(self, x_BTD: Float[Array, "B _ D"], tp: TensorParallel) -> Float[Array, "B _ D"]:
        (up_BTF,) = tp.column_parallel(x_BTD, self.up)
        return tp.row_parallel((self.activate(up_BTF), self.down))

    @property
    def inputs(self) -> tuple[Linear, ...]:
        return (self.up,)

    def activate(self, up_BTF: Activation) -> Activation:
        gelu = exact_gelu if self.exact else jax.nn.gelu
        return jax.tree.map(lambda up: gelu(checkpoint_name(up, UP)), up_BTF)


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
"""Of gated MLPs and of experts, by the name of `model.mlp`."""


class GatedMlp(eqx.Module):
    """y = gated(x @ gate + b, x @ up + b) @ down + b.

    Communication  what `tp` does for one column-parallel and one row-parallel product.
    """

    gate: Linear
    up: Linear
    down: Linear
    gated: Gate = eqx.field(static=True)

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        std: float,
        std_out: float,
        key: PRNGKeyArray,
        bias: bool = False,
        gated: Gate = swiglu,
    ):
        key_gate, key_up, key_down = jax.random.split(key, 3)
        self.gate = Linear.column(width, hidden, std=std, key=key_gate, bias=bias)
        self.up = Linear.column(width, hidden, std=std, key=key_up, bias=bias)
        self.down = Linear.row(hidden, width, std=std_out, key=key_down, bias=bias)
        self.gated = gated

    def __call__(self, x_BTD: Float[Array, "B _ D"], tp: TensorParallel) -> Float[Array, "B _ D"]:
        gate_BTF, up_BTF = tp.column_parallel(x_BTD, self.gate, self.up)
        return tp.row_parallel((self.activate(gate_BTF, up_BTF), self.down))

    @property
    def inputs(self) -> tuple[Linear, ...]:
        return self.gate, self.up

    def activate(self, gate_BTF: Activation, up_BTF: Activation) -> Activation:
        def hidden(gate: Float[Array, "B T F"], up: Float[Array, "B T F"]) -> Float[Array, "B T F"]:
            return self.gated(checkpoint_name(gate, GATE), checkpoint_name(up, UP))

        return jax.tree.map(hidden, gate_BTF, up_BTF)


MLPS = {
    Mlp.gelu: GeluMlp,
    Mlp.gelu_erf: partial(GeluMlp, exact=True),
    **{mlp: partial(GatedMlp, gated=gated) for mlp, gated in GATES.items()},
}
"""The MLPs that `model.mlp` names; GELU is in its tanh form unless it is exact."""
