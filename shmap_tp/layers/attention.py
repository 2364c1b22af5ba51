"""Causal self-attention, its heads cut along mp.

Shoeybi et al. 2019, "Megatron-LM", section 3, https://arxiv.org/abs/1909.08053; grouped-query heads as Ainslie et al.
2023, https://arxiv.org/abs/2305.13245

B batch, T time (queries), S time (keys), D model width, H query heads, N key/value heads, K head dim, G = H / N.
H/mp: dim H cut along mp.  {+mp}: a sum over mp still owed.

    x  --into: query, key, value-->  q[B T H/mp K], k and v[B T N/mp K]  --attention, head by head-->
       mixed[B T H/mp K]  --out_of: out {+mp}-->  y

What computes the attention of each head is a value, too: `Chunked`, here, in XLA's own operations, or a kernel of
kernels.py.  Whoever builds the model chooses it (choice.py); none of them moves anything between devices.
"""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from shmap_tp.layers.flash_attention import ATTENTION_OUTPUT, Cudnn, Splash
from shmap_tp.layers.later import QUERY_KEY_VALUE, DeferredResiduals
from shmap_tp.layers.linear import ColumnParallelHeads, RowParallelHeads, into_heads
from shmap_tp.layers.positions import AnyPositions
from shmap_tp.parallel.collectives import mark_varying
from shmap_tp.parallel.mesh import MP
from shmap_tp.parallel.modes import TensorParallel
from shmap_tp.parallel.partitioning import param
from shmap_tp.parallel.tensor_parallel import Columns, Product


@dataclass(frozen=True)
class Chunked:
    """softmax(q k' / sqrt(K) + bias, s <= t) v by `causal_attention`: for any device, shape, dtype and bias."""

    chunk: int

    def __call__(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BTNK: Float[Array, "B T N K"],
        v_BTNK: Float[Array, "B T N K"],
        slopes_H: Float[Array, " H"] | None,
    ) -> tuple[Float[Array, "B T H K"], DeferredResiduals]:
        """(mixed, nothing that is put off).  Wire: nothing."""
        return kept(causal_attention(q_BTHK, k_BTNK, v_BTNK, slopes_H, self.chunk), ATTENTION_OUTPUT), ()


AnyAttention = Chunked | Splash | Cudnn


def kept(x_BTHK: Float[Array, "B T H K"], name: str) -> Float[Array, "B T H K"]:
    """x, by a name for remat policies, kept head by head.  Stacked over layers as [B T H K], the few heads of a device
    are padded to the rows of a TPU's tile: at 6.9B, 8 ways on a v3, so much memory that the compiler gathered again,
    and a step took 33.8 s instead of 31.7 (predicted)."""
    return checkpoint_name(x_BTHK.transpose(0, 2, 1, 3), name).transpose(0, 2, 1, 3)


class KeyValueHeads(eqx.Module):
    """k (or v) = h @ w for the key/value heads that this device's query heads look at.

    Shapes  h[B T D], varying over mp (entered) -> k[B T N/mp K]; where mp > N, w is whole on every device, and k is the
            one head [B T 1 K] shared by all query heads here.
    Wire    none here where mp <= N.  Where mp > N, backward: one all-reduce of dw (D N K values, float32) over mp,
            unless the wire made w vary over mp before: its gradient then meets with all others.
    """

    weight: Float[Array, "D N K"] = param(None, MP, None, whole_if_fewer=True)
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, head_dim: int, *, std: float, key: PRNGKeyArray):
        self.weight = std * jax.random.normal(key, (width, heads, head_dim))
        self.heads = heads

    def __call__(self, h_BTD: Float[Array, "B T D"]) -> Float[Array, "B T N K"]:
        weight_DNK = self.weight
        if lax.axis_size(MP) > self.heads:
            mine = lax.axis_index(MP) * self.heads // lax.axis_size(MP)
            weight_DNK = lax.dynamic_slice_in_dim(mark_varying(weight_DNK, MP), mine, 1, axis=1)
        return into_heads(h_BTD, weight_DNK)


