"""What a step minimises: the cross entropy of the next token, and what auxiliary losses add to it (`Objective`).

The output projection and its cross entropy are computed over a vocabulary sharded over mp, one chunk of positions at a
time (`LinearCrossEntropy`).

Logits of the whole vocabulary never exist on a device (Shoeybi et al. 2019, "Megatron-LM", section 3,
https://arxiv.org/abs/1909.08053), nor do logits of more than a chunk: the objective is linear in the losses of the
positions, so a chunk's gradients are computed with its logits, which are neither saved nor recomputed
(Hsu et al. 2024, "Liger Kernel", section 3.2, https://arxiv.org/abs/2410.10989).

B batch, T time, N positions of a chunk, C chunks, D model width, V vocabulary rows, padded.  V/mp: dim V sharded over
mp. {+mp}: a partial sum, not yet reduced.

    h[N D]  @  w[V/mp D]' + b[V/mp]  ->  logits[N V/mp]                                          product 1
    logits  --of these columns: max, sum of exp, the target's logit; all-gather over mp-->
            m[N], z[N], t[N] of all columns  ->  log p = t - m - log z,  log Z = m + log z       replicated over mp
    objective   sum of share (-log p + z_loss (log Z)^2), share = 1 / counted, of an ignored target 0
    dlogits[N V/mp] = share ((1 + 2 z_loss log Z) exp(logits - m) / z - (1 at the target))
    dh[N D] {+mp}   = dlogits   @  w[V/mp D]                                                      product 2
    dw[V/mp D]     += dlogits'  @  h[N D]                                                         product 3
    db[V/mp]       += sum over N of dlogits

With a softcap c the logits are c tanh(. / c) of product 1 with b, and dlogits is multiplied by 1 - (logits / c)^2.

Another objective is a subclass of `Objective`, as that of `training/dpo.py`.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from shmap_tp.config.schema import Config
from shmap_tp.config.sources import each_source
from shmap_tp.layers.context import IGNORE, Batch, Extras, Statistics
from shmap_tp.layers.embedding import OutputProjection, score
from shmap_tp.model.transformer import Carried, Execution, Transformer
from shmap_tp.parallel.collectives import all_reduce, mark_varying, varying_axes
from shmap_tp.parallel.mesh import MP, ranks, token_axes

Sums = tuple[Float[Array, ""], Float[Array, "*sources"]]
"""(the objective, the cross entropy) of the positions so far; the second by source where rows have sources."""


@dataclass(frozen=True)
class LinearCrossEntropy:
    """Mean cross entropy of the counted targets, plus z_loss times the mean of (log Z)^2, computed from h.

    Three products with the head's weight where gradients are taken, one where not.  Logits and everything derived from
    them are float32 (or wider); the operands of each product are in h's dtype; dw and db are accumulated in float32.
    Memory         the logits of a chunk, and dw[V/mp D] in float32.
    Communication  forward one all-gather over mp per chunk, of three values per position; backward none.
    """

    vocabulary: int
    """Number of real ids: columns beyond are padding and have no probability."""
    z_loss: float
    chunk: int
    """Largest number of positions in a chunk; positions are spread evenly over the fewest chunks."""
    sources: int = 0
    """Number of sources of rows that have one."""

    @jax.named_scope("head")
    def __call__(
        self,
        h_BTD: Float[Array, "B T D"],
        projection: OutputProjection,
        targets_BT: Int[Array, "B T"],
        counted: Float[Array, ""],
        sources_BT: Int[Array, "B T"] | None = None,
        weights_BT: Float[Array, "B T"] | None = None,
    ) -> Sums:
        """This device's share of (the objective, the cross entropy); only the first is differentiated.

        h has entered (`TensorParallel.enter`); `counted` is the number of counted targets of the whole step.  With the
        source of each position, the cross entropy is a vector: what each source adds to it.
        With `weights`, the sum has these in place of 1 / counted.
        """
        h_BTD, projection = mark_varying((h_BTD, projection), (*token_axes(), MP))  # as their gradients vary
        h_CND = self._chunked(h_BTD.reshape(-1, h_BTD.shape[-1]), 0)
        targets_CN = self._chunked(targets_BT.reshape(-1), IGNORE)
        share_CN = 1 / counted if weights_BT is None else self._chunked(weights_BT.reshape(-1), 0)
        share_CN = jnp.where(targets_CN >= 0, share_CN, 0.0)
        source_CN = None if sources_BT is None else self._chunked(sources_BT.reshape(-1), 0)
        objective, loss = _sums(self, h_CND, projection, targets_CN, lax.stop_gradient(share_CN), source_CN)
        return objective, lax.stop_gradient(loss)

    @jax.named_scope("head")
    def negative_log_likelihoods(
        self, h_BTD: Float[Array, "B T D"], projection: OutputProjection, targets_BT: Int[Array, "B T"]
    ) -> Float[Array, "B T"]:
        """-log p of each target, 0 where it does not count; h and communication as of a call.  It is not meant to be
        differentiated: that would save the logits."""
        projection = replace(projection, weight=projection.weight.astype(h_BTD.dtype))
        h_CND = self._chunked(h_BTD.reshape(-1, h_BTD.shape[-1]), 0)
        targets_CN = self._chunked(targets_BT.reshape(-1), IGNORE)

        def chunk(_: None, part: tuple[Array, Array]) -> tuple[None, Array]:
            h_ND, targets_N = part
            nll_N = _scores(h_ND, projection, targets_N, self.vocabulary).nll_N
            return None, jnp.where(targets_N >= 0, nll_N, 0.0)

        _, nll_CN = lax.scan(chunk, None, (h_CND, targets_CN))
        return nll_CN.reshape(-1)[: targets_BT.size].reshape(targets_BT.shape)

    def _chunked(self, x: Array, filling: int) -> Array:
        """[positions ...] -> [C N ...], the last chunk padded with `filling`."""
        chunks = -(-x.shape[0] // self.chunk)
        size = -(-x.shape[0] // chunks)
        beyond = [(0, chunks * size - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, beyond, constant_values=filling).reshape(chunks, size, *x.shape[1:])


class TargetStatistics(NamedTuple):
    """What the probability of a target depends on, over a vocabulary sharded over mp."""

    logits_NV: Float[Array, "N V"]
    """The logits of this device's columns; the lowest number for padding."""
    is_target_NV: Bool[Array, "N V"]
    """Whether the column is the target."""
    max_N: Float[Array, "N"]
    """m, the largest logit of all columns."""
    z_N: Float[Array, "N"]
    """The sum of exp(logits - m) over all columns."""
    target_N: Float[Array, "N"]
    """The logit of the target; 0 where it is no column."""


