"""Flash-attention kernels of JAX and cuDNN, each a value that `Attention` holds: [T, T] scores never exist in memory.

B batch, T time, H query heads, N key/value heads, K head dim, G = H / N, all of one device.

    Splash   TPU v4 and later: jax.experimental.pallas.ops.tpu.splash_attention, of the JAX authors
    Cudnn    NVIDIA Ampere and later: cuDNN's flash attention, by jax.nn.dot_product_attention

Both implement Dao et al. 2022, "FlashAttention", https://arxiv.org/abs/2205.14135: forward, blocks of scores with a
running softmax; backward, the scores recomputed from q, k and the logarithm of each query's denominator.  The
plain version is `Chunked` of attention.py; attention_selection.py decides which of the three a program uses.

The kernels' operations know no varying types, so they run inside `without_vma_check` and are never differentiated
through it: `_attend` states forward and backward, and both only call kernels.

Where q, k and v are offloaded to host memory, a kernel returns them as deferred residuals, and its backward pass
receives them from `model/blocks.py`.

The blocks of scores that splash attention computes are those that are not masked, of the queries of a device
(`make_splash`).  T queries, S keys; for a row that is split along time over R ranks S = R T.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jaxtyping import Array, Bool, Float, Int

from shmap_tp.config.activation_names import ATTENTION_OUTPUT, SOFTMAX_DENOMINATORS
from shmap_tp.errors import UserError
from shmap_tp.layers.causal_attention import Pattern
from shmap_tp.layers.context import DeferredResiduals
from shmap_tp.layers.xla_workarounds import MAX_ADDITIONS, sum_by_additions
from shmap_tp.parallel.collectives import mark_varying, varying_axes, without_vma_check
from shmap_tp.parallel.context_parallel import chunks_of, own_chunks
from shmap_tp.parallel.mesh import Role, axes_of

BLOCKS = (512, 256, 128)
"""Positions in a block of queries and of keys: the first that divides T, or of split rows each chunk, is used.  Larger
blocks compute more of the masked half, and at K = 256 their backward pass does not fit the vector memory of v4."""
MOST_KEYS = 4096
"""Positions in the largest block of keys of a backward kernel, for heads of up to 128: with its sums in float32 it
takes 20 MiB of vector memory, which v5e and later allow (`SCOPED_VMEM_KIB` of hardware/xla_options.py)."""
ADDED_AT_ONCE = 8
"""Partial dq that XLA for TPU adds in one operation.  Blocks of keys have 1024 positions where there would be more."""
MAX_PARTIAL_DQ = 32
"""Two backward kernels are used where there would be more of them, each as large as q."""


def make_splash(
    sizes: tuple[int, int, int],
    options: Pattern,
    rank: Int[Array, ""] | None,
    interpret: bool,
    most_keys: int = MOST_KEYS,
) -> Callable[..., Array]:
    """q[G T K], k[S K], v[S K] -> [G T K]: the kernel for the query heads of one key/value head, causal.

    `sizes` is (G, T, S); a block of keys of the backward kernel has at most `most_keys`.
    Without a `rank` the queries have the positions of the last T keys; with one they are this device's two chunks of a
    row (`context_parallel.py`).
    """
    shared, time, keys = sizes
    ranks = 1 if rank is None else keys // time
    chunk = time if ranks == 1 else time // 2
    size = next(size for size in BLOCKS if chunk % size == 0)
    backward_keys = _backward_keys(keys, size, most_keys)
    fused = backward_keys is not None
    blocks = splash_kernel.BlockSizes(
        block_q=size,
        block_kv=size,
        block_kv_compute=size,
        block_q_dkv=size,
        block_kv_dkv=backward_keys or size,
        block_kv_dkv_compute=size,
        block_q_dq=None if fused else size,
        block_kv_dq=None if fused else size,
        use_fused_bwd_kernel=fused,
    )
    kernel = splash_kernel.make_splash_mqa(
        splash_mask.MultiHeadMask([_mask((time * ranks, keys), ranks, options.window)] * shared),
        block_sizes=blocks,
        attn_logits_soft_cap=options.softcap,
        interpret=interpret,
        head_shards=1,
        q_seq_shards=ranks,
    )
    return kernel if rank is None else _of_rank(kernel, rank, ranks)


def _backward_keys(keys: int, size: int, most: int) -> int | None:
    """Positions in a block of keys of the backward kernel, `size` or more; None where it is two kernels.

    One kernel has 5 matmuls a block, where two have 7, and returns a partial dq for each block of keys.  Larger blocks
    make fewer of these, and compute more of the masked half: with n blocks 1/n more.
    """

    def too_many() -> bool:
        return keys // size > (ADDED_AT_ONCE if size < 1024 else MAX_ADDITIONS)

    while too_many() and 2 * size <= most and keys % (2 * size) == 0:
        size *= 2
    return size if keys // size <= MAX_PARTIAL_DQ else None


def _mask(shape: tuple[int, int], ranks: int, window: int | None) -> splash_mask.Mask:
    """The mask of the queries of all ranks, in their order, with the keys."""
    queries, keys = shape
    if ranks == 1 and window is None:
        return splash_mask.CausalMask(shape, offset=keys - queries)
    if ranks == 1:
        return splash_mask.LocalMask(shape, window_size=(window - 1, 0), offset=keys - queries)
    return _RankOrderedMask(keys, ranks, window)


class _RankOrderedMask(splash_mask.LocalMask):
    """Causal, within a window or not, for queries in the order of the ranks."""

    def __init__(self, keys: int, ranks: int, window: int | None):
        super().__init__((keys, keys), window_size=(None if window is None else window - 1, 0), offset=0)
        chunks = np.arange(keys, dtype=np.int32).reshape(2 * ranks, -1)
        self.q_sequence = np.concatenate([chunks[n] for rank in range(ranks) for n in chunks_of(rank, ranks)])

    def __getitem__(self, index: tuple[slice, slice]) -> Bool[np.ndarray, "T S"]:
        """The mask of a block, or one element where all or none of the block is masked.  The library asks for every
        block, and a row of 131,072 positions has 65,536."""
        queries, keys = self.q_sequence[index[0]], range(*index[1].indices(self.shape[1]))
        nearest, farthest = int(queries[0]) - keys[-1], int(queries[-1]) - keys[0]
        left = self.window_size[0]
        if farthest < 0 or (left is not None and nearest > left):
            return np.zeros((1, 1), bool)
        if nearest >= 0 and (left is None or farthest <= left):
            return np.ones((1, 1), bool)
        return super().__getitem__(index)


def _of_rank(
    kernel: splash_kernel.SplashAttentionKernel, rank: Int[Array, ""], ranks: int
) -> splash_kernel.SplashAttentionKernel:
    """The kernel for the queries of one rank, made from the kernel for the queries of all: the arrays that say which
    blocks are computed are split along their dim of queries."""

    def cut(x: Array) -> Array:
        dim = 0 if x.ndim == 1 else 1
        size = x.shape[dim] // ranks
        return lax.dynamic_slice_in_dim(x, rank * size, size, dim)

    return jax.tree.map(cut, kernel)


SPLASH_HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True)
class Splash:
    """softmax(q k' / sqrt(K), s <= t) v on the matrix units of a TPU, block by block.

    Scores and softmax are float32; q is scaled by K^-0.5 before, in float32, and rounded back to its own dtype.  Blocks
    of scores that are masked are skipped.  The backward pass is one kernel, which returns a partial dq for every block
    of keys, in q's dtype, which are summed by `sum_by_additions`, or more than 16 by XLA; of rows so long that these
    would not fit, it is two.
    """

    defer: bool = False
    """Whether q, k and v are returned as deferred residuals, and read in the backward pass from `save_at_block_end`."""
    interpret: bool = False
    """Interpret the kernel on any device instead of compiling it: for tests."""
    most_keys: int = MOST_KEYS
    """Keys in a block of the backward kernel, for heads of up to 128; larger heads have fewer."""
    patterns: ClassVar[frozenset[str]] = frozenset({"segments", "earlier", "window", "softcap", "scale", "sinks"})
    """The fields of a `Pattern` that it computes."""

    def __call__(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BSNK: Float[Array, "B S N K"],
        v_BSNK: Float[Array, "B S N K"],
        pattern: Pattern,
    ) -> tuple[Float[Array, "B T H K"], DeferredResiduals]:
        """(mixed, deferred residuals); with more keys than queries, of this device's part of the rows.  Communication:
        none."""
        _refuse(self, pattern)
        (batch, time, heads, head_dim), (_, keys, groups, _) = q_BTHK.shape, k_BSNK.shape
        shared = heads // groups
        scale = head_dim**-0.5 if pattern.scale is None else pattern.scale
        scaled_BTHK = (q_BTHK.astype(jnp.float32) * scale).astype(q_BTHK.dtype)
        q = scaled_BTHK.reshape(batch, time, groups, shared, head_dim).transpose(0, 2, 3, 1, 4)
        k, v = [x.transpose(0, 2, 1, 3).reshape(batch * groups, keys, head_dim) for x in (k_BSNK, v_BSNK)]
        q = q.reshape(batch * groups, shared, time, head_dim)
        arrays = [q, k, v]
        if pattern.sinks_H is not None:  # in q's dtype, which the kernel returns their gradient in
            arrays.append(jnp.tile(pattern.sinks_H.astype(q.dtype).reshape(groups, shared), (batch, 1)))
        mixed, residuals = _call_kernel(self, tuple(arrays), pattern, MaskArrays.of(pattern, time, keys))
        mixed = mixed.reshape(batch, groups, shared, time, head_dim)
        return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, time, heads, head_dim), residuals

    def run(
        self,
        options: Pattern,
        mask: "MaskArrays",
        q_CGTK: Float[Array, "C G T K"],
        k_CSK: Float[Array, "C S K"],
        v_CSK: Float[Array, "C S K"],
        sinks_CG: Float[Array, "C G"] | None = None,
    ) -> Float[Array, "C G T K"]:
        """The kernel, for C = B N pairs of sequence and key/value head; `options` has no arrays.

        The two cores of a v4 or v5p chip share a mapped dim; none of the backward kernel's own dims can be shared so.
        """
        most_keys = self.most_keys * 128 // max(q_CGTK.shape[3], 128)
        kernel = make_splash((*q_CGTK.shape[1:3], k_CSK.shape[1]), options, mask.rank, self.interpret, most_keys)
        segments = None
        if mask.query_segments is not None:
            of_pairs = [
                jnp.repeat(segments_BT, q_CGTK.shape[0] // segments_BT.shape[0], axis=0)
                for segments_BT in (mask.query_segments, mask.key_segments)
            ]
            segments = splash_kernel.SegmentIds(*of_pairs)
        return jax.vmap(kernel)(q_CGTK, k_CSK, v_CSK, segments, sinks_CG)


@dataclass(frozen=True)
class Cudnn:
    """softmax(q k' / sqrt(K), s <= t) v by cuDNN's flash attention, bfloat16 or float16.

    No GPU has run it in this project: the tests check that it is lowered to cuDNN's forward and backward calls, with
    the right number, shapes and dtypes.
    """

    defer: bool = False
    """Whether q, k and v are returned as deferred residuals, and read in the backward pass from `save_at_block_end`."""
    otherwise: Callable[..., tuple[Array, DeferredResiduals]] | None = None
    """The attention of patterns that it does not compute; None: they are refused."""
    patterns: ClassVar[frozenset[str]] = frozenset({"window", "scale"})

    def __call__(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BSNK: Float[Array, "B S N K"],
        v_BSNK: Float[Array, "B S N K"],
        pattern: Pattern,
    ) -> tuple[Float[Array, "B T H K"], DeferredResiduals]:
        """(mixed, deferred residuals).  Communication: none.  Raises UserError for rows that are split along time."""
        if self.otherwise is not None and pattern.used - self.patterns:
            return self.otherwise(q_BTHK, k_BSNK, v_BSNK, pattern)
        if q_BTHK.shape[1] < k_BSNK.shape[1]:
            raise UserError(
                "model.attention=cudnn computes whole rows, which mesh.cp splits; use model.attention=chunked"
            )
        _refuse(self, pattern)
        return _call_kernel(self, (q_BTHK, k_BSNK, v_BSNK), pattern, MaskArrays(None, None, None))

    def run(
        self,
        options: Pattern,
        mask: "MaskArrays",
        q_BTHK: Float[Array, "B T H K"],
        k_BTNK: Float[Array, "B T N K"],
        v_BTNK: Float[Array, "B T N K"],
    ) -> Float[Array, "B T H K"]:
        """The kernel."""
        window = None if options.window is None else (options.window - 1, 0)
        how = {"scale": options.scale, "is_causal": True, "local_window_size": window, "implementation": "cudnn"}
        return jax.nn.dot_product_attention(q_BTHK, k_BTNK, v_BTNK, **how)


def _refuse(kernel: "Splash | Cudnn", pattern: Pattern) -> None:
    """Raises UserError for what the kernel cannot do."""
    if unknown := pattern.used - kernel.patterns:
        name = type(kernel).__name__.lower()
        raise UserError(
            f"model.attention={name} computes no {' and no '.join(sorted(unknown))}, which these inputs need; "
            f"use model.attention=chunked"
        )


def _call_kernel(
    kernel: "Splash | Cudnn", arrays: tuple[Array, ...], pattern: Pattern, mask: "MaskArrays"
) -> tuple[Array, DeferredResiduals]:
    """kernel.run(the options of the pattern, mask, q, k, v, and sinks if there are any).

    These are marked as varying over the same axes before: JAX then adds what the gradient of one that did not vary
    needs, and the gradients returned here have the types of the arguments.  The planner reads the scope.
    """
    arrays = mark_varying(arrays, tuple(sorted(frozenset[str]().union(*[varying_axes(x) for x in arrays]))))
    options = replace(pattern, slopes_H=None, segments_BT=None, sinks_H=None)
    window = "" if pattern.window is None else f"_window_{pattern.window}"
    with jax.named_scope(f"attend{window}" + ("" if pattern.earlier is None else "_of_chunks")):
        return _attend(kernel, options, mask, *arrays)


class MaskArrays(NamedTuple):
    """What the mask of a kernel depends on, beside the pattern: where the queries are among the keys."""

    query_segments: Int[Array, "B T"] | None
    key_segments: Int[Array, "B S"] | None
    rank: Int[Array, ""] | None
    """This device's rank along the axes that split rows; None: every device has whole rows."""

    @classmethod
    def of(cls, pattern: Pattern, queries: int, keys: int) -> "MaskArrays":
        """The mask of so many queries and keys of this device, inside shard_map."""
        if pattern.earlier is not None:
            return cls(pattern.segments_BT[:, pattern.earlier :], pattern.segments_BT, None)
        if queries == keys:
            return cls(pattern.segments_BT, pattern.segments_BT, None)
        return cls(own_chunks(pattern.segments_BT), pattern.segments_BT, lax.axis_index(axes_of(Role.time)))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    kernel: "Splash | Cudnn", options: Pattern, mask: MaskArrays, *arrays: Array
) -> tuple[Array, DeferredResiduals]:
    return without_vma_check(partial(kernel.run, options), mask, *arrays), _residuals(kernel, arrays[:3])


class Placeholder(eqx.Module):
    """Stands for the output (0), q (1), k (2) or v (3) in the residuals of the backward kernel."""

    of: int = eqx.field(static=True)
    shape: tuple[int, ...] = eqx.field(static=True)


def _forward(
    kernel: "Splash | Cudnn", options: Pattern, mask: MaskArrays, *arrays: Array
) -> tuple[tuple[Array, DeferredResiduals], Any]:
    """((output, deferred residuals), residuals of the backward kernel).  The output, q, k and v are placeholders in
    there: an array that leaves `without_vma_check` twice would be saved twice by a rematerialisation policy."""

    def run(mask: MaskArrays, *arrays: Array) -> tuple[Array, Any]:
        mixed, pull = jax.vjp(partial(kernel.run, options, mask), *arrays)
        known: dict[int, Any] = {id(x): Placeholder(of, x.shape) for of, x in enumerate((mixed, *arrays[:3]))}

        def named(x: Array) -> Any:
            if id(x) not in known:
                is_float = jnp.issubdtype(x.dtype, jnp.floating)
                known[id(x)] = checkpoint_name(x, SOFTMAX_DENOMINATORS) if is_float else x
            return known[id(x)]

        return _checkpoint_as_bits(mixed, ATTENTION_OUTPUT), jax.tree.map(named, pull)

    mixed, pull = without_vma_check(run, mask, *arrays)
    qkv = arrays[:3]
    residuals = _residuals(kernel, qkv)
    return (mixed, residuals), (pull, mixed, None if residuals else qkv)


def _residuals(kernel: "Splash | Cudnn", qkv: DeferredResiduals) -> DeferredResiduals:
    """q, k and v in three dims each: XLA for TPU copies arrays of more dims before it writes them to the host."""
    return tuple(x.reshape(-1, *x.shape[-2:]) for x in qkv) if kernel.defer else ()


def _checkpoint_as_bits(x: Array, name: str) -> Array:
    """x, named for rematerialisation policies, which save its bits as integers.  JAX rounds a saved float to its own
    precision (reduce_precision), which for a kernel's output is a copy."""
    bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(checkpoint_name(lax.bitcast_convert_type(x, bits), name), x.dtype)


def _backward(
    kernel: "Splash | Cudnn", options: Pattern, saved: Any, cotangents: tuple[Array, DeferredResiduals]
) -> tuple[Array | None, ...]:
    """`cotangents` are those of the output and, where q, k and v are deferred, q, k and v themselves
    (`model/blocks.py`)."""
    pull, mixed, qkv = saved
    d_mixed, deferred = cotangents

    def run(pull: Any, d_mixed: Array, *arrays: Array) -> tuple[Array, ...]:
        def filled(x: Any) -> Array:
            return arrays[x.of].reshape(x.shape) if isinstance(x, Placeholder) else x

        return sum_by_additions(jax.tree.map(filled, pull, is_leaf=lambda x: isinstance(x, Placeholder)))(d_mixed)

    return None, *without_vma_check(run, pull, d_mixed, mixed, *(deferred or qkv))


_attend.defvjp(_forward, _backward)
