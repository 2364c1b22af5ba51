"""A mixture of experts in place of the MLP, the experts sharded over mp.

Shazeer et al. 2017, "Outrageously Large Neural Networks", https://arxiv.org/abs/1701.06538
Jiang et al. 2024, "Mixtral of Experts", section 2.1, https://arxiv.org/abs/2401.04088

B batch, T time, D model width, F hidden width, E experts, C chosen experts of a token, N = B T tokens, R rows: pairs of
a token and one of its experts.  E/mp: whole experts, sharded over mp.  {+mp}: a partial sum, not yet reduced.

    x  --enter-->  [N D]  --router-->  C experts of each token, and their weights
       --sort by expert, those of this device first-->  [R D]
       --gate, up[E/mp D F]-->  [R F]  --activation, times weights-->  [R F]  --down[E/mp F D]-->  [R D]
       --added up by token-->  [N D] {+mp}  --reduce-->  y

The rows are weighted before `down`: the gradient of the weights then needs no result of it.

No token is dropped, and no shape depends on the choice: R = N min(C, E/mp) rows, which is what a device needs where its
experts are chosen as often as possible.  Rows beyond those that are chosen are multiplied by nothing.

The router is replicated, and every device of mp chooses alike.  Its weights reach the output through the experts of the
device alone: the gradient of the router is a partial sum over mp, as that of x is, and `mark_varying` and `enter` say
so.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from shmap_tp.config.activation_names import GATE, UP
from shmap_tp.config.schema import Mlp, ModelConfig, RouterScores
from shmap_tp.layers.context import Context
from shmap_tp.layers.grouped_matmul import GroupedMatmul
from shmap_tp.layers.mlp import MLPS, GatedMlp
from shmap_tp.parallel.collectives import all_reduce, mark_varying, varying_axes
from shmap_tp.parallel.mesh import MP, Role, axes_of, ranks
from shmap_tp.parallel.partitioning import ParameterKind, param

ACTIVATIONS: dict[Mlp, Callable[[Array], Array]] = {Mlp.swiglu: jax.nn.silu, Mlp.geglu: jax.nn.gelu}
"""Of the gate, by the name of `model.mlp`."""


class Routing(NamedTuple):
    """What a router says about each token."""

    experts_NC: Int[Array, "N C"]
    weights_NC: Float[Array, "N C"]
    """float32."""
    scores_NE: Float[Array, "N E"]
    """Of all experts; float32."""
    logits_NE: Float[Array, "N E"]
    """float32."""


class Router(eqx.Module):
    """scores = softmax(x @ w) or sigmoid(x @ w) in float32; the C largest are chosen, of equal ones the first.  Their
    scores are the weights; `normalize` divides these by their sum.

    A softmax of the chosen logits alone, as Mixtral has it, is the same as `normalize` with a softmax of all.

    Communication  backward: one all-reduce of dw (D E values) over mp, unless the tensor-parallel mode marked w as
                   varying before: then it is reduced once per step.
    """

    weight: Float[Array, "D E"] = param(None, None)
    per_token: int = eqx.field(static=True)
    scores: RouterScores = eqx.field(static=True)
    normalize: bool = eqx.field(static=True)

    def __init__(self, config: ModelConfig, *, key: PRNGKeyArray):
        self.weight = config.init_std * jax.random.normal(key, (config.width, config.experts))
        self.per_token, self.scores = config.experts_per_token, config.router_scores
        self.normalize = config.router_normalize

    def __call__(self, x_ND: Float[Array, "N D"]) -> Routing:
        weight_DE = mark_varying(self.weight, MP).astype(x_ND.dtype)
        wide = x_ND.dtype if x_ND.dtype.itemsize > 4 else jnp.float32
        logits_NE = jnp.matmul(x_ND, weight_DE, preferred_element_type=wide)
        of_all = jax.nn.sigmoid if self.scores == RouterScores.sigmoid else jax.nn.softmax
        scores_NE = of_all(logits_NE)
        weights_NC, experts_NC = lax.top_k(scores_NE, self.per_token)
        if self.normalize:
            weights_NC = weights_NC / jnp.sum(weights_NC, axis=-1, keepdims=True)
        return Routing(experts_NC, weights_NC, scores_NE, logits_NE)


class ExpertMatrices(eqx.Module):
    """A matrix for each expert: rows of x, sorted by expert, times the matrix of their expert.

    Communication  none.
    """

    weight: Float[Array, "E D F"] = param(MP, None, None, kind=ParameterKind.experts)

    def __init__(self, experts: int, features_in: int, features_out: int, *, std: float, key: PRNGKeyArray):
        self.weight = std * jax.random.normal(key, (experts, features_in, features_out))

    def __call__(
        self, x_RD: Float[Array, "R D"], sizes_E: Int[Array, " E"], multiply: GroupedMatmul
    ) -> Float[Array, "R F"]:
        return multiply(*_varying_alike(x_RD, self.weight.astype(x_RD.dtype), sizes_E))


class Experts(eqx.Module):
    """y = sum over the chosen experts e of weight_e (activation(x @ gate_e) * (x @ up_e)) @ down_e, plus the MLP that
    all tokens share, if there is one.

    Communication  `enter` and `reduce` of `tp`, as one column-parallel and one row-parallel product; under
                   CollectiveMatmul these are single collectives, as a ring would need all positions to sort them.  The
                   router's (see there), and with an auxiliary loss the all-reduce of a scalar over mp.
    """

    router: Router
    gate: ExpertMatrices
    up: ExpertMatrices
    down: ExpertMatrices
    shared: GatedMlp | None
    """The shared expert."""
    activation: Callable[[Array], Array] = eqx.field(static=True)
    balance_loss: float = eqx.field(static=True)
    z_loss: float = eqx.field(static=True)

    def __init__(self, config: ModelConfig, *, std: float, std_out: float, key: PRNGKeyArray):
        key_router, key_gate, key_up, key_down, key_shared = jax.random.split(key, 5)
        sizes = config.experts, config.width, config.ffn
        self.router = Router(config, key=key_router)
        self.gate = ExpertMatrices(*sizes, std=std, key=key_gate)
        self.up = ExpertMatrices(*sizes, std=std, key=key_up)
        self.down = ExpertMatrices(config.experts, config.ffn, config.width, std=std_out, key=key_down)
        shared = config.width, config.shared_expert_ffn
        self.shared = MLPS[config.mlp](*shared, std=std, std_out=std_out, key=key_shared) if shared[1] else None
        self.activation = ACTIVATIONS[config.mlp]
        self.balance_loss, self.z_loss = config.router_balance_loss, config.router_z_loss

    def __call__(
        self, x_BTD: Float[Array, "B _ D"], context: Context
    ) -> tuple[Float[Array, "B _ D"], Float[Array, ""] | None]:
        """(y, the auxiliary loss summed over tokens)."""
        h_BTD = context.tp.enter(x_BTD)
        h_ND = h_BTD.reshape(-1, h_BTD.shape[2])
        with jax.named_scope("router"):
            routing = self.router(h_ND)
        y_ND = self._chosen(h_ND, routing, context.grouped_matmul)
        y_BTD = y_ND.reshape(h_BTD.shape)
        if self.shared is not None:
            with jax.named_scope("shared_expert"):
                hidden_BTF = self.shared.activate(*(layer(h_BTD) for layer in self.shared.inputs))
                y_BTD = y_BTD + self.shared.down(hidden_BTF)
        return context.tp.reduce(y_BTD), self._auxiliary_loss(routing, h_BTD.shape[0])

    def _chosen(self, h_ND: Float[Array, "N D"], routing: Routing, multiply: GroupedMatmul) -> Float[Array, "N D"]:
        """The weighted sum {+mp} of the chosen experts of this device, for each token."""
        rows = sort_by_expert(routing.experts_NC, self.gate.weight.shape[0])
        is_chosen = rows.is_chosen[:, None]
        x_RD = jnp.where(is_chosen, h_ND[rows.token], 0)
        gate_RF = checkpoint_name(self.gate(x_RD, rows.sizes, multiply), GATE)
        up_RF = checkpoint_name(self.up(x_RD, rows.sizes, multiply), UP)
        weights_R = jnp.where(rows.is_chosen, routing.weights_NC.ravel()[rows.pair], 0).astype(up_RF.dtype)
        hidden_RF = self.activation(gate_RF) * up_RF * weights_R[:, None]
        y_RD = jnp.where(is_chosen, self.down(hidden_RF, rows.sizes, multiply), 0)
        return jnp.zeros_like(h_ND).at[rows.token].add(y_RD)

    def _auxiliary_loss(self, routing: Routing, batch: int) -> Float[Array, ""] | None:
        """The router's losses, summed over tokens; None where neither has a weight.  Communication: one all-reduce of
        a scalar over mp, whose devices all have the same loss: each contributes 1/mp of it and of its gradient."""
        if not self.balance_loss and not self.z_loss:
            return None
        loss = self.balance_loss * balance_loss(routing, batch) + self.z_loss * router_z_loss(routing.logits_NE)
        return lax.pmean(loss, MP)


class Rows(NamedTuple):
    """The pairs of a token and an expert of this device, sorted by expert."""

    pair: Int[Array, " R"]
    """The number n C + c of the pair of token n and its expert number c."""
    token: Int[Array, " R"]
    sizes: Int[Array, " E"]
    """How many rows each expert of this device has."""
    is_chosen: Array
    """[R]: whether it is a row of an expert of this device; those that are not come last."""


def sort_by_expert(experts_NC: Int[Array, "N C"], experts: int) -> Rows:
    """The rows of this device's `experts` experts.  Communication: none."""
    tokens, chosen = experts_NC.shape
    local_P = experts_NC.ravel() - lax.axis_index(MP) * experts
    group_P = jnp.where((local_P >= 0) & (local_P < experts), local_P, experts)
    pair_R = jnp.argsort(group_P, stable=True)[: tokens * min(chosen, experts)]
    sizes_E = jnp.sum(group_P[:, None] == jnp.arange(experts)[None], axis=0, dtype=jnp.int32)
    return Rows(pair_R, pair_R // chosen, sizes_E, group_P[pair_R] < experts)


def even_share(config: ModelConfig, mp: int) -> float:
    """The share of its R rows that a device multiplies where all experts are chosen equally often."""
    if not config.experts:
        return 1.0
    return config.experts_per_token / mp / min(config.experts_per_token, config.experts // mp)


def balance_loss(routing: Routing, batch: int) -> Float[Array, ""]:
    """T sum_e f_e P_e of each sequence, summed over sequences: f_e is E / C times the fraction of the pairs of the
    sequence that chose expert e, and P_e the mean of its share of the scores; 1 per token where both are uniform.  Of
    sequences that are split along time, the part of one of R devices, which is the same for all: 1 / R of it.

    Fedus et al. 2021, "Switch Transformers", section 2.2, https://arxiv.org/abs/2101.03961; of each sequence by itself
    as in DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2, https://arxiv.org/abs/2412.19437.  A product of two means over
    a microbatch, or over the tokens of a device, would depend on how the batch is divided.

    Communication  none; over the axes that shard time one all-reduce of two arrays of B E values.
    """
    tokens, experts = routing.scores_NE.shape
    time, chosen = tokens // batch, routing.experts_NC.shape[1]
    one_hot_NE = jnp.sum(routing.experts_NC[:, :, None] == jnp.arange(experts)[None, None], axis=1)
    counts_BE = jnp.sum(one_hot_NE.reshape(batch, time, experts), axis=1)
    shares_NE = routing.scores_NE / jnp.sum(routing.scores_NE, axis=-1, keepdims=True)
    mean_BE = jnp.mean(shares_NE.reshape(batch, time, experts), axis=1)
    over = axes_of(Role.time)
    counts_BE, mean_BE = all_reduce((counts_BE, mean_BE), over)  # R times the mean
    return jnp.sum(counts_BE.astype(mean_BE.dtype) * mean_BE) * (experts / chosen / ranks(over) ** 2)


def router_z_loss(logits_NE: Float[Array, "N E"]) -> Float[Array, ""]:
    """The squared log of the softmax's denominator, summed over tokens.  Zoph et al. 2022, "ST-MoE", section 3.2,
    https://arxiv.org/abs/2202.08906"""
    return jnp.sum(jnp.square(jax.nn.logsumexp(logits_NE, axis=-1)))


def _varying_alike(*arrays: Array) -> tuple[Array, ...]:
    """`arrays`, each typed as varying over all axes that any of them varies over."""
    axes = tuple(frozenset().union(*map(varying_axes, arrays)))
    return tuple(mark_varying(array, axes) for array in arrays)
