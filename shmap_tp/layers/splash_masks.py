"""Which blocks of scores splash attention computes: those that are not masked, of the queries of a device.

G query heads of a key/value head, T queries, S keys; of a row that is split along time over R ranks, S = R T.
"""

from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jaxtyping import Array, Bool, Int

from shmap_tp.layers.causal_attention import Pattern
from shmap_tp.layers.xla_workarounds import MAX_ADDITIONS
from shmap_tp.parallel.context_parallel import chunks_of

BLOCKS = (512, 256, 128)
"""Positions in a block of queries and of keys: the first that divides T, or of split rows each chunk, is used.  Larger
blocks compute more of the masked half, and at K = 256 their backward pass does not fit the vector memory of v4."""
MOST_KEYS = 4096
"""Positions in the largest block of keys of a backward kernel, for heads of up to 128: with its sums in float32 it
takes 20 MiB of vector memory, which v5e and later allow (`SCOPED_VMEM_KIB` of hardware/xla_options.py)."""
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
    Without a `rank` the queries are those of the last T keys; with one they are this device's two chunks of a row
    (`context_parallel.py`).
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
    make fewer of these, and compute more of the masked half: one of n blocks 1/n more.
    """
    while keys // size > MAX_ADDITIONS and 2 * size <= most and keys % (2 * size) == 0:
        size *= 2
    return size if keys // size <= MAX_PARTIAL_DQ else None


def _mask(shape: tuple[int, int], ranks: int, window: int | None) -> splash_mask.Mask:
    """That of the queries of all ranks, in their order, with the keys."""
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
        """The mask of a block; of one that is masked in all of its elements or in none, one element.  The library asks
        for every block, of which a row of 131,072 positions has 65,536."""
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
    """The kernel for the queries of one rank, of that for the queries of all: its arrays, which say which blocks are
    computed, are split along their dim of queries."""

    def cut(x: Array) -> Array:
        dim = 0 if x.ndim == 1 else 1
        size = x.shape[dim] // ranks
        return lax.dynamic_slice_in_dim(x, rank * size, size, dim)

    return jax.tree.map(cut, kernel)
