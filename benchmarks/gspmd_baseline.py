"""The GSPMD baseline: the same model and training step under plain `jax.jit`, sharded by the compiler.

Written as in T5X and MaxText: global shapes everywhere, weights sharded by the spec trees of shmap_tp, a sharding
constraint on every activation that determines the partitioning, gradients accumulated over a scan of microbatches.  The
compiler chooses the collectives (GSPMD; since jax 0.7 Shardy propagates the shardings).  Parameters, norms, matmuls,
attention, remat policies, clipping and optimizer are those of shmap_tp, so that the two programs differ only in who
shards them.  `mesh.tensor_parallel` is not used.

B batch, T time, D model width, F hidden width, H query heads, N key/value heads, K head dim, V vocabulary rows, padded.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int
from model_options import refuse_options

from shmap_tp.config.activation_names import QUERY_KEY_VALUE, SUBLAYER_OUTPUT
from shmap_tp.config.choices import Remat
from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.layers.attention import Attention, Chunked, checkpoint_per_head
from shmap_tp.layers.causal_attention import Pattern
from shmap_tp.layers.context import input_ids
from shmap_tp.layers.linear import Linear, matmul
from shmap_tp.layers.mlp import MlpLayer
from shmap_tp.layers.positions import Alibi, PositionEncoding, alibi_slopes
from shmap_tp.layers.xla_workarounds import recompute_from
from shmap_tp.model.blocks import ParallelBlock, SequentialBlock, checkpointed
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.mesh import DP, MP, token_axes
from shmap_tp.parallel.tensor_parallel import AllReduce
from shmap_tp.training.bad_steps import StepOutcome, select_tree
from shmap_tp.training.optimizer import clip_by_global_norm, make_optimizer, update_norms
from shmap_tp.training.step import CONFIGURED, Components, State, StepFunctions, build_step_functions

SUPPORTED = (
    *("norm", "norm_epsilon", "norm_bias", "mlp", "rotary_base", "rotary_dim", "rotary_pairing", "rotary_scaling"),
    *("rotary_scaling_factor", "rotary_low_frequency_factor", "rotary_high_frequency_factor"),
    *("rotary_original_context", "rotary_amplitude"),
)
"""Options of a model that are computed by the modules of shmap_tp which are called here."""


@dataclasses.dataclass(frozen=True)
class Constraint:
    """constrain(x, DP, None, MP) constrains x to have its first dim sharded over dp and its third over mp."""

    mesh: Mesh

    def __call__(self, x: Array, *axes: str | None) -> Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, self.spec(*axes)))

    def spec(self, *axes: str | None) -> P:
        """The PartitionSpec; DP stands for all axes that shard tokens."""
        return P(*(token_axes(self.mesh.axis_names) if axis == DP else axis for axis in axes))


def attention(
    layer: Attention, h_BTD: Float[Array, "B T D"], positions: PositionEncoding, constrain: Constraint
) -> Float[Array, "B T D"]:
    q_BTHK = constrain(layer.query(h_BTD), DP, None, MP, None)
    k_BTNK, v_BTNK = (
        constrain(
            jnp.einsum("btd,dhk->bthk", h_BTD, key_value_weight(each, constrain).astype(h_BTD.dtype)),
            DP,
            None,
            MP,
            None,
        )
        for each in (layer.key, layer.value)
    )
    q_BTHK, k_BTNK = positions.rotate(q_BTHK), positions.rotate(k_BTNK)
    q_BTHK, k_BTNK, v_BTNK = (checkpoint_per_head(x, QUERY_KEY_VALUE) for x in (q_BTHK, k_BTNK, v_BTNK))
    slopes_H = jnp.asarray(alibi_slopes(positions.heads)) if isinstance(positions, Alibi) else None
    mixed_BTHK = attend(layer, Pattern(slopes_H), constrain)(q_BTHK, k_BTNK, v_BTNK)
    mixed_BTHK = constrain(mixed_BTHK, DP, None, MP, None)
    return layer.out(mixed_BTHK)


def attend(layer: Attention, pattern: Pattern, constrain: Constraint) -> Callable[..., Float[Array, "B T H K"]]:
    """The attention function of all heads.

    The compiler cannot shard a kernel: under shard_map each device runs it on its own heads.  Kernels have no ALiBi.
    Residuals are not deferred to the end of the block: the compiler schedules offload copies here.
    """
    if isinstance(layer.attend, Chunked):
        return lambda *qkv: layer.attend(*qkv, pattern)[0]
    kernel, heads = dataclasses.replace(layer.attend, defer=False), constrain.spec(DP, None, MP, None)
    return jax.shard_map(
        lambda *qkv: kernel(*qkv, pattern)[0], mesh=constrain.mesh, in_specs=(heads, heads, heads), out_specs=heads
    )


def key_value_weight(layer: Linear, constrain: Constraint) -> Float[Array, "D N K"]:
    """The weight; where mp > N each head is repeated, so that every device has the head that it needs."""
    repeats = max(1, constrain.mesh.shape[MP] // layer.outputs[0])
    return constrain(jnp.repeat(layer.weight, repeats, axis=1), None, MP, None)


def mlp(layer: MlpLayer, h_BTD: Float[Array, "B T D"], constrain: Constraint) -> Float[Array, "B T D"]:
    return layer.down(layer.activate(*(constrain(column(h_BTD), DP, None, MP) for column in layer.inputs)))


def residual(x_BTD: Float[Array, "B T D"], constrain: Constraint) -> Float[Array, "B T D"]:
    """The output of a sublayer, replicated over mp, named so that a remat policy can save it."""
    return checkpoint_name(constrain(x_BTD, DP, None, None), SUBLAYER_OUTPUT)


def apply_block(
    block: ParallelBlock | SequentialBlock,
    x_BTD: Float[Array, "B T D"],
    positions: PositionEncoding,
    constrain: Constraint,
) -> Float[Array, "B T D"]:
    if isinstance(block, ParallelBlock):
        h_BTD = constrain(block.norm(x_BTD), DP, None, None)
        return x_BTD + residual(
            attention(block.attention, h_BTD, positions, constrain) + mlp(block.mlp, h_BTD, constrain), constrain
        )
    h_BTD = constrain(block.attention_norm(x_BTD), DP, None, None)
    x_BTD = x_BTD + residual(attention(block.attention, h_BTD, positions, constrain), constrain)
    return x_BTD + residual(mlp(block.mlp, constrain(block.mlp_norm(x_BTD), DP, None, None), constrain), constrain)


def transformer(
    params: Transformer, ids_BT: Int[Array, "B T"], dtype: DTypeLike, constrain: Constraint
) -> Float[Array, "B T V"]:
    """Logits, computed in `dtype`; negative ids are padding, and their embedding is zero."""
    rows_BTD = params.embedding.weight.at[ids_BT].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    x_BTD = params.positions.add_to_input(residual(rows_BTD.astype(dtype), constrain), AllReduce())

    def layer(x_BTD: Array, block: ParallelBlock | SequentialBlock) -> tuple[Array, None]:
        return constrain(apply_block(block, x_BTD, params.positions, constrain), DP, None, None), None

    if params.remat != Remat.none:
        layer = checkpointed(layer, params.remat, params.offload)
    x_BTD, _ = lax.scan(layer, x_BTD, params.blocks)
    table = params.embedding if params.head is None else params.head
    return constrain(matmul(constrain(params.norm(x_BTD), DP, None, None), table.weight.T), DP, None, MP)


def cross_entropy(
    logits_BTV: Float[Array, "B T V"], targets_BT: Int[Array, "B T"], vocabulary: int
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(-log p(target), log z), both 0 where the target is ignored.

    The logit of the target is a one-hot sum, which the compiler can shard over V without a gather.
    """
    wide = jnp.promote_types(logits_BTV.dtype, jnp.float32)
    logits_BTV = logits_BTV.astype(wide)
    columns_V = jnp.arange(logits_BTV.shape[-1])
    if logits_BTV.shape[-1] > vocabulary:
        logits_BTV = jnp.where((columns_V < vocabulary)[None, None], logits_BTV, jnp.finfo(wide).min)
    logz_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    is_target_BTV = targets_BT[..., None] == columns_V[None, None]
    target_BT = jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0.0), axis=-1)
    counted_BT = targets_BT >= 0
    return jnp.where(counted_BT, logz_BT - target_BT, 0.0), jnp.where(counted_BT, logz_BT, 0.0)