def target_statistics(logits_NV: Float[Array, "N V"], targets_N: Int[Array, "N"], vocabulary: int) -> TargetStatistics:
    """The statistics of each target among the columns below `vocabulary`.  One all-gather of [3 N] over mp."""
    column_V = lax.axis_index(MP) * logits_NV.shape[1] + jnp.arange(logits_NV.shape[1])
    logits_NV = jnp.where((column_V < vocabulary)[None], logits_NV, jnp.finfo(logits_NV.dtype).min)
    is_target_NV = targets_N[:, None] == column_V[None]
    max_N = jnp.max(logits_NV, axis=-1)
    sum_N = jnp.sum(jnp.exp(logits_NV - max_N[:, None]), axis=-1)
    target_N = jnp.sum(jnp.where(is_target_NV, logits_NV, 0.0), axis=-1)
    parts = lax.all_gather(jnp.stack([max_N, sum_N, target_N]), MP, to="invarying")  # [mp 3 N]
    m_N = jnp.max(parts[:, 0], axis=0)
    z_N = jnp.sum(parts[:, 1] * jnp.exp(parts[:, 0] - m_N[None]), axis=0)
    return TargetStatistics(logits_NV, is_target_NV, m_N, z_N, jnp.sum(parts[:, 2], axis=0))


