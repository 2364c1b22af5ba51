"""A layer under shard_map compared with its dense reference: output, input gradients and parameter gradients.

B batch, T time, D model width, F features.  B/dp: dim B sharded over dp.  All float inputs and parameters are
differentiated against a random cotangent of the output.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shmap_tp.parallel.collectives import mark_varying, reduce_partial_gradients
from shmap_tp.parallel.mesh import DP, MP, batch_axes, token_axes
from shmap_tp.parallel.partitioning import partition_specs
from shmap_tp.parallel.tensor_parallel import AllReduce, CollectiveMatmul, SequenceParallel, TensorParallel
from tests.helpers.assertions import RELATIVE, assert_close, by_path
from tests.helpers.model_fixtures import mesh, random_like, shapes_of

ALL_REDUCE, SEQUENCE, COLLECTIVE_MATMUL = AllReduce(), SequenceParallel(), CollectiveMatmul()

BATCH_SHARDED = P(DP, None, None)  # [B/dp T D], replicated over mp
FEATURES_SHARDED = P(DP, None, MP)  # [B/dp T F/mp]
TIME_SHARDED = P(DP, MP, None)  # [B/dp T/mp D]


@dataclass(frozen=True, eq=False)
class Case:
    """A layer, how it is called on one device, and the dense reference of that call."""

    make: Callable[..., eqx.Module]
    """make(key=...) -> the layer."""
    call: Callable[..., Any]
    """call(layer, *inputs), under shard_map."""
    dense: Callable[..., Any]
    """dense(p, *inputs), on full arrays."""
    inputs: tuple[tuple[tuple[int, ...] | np.ndarray, P], ...]
    """(the shape of a float input, or an integer input itself; its PartitionSpec), for each input."""
    out: Any
    """PartitionSpec of the output, or a tuple of them."""
    tp: TensorParallel = ALL_REDUCE
    """The tensor-parallel mode that `call` uses; it also marks the parameters as varying."""

    def arrays(self, precision: str) -> tuple[eqx.Module, list[np.ndarray]]:
        """(the layer with random parameters, the inputs): the same float32 numbers in every precision."""
        rng = np.random.default_rng(1)
        inputs = [x if isinstance(x, np.ndarray) else rng.normal(size=x).astype("float32") for x, _ in self.inputs]
        return jax.tree.map(partial(in_precision, precision), (random_like(shapes_of(self.make), "float32"), inputs))

    @property
    def input_specs(self) -> list[P]:
        return [spec for _, spec in self.inputs]


def value_and_gradients(call: Callable[..., Any], params: Any, inputs: list[Any], cotangent: Any) -> dict[str, Any]:
    """The output of call(params, *inputs), and the gradients of all floats for this cotangent of the output."""
    floats = {i: x for i, x in enumerate(inputs) if np.issubdtype(x.dtype, np.floating)}

    def of_floats(params: Any, floats: dict[int, Any]) -> Any:
        return call(params, *[floats.get(i, x) for i, x in enumerate(inputs)])

    out, pull = jax.vjp(of_floats, params, floats)
    d_params, d_inputs = pull(cotangent)
    return {"out": out, "d_params": d_params, "d_inputs": d_inputs}


def on_mesh(case: Case, mesh: Mesh, *, gradients: bool = True) -> Callable[[Any, list[Any], Any], dict[str, Any]]:
    """`value_and_gradients` of the layer over `mesh`, or the value only: (params, inputs, cotangent) -> outputs, all
    full arrays."""
    params = shapes_of(case.make)
    specs = partition_specs(params, dict(mesh.shape))
    in_specs, out = jax.tree.map(partial(_over_batches, mesh), (case.input_specs, case.out))
    floats = {i: in_specs[i] for i, (x, _) in enumerate(case.inputs) if not isinstance(x, np.ndarray)}

    def local(params: Any, inputs: list[Any], cotangent: Any) -> dict[str, Any]:
        marked = mark_varying(params, (*token_axes(), *case.tp.time_axes))
        if not gradients:
            return {"out": case.call(marked, *inputs)}
        found = value_and_gradients(case.call, marked, inputs, cotangent)
        reduced = found["d_params"]
        for axis in mesh.axis_names:
            reduced = reduce_partial_gradients(axis, reduced, params)
        return found | {"d_params": reduced}

    outs = {"out": out} | ({"d_params": specs, "d_inputs": floats} if gradients else {})
    return jax.shard_map(local, mesh=mesh, in_specs=(specs, in_specs, out), out_specs=outs)


def _over_batches(mesh: Mesh, spec: P) -> P:
    """A spec for a mesh of dp and mp -> for this one, whose batch axes may be more."""
    return P(*(batch_axes(mesh.axis_names) if axis == DP else axis for axis in spec))


EXPECTED: dict[Any, dict[str, Any]] = {}


@cache
def cotangent_of(case: Case) -> Any:
    """A random cotangent of the output."""
    params, inputs = case.arrays("float32")
    shapes, rng = jax.eval_shape(case.dense, by_path(params), *inputs), np.random.default_rng(2)
    return jax.tree.map(lambda out: rng.normal(size=out.shape).astype("float32"), shapes)


def expected(case: Case) -> dict[str, Any]:
    """`value_and_gradients` of the dense reference in float64, once for all cases that have this reference and these
    arrays, such as those of other tensor-parallel modes."""
    params, inputs = case.arrays("float64")
    key = case.dense, *(x.tobytes() for x in jax.tree.leaves((params, inputs)))
    if key not in EXPECTED:
        with jax.enable_x64(True):
            cotangent = jax.tree.map(partial(in_precision, "float64"), cotangent_of(case))
            run = jax.jit(partial(value_and_gradients, case.dense))
            EXPECTED[key] = jax.device_get(run(by_path(params), inputs, cotangent))
    return EXPECTED[key]


def in_precision(precision: str, x: np.ndarray) -> np.ndarray:
    """Floats in this precision, integers as they are."""
    return np.asarray(x, precision) if np.issubdtype(x.dtype, np.floating) else x


def compare(case: Case, shape: tuple[int, int], precision: str, *, gradients: bool = True, **others: Any) -> None:
    """Asserts that output, input gradients and parameter gradients on this mesh equal those of the reference, or only
    the output; `others` as for `model_fixtures.mesh`."""
    cotangent = jax.tree.map(partial(in_precision, precision), cotangent_of(case))
    params, inputs = case.arrays(precision)
    promotion = "standard" if precision == "float64" else "strict"  # "strict" refuses promote_types(float64, float32)
    with jax.enable_x64(precision == "float64"), jax.numpy_dtype_promotion(promotion):
        run = jax.jit(on_mesh(case, mesh(shape, **others), gradients=gradients))
        found = {name: by_path(x) if name == "d_params" else x for name, x in run(params, inputs, cotangent).items()}
    assert all(array.dtype == precision for array in jax.tree.leaves(found))
    wanted = expected(case)
    assert_close(found, {name: wanted[name] for name in found}, RELATIVE[precision])


def on_one_device(function: Callable[..., Any], *arrays: Any) -> Any:
    """function(*arrays), under shard_map, as kernels are called."""
    return jax.jit(jax.shard_map(function, mesh=mesh((1, 1)), in_specs=P(), out_specs=P()))(*arrays)
