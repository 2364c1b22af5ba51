"""Causal self-attention, its heads sharded over mp.

Shoeybi et al. 2019, "Megatron-LM", section 3, https://arxiv.org/abs/1909.08053; grouped-query heads as Ainslie et al.
2023, https://arxiv.org/abs/2305.13245

B batch, T time (queries), S time (keys), D model width, H query heads, N key/value heads, K head dim, G = H / N.
H/mp: dim H sharded over mp.  {+mp}: a partial sum, not yet reduced.

    x  --column_parallel: query, key, value-->  q[B T H/mp K], k and v[B T N/mp K]  --norms of q and k, rotation-->
       --attention, head by head-->  mixed[B T H/mp K]  --row_parallel: out {+mp}, reduced-->  y

How the attention of each head is computed is a value, too: `Chunked`, here, in XLA's own operations, or a kernel of
flash_attention.py, selected when the model is built (attention_selection.py).  None of them communicates: of rows that
are split along time, `attend_rows` fetches the keys and values before (`context_parallel.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from shmap_tp.config.activation_names import ATTENTION_OUTPUT, QUERY_KEY_VALUE
from shmap_tp.layers.causal_attention import Keys, Pattern, Queries, attend_from, causal_attention
from shmap_tp.layers.context import Context, DeferredResiduals, Extras
from shmap_tp.layers.flash_attention import Cudnn, Splash
from shmap_tp.layers.head_kernels import Heads, heads_first, heads_last
from shmap_tp.layers.linear import Linear
from shmap_tp.layers.norm import JointRMSNorm, RMSNorm
from shmap_tp.layers.positions import Rotary
from shmap_tp.parallel.collectives import mark_varying
from shmap_tp.parallel.context_parallel import (
    chunk_numbers,
    chunks_as_rows,
    own_chunks,
    own_chunks_with_before,
    sees_one_chunk_back,
    whole_rows,
    with_chunks_before,
)
from shmap_tp.parallel.mesh import MP, Role, axes_of, ranks
from shmap_tp.parallel.partitioning import param
from shmap_tp.parallel.tensor_parallel import Activation


@dataclass(frozen=True)
class Chunked:
    """softmax(q k' / sqrt(K) + bias, s <= t) v by `causal_attention`: for any device, shape, dtype and
    pattern."""

    chunk: int
    """Queries whose scores exist at a time."""

    def __call__(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BSNK: Float[Array, "B S N K"],
        v_BSNK: Float[Array, "B S N K"],
        pattern: Pattern,
    ) -> tuple[Float[Array, "B T H K"], DeferredResiduals]:
        """(mixed, no deferred residuals).  Communication: none.

        Where rows are split along time, the first chunk of this device is computed with the first half of the keys, and
        the second with all of them: 3/4 of all pairs, the same on every device.
        """
        keys, earlier = Keys(k_BSNK, v_BSNK, pattern.segments_BT), pattern.earlier
        if earlier is not None:
            queries = Queries(q_BTHK, keys.segments_BS[:, earlier:])
            mixed_BTHK = attend_from(queries, keys, pattern, earlier, self.chunk)
        elif q_BTHK.shape[1] < k_BSNK.shape[1]:
            mixed_BTHK = self._attend_two_chunks(Queries(q_BTHK, own_chunks(pattern.segments_BT)), keys, pattern)
        else:
            mixed_BTHK = causal_attention(q_BTHK, k_BSNK, v_BSNK, pattern, self.chunk)
        return checkpoint_per_head(mixed_BTHK, ATTENTION_OUTPUT), ()

    def _attend_two_chunks(self, queries: Queries, keys: Keys, pattern: Pattern) -> Float[Array, "B T H K"]:
        """The attention of this device's two chunks of queries to the keys of all ranks."""
        half, mixed = keys.k_BSNK.shape[1] // 2, []
        visible = [keys.between(0, half), keys]
        for part, seen, number in zip(queries.halves(), visible, chunk_numbers(), strict=True):
            mixed.append(attend_from(part, seen, pattern, number * part.q_BTHK.shape[1], self.chunk))
        return jnp.concatenate(mixed, axis=1)


AnyAttention = Chunked | Splash | Cudnn


def checkpoint_per_head(
    x_BTHK: Float[Array, "B T H K"], name: str, stored: Callable[[Array], Array] = lambda x: x
) -> Float[Array, "B T H K"]:
    """x, named for rematerialisation policies, which save it as [B H T K]: stacked as [B T H K], the few heads of a
    device would be padded to the rows of a TPU tile (docs/performance-notes.md).  `stored` is `Context.stored`."""
    return checkpoint_name(stored(x_BTHK.transpose(0, 2, 1, 3)), name).transpose(0, 2, 1, 3)


class Attention(eqx.Module):
    """y = softmax(q k' / sqrt(K) + bias, s <= t) v @ out, with q, k, v = x @ query, x @ key, x @ value.

    With `head_norms` every head of q and of k is normalised before it is rotated (Yang et al. 2025, Qwen3, section 2,
    https://arxiv.org/abs/2505.09388), or all of them together (`JointRMSNorm`).  `with_sinks` adds a number for each
    head that takes part in the denominator of its softmax alone (`Pattern.sinks_H`).

    A parallel block shares one `column_parallel` and one `row_parallel` with the MLP, and so uses `inputs`, `mix` and
    `out` apart; a sequential block calls the attention.

    Communication  what `tp` does for one column-parallel and one row-parallel product, what k and v need where mp > N,
                   and what JointRMSNorm does.  The scale [K] of a norm of each head is applied to the heads of every
                   device: backward its gradient is all-reduced over mp, unless the tensor-parallel mode marked the
                   scale as varying before.
    """

    query: Linear
    key: Linear
    value: Linear
    out: Linear
    query_norm: RMSNorm | JointRMSNorm | None
    key_norm: RMSNorm | JointRMSNorm | None
    sinks: Float[Array, " H"] | None = param(MP)
    attend: AnyAttention = eqx.field(static=True)

    def __init__(
        self,
        width: int,
        heads: tuple[int, int],
        head_dim: int,
        attend: AnyAttention,
        *,
        std: float,
        std_out: float,
        key: PRNGKeyArray,
        biases: tuple[bool, bool] = (False, False),
        head_norms: tuple[RMSNorm | JointRMSNorm, RMSNorm | JointRMSNorm] | None = None,
    ):
        """`heads` is (query heads, key/value heads), `biases` whether (q, k and v; the output) have one;
        `head_norms` are the norms of (q, k)."""
        key_q, key_k, key_v, key_out = jax.random.split(key, 4)
        in_bias, out_bias = biases
        features = heads[0] * head_dim
        self.query = Linear.column(width, features, std=std, key=key_q, bias=in_bias, head_dim=head_dim)
        self.key = Linear.heads(width, heads[1], head_dim, std=std, key=key_k, bias=in_bias)
        self.value = Linear.heads(width, heads[1], head_dim, std=std, key=key_v, bias=in_bias)
        self.out = Linear.row(features, width, std=std_out, key=key_out, bias=out_bias)
        self.query_norm, self.key_norm = head_norms or (None, None)
        self.sinks = None
        self.attend = attend

    def __call__(self, x_BTD: Float[Array, "B _ D"], context: Context) -> tuple[Float[Array, "B _ D"], Extras]:
        q_BTHK, k_BTNK, v_BTNK = context.tp.column_parallel(x_BTD, *self.inputs(context))
        mixed_BTHK, extras = self.mix(q_BTHK, k_BTNK, v_BTNK, context)
        return context.tp.row_parallel((mixed_BTHK, self.out)), extras

    def inputs(self, context: Context) -> tuple[Linear, Linear, Linear]:
        """The layers of q, k and v."""
        is_flat = self._kernels(context) is not None
        return tuple(replace(layer, is_flat=is_flat) for layer in (self.query, self.key, self.value))

    def _kernels(self, context: Context) -> Heads | None:
        """What kernels compute for q and k before splash attention; None: XLA's operations do."""
        attend, norm, encoding = self.attend, self.query_norm, context.encoding
        is_plain = context.cache is None and context.positions is None and isinstance(norm, RMSNorm | None)
        if not (is_plain and isinstance(attend, Splash) and isinstance(encoding, Rotary)):
            return None
        epsilon = None if norm is None else norm.epsilon
        how = Heads(self.query.outputs[1], encoding.rotation, epsilon=epsilon, interpret=attend.interpret)
        return how if how.is_suited else None

    def mix(self, q: Activation, k: Activation, v: Activation, context: Context) -> tuple[Activation, Extras]:
        """softmax(q k') v of this device's heads, for all positions; with a cache also of the tokens before these.

        With a cache every device has whole rows, also on a mesh with an axis that shards time.

        Communication: that of `attend_rows`, without a cache.

        Raises TypeError for a cache with segments.
        """
        tp, encoding = context.tp, context.encoding
        q_BTHK, k_BTNK, v_BTNK = (tp.concat_time(y) for y in (q, k, v))
        if (how := self._kernels(context)) is not None:
            return self._mix_in_kernels(how, (q_BTHK, k_BTNK, v_BTNK), context)
        if self.query_norm is not None:
            q_BTHK = _normalize_heads(self.query_norm, q_BTHK, context)
            k_BTNK = _normalize_heads(self.key_norm, k_BTNK, context)
        qk = encoding.rotate(q_BTHK, context.positions), encoding.rotate(k_BTNK, context.positions)
        pattern = replace(context.pattern, slopes_H=encoding.slopes(), sinks_H=self.sinks)
        if context.cache is not None:
            if context.segments is not None:
                raise TypeError("a cache holds one document a row: attention with a cache takes no segments")
            mixed_BTHK, cache = context.cache.attend(*qk, v_BTNK, pattern, self.attend)
            return tp.split_time(mixed_BTHK), Extras(cache=cache)
        if self.query_norm is None:  # else they are saved before their norms
            qk = tuple(checkpoint_per_head(x, QUERY_KEY_VALUE, context.stored) for x in qk)
        qkv = *qk, checkpoint_per_head(v_BTNK, QUERY_KEY_VALUE, context.stored)
        mixed_BTHK, residuals = attend_rows(self.attend, qkv, replace(pattern, segments_BT=context.segments))
        return tp.split_time(mixed_BTHK), Extras(residuals=residuals)

    def _mix_in_kernels(
        self, how: Heads, qkv: tuple[Array, Array, Array], context: Context
    ) -> tuple[Activation, Extras]:
        """The same, [B T F] of all heads: policies save q, k and v as the matmuls write them."""
        q, k, v = (checkpoint_name(context.stored(x.reshape(*x.shape[:2], -1)), QUERY_KEY_VALUE) for x in qkv)
        query_norm, key_norm = mark_varying((self.query_norm, self.key_norm), MP)
        pattern = context.pattern
        scale = how.head_dim**-0.5 if pattern.scale is None else pattern.scale  # of scores: here that of q
        heads = (
            heads_first(how._replace(scale=scale), q, None if query_norm is None else query_norm.factor),
            heads_first(how, k, None if key_norm is None else key_norm.factor),
            heads_first(how._replace(rotation=None), v),
        )
        pattern = replace(pattern, scale=1.0, sinks_H=self.sinks, segments_BT=context.segments)
        mixed_BTHK, residuals = attend_rows(self.attend, heads, pattern)
        return context.tp.split_time(heads_last(how, mixed_BTHK)), Extras(residuals=residuals)


def attend_rows(
    attend: AnyAttention, qkv: tuple[Array, Array, Array], pattern: Pattern
) -> tuple[Float[Array, "B T H K"], DeferredResiduals]:
    """(attention of the positions of this device to all positions of their rows, deferred residuals); the segments are
    the segments of whole rows.

    Communication: where rows are split along time, `whole_rows` of k and v; where the window allows it,
    `with_chunks_before`, and each chunk of queries is then a row by itself.
    """
    q_BTHK, *keys_and_values = qkv
    if not sees_one_chunk_back(pattern.window, q_BTHK.shape[1]):
        k_BSNK, v_BSNK = whole_rows(keys_and_values)
        if pattern.window is not None and pattern.window >= k_BSNK.shape[1]:
            pattern = replace(pattern, window=None)
        return attend(q_BTHK, k_BSNK, v_BSNK, pattern)
    segments_BT = pattern.segments_BT
    if segments_BT is None:
        segments_BT = jnp.zeros((q_BTHK.shape[0], q_BTHK.shape[1] * ranks(axes_of(Role.time))), jnp.int32)
    nothing = -1  # a segment that no query has
    segments_BT = own_chunks_with_before(segments_BT, nothing)
    pattern = replace(pattern, segments_BT=segments_BT, earlier=segments_BT.shape[1] // 2)
    mixed_BTHK, residuals = attend(chunks_as_rows(q_BTHK), *with_chunks_before(keys_and_values), pattern)
    return mixed_BTHK.reshape(*q_BTHK.shape[:2], *mixed_BTHK.shape[2:]), residuals


def with_sinks(attention: Attention, heads: int) -> Attention:
    """`attention` with a sink for each of so many query heads, initially 0."""
    return eqx.tree_at(lambda attention: attention.sinks, attention, jnp.zeros(heads), is_leaf=lambda x: x is None)


def _normalize_heads(
    norm: RMSNorm | JointRMSNorm, x_BTHK: Float[Array, "B T H K"], context: Context
) -> Float[Array, "B T H K"]:
    """The heads of q or k normalised.  Policies save x in place of the result: the gradient of the norm reads x, and
    attention's backward pass recomputes norm and rotation, instead of the projection."""
    return mark_varying(norm, MP)(checkpoint_per_head(x_BTHK, QUERY_KEY_VALUE, context.stored))
