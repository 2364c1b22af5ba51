"""Reading traced programs: their equations, and the kernels that they call."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shmap_tp.config.schema import ModelConfig
from shmap_tp.layers.attention import AnyAttention
from shmap_tp.layers.context import Batch, next_token_batch, tokens_spec
from shmap_tp.model.loss import LinearCrossEntropy, Objective
from shmap_tp.model.tracing import bodies
from shmap_tp.model.transformer import Execution, Transformer
from shmap_tp.parallel.fsdp import Replicated
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.parallel.partitioning import partition_specs
from shmap_tp.training.step import loss_and_gradients
from tests.helpers.model_fixtures import mesh, shapes_of
from tests.helpers.sharded_harness import ALL_REDUCE


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a program, including those of the programs inside it; the outer first."""
    for equation, _ in repeated_equations(jaxpr):
        yield equation


def repeated_equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """(equation, how often it runs) for all equations: those inside a scan run once per iteration."""
    for equation in jaxpr.eqns:
        yield equation, times
        inner = equation.params["length"] if equation.primitive.name == "scan" else 1
        for body in bodies(equation.params):
            yield from repeated_equations(body, times * inner)


def equations_named(jaxpr: Any, primitive: str) -> list[Any]:
    """All equations of this primitive."""
    return [equation for equation in equations(jaxpr) if equation.primitive.name == primitive]


def pallas_kernels(jaxpr: Any) -> list[str]:
    """The names of all Pallas kernels of a program, one for each call in its text."""
    params = [equation.params for equation in equations_named(jaxpr, "pallas_call")]
    return [each["name"] if "name" in each else each["name_and_src_info"].name for each in params]


def is_on_host(var: Any) -> bool:
    """Whether a variable of a jaxpr is in host memory."""
    return "host" in str(getattr(var.aval, "memory_space", "")).lower()


def trace_loss_and_gradients(model: ModelConfig, attend: AnyAttention, dtype: str = "float32") -> Any:
    """The jaxpr of loss and gradients of one microbatch of 4 sequences, on a (2, 4) mesh, computed in `dtype`."""
    params = shapes_of(partial(Transformer, model, attend))
    tokens = jax.ShapeDtypeStruct((1, 4, model.context + 1), jnp.int32)
    return jax.make_jaxpr(loss_and_gradients_on_mesh(model, params, dtype))(params, tokens).jaxpr


def loss_and_gradients_on_mesh(model: ModelConfig, params: Transformer, dtype: str = "float32") -> Callable[..., Any]:
    """(params, tokens[A B T+1]) -> (loss, gradients), on a (2, 4) mesh, computed in `dtype`."""
    specs, on = partition_specs(params, {DP: 2, MP: 4}), mesh((2, 4))
    placements = jax.tree.map(lambda _: Replicated((DP,)), specs)
    loss = LinearCrossEntropy(model.vocabulary, 0.0, 2048)
    objective = Objective(loss, Execution(ALL_REDUCE, jnp.dtype(dtype), placements))

    def local(params: Transformer, batch: Batch) -> tuple[jax.Array, Transformer]:
        parts, gradients = loss_and_gradients(objective, params, batch)
        return parts.losses, gradients

    mapped = jax.shard_map(local, mesh=on, in_specs=(specs, tokens_spec(on.axis_names)), out_specs=(P(), specs))
    return lambda params, tokens: mapped(params, next_token_batch(tokens, on.axis_names))
