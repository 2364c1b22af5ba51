"""Sums over a few arrays, made by adding them.

Of a sum over a dim that is not fused with what makes it, XLA for TPU (libtpu 0.0.42) makes an operation of its own,
which by its own estimate takes three and a half times as long as adding the arrays (v5e, four of them, bfloat16).  The
parts of splash attention's dq are such: of 9.8 s a step of 16B on a v5e-256 it saves 0.2 (predicted).
"""

import functools
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.typing import DTypeLike
from jaxtyping import Array

MOST = 16
"""Arrays that are added: of more it would be a long program."""


def sum_by_additions(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, each of its sums over one dim of at most MOST made by adding, in the dtype that it is summed in.

    For a library's function, whose sums are not ours to write.  It looks into what is jitted, and nowhere deeper: a
    kernel's or a loop's own sums stay.
    """

    def added(*args: Any) -> Any:
        jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(_added(jaxpr))(*jax.tree.leaves(args)))

    return added


def _added(jaxpr: Any) -> Any:
    """The same closed jaxpr, its short sums made by adding."""
    equations = jaxpr.jaxpr.eqns
    widened = {one.outvars[0]: one.invars[0] for one in equations if one.primitive.name == "convert_element_type"}

    def changed(equation: Any) -> Any:
        name, params = equation.primitive.name, equation.params
        if name == "jit":
            return equation.replace(params=params | {"jaxpr": _added(params["jaxpr"])})
        if name != "reduce_sum" or len(params["axes"]) != 1:
            return equation
        (wide,), (axis,), dtype = equation.invars, map(int, params["axes"]), equation.outvars[0].aval.dtype
        x = widened.get(wide, wide)  # each is widened as it is added, not all of them before, in memory
        if not 1 <= x.aval.shape[axis] <= MOST:
            return equation
        call = jax.make_jaxpr(jax.jit(partial(_sum, axis=axis, dtype=dtype)))(x.aval).eqns[0]
        return call.replace(invars=[x], outvars=equation.outvars)

    return jaxpr.replace(jaxpr=jaxpr.jaxpr.replace(eqns=[changed(equation) for equation in equations]))


def _sum(x: Array, axis: int, dtype: DTypeLike) -> Array:
    each = [lax.index_in_dim(x, i, axis, keepdims=False).astype(dtype) for i in range(x.shape[axis])]
    return functools.reduce(operator.add, each)
