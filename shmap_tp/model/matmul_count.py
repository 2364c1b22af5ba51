"""FLOPs of the matmuls of a traced program."""

import math
import re
from typing import Any

from shmap_tp.errors import UserError
from shmap_tp.model.jaxprs import Visit, bodies

UNCOUNTED = re.compile(r"dot|conv_|call|fft|solve|cholesky|^lu$|^qr$|eig|svd|householder")
"""Primitives that do more than elementwise work, and that `matmul_flops` cannot count; not those that only contain
other equations, which are visited themselves."""


class UncountedError(UserError):
    """A program contains work whose FLOPs cannot be counted."""


def matmul_flops(visit: Visit) -> int:
    """FLOPs of an equation, as often as it runs: 0 for elementwise work, and for what only contains other equations.

    Raises UncountedError for a kernel, for another operation of linear algebra, and for a matmul in a while loop or a
    branch.
    """
    name, equation = visit.name, visit.equation
    if name == "dot_general":
        ((contracted, _), _), left = equation.params["dimension_numbers"], equation.invars[0].aval
        flops = 2 * equation.outvars[0].aval.size * math.prod(left.shape[dim] for dim in contracted)
    elif name in ("ragged_dot", "ragged_dot_general"):
        flops = _ragged_flops(equation)
    elif name == "conv_general_dilated":
        kernel, outputs = equation.invars[1].aval, equation.params["dimension_numbers"].rhs_spec[0]
        flops = 2 * equation.outvars[0].aval.size * (kernel.size // kernel.shape[outputs])
    elif UNCOUNTED.search(name) and (name == "pallas_call" or not bodies(equation.params)):
        raise UncountedError(
            f"the FLOPs of {name} in {visit.scope or 'the model'} are not known; write it with jnp.einsum, jnp.matmul "
            f"or the `attend` that a block is given"
        )
    else:
        return 0
    if visit.loop:
        raise UncountedError(
            f"a matmul in {visit.scope or 'the model'} is in a {visit.loop}, so it is unknown how often it runs; "
            f"use lax.scan instead, or jnp.where"
        )
    return flops * visit.times


def _ragged_flops(equation: Any) -> int:
    """2abc for a grouped product: every row belongs to one group, and is multiplied once."""
    left, right, out = equation.invars[0].aval, equation.invars[1].aval, equation.outvars[0].aval
    rows = left.shape[0]
    if right.ndim == 3:  # rows[a b] of the groups, each with a matrix
        return 2 * rows * math.prod(right.shape[1:])
    return 2 * rows * math.prod(out.shape[1:])  # the gradient of the matrices, [groups b c]