@dataclass(frozen=True)
class _Scores:
    """Softmax statistics of each position of a chunk."""

    exp_NV: Float[Array, "N V"]
    """exp(logits - m) of this device's columns; 0 for padding."""
    is_target_NV: Bool[Array, "N V"]
    """Whether the column is the target."""
    z_N: Float[Array, "N"]
    """The sum of exp(logits - m) over all columns."""
    log_z_N: Float[Array, "N"]
    """log Z = m + log z."""
    nll_N: Float[Array, "N"]
    """-log p(target)."""
    slope_NV: Float[Array, "N V"] | None
    """The derivative of the softcap; None without one."""


def _scores(
    h_ND: Float[Array, "N D"], projection: OutputProjection, targets_N: Int[Array, "N"], vocabulary: int
) -> _Scores:
    """One matmul, one all-gather of [3 N] over mp."""
    logits_NV, cap = score(h_ND, projection), projection.softcap
    slope_NV = None if cap is None else 1 - jnp.square(logits_NV / cap)
    with jax.named_scope("cross_entropy"):
        found = target_statistics(logits_NV, targets_N, vocabulary)
        nll_N = jnp.log(found.z_N) - (found.target_N - found.max_N)
        exp_NV = jnp.exp(found.logits_NV - found.max_N[:, None])
        return _Scores(exp_NV, found.is_target_NV, found.z_N, jnp.log(found.z_N) + found.max_N, nll_N, slope_NV)


def _add(
    how: LinearCrossEntropy,
    sums: Sums,
    scores: _Scores,
    share_N: Float[Array, "N"],
    source_N: Int[Array, "N"] | None,
) -> Sums:
    loss, square = (jnp.sum(share_N * x_N) for x_N in (scores.nll_N, jnp.square(scores.log_z_N)))
    objective = sums[0] + loss + how.z_loss * square
    if source_N is None:
        return objective, sums[1] + loss
    is_source_NS = source_N[:, None] == jnp.arange(how.sources)[None]
    return objective, sums[1] + jnp.sum(jnp.where(is_source_NS, (share_N * scores.nll_N)[:, None], 0.0), axis=0)


def _zeros(how: LinearCrossEntropy, share_CN: Float[Array, "C N"], source_CN: Int[Array, "C N"] | None) -> Sums:
    shapes = (), () if source_CN is None else (how.sources,)
    objective, loss = (mark_varying(jnp.zeros(shape, share_CN.dtype), token_axes()) for shape in shapes)
    return objective, loss


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(
    how: LinearCrossEntropy,
    h_CND: Float[Array, "C N D"],
    projection: OutputProjection,
    targets_CN: Int[Array, "C N"],
    share_CN: Float[Array, "C N"],
    source_CN: Int[Array, "C N"] | None,
) -> Sums:
    """The sums alone, where no gradient is taken; else `_sums_and_gradients` computes both together.

    The plain version is autodiff of this function, which would save or recompute the logits.  The custom gradient
    stands for no collective: dh is reduced over mp, and dw over dp, by the transposes of the casts before it.
    """
    projection = replace(projection, weight=projection.weight.astype(h_CND.dtype))

    def chunk(sums: Sums, part: tuple[Array, Array, Array, Array | None]) -> tuple[Sums, None]:
        h_ND, targets_N, share_N, source_N = part
        return _add(how, sums, _scores(h_ND, projection, targets_N, how.vocabulary), share_N, source_N), None

    return lax.scan(chunk, _zeros(how, share_CN, source_CN), (h_CND, targets_CN, share_CN, source_CN))[0]


