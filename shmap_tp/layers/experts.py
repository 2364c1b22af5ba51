"""A mixture of experts in place of the MLP, the experts sharded over mp, over ranks of tokens (ep), or both.

Shazeer et al. 2017, "Outrageously Large Neural Networks", https://arxiv.org/abs/1701.06538
Jiang et al. 2024, "Mixtral of Experts", section 2.1, https://arxiv.org/abs/2401.04088

B batch, T time, D model width, F hidden width, E experts, C chosen experts of a token, N = B T tokens, R rows: pairs of
a token and one of its experts.  E/: whole experts, sharded over ep and mp.  {+mp}: a partial sum, not yet reduced.

    x  --enter-->  [N D]  --router-->  C experts of each token, and their weights
       --dispatch: the rows of this device's experts, sorted by expert-->  [R D]
       --gate, up[E/ D F]-->  [R F]  --gated, times weights-->  [R F]  --down[E/ F D]-->  [R D]
       --dispatch: back to their tokens, added up-->  [N D] {+mp}  --reduce-->  y

How rows come to a device is the dispatch's affair (`expert_dispatch.py`): no communication over mp, whose ranks have
the same tokens, and an all-to-all over ep, whose ranks have others.

The rows are weighted before `down`: the gradient of the weights then needs no result of it.

The router is replicated, and every device of mp chooses alike.  Its weights reach the output through the experts of the
device alone: the gradient of the router is a partial sum over mp, as that of x is, and `mark_varying` and `enter` say
so.
"""

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from shmap_tp.config.activation_names import GATE, UP
from shmap_tp.config.choices import RouterScores
from shmap_tp.config.schema import Config, MeshConfig, ModelConfig
from shmap_tp.errors import UserError
from shmap_tp.layers.context import Context
from shmap_tp.layers.expert_dispatch import dispatch_of_mesh
from shmap_tp.layers.grouped_matmul import GroupedMatmul
from shmap_tp.layers.mlp import GATES, MLPS, Gate, MlpLayer
from shmap_tp.parallel.collectives import all_reduce, mark_varying, varying_axes
from shmap_tp.parallel.context_parallel import own_chunks
from shmap_tp.parallel.eight_bit import EightBit
from shmap_tp.parallel.mesh import EP, MP, Role, axes_of, ranks
from shmap_tp.parallel.partitioning import ParameterKind, param


class Routing(NamedTuple):
    """What a router says about each token."""

    experts_NC: Int[Array, "N C"]
    weights_NC: Float[Array, "N C"]
    """float32."""
    scores_NE: Float[Array, "N E"]
    """The scores of all experts; float32."""
    logits_NE: Float[Array, "N E"]
    """float32."""
    is_token_N: Bool[Array, " N"] | None = None
    """None: all are."""

    def among(self, is_token_N: Bool[Array, " N"] | None) -> "Routing":
        """The same routing, but slots without a token choose expert number E, which no device has."""
        if is_token_N is None:
            return self
        experts_NC = jnp.where(is_token_N[:, None], self.experts_NC, self.scores_NE.shape[1])
        return self._replace(experts_NC=experts_NC, is_token_N=is_token_N)

    def of_tokens(self, x: Float[Array, "N ..."]) -> Float[Array, "N ..."]:
        """x, and 0 for what is no token."""
        if self.is_token_N is None:
            return x
        return jnp.where(self.is_token_N.reshape(-1, *[1] * (x.ndim - 1)), x, 0)


class RouterStatistics(NamedTuple):
    """What a step counts in one layer, of this device's tokens; the sum over devices is that of all tokens."""

    load_E: Int[Array, " E"]
    """How many tokens chose each expert, counted by the first rank of mp: an exact sum, on every mesh the same."""
    entropy: Float[Array, ""]
    """The entropy of the scores of each token, as shares, in nats; summed over tokens."""
    dropped: Float[Array, ""]
    """How many pairs of a token and an expert were not computed, for want of capacity."""

    def metrics(self, tokens: int | Int[Array, ""]) -> dict[str, Float[Array, ""]]:
        """The load of the expert that most tokens of a layer chose, relative to the mean; the mean entropy; the share
        of pairs that were dropped.  The arrays are sums over a step of so many tokens, stacked over layers."""
        layers, experts = self.load_E.shape
        load_LE = self.load_E.astype(self.entropy.dtype)
        pairs = jnp.sum(load_LE)
        return {
            "expert_load": jnp.max(load_LE) * (layers * experts) / pairs,
            "router_entropy": jnp.sum(self.entropy) / jnp.asarray(layers * tokens, self.entropy.dtype),
            "experts_dropped": jnp.sum(self.dropped) / pairs,
        }


