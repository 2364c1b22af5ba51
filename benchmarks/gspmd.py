"""The compiler's twin of shmap_tp.step: the same model and step under plain `jax.jit`, to compare with.

What a good user of jit writes, in the manner of T5X and MaxText: whole shapes everywhere, the weights laid out by
shmap_tp's own spec trees, a sharding constraint on every activation that decides something, gradients accumulated over
a scan of microbatches.  Which collectives that takes is the partitioner's choice (GSPMD; since jax 0.7 the layouts in
between are found by Shardy).  Parameters, norms, matrix products, attention, remat policies, clipping and optimizer are
shmap_tp's, so the two programs differ in who cuts them and in nothing else.  `mesh.tensor_parallel` is not asked.

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

from shmap_tp.config.activation_names import QUERY_KEY_VALUE, SUBLAYER_OUTPUT
from shmap_tp.config.schema import Config, Remat
from shmap_tp.layers.attention import Attention, Chunked, KeyValueHeads, checkpoint_per_head
from shmap_tp.layers.linear import matmul
from shmap_tp.layers.mlp import GeluMlp, SwigluMlp
from shmap_tp.layers.positions import Alibi, PositionEncoding, alibi_slopes
from shmap_tp.model.blocks import ParallelBlock, SequentialBlock
from shmap_tp.model.remat import checkpointed
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.parallel.tensor_parallel import AllReduce
from shmap_tp.training.bad_steps import select_tree
from shmap_tp.training.optimizer import clip_by_global_norm, learning_rate_schedule, make_optimizer
from shmap_tp.training.step import State, StepFunctions, build_step_functions


@dataclasses.dataclass(frozen=True)
class Layout:
    """lay(x, DP, None, MP) is x, to lie on `mesh` with its first dim cut along dp and its third along mp."""

    mesh: Mesh

    def __call__(self, x: Array, *axes: str | None) -> Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*axes)))


def attention(
    layer: Attention, h_BTD: Float[Array, "B T D"], positions: PositionEncoding, lay: Layout
) -> Float[Array, "B T D"]:

    q_BTHK = lay(layer.query(h_BTD), DP, None, MP, None)
    k_BTNK, v_BTNK = (
        lay(jnp.einsum("btd,dhk->bthk", h_BTD, key_value_weight(each, lay).astype(h_BTD.dtype)), DP, None, MP, None)
        for each in (layer.key, layer.value)
    )
    q_BTHK, k_BTNK = positions.rotate(q_BTHK), positions.rotate(k_BTNK)
    q_BTHK, k_BTNK, v_BTNK = (checkpoint_per_head(x, QUERY_KEY_VALUE) for x in (q_BTHK, k_BTNK, v_BTNK))
    slopes_H = jnp.asarray(alibi_slopes(positions.heads)) if isinstance(positions, Alibi) else None
    mixed_BTHK = lay(attend(layer, lay)(q_BTHK, k_BTNK, v_BTNK, slopes_H), DP, None, MP, None)
    return layer.out(mixed_BTHK)


def attend(layer: Attention, lay: Layout) -> Callable[..., Float[Array, "B T H K"]]:
    """The attention of each head.  A partitioner cannot cut a kernel: under shard_map each device runs its own heads'.
    A kernel takes no slopes.  Nothing is put off: when the host's writes start is the compiler's to say here."""
    if isinstance(layer.attend, Chunked):
        return lambda *qkv: layer.attend(*qkv)[0]
    kernel, heads = dataclasses.replace(layer.attend, defer=False), P(DP, None, MP, None)
    return jax.shard_map(
        lambda *qkv: kernel(*qkv)[0], mesh=lay.mesh, in_specs=(heads, heads, heads, None), out_specs=heads
    )


def key_value_weight(layer: KeyValueHeads, lay: Layout) -> Float[Array, "D N K"]:
    """The weight; where mp > N each head is repeated until every device has the one that it needs."""
    repeats = max(1, lay.mesh.shape[MP] // layer.heads)
    return lay(jnp.repeat(layer.weight, repeats, axis=1), None, MP, None)


def mlp(layer: GeluMlp | SwigluMlp, h_BTD: Float[Array, "B T D"], lay: Layout) -> Float[Array, "B T D"]:
    return layer.down(layer.activate(*(lay(column(h_BTD), DP, None, MP) for column in layer.inputs)))


def residual(x_BTD: Float[Array, "B T D"], lay: Layout) -> Float[Array, "B T D"]:
    """What a sublayer gives to the residual stream: whole over mp, and kept by the remat policy that keeps such."""
    return checkpoint_name(lay(x_BTD, DP, None, None), SUBLAYER_OUTPUT)


def apply_block(
    block: ParallelBlock | SequentialBlock, x_BTD: Float[Array, "B T D"], positions: PositionEncoding, lay: Layout
) -> Float[Array, "B T D"]:
    if isinstance(block, ParallelBlock):
        h_BTD = lay(block.norm(x_BTD), DP, None, None)
        return x_BTD + residual(attention(block.attention, h_BTD, positions, lay) + mlp(block.mlp, h_BTD, lay), lay)
    h_BTD = lay(block.attention_norm(x_BTD), DP, None, None)
    x_BTD = x_BTD + residual(attention(block.attention, h_BTD, positions, lay), lay)
    return x_BTD + residual(mlp(block.mlp, lay(block.mlp_norm(x_BTD), DP, None, None), lay), lay)


def transformer(params: Transformer, ids_BT: Int[Array, "B T"], dtype: DTypeLike, lay: Layout) -> Float[Array, "B T V"]:
    """Logits, computed in `dtype`; an id below zero stands behind the last token that counts, and reads zeros."""
    rows_BTD = params.embedding.weight.at[ids_BT].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    x_BTD = params.positions.add_to_input(residual(rows_BTD.astype(dtype), lay), AllReduce())

    def layer(x_BTD: Array, block: ParallelBlock | SequentialBlock) -> tuple[Array, None]:
        return lay(apply_block(block, x_BTD, params.positions, lay), DP, None, None), None

    if params.remat != Remat.none:
        layer = checkpointed(layer, params.remat, params.offload)
    x_BTD, _ = lax.scan(layer, x_BTD, params.blocks)
    table = params.embedding if params.head is None else params.head
    return lay(matmul(lay(params.norm(x_BTD), DP, None, None), table.weight.T), DP, None, MP)


def cross_entropy(
    logits_BTV: Float[Array, "B T V"], targets_BT: Int[Array, "B T"], vocabulary: int
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(-log p(target), log z), both 0 where the target is ignored; the target's logit by a one-hot sum, which a
    partitioner cuts along V without gathering."""
    wide = jnp.promote_types(logits_BTV.dtype, jnp.float32)
    logits_BTV = logits_BTV.astype(wide)
    columns_V = jnp.arange(logits_BTV.shape[-1])
    if logits_BTV.shape[-1] > vocabulary:
        logits_BTV = jnp.where((columns_V < vocabulary)[None, None], logits_BTV, jnp.finfo(wide).min)
    logz_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    own_BTV = targets_BT[..., None] == columns_V[None, None]
    target_BT = jnp.sum(jnp.where(own_BTV, logits_BTV, 0.0), axis=-1)
    counted_BT = targets_BT >= 0
    return jnp.where(counted_BT, logz_BT - target_BT, 0.0), jnp.where(counted_BT, logz_BT, 0.0)