class Attention(eqx.Module):
    """mixed = softmax(q k' / sqrt(K) + bias, s <= t) v, each device its own heads; q, k, v are products of the columns,
    and y = mixed @ out.

    Wire    none here but KeyValueHeads' own where mp > N; what `into` and `out_of` cost, the wire in use says.
    """

    query: ColumnParallelHeads
    key: KeyValueHeads
    value: KeyValueHeads
    out: RowParallelHeads
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
    ):
        """`heads` is (query heads, key/value heads)."""
        key_q, key_k, key_v, key_out = jax.random.split(key, 4)
        self.query = ColumnParallelHeads(width, heads[0], head_dim, std=std, key=key_q)
        self.key = KeyValueHeads(width, heads[1], head_dim, std=std, key=key_k)
        self.value = KeyValueHeads(width, heads[1], head_dim, std=std, key=key_v)
        self.out = RowParallelHeads(heads[0] * head_dim, width, std=std_out, key=key_out)
        self.attend = attend

    @property
    def columns(self) -> Columns:
        return self.query, self.key, self.value

    def __call__(
        self, q: Product, k: Product, v: Product, positions: AnyPositions, wire: TensorParallel
    ) -> tuple[Product, DeferredResiduals]:
        """(mixed, what is handed to `put_off` at the end of the block)."""
        q_BTHK, k_BTNK, v_BTNK = (wire.in_time(y) for y in (q, k, v))
        qkv = positions.on_heads(q_BTHK), positions.on_heads(k_BTNK), v_BTNK
        mixed_BTHK, handed = self.attend(*(kept(x, QUERY_KEY_VALUE) for x in qkv), positions.slopes())
        return wire.in_parts(mixed_BTHK), handed


def causal_attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BTNK: Float[Array, "B T N K"],
    v_BTNK: Float[Array, "B T N K"],
    slopes_H: Float[Array, " H"] | None,
    chunk: int,
) -> Float[Array, "B T H K"]:
    """Attention of every query to the keys up to its own time, `chunk` queries at a time.

    Scores and softmax in float32 (or wider).  Each chunk of queries sees just the keys up to its end, so the work is
    half of T^2 plus half a chunk, and at most [B, H, chunk, T] scores exist at a time: the backward pass computes them
    again.
    """
    time = q_BTHK.shape[1]
    if time <= chunk:
        return _attend(q_BTHK, k_BTNK, v_BTNK, slopes_H)
    attend = jax.checkpoint(_attend)
    ends = [(start, min(start + chunk, time)) for start in range(0, time, chunk)]
    return jnp.concatenate([attend(q_BTHK[:, a:b], k_BTNK[:, :b], v_BTNK[:, :b], slopes_H) for a, b in ends], axis=1)


@jax.named_scope("attend")
def _attend(
    q_BTHK: Float[Array, "B T H K"],
    k_BSNK: Float[Array, "B S N K"],
    v_BSNK: Float[Array, "B S N K"],
    slopes_H: Float[Array, " H"] | None,
) -> Float[Array, "B T H K"]:
    """Exact softmax attention of the last T of S positions to all S of them.

    A pair of batch and key/value head is one batch entry of plain matrix products; its G query heads are further rows.
    """
    (batch, time, heads, head_dim), (_, keys, groups, _) = q_BTHK.shape, k_BSNK.shape
    shared, wide = heads // groups, jnp.promote_types(q_BTHK.dtype, jnp.float32)
    q = q_BTHK.reshape(batch, time, groups, shared, head_dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(batch, groups, shared * time, head_dim)
    k, v = k_BSNK.transpose(0, 2, 1, 3), v_BSNK.transpose(0, 2, 1, 3)
    scores = jnp.einsum("bnrk,bnsk->bnrs", q, k, preferred_element_type=wide) * head_dim**-0.5
    weights = jax.nn.softmax(scores + _bias(slopes_H, shared, time, keys, wide)[None], axis=-1)
    mixed = jnp.einsum("bnrs,bnsk->bnrk", weights.astype(v.dtype), v)
    mixed = mixed.reshape(batch, groups, shared, time, head_dim)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, time, heads, head_dim)


def _bias(
    slopes_H: Float[Array, " H"] | None, shared: int, time: int, keys: int, dtype: DTypeLike
) -> Float[Array, "N R S"]:
    """What is added to the scores of [N or 1, G x T, S]: the head's slope x (s - t), and nearly -inf for the future."""
    past_TS = jnp.arange(keys)[None, :] - jnp.arange(keys - time, keys)[:, None]
    slopes_H = jnp.zeros(shared, dtype) if slopes_H is None else slopes_H.astype(dtype)
    bias_HTS = slopes_H[:, None, None] * past_TS.astype(dtype)[None]
    bias_HTS = jnp.where((past_TS <= 0)[None], bias_HTS, jnp.finfo(dtype).min)
    return bias_HTS.reshape(-1, shared * time, keys)
