"""Functions that exist only because of how XLA compiles, or JAX differentiates, their plain versions, which they name.

The observations and timings behind them are in docs/performance-notes.md.
"""

import functools
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike
from jaxtyping import Array, Float

LANES = 128
"""Elements in the rows that a TPU's memory is made of: the last dim of an array is padded to a multiple of it."""

MAX_ADDITIONS = 16
"""Longest dim whose sum is written as additions; for a longer one the program would grow too much."""


def sum_by_additions(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with each sum over one dim of at most MAX_ADDITIONS written as additions of slices.

    The plain version is `function` itself.  It is for a library's function (splash attention's backward pass adds
    partial dq), whose sums cannot be edited.  It rewrites the jaxpr, inside jit but not inside kernels or loops.
    """

    def added(*args: Any) -> Any:
        jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        return jax.tree.unflatten(
            jax.tree.structure(shapes), jaxpr_as_fun(_with_additions(jaxpr))(*jax.tree.leaves(args))
        )

    return added


def _with_additions(jaxpr: Any) -> Any:
    """The same closed jaxpr, with additions in place of its short sums."""
    equations = jaxpr.jaxpr.eqns
    widened = {one.outvars[0]: one.invars[0] for one in equations if one.primitive.name == "convert_element_type"}

    def rewrite(equation: Any) -> Any:
        name, params = equation.primitive.name, equation.params
        if name == "jit":
            return equation.replace(params=params | {"jaxpr": _with_additions(params["jaxpr"])})
        if name != "reduce_sum" or len(params["axes"]) != 1:
            return equation
        (wide,), (axis,), dtype = equation.invars, map(int, params["axes"]), equation.outvars[0].aval.dtype
        x = widened.get(wide, wide)  # convert each slice as it is added, instead of the whole array before
        if not 1 <= x.aval.shape[axis] <= MAX_ADDITIONS:
            return equation
        call = jax.make_jaxpr(jax.jit(partial(_sum, axis=axis, dtype=dtype)))(x.aval).eqns[0]
        return call.replace(invars=[x], outvars=equation.outvars)

    return jaxpr.replace(jaxpr=jaxpr.jaxpr.replace(eqns=[rewrite(equation) for equation in equations]))


def _sum(x: Array, axis: int, dtype: DTypeLike) -> Array:
    slices = [lax.index_in_dim(x, i, axis, keepdims=False).astype(dtype) for i in range(x.shape[axis])]
    return functools.reduce(operator.add, slices)


@jax.custom_vjp
def join_gradients(*values: Any) -> tuple[Any, ...]:
    """The values.  Their gradients are in memory, all of them, before anything uses one.

    The plain version is the identity.  With it XLA for TPU holds the FSDP gradient of the head, in float32, until the
    backward pass of all blocks is done; and it computes the gradient of a norm that follows a matmul anew for every
    tile of the two matmuls that read it, which takes as long as they do.
    """
    return values


join_gradients.defvjp(lambda *values: (values, None), lambda _, gradients: lax.optimization_barrier(gradients))


row_major_p = Primitive("row_major")
row_major_p.def_impl(lambda x: x)
row_major_p.def_abstract_eval(lambda x: x)
ad.deflinear2(row_major_p, lambda dy, _: [row_major_p.bind(dy)])
batching.defvectorized(row_major_p)


def row_major(x: Array) -> Array:
    """x.  On TPUs it and its gradient are stored with the last dim contiguous, if that fills whole rows of memory.

    The plain version is the identity.  With it XLA for TPU stacks what a loop over layers saves in the layout of the
    operation that made it, and copies it in every layer if the backward pass reads it in another.  In some models
    the constraint causes such copies instead, so that it is a choice (`model.row_major`).  It is a primitive, whose
    lowering for other devices is the identity.
    """
    return row_major_p.bind(x)


def _row_major_on_tpu(x: Array) -> Array:
    if x.shape[-1] % LANES:
        return x
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


mlir.register_lowering(row_major_p, lambda _, x: [x])
mlir.register_lowering(row_major_p, mlir.lower_fun(_row_major_on_tpu, multiple_results=False), platform="tpu")


def recompute_from(tree: Any) -> Any:
    """The same values, from which XLA computes everything again instead of keeping what it has computed from `tree`.

    The plain version is the identity, with which XLA keeps an elementwise result in memory until its last use.  A
    barrier around whole arrays would copy them; this multiplies them by a 1 that XLA does not know.  CPUs get the
    plain version, a 1 that it knows: there the second computation takes time and memory, and saves none.
    """
    one = lax.platform_dependent(jnp.ones(()), cpu=lambda one: one, default=lax.optimization_barrier)
    return jax.tree.map(lambda x: x * one.astype(x.dtype), tree)


@jax.custom_jvp
def exact_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x times the normal distribution's cumulative function.  Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415

    The plain version is `jax.nn.gelu(x, approximate=False)`, whose derivative jax 0.12 cannot trace under shard_map: it
    evaluates a polynomial whose coefficients do not vary over the mesh axes that x varies over.
    """
    return jax.nn.gelu(x, approximate=False)


@exact_gelu.defjvp
def _exact_gelu_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    ((x,), (t,)) = primals, tangents
    cumulative = 0.5 * lax.erfc(-x * np.sqrt(0.5).astype(x.dtype))
    density = np.sqrt(0.5 / np.pi).astype(x.dtype) * jnp.exp(-0.5 * x * x)
    return exact_gelu(x), t * (cumulative + x * density)


def isolate_gradient(module: Any) -> Any:
    """`module`, its gradient computed apart from the accumulator that it is added to.

    The plain version is the identity, on which XLA for TPU fails where a loop accumulates an all-reduce directly
    (RET_CHECK in while_loop_all_reduce_code_motion).  The extra dim around the barrier is for jax 0.12, which drops a
    barrier's gradient that is added to a total.
    """

    def isolate(w: Array) -> Array:
        return lax.squeeze(lax.optimization_barrier(lax.expand_dims(w, (0,))), (0,))

    return jax.tree.map(isolate, module)