def build_gspmd_programs(config: Config, mesh: Mesh, dtype: DTypeLike) -> StepFunctions:
    """shmap_tp's programs of `config` on `mesh`, the step and the evaluation cut by the compiler instead."""
    explicit = build_step_functions(config, mesh, dtype)
    shardings: State = jax.tree.map(lambda x: x.sharding, explicit.shapes)
    whole, lay = NamedSharding(mesh, P()), Layout(mesh)
    optimizer, schedule = make_optimizer(config.optimizer), learning_rate_schedule(config.optimizer)

    def objective(params: Transformer, tokens_BT: Array, counted: Array) -> tuple[Array, Array]:
        logits_BTV = transformer(params, tokens_BT[:, :-1], dtype, lay)
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
        good, guard = state.guard.update(loss, norm, config.guard)
        updates, optimizer_state = optimizer.transformation.update(gradients, state.optimizer, state.params)
        updated = (optax.apply_updates(state.params, updates), optimizer_state)
        params, optimizer_state = select_tree(good, updated, (state.params, state.optimizer))
        rate = schedule(state.step - state.guard.skipped)
        metrics = {"loss": loss, "grad_norm": norm, "learning_rate": rate} | guard.counts()
        return State(params, optimizer_state, guard, state.step + 1), metrics

    def evaluate(params: Transformer, tokens_ABT: Array) -> Array:
        counted = counted_tokens(tokens_ABT)
        return jnp.sum(lax.map(lambda tokens_BT: objective(params, tokens_BT, counted)[1], tokens_ABT))

    return dataclasses.replace(
        explicit,
        step=jax.jit(
            step,
            in_shardings=(shardings, explicit.tokens.sharding),
            out_shardings=(shardings, whole),
            donate_argnums=0,
        ),
        evaluate=jax.jit(evaluate, in_shardings=(shardings.params, explicit.tokens.sharding), out_shardings=whole),
    )


def counted_tokens(tokens_ABT: Int[Array, "A B T"]) -> Float[Array, ""]:
    """How many targets of the whole step count, at least 1."""
    return jnp.maximum(1, jnp.sum(tokens_ABT[..., 1:] >= 0)).astype(float)
