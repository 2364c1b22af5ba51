"""Attention by kernels that others wrote, each a value that `Attention` holds: no [T, T] scores ever lie in memory.

B batch, T time, H query heads, N key/value heads, K head dim, G = H / N, all of one device.

    Splash   TPU v4 and later: jax.experimental.pallas.ops.tpu.splash_attention, of the JAX authors
    Cudnn    NVIDIA Ampere and later: cuDNN's flash attention, by jax.nn.dot_product_attention

Both are Dao et al. 2022, "FlashAttention", https://arxiv.org/abs/2205.14135: forward, blocks of scores with a running
softmax; backward, the scores once more from q, k and the logarithm of each query's denominator.  Which of them, or the
plain `Chunked` of attention.py, a program takes is decided in choice.py.

The kernels know nothing of varying and invarying values, so they run behind a fence, `_unchecked`, and are never
differentiated through it: `_attend` says what forward and backward are, and both only call it.

Where the host is to keep q, k and v, a kernel hands them on, and gets them back in its backward pass, from `later`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from shmap_tp.layers.later import DeferredResiduals
from shmap_tp.layers.xla_workarounds import sum_by_additions
from shmap_tp.parallel.collectives import mark_varying, varying_axes

ATTENTION_OUTPUT = "attended"
"""Names what attention made, so that a remat policy can keep it."""


SOFTMAX_DENOMINATORS = "denominators"
"""Names what a kernel's backward pass needs besides: one number for each query of each head."""

BLOCKS = (512, 256, 128)
"""Positions of a block of queries and of keys: the first that divides T.  With larger ones more of the masked half is
computed, and at K = 256 the backward pass does not fit the vector memory of a v4."""

SPLASH_HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True)
class Splash:
    """softmax(q k' / sqrt(K), s <= t) v on the matrix units of a TPU, block by block.

    Scores and softmax in float32; q is scaled by K^-0.5 before, in float32, and rounded to its own dtype again.
    Blocks above the diagonal are left out.  Backward in one kernel: partial dq of every block of keys, in q's dtype,
    which are then added (`adding`).
    """

    later: bool = False
    """Whether what the backward kernel reads of q, k and v comes from `put_off` (`later`), which they are handed to."""
    interpret: bool = False
    """Run the kernel's program on whatever device there is, instead of compiling it: for tests."""

    def __call__(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BTNK: Float[Array, "B T N K"],
        v_BTNK: Float[Array, "B T N K"],
        slopes_H: Float[Array, " H"] | None,
    ) -> tuple[Float[Array, "B T H K"], DeferredResiduals]:
        """(mixed, what is handed to `put_off`).  Wire: nothing."""
        assert slopes_H is None, "the kernel adds no bias to scores: choice.py must not have chosen it"
        (batch, time, heads, head_dim), groups = q_BTHK.shape, k_BTNK.shape[2]
        shared = heads // groups
        scaled_BTHK = (q_BTHK.astype(jnp.float32) * head_dim**-0.5).astype(q_BTHK.dtype)
        q = scaled_BTHK.reshape(batch, time, groups, shared, head_dim).transpose(0, 2, 3, 1, 4)
        k, v = [x.transpose(0, 2, 1, 3).reshape(batch * groups, time, head_dim) for x in (k_BTNK, v_BTNK)]
        mixed, handed = _fenced(self, q.reshape(batch * groups, shared, time, head_dim), k, v)
        mixed = mixed.reshape(batch, groups, shared, time, head_dim)
        return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, time, heads, head_dim), handed

    def run(
        self, q_CGTK: Float[Array, "C G T K"], k_CTK: Float[Array, "C T K"], v_CTK: Float[Array, "C T K"]
    ) -> Float[Array, "C G T K"]:
        """What the fence is around, C = B N being windows x key/value heads.  A dim that is mapped is one that the two
        cores of a v4 or v5p share; of the backward kernel's own dims none is."""
        return jax.vmap(_splash(*q_CGTK.shape[1:3], self.interpret))(q_CGTK, k_CTK, v_CTK)


def _splash(shared: int, time: int, interpret: bool) -> Callable[[Array, Array, Array], Array]:
    """q[G T K], k[T K], v[T K] -> [G T K]: the kernel for the query heads of one key/value head, causal."""
    size = next(size for size in BLOCKS if time % size == 0)
    blocks = splash_kernel.BlockSizes(
        block_q=size,
        block_kv=size,
        block_kv_compute=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_kv_dkv_compute=size,
        use_fused_bwd_kernel=True,
    )
    mask = splash_mask.MultiHeadMask([splash_mask.CausalMask((time, time))] * shared)
    return splash_kernel.make_splash_mqa(mask, block_sizes=blocks, head_shards=1, q_seq_shards=1, interpret=interpret)


