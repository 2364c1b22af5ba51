"""FLOPs of a traced program."""

import math
from typing import Any

from shmap_tp.model.tracing import bodies


def matmul_flops(jaxpr: Any) -> int:
    """FLOPs of all matmuls of one run, on one device."""
    total = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        flops = sum(matmul_flops(body) for body in bodies(params))
        assert not (flops and name in ("while", "cond")), f"it is unknown how often the matmuls of a {name} run"
        if name == "dot_general":
            ((contracted, _), _), left = params["dimension_numbers"], equation.invars[0].aval
            flops = 2 * equation.outvars[0].aval.size * math.prod(left.shape[dim] for dim in contracted)
        total += flops * (params["length"] if name == "scan" else 1)
    return total
