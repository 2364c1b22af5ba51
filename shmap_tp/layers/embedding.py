"""Embedding and head, their vocabulary sharded over mp.

Shoeybi et al. 2019, "Megatron-LM", section 3, https://arxiv.org/abs/1909.08053

B batch, T time, N positions of a chunk, D model width, V vocabulary rows, padded.  V/mp: dim V sharded over mp.
{+mp}: a partial sum, not yet reduced.

    lookup   ids[B T]     w[V/mp D]  ->  x[B T D] {+mp}    rows of other devices count as zero
    score    x[N D]    @  w[V/mp D]' + b[V/mp]  ->  logits[N V/mp]    never gathered: the loss works on the shards
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from shmap_tp.parallel.mesh import MP
from shmap_tp.parallel.partitioning import ParameterKind, param


def _table(vocabulary: int, rows: int, width: int, std: float, key: PRNGKeyArray) -> Float[Array, "V D"]:
    """Random rows for the real ids, zeros for the padding: the values of a row do not depend on the padding."""
    real = std * jax.random.normal(key, (vocabulary, width))
    return jnp.pad(real, ((0, rows - vocabulary), (0, 0)))


class VocabParallelEmbedding(eqx.Module):
    """x = w[ids], each device looking up the ids of its own rows.

    Shapes         ids[B T] of 0 <= id < V -> x[B T D] {+mp}, in `dtype`.
    Communication  none; x is reduced by the tensor-parallel mode.
    """

    weight: Float[Array, "V D"] = param(MP, None, kind=ParameterKind.embedding)

    def __init__(self, vocabulary: int, rows: int, width: int, *, std: float, key: PRNGKeyArray):
        self.weight = _table(vocabulary, rows, width, std, key)

    def __call__(self, ids_BT: Int[Array, "B T"], dtype: DTypeLike) -> Float[Array, "B T D"]:
        rows = self.weight.shape[0]
        row_BT = ids_BT - lax.axis_index(MP) * rows
        local_BT = (row_BT >= 0) & (row_BT < rows)
        x_BTD = self.weight[jnp.where(local_BT, row_BT, 0)].astype(dtype)
        return jnp.where(local_BT[..., None], x_BTD, jnp.zeros((), dtype))


class VocabParallelHead(eqx.Module):
    """The weight and bias of the output head, where it is not tied to the embedding; each device has its own rows."""

    weight: Float[Array, "V D"] = param(MP, None, kind=ParameterKind.head)
    bias: Float[Array, " V"] | None = param(MP)

    def __init__(self, vocabulary: int, rows: int, width: int, *, std: float, key: PRNGKeyArray, bias: bool = False):
        self.weight = _table(vocabulary, rows, width, std, key)
        self.bias = jnp.zeros(rows) if bias else None


class OutputProjection(eqx.Module):
    """What logits are computed with: weight and bias of the head or, where the two are tied, the embedding's weight."""

    weight: Float[Array, "V D"]
    bias: Float[Array, " V"] | None = None
    softcap: float | None = eqx.field(static=True, default=None)


def score(x_ND: Float[Array, "N D"], projection: OutputProjection) -> Float[Array, "N V"]:
    """logits = x @ w' + b, with a softcap c: c tanh((x @ w' + b) / c).

    Shapes         x[N D], varying over mp -> logits[N V/mp]; w is cast to x's dtype, and the logits are float32 (or
                   wider), not rounded to x's dtype in between.  Padded rows are scored, too.
    Communication  none; x entered by the tensor-parallel mode.
    """
    wide = jnp.promote_types(x_ND.dtype, jnp.float32)
    logits_NV = jnp.matmul(x_ND, projection.weight.astype(x_ND.dtype).T, preferred_element_type=wide)
    if projection.bias is not None:
        logits_NV = logits_NV + projection.bias.astype(wide)[None]
    return logits_NV if projection.softcap is None else projection.softcap * jnp.tanh(logits_NV / projection.softcap)