@dataclass(frozen=True)
class Cudnn:
    """softmax(q k' / sqrt(K), s <= t) v by cuDNN's flash attention, bfloat16 or float16.

    No GPU has run it from here: that it is lowered to cuDNN's forward and backward calls, with the right shapes, types
    and number of them, is all that the tests see.
    """

    later: bool = False
    """Whether what the backward kernel reads of q, k and v comes from `put_off` (`later`), which they are handed to."""

    def __call__(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BTNK: Float[Array, "B T N K"],
        v_BTNK: Float[Array, "B T N K"],
        slopes_H: Float[Array, " H"] | None,
    ) -> tuple[Float[Array, "B T H K"], DeferredResiduals]:
        """(mixed, what is handed to `put_off`).  Wire: nothing."""
        assert slopes_H is None, "the kernel adds no bias to scores: choice.py must not have chosen it"
        return _fenced(self, q_BTHK, k_BTNK, v_BTNK)

    def run(
        self, q_BTHK: Float[Array, "B T H K"], k_BTNK: Float[Array, "B T N K"], v_BTNK: Float[Array, "B T N K"]
    ) -> Float[Array, "B T H K"]:
        """What the fence is around."""
        return jax.nn.dot_product_attention(q_BTHK, k_BTNK, v_BTNK, is_causal=True, implementation="cudnn")


# The fence


def without_vma_check(run: Callable[..., Any], *args: Any) -> Any:
    """run(*args), whose operations need not know what varies; every result is typed as varying as the arguments are.

    Every mesh axis is manual around it already, so the inner shard_map makes none so, cuts nothing and moves nothing:
    it only switches off, for these lines, the check that Pallas' operations do not pass.  The types of the results are
    this function's word for it.  Its casts' transposes would be sums over the mesh that nobody owes: whoever calls it
    must not let JAX differentiate it.
    """

    def untyped(x: Array) -> Array:
        """x, varying over nothing by its type: what any unchecked operation returns, here two that cost nothing."""
        return lax.squeeze(lax.expand_dims(x, (0,)), (0,))

    def within(*args: Any) -> Any:
        return run(*jax.tree.map(untyped, args))

    axes = sorted(frozenset[str]().union(*[varying_axes(x) for x in jax.tree.leaves(args)]))
    results = jax.shard_map(within, in_specs=P(), out_specs=P(), check_vma=False)(*args)
    for axis in axes:
        results = mark_varying(results, axis)
    return results


def _fenced(kernel: "Splash | Cudnn", *qkv: Array) -> tuple[Array, DeferredResiduals]:
    """kernel.run(q, k, v).  All three are made to vary over the same axes before: what the gradient of one that did not
    owes is then JAX's to see, and the gradients that come out of the fence have the types of what went in."""
    for axis in sorted(frozenset[str]().union(*[varying_axes(x) for x in qkv])):
        qkv = mark_varying(qkv, axis)
    with jax.named_scope("attend"):
        return _attend(kernel, *qkv)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(kernel: "Splash | Cudnn", *qkv: Array) -> tuple[Array, DeferredResiduals]:
    return without_vma_check(kernel.run, *qkv), _handed(kernel, qkv)


class Place(eqx.Module):
    """Stands for the output, q, k or v in what the backward kernel needs: `of` 0 to 3."""

    of: int = eqx.field(static=True)
    shape: tuple[int, ...] = eqx.field(static=True)


def _forward(kernel: "Splash | Cudnn", *qkv: Array) -> tuple[tuple[Array, DeferredResiduals], Any]:
    """(output, what the backward kernel needs): of those, what the forward kernel made is named.  The output, q, k and
    v stand in there but as places: what comes out of the fence twice, a remat policy keeps twice (16B on a v5e-256:
    2 GiB, and 0.13 of 9.94 s a step, predicted)."""

    def run(*qkv: Array) -> tuple[Array, Any]:
        mixed, pull = jax.vjp(kernel.run, *qkv)
        known: dict[int, Any] = {id(x): Place(of, x.shape) for of, x in enumerate((mixed, *qkv))}

        def named(x: Array) -> Any:
            if id(x) not in known:
                known[id(x)] = checkpoint_name(x, SOFTMAX_DENOMINATORS) if jnp.issubdtype(x.dtype, jnp.floating) else x
            return known[id(x)]

        return _named_as_bits(mixed, ATTENTION_OUTPUT), jax.tree.map(named, pull)

    mixed, pull = without_vma_check(run, *qkv)
    handed = _handed(kernel, qkv)
    return (mixed, handed), (pull, mixed, None if handed else qkv)


def _handed(kernel: "Splash | Cudnn", qkv: DeferredResiduals) -> DeferredResiduals:
    """In three dims each: of more, XLA for TPU (libtpu 0.0.42) makes another copy before it writes them to the host."""
    return tuple(x.reshape(-1, *x.shape[-2:]) for x in qkv) if kernel.later else ()


def _named_as_bits(x: Array, name: str) -> Array:
    """x by a name for remat policies, which then keep its bits.  A float that is kept JAX rounds to its own precision
    (reduce_precision), and of what a kernel made that is a copy (16B: 0.06 s a step)."""
    bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(checkpoint_name(lax.bitcast_convert_type(x, bits), name), x.dtype)


def _backward(kernel: "Splash | Cudnn", kept: Any, gradients: tuple[Array, DeferredResiduals]) -> tuple[Array, ...]:
    """`gradients` are that of the output and, where they are read later, q, k and v themselves (`later`)."""
    pull, mixed, qkv = kept
    d_mixed, handed = gradients

    def run(pull: Any, d_mixed: Array, *places: Array) -> tuple[Array, ...]:
        def found(x: Any) -> Array:
            return places[x.of].reshape(x.shape) if isinstance(x, Place) else x

        return sum_by_additions(jax.tree.map(found, pull, is_leaf=lambda x: isinstance(x, Place)))(d_mixed)

    return without_vma_check(run, pull, d_mixed, mixed, *(handed or qkv))


_attend.defvjp(_forward, _backward)