def _sums_and_gradients(how: LinearCrossEntropy, *primals: Any) -> tuple[Sums, tuple[Array, OutputProjection]]:
    """(the sums, (dh[C N D], (dw[V/mp D], db[V/mp])) of the objective), of frozen weights None.

    `primals` are the other arguments of `_sums`, each array with whether a gradient of it is taken.
    """
    h_CND, projection, targets_CN, share_CN, source_CN = jax.tree.map(lambda x: x.value, primals, is_leaf=_is_primal)
    is_trained = jax.tree.map(lambda x: x.perturbed, primals[1], is_leaf=_is_primal)
    cast_VD = projection.weight.astype(h_CND.dtype)
    cast = replace(projection, weight=cast_VD)

    def chunk(carry: tuple[Sums, OutputProjection], part: tuple) -> tuple[tuple, Array]:
        (sums, gradients), (h_ND, targets_N, share_N, source_N) = carry, part
        dw_VD, db_V = gradients.weight, gradients.bias
        scores = _scores(h_ND, cast, targets_N, how.vocabulary)
        with jax.named_scope("cross_entropy"):
            scale_N = share_N * (1 + 2 * how.z_loss * scores.log_z_N) / scores.z_N
            dlogits_NV = scale_N[:, None] * scores.exp_NV - jnp.where(scores.is_target_NV, share_N[:, None], 0.0)
            if scores.slope_NV is not None:
                dlogits_NV = dlogits_NV * scores.slope_NV
            db_V = None if db_V is None else db_V + jnp.sum(dlogits_NV, axis=0)
            dlogits_NV = dlogits_NV.astype(h_ND.dtype)
        if dw_VD is not None:
            dw_VD = dw_VD + jnp.matmul(dlogits_NV.T, h_ND, preferred_element_type=dw_VD.dtype)
        gradients = jax.tree.unflatten(jax.tree.structure(gradients), [x for x in (dw_VD, db_V) if x is not None])
        return (_add(how, sums, scores, share_N, source_N), gradients), dlogits_NV @ cast_VD

    zeros = jax.tree.map(lambda w: jnp.zeros_like(w, share_CN.dtype), eqx.filter(projection, is_trained))
    parts = h_CND, targets_CN, share_CN, source_CN
    (sums, gradients), dh_CND = lax.scan(chunk, (_zeros(how, share_CN, source_CN), zeros), parts)
    return sums, (dh_CND, jax.tree.map(lambda dw, w: dw.astype(w.dtype), gradients, eqx.filter(projection, is_trained)))


def _is_primal(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.CustomVJPPrimal)


def _scaled(
    how: LinearCrossEntropy, gradients: tuple[Array, OutputProjection], cotangents: tuple[Array, Any]
) -> tuple[Array, OutputProjection, None, None, None]:
    """The gradients times the cotangent of the objective; targets, shares and sources have no gradient."""
    dh_CND, d_projection = jax.tree.map(lambda gradient: gradient * cotangents[0].astype(gradient.dtype), gradients)
    return dh_CND, d_projection, None, None, None


_sums.defvjp(_sums_and_gradients, _scaled, symbolic_zeros=True)


# The objective of a step


class LossParts(NamedTuple):
    """What an objective says beside its value, summed over devices and microbatches."""

    losses: Float[Array, "*parts"]
    """The cross entropy, by source where rows have one; of another objective its own parts."""
    statistics: Statistics | None
    """The statistics of the blocks."""