def build_gspmd_programs(
    config: Config, mesh: Mesh, dtype: DTypeLike, components: Components = CONFIGURED, end_of_text: int | None = None
) -> StepFunctions:
    """The step functions of `config` on `mesh`, with step and evaluation sharded by the compiler.

    Raises UserError if documents are isolated, or the model has biases, head norms, two norms in a parallel block or an
    embedding scale.
    """
    refuse_options(config.model, "the GSPMD baseline", supported=SUPPORTED)
    assert components == CONFIGURED, "the GSPMD baseline is written for the blocks of this project"
    if end_of_text is not None:
        raise UserError("the GSPMD baseline isolates no documents; compare with data.documents=joined")
    explicit = build_step_functions(config, mesh, dtype)
    shardings: State = jax.tree.map(lambda x: x.sharding, explicit.shapes)
    replicated, constrain = NamedSharding(mesh, P()), Constraint(mesh)
    optimizer = make_optimizer(config.optimizer)

    def objective(params: Transformer, tokens_BT: Array, counted: Array) -> tuple[Array, Array]:
        logits_BTV = transformer(params, input_ids(tokens_BT[:, :-1]), dtype, constrain)
        nll_BT, logz_BT = cross_entropy(logits_BTV, tokens_BT[:, 1:], config.model.vocabulary)
        loss = jnp.sum(nll_BT) / counted
        return loss + config.train.z_loss * jnp.sum(jnp.square(logz_BT)) / counted, loss

    def step(state: State, tokens_ABT: Array) -> tuple[State, dict[str, Array]]:
        counted = counted_tokens(tokens_ABT)

        def microbatch(total: Any, tokens_BT: Array) -> tuple[Any, None]:
            (_, loss), gradients = jax.value_and_grad(objective, has_aux=True)(state.params, tokens_BT, counted)
            return jax.tree.map(jnp.add, total, (loss, gradients)), None

        zeros = lax.with_sharding_constraint(jax.tree.map(jnp.zeros_like, state.params), shardings.params)
        (loss, gradients), _ = lax.scan(microbatch, (jnp.zeros(()), zeros), tokens_ABT)
        gradients = lax.with_sharding_constraint(gradients, shardings.params)
        gradients, norm = clip_by_global_norm(gradients, config.optimizer.clip_norm)

        def updated_from(gradients: Any) -> tuple[Any, Any]:
            updates, optimizer_state = optimizer.transformation.update(gradients, state.optimizer, state.params)
            return optax.apply_updates(state.params, updates), optimizer_state

        outcome = StepOutcome(loss, norm, *update_norms(state.params, *updated_from(recompute_from(gradients))))
        good, guard = state.guard.update(outcome, config.guard)
        params, optimizer_state = select_tree(good, updated_from(gradients), (state.params, state.optimizer))
        rate = optimizer.schedule(state.step - state.guard.skipped)
        metrics = outcome.metrics() | {"learning_rate": rate} | guard.counts()
        return State(params, optimizer_state, guard, state.step + 1), metrics

    def evaluate(params: Transformer, tokens_ABT: Array) -> tuple[Array, Array]:
        counted = counted_tokens(tokens_ABT)
        return jnp.sum(lax.map(lambda tokens_BT: objective(params, tokens_BT, counted)[1], tokens_ABT)), counted

    return dataclasses.replace(
        explicit,
        step=jax.jit(
            step,
            in_shardings=(shardings, explicit.tokens.sharding),
            out_shardings=(shardings, replicated),
            donate_argnums=0,
        ),
        evaluate=jax.jit(evaluate, in_shardings=(shardings.params, explicit.tokens.sharding), out_shardings=replicated),
    )


def counted_tokens(tokens_ABT: Int[Array, "A B T"]) -> Float[Array, ""]:
    """Number of targets in the step that are not ignored, at least 1."""
    return jnp.maximum(1, jnp.sum(tokens_ABT[..., 1:] >= 0)).astype(float)