class Router(eqx.Module):
    """scores = softmax(x @ w + b) or sigmoid(x @ w + b) in float32; the C largest are chosen, of equal ones the first.
    Their scores are the weights; `normalize` divides these by their sum.

    A softmax of the chosen logits alone, as Mixtral has it, is the same as `normalize` with a softmax of all.

    With a choice bias the experts with the largest score + choice bias are chosen; weights are scores without it.  The
    bias has no gradient, and moves after each step by the load of all tokens of the step (`balanced`).  Wang et al.
    2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", https://arxiv.org/abs/2408.15664;
    DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2, https://arxiv.org/abs/2412.19437

    Communication  backward: one all-reduce of dw (D E values) and db over mp, unless the tensor-parallel mode marked
                   them as varying before: then they are reduced once per step.
    """

    weight: Float[Array, "D E"] = param(None, None)
    bias: Float[Array, " E"] | None = param(None)
    choice_bias: Float[Array, " E"] | None = param(None, trained=False)
    """float32."""
    per_token: int = eqx.field(static=True)
    bias_rate: float = eqx.field(static=True)
    """By how much a step moves the bias of an expert."""
    scores: RouterScores = eqx.field(static=True)
    normalize: bool = eqx.field(static=True)

    def __init__(self, config: ModelConfig, *, key: PRNGKeyArray):
        self.weight = config.init_std * jax.random.normal(key, (config.width, config.experts))
        self.bias = jnp.zeros(config.experts) if config.mlp_bias else None
        self.per_token, self.scores = config.experts_per_token, config.router_scores
        self.normalize = config.router_normalize
        self.choice_bias = None if config.router_bias_rate is None else jnp.zeros(config.experts)
        self.bias_rate = config.router_bias_rate or 0.0

    def __call__(self, x_ND: Float[Array, "N D"]) -> Routing:
        weight_DE = mark_varying(self.weight, MP).astype(x_ND.dtype)
        wide = x_ND.dtype if x_ND.dtype.itemsize > 4 else jnp.float32
        logits_NE = jnp.matmul(x_ND, weight_DE, preferred_element_type=wide)
        if self.bias is not None:
            logits_NE = logits_NE + mark_varying(self.bias, MP).astype(wide)[None]
        of_all = jax.nn.sigmoid if self.scores == RouterScores.sigmoid else jax.nn.softmax
        scores_NE = of_all(logits_NE)
        if self.choice_bias is None:
            weights_NC, experts_NC = lax.top_k(scores_NE, self.per_token)
        else:
            biased_NE = lax.stop_gradient(scores_NE) + mark_varying(self.choice_bias, MP)[None]
            _, experts_NC = lax.top_k(biased_NE, self.per_token)
            weights_NC = jnp.take_along_axis(scores_NE, experts_NC, axis=1)
        if self.normalize:
            weights_NC = weights_NC / jnp.sum(weights_NC, axis=-1, keepdims=True)
        return Routing(experts_NC, weights_NC, scores_NE, logits_NE)

    def balanced(self, load_LE: Int[Array, "L E"], tokens: int | Int[Array, ""], good: Bool[Array, ""]) -> "Router":
        """The routers of all layers after a step of so many tokens: the bias of an expert grows by the rate where fewer
        tokens chose it than the mean, and falls by it where more did.  Not `good`: unchanged.  Communication: none."""
        less, more = -(-tokens * self.per_token // load_LE.shape[1]), tokens * self.per_token // load_LE.shape[1]
        sign_LE = jnp.where(load_LE < less, 1.0, jnp.where(load_LE > more, -1.0, 0.0))
        bias_LE = jnp.where(good, self.choice_bias + self.bias_rate * sign_LE, self.choice_bias)
        return eqx.tree_at(lambda router: router.choice_bias, self, bias_LE)


class ExpertMatrices(eqx.Module):
    """A matrix for each expert: rows of x, sorted by expert, times the matrix of their expert; and maybe a bias.

    Communication  none.
    """

    weight: Float[Array, "E D F"] = param((EP, MP), None, None, kind=ParameterKind.experts)
    bias: Float[Array, "E F"] | None = param((EP, MP), None, kind=ParameterKind.vector)

    def __init__(
        self, experts: int, features_in: int, features_out: int, *, std: float, key: PRNGKeyArray, bias: bool = False
    ):
        self.weight = std * jax.random.normal(key, (experts, features_in, features_out))
        self.bias = jnp.zeros((experts, features_out)) if bias else None

    def add_bias(self, y_RF: Float[Array, "R F"], rows: "ExpertRows", weights_R1: Array | float = 1) -> Array:
        """y + weight b of each row's expert.  Places without a row add nothing to the gradient of a bias."""
        if self.bias is None:
            return y_RF
        bias_EF, expert_R = _varying_alike(self.bias.astype(y_RF.dtype), rows.expert_R)
        return y_RF + weights_R1 * jnp.where(rows.is_row_R[:, None], bias_EF[expert_R], 0)


class ExpertRows(NamedTuple):
    """Which rows have an expert, and which expert; rows are sorted by expert, and others stand after them."""

    is_row_R: Bool[Array, " R"]
    expert_R: Int[Array, " R"]

    @classmethod
    def of(cls, rows: int, sizes_E: Int[Array, " E"]) -> "ExpertRows":
        """`rows` rows, sorted by expert; each expert has as many as `sizes_E` says."""
        ends_E, number_R = jnp.cumsum(sizes_E), jnp.arange(rows)
        expert_R = jnp.sum(number_R[:, None] >= ends_E[None], axis=1)
        return cls(number_R < ends_E[-1], jnp.minimum(expert_R, len(sizes_E) - 1))


class Experts(eqx.Module):
    """y = sum over the chosen experts e of weight_e (gated(x @ gate_e + b, x @ up_e + b) @ down_e + b), plus the MLP
    that all tokens share, if there is one.

    Communication  `enter` and `reduce` of `tp`, as one column-parallel and one row-parallel product; under
                   CollectiveMatmul these are single collectives, as a ring would need all positions to sort them.  The
                   router's (see there), and with an auxiliary loss the all-reduce of a scalar over mp.
    """

    router: Router
    gate: ExpertMatrices
    up: ExpertMatrices
    down: ExpertMatrices
    shared: MlpLayer | None
    """The shared expert."""
    gated: Gate = eqx.field(static=True)
    balance_loss: float = eqx.field(static=True)
    z_loss: float = eqx.field(static=True)
    capacity: float | None = eqx.field(static=True)
    """As of `OverTokens`."""

    def __init__(self, config: ModelConfig, *, std: float, std_out: float, key: PRNGKeyArray):
        key_router, key_gate, key_up, key_down, key_shared = jax.random.split(key, 5)
        sizes, bias = (config.experts, config.width, config.ffn), config.mlp_bias
        self.router = Router(config, key=key_router)
        self.gate = ExpertMatrices(*sizes, std=std, key=key_gate, bias=bias)
        self.up = ExpertMatrices(*sizes, std=std, key=key_up, bias=bias)
        self.down = ExpertMatrices(config.experts, config.ffn, config.width, std=std_out, key=key_down, bias=bias)
        shared = config.width, config.shared_expert_ffn
        self.shared = MLPS[config.mlp](*shared, std=std, std_out=std_out, key=key_shared) if shared[1] else None
        self.gated = GATES[config.mlp]
        self.balance_loss, self.z_loss = config.router_balance_loss, config.router_z_loss
        self.capacity = config.expert_capacity

    def __call__(
        self, x_BTD: Float[Array, "B _ D"], context: Context
    ) -> tuple[Float[Array, "B _ D"], Float[Array, ""] | None, RouterStatistics]:
        """(y, the auxiliary loss summed over tokens, what became of the tokens)."""
        h_BTD = context.tp.enter(x_BTD)
        h_ND = h_BTD.reshape(-1, h_BTD.shape[2])
        with jax.named_scope("router"):
            is_token = context.is_token
            routing = self.router(h_ND).among(None if is_token is None else is_token.ravel())
        y_ND, dropped = self._chosen(h_ND, routing, context.grouped_matmul)
        y_BTD = y_ND.reshape(h_BTD.shape)
        if self.shared is not None:
            with jax.named_scope("shared_expert"):
                hidden_BTF = self.shared.activate(*(layer(h_BTD) for layer in self.shared.inputs))
                y_BTD = y_BTD + self.shared.down(hidden_BTF)
        loss = self._auxiliary_loss(routing, h_BTD.shape[0], context.segments)
        return context.tp.reduce(y_BTD), loss, router_statistics(routing, dropped)

    def _chosen(
        self, h_ND: Float[Array, "N D"], routing: Routing, multiply: GroupedMatmul
    ) -> tuple[Float[Array, "N D"], Int[Array, ""]]:
        """(the weighted sum {+mp} of the chosen experts, for each token; how many rows were dropped)."""

        @jax.named_scope("experts")
        def compute(x_RD: Array, weights_R: Array, sizes_E: Array) -> Array:
            rows = ExpertRows.of(len(x_RD), sizes_E)
            inputs = self.gate, self.up
            products_RF = _products(multiply, x_RD, inputs, sizes_E)
            gate_RF, up_RF = (layer.add_bias(y, rows) for layer, y in zip(inputs, products_RF, strict=True))
            gate_RF, up_RF = checkpoint_name(gate_RF, GATE), checkpoint_name(up_RF, UP)
            weights_R1 = jnp.where(rows.is_row_R, weights_R, 0)[:, None].astype(up_RF.dtype)
            hidden_RF = self.gated(gate_RF, up_RF) * weights_R1
            (y_RD,) = _products(multiply, hidden_RF, (self.down,), sizes_E)
            return self.down.add_bias(y_RD, rows, weights_R1)

        tokens = None if routing.is_token_N is None else jnp.sum(routing.is_token_N, dtype=jnp.int32)
        dispatch = dispatch_of_mesh(self.capacity, tokens)
        return dispatch(h_ND, routing.experts_NC, routing.weights_NC, self.gate.weight.shape[0], compute)

    def _auxiliary_loss(
        self, routing: Routing, batch: int, segments_BT: Int[Array, "B row"] | None
    ) -> Float[Array, ""] | None:
        """The router's losses, summed over tokens; None where neither has a weight.  Communication: one all-reduce of
        a scalar over mp, whose devices all have the same loss: each contributes 1/mp of it and of its gradient."""
        if not self.balance_loss and not self.z_loss:
            return None
        balance = balance_loss(routing, batch, segments_BT)
        loss = self.balance_loss * balance + self.z_loss * router_z_loss(routing)
        return lax.pmean(loss, MP)


def _products(
    multiply: GroupedMatmul, x_RD: Array, layers: tuple[ExpertMatrices, ...], sizes_E: Array
) -> tuple[Array, ...]:
    """x times the matrices of each layer."""
    weights = (layer.weight for layer in layers)
    weights = tuple(w if isinstance(w, EightBit) else w.astype(x_RD.dtype) for w in weights)
    operands, structure = jax.tree.flatten((x_RD, weights, sizes_E))
    return multiply(*jax.tree.unflatten(structure, _varying_alike(*operands)))


def rows_of_a_token(config: ModelConfig, mesh: MeshConfig) -> float:
    """R / N: how many rows a device has room for, for each of its tokens."""
    devices, chosen = mesh.ep * mesh.mp, config.experts_per_token
    for_a_rank = min(chosen, config.experts // devices)
    if mesh.ep > 1 and config.expert_capacity is not None:
        for_a_rank = min(for_a_rank, config.expert_capacity * chosen / devices)
    return float(mesh.ep * for_a_rank)


def even_share(config: ModelConfig, mesh: MeshConfig) -> float:
    """The share of its R rows that a device multiplies where all experts are chosen equally often."""
    return config.experts_per_token / mesh.mp / rows_of_a_token(config, mesh) if config.experts else 1.0


def drops_tokens(config: Config) -> bool:
    """Whether the experts of `config` may leave out rows for want of capacity."""
    return bool(config.model.experts) and config.model.expert_capacity is not None and config.mesh.ep > 1


def balance_loss(routing: Routing, batch: int, segments_BT: Int[Array, "B row"] | None = None) -> Float[Array, ""]:
    """T sum_e f_e P_e of each document, of T tokens, summed over documents: f_e is E / C times the fraction of the
    pairs of the document that chose expert e, and P_e the mean of its share of the scores; 1 per token where both are
    uniform.  Without segments each row is a document.  Where rows are split along time, each of R devices has the
    same part of it, 1 / R.

    Fedus et al. 2021, "Switch Transformers", section 2.2, https://arxiv.org/abs/2101.03961; of each document by itself
    as in DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2, https://arxiv.org/abs/2412.19437.  A product of two means over
    a microbatch, a packed row or the tokens of a device would depend on how the documents are divided.

    Communication  none; over the axes that shard time one all-reduce of two arrays of B E values, or with segments of
                   two of B row E values and one of B row.
    """
    tokens, experts = routing.scores_NE.shape
    time, chosen = tokens // batch, routing.experts_NC.shape[1]
    one_hot_NE = jnp.sum(routing.experts_NC[:, :, None] == jnp.arange(experts)[None, None], axis=1)
    sums, over = partial(_by_document, batch=batch, segments_BT=segments_BT), axes_of(Role.time)
    counts_SE = sums(one_hot_NE)
    shares_NE = routing.scores_NE / jnp.sum(routing.scores_NE, axis=-1, keepdims=True)
    size = time
    if segments_BT is not None or routing.is_token_N is not None:
        ones_N1 = jnp.ones_like(shares_NE[:, :1])
        size = jnp.maximum(all_reduce(sums(routing.of_tokens(ones_N1)), over), 1) / ranks(over)
    mean_SE = sums(routing.of_tokens(shares_NE)) / size
    counts_SE, mean_SE = all_reduce((counts_SE, mean_SE), over)  # R times the mean
    return jnp.sum(counts_SE.astype(mean_SE.dtype) * mean_SE) * (experts / chosen / ranks(over) ** 2)


def _by_document(x_NE: Shaped[Array, "N E"], batch: int, segments_BT: Int[Array, "B row"] | None) -> Array:
    """The sums of x over the tokens of each document, [S E]: S documents that the rows may have, without segments B."""
    if segments_BT is None:
        return jnp.sum(x_NE.reshape(batch, -1, x_NE.shape[1]), axis=1)
    rows, row = segments_BT.shape
    document_N = (jnp.arange(rows)[:, None] * row + own_chunks(segments_BT)).ravel()
    zeros_SE, document_N, x_NE = _varying_alike(jnp.zeros((rows * row, x_NE.shape[1]), x_NE.dtype), document_N, x_NE)
    return zeros_SE.at[document_N].add(x_NE)


def router_statistics(routing: Routing, dropped: Int[Array, ""]) -> RouterStatistics:
    """Without gradients.  Communication: none."""
    scores_NE, wide = lax.stop_gradient(routing.scores_NE), routing.scores_NE.dtype
    shares_NE = scores_NE / jnp.sum(scores_NE, axis=-1, keepdims=True)
    entropy = -jnp.sum(routing.of_tokens(jax.scipy.special.xlogy(shares_NE, shares_NE)))
    is_of_NCE = routing.experts_NC[:, :, None] == jnp.arange(scores_NE.shape[1])[None, None]
    load_E = jnp.sum(is_of_NCE, axis=(0, 1), dtype=jnp.int32)
    load_E = jnp.where(lax.axis_index(MP) == 0, load_E, 0)
    return RouterStatistics(load_E, entropy / ranks((MP,)), dropped.astype(wide))


def balanced_routers(params: Any, statistics: Any, tokens: int | Int[Array, ""], good: Bool[Array, ""]) -> Any:
    """`params` after a step: the biases of its routers are `Router.balanced`, everything else is as it was.

    `statistics` are the statistics of the blocks, summed over the step.  Raises UserError if no router made them.
    """

    def balance(node: Any) -> Any:
        if not (isinstance(node, Router) and node.bias_rate):
            return node
        if not isinstance(statistics, RouterStatistics):
            raise UserError(
                "a router has a choice bias, but the extras of its block have no RouterStatistics to move it by; "
                "return those of Experts as SequentialBlock does, or use model.router_bias_rate=null"
            )
        return node.balanced(statistics.load_E, tokens, good)

    return jax.tree.map(balance, params, is_leaf=lambda node: isinstance(node, Router))


def router_z_loss(routing: Routing) -> Float[Array, ""]:
    """The squared log of the softmax's denominator, summed over tokens.  Zoph et al. 2022, "ST-MoE", section 3.2,
    https://arxiv.org/abs/2202.08906"""
    return jnp.sum(routing.of_tokens(jnp.square(jax.nn.logsumexp(routing.logits_NE, axis=-1))))


def _varying_alike(*arrays: Array) -> tuple[Array, ...]:
    """`arrays`, each typed as varying over all axes that any of them varies over."""
    axes = tuple(frozenset().union(*map(varying_axes, arrays)))
    return tuple(mark_varying(array, axes) for array in arrays)