@dataclass(frozen=True)
class Objective:
    """The training objective, a function of parameters and tokens."""

    loss: LinearCrossEntropy
    execution: Execution
    auxiliary: bool = True
    """Whether the auxiliary losses of the blocks are part of it."""
    sources: tuple[str, ...] = ()
    """The names of the sources of rows that have one."""

    def __call__(
        self, params: Transformer, batch: Batch, counted: Float[Array, ""], tokens: int | Int[Array, ""]
    ) -> tuple[Float[Array, ""], LossParts]:
        """This device's share of (the objective, its parts), for a microbatch[B T].  Only the first is differentiated.

        `counted` and `tokens` are the results of `self.counted` and `all_tokens` for the whole step.
        """
        h_BTD, projection, extras = self.hidden(params, batch)
        objective, loss = self.loss(h_BTD, projection, batch.targets, counted, batch.sources)
        return self.with_auxiliary(objective, extras, tokens), LossParts(loss, extras.statistics)

    def hidden(self, params: Transformer, batch: Batch) -> tuple[Float[Array, "B T D"], OutputProjection, Extras]:
        """(h and the projection to logits, which the loss reads; the extras of the blocks)."""
        h_BTD, extras = params(batch.inputs, self.execution, Carried(batch.positions, batch.segments, batch.is_token))
        return *params.output_projection(h_BTD, self.execution), extras

    def with_auxiliary(
        self, objective: Float[Array, ""], extras: Extras, tokens: int | Int[Array, ""]
    ) -> Float[Array, ""]:
        """`objective` plus this device's share of the auxiliary losses."""
        if extras.auxiliary_loss is None or not self.auxiliary:
            return objective
        # in a mode that shards time, each device of mp has a sum over its positions
        over = tuple(axis for axis in self.execution.tp.time_axes if axis in varying_axes(extras.auxiliary_loss))
        share = mark_varying(all_reduce(extras.auxiliary_loss, over), token_axes())
        return objective + share / jnp.asarray(tokens, share.dtype)

    def counted(self, batch: Batch) -> Float[Array, ""]:
        """How many things of the whole step the loss is the mean of: targets that count, at least 1.  Communication:
        one all-reduce of a scalar over the token axes."""
        return jnp.maximum(1, all_reduce(jnp.sum(batch.targets >= 0), token_axes())).astype(float)

    def total(self, losses: Float[Array, "*parts"], batch: Batch) -> Float[Array, ""]:
        """The loss of which `losses` are the parts, summed over devices."""
        return losses if batch.sources is None else jnp.sum(losses)

    def metrics(self, losses: Float[Array, "*parts"], batch: Batch) -> dict[str, Float[Array, ""]]:
        """By name the mean cross entropy of the counted targets of each source; NaN where it has none.  Communication:
        one all-reduce of a number for each source."""
        if batch.sources is None:
            return {}
        counted = jnp.where(batch.targets >= 0, batch.sources, -1)  # -1: of no source
        local = jnp.stack([jnp.sum(counted == number) for number in range(len(self.sources))])
        counts = all_reduce(local, token_axes()).astype(losses.dtype)
        means = jnp.where(counts > 0, losses * jnp.sum(counts) / jnp.maximum(counts, 1), jnp.nan)
        return {f"{name}/loss": mean for name, mean in zip(self.sources, means, strict=True)}

    def alone(self) -> "Objective":
        """The objective without z_loss and auxiliary losses, which evaluation reports; it can be differentiated."""
        return replace(self, loss=replace(self.loss, z_loss=0.0), auxiliary=False)


def all_tokens(batch: Batch) -> int | Int[Array, ""]:
    """The number of inputs of the whole step that are tokens, on all devices; at least 1.  Communication: where the
    batch has free space, one all-reduce of a scalar over the token axes."""
    if batch.is_token is None:
        return batch.inputs.size * ranks(token_axes())
    return jnp.maximum(1, all_reduce(jnp.sum(batch.is_token, dtype=jnp.int32), token_axes()))


def next_token_objective(config: Config, execution: Execution) -> Objective:
    """The cross entropy of the next token, as `config` has it."""
    train, sources = config.train, (*each_source(config.data),) if config.data.sources else ()
    loss = LinearCrossEntropy(config.model.vocabulary, train.z_loss, train.loss_chunk, len(sources))
    return Objective(loss, execution, sources=sources)
