"""Errors that are easy to make here, each made on purpose, and what detects it.

refused   the program does not type-check, or its shapes do not match, whatever its inputs
wrong     it runs, and the comparison with the dense reference fails
wasteful  its values are right, and the check of its collectives fails

Each test also proves that the check which it calls can fail.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

from shmap_tp.layers import embedding, linear, positions
from shmap_tp.layers.linear import Kind, Linear
from shmap_tp.layers.norm import LayerNorm, RMSNorm
from shmap_tp.model import loss
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel import collective_matmul, fsdp, tensor_parallel, weights
from shmap_tp.parallel.collective_matmul import RingStep
from shmap_tp.parallel.fsdp import Fsdp, Zero1
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.parallel.tensor_parallel import AllReduce
from shmap_tp.plan.ledger import Direction, communication_in_jaxpr
from shmap_tp.training import optimizer, step
from tests.helpers import sharded_harness
from tests.helpers.assertions import RELATIVE, assert_close
from tests.helpers.layer_cases import LAYERS
from tests.helpers.model_cases import FSDP, SLICES, compare_model
from tests.helpers.model_fixtures import mesh
from tests.helpers.mutations import (
    compare_layer,
    compare_loss,
    declare,
    is_wasteful,
    mutate,
    of_kind,
    refused_by_shape,
    refused_by_type,
    trace_step,
    with_lax,
    wrong,
)

BLOCKS = ["parallel_block_2_of_8", "sequential_block"]


def identity(x: Any, *_: Any, **__: Any) -> Any:
    return x


def kept(self: Any, x: Any) -> Any:
    return x


def gather_flipped(x: Any, axis: Any, dim: int) -> Any:
    return jnp.flip(lax.all_gather(x, axis, axis=dim % x.ndim, tiled=True), dim)


def local_term(term: Any, n: int, dtype: Any, send: Any) -> Any:
    """No type detects it: the local term has the shape of the sum."""
    return term(RingStep(0, [], [])).astype(dtype)


def clip_by_optax(gradients: Any, limit: float) -> tuple[Any, Any]:
    """Its norm is that of one device's shards, so that replicas of a parameter would diverge."""
    return optax.clip_by_global_norm(limit).update(gradients, optax.EmptyState())[0], optax.tree.norm(gradients)


def megatron(forward: Any, backward: Any) -> Any:
    """A method whose gradient is defined by hand.  Megatron's f is right without check_vma; with it JAX has reduced dx
    already, so that the result is mp times dx."""
    function = jax.custom_vjp(forward)
    function.defvjp(lambda x: (forward(x), None), lambda _, dx: (backward(dx),))
    return lambda self, x: function(x)


def over_mp(x: Any) -> Any:
    return lax.psum(x, MP)


PARALLEL, SEQUENTIAL = (partial(compare_layer, block) for block in BLOCKS)
TRACE_FSDP = partial(trace_step, "mesh.zero=fsdp")
TRACE_SLICES = partial(TRACE_FSDP, "mesh.slices=2", "mesh.dp=4", "mesh.mp=2")
MISTAKES = {
    # what is wrong: (module or type, name, what replaces it, how it is detected, by which check)
    "no all-reduce after a row-parallel product": (AllReduce, "reduce", kept, refused_by_type, PARALLEL),
    "no all-reduce in a sequential block": (AllReduce, "reduce", kept, refused_by_type, SEQUENTIAL),
    "no all-reduce in a step": (AllReduce, "reduce", kept, refused_by_type, trace_step),
    "a second all-reduce after a row-parallel product, which sums mp equal values": (
        AllReduce, "reduce", lambda self, x: over_mp(over_mp(x)), wrong, PARALLEL),
    "a custom gradient for reduce, as Megatron's g": (
        AllReduce, "reduce", megatron(over_mp, identity), refused_by_type, PARALLEL),
    "a custom gradient for enter, as Megatron's f": (AllReduce, "enter", megatron(identity, over_mp), wrong, PARALLEL),
    "the same in a sequential block": (AllReduce, "enter", megatron(identity, over_mp), wrong, SEQUENTIAL),
    "an input that is not marked as varying: dx is reduced once for each product that reads it": (
        AllReduce, "enter", kept, nullcontext(), partial(is_wasteful, BLOCKS[0])),
    "an input of a sequential block that is not marked as varying": (
        AllReduce, "enter", kept, nullcontext(), partial(is_wasteful, BLOCKS[1])),
    "gradients are not reduced over dp": (fsdp, "all_reduce", identity, refused_by_type, trace_step),
    "an fsdp weight is not gathered": (fsdp, "all_gather", identity, refused_by_shape, TRACE_FSDP),
    "an fsdp weight is gathered in another order": (
        fsdp, "all_gather", gather_flipped, wrong, partial(compare_model, FSDP, gradients=False)),
    "a gradient ring returns only the local term": (
        weights, "ring_reduce_scatter", local_term, wrong, partial(compare_model, SLICES)),
    "a gradient ring over many tokens, whose terms wait for no received sums, which is right": (
        weights, "MIN_TOKENS_TO_OVERLAP", 0, nullcontext(), partial(compare_model, SLICES)),
    "no fsdp gather between slices": (Fsdp, "gather_between_slices", kept, refused_by_shape, TRACE_SLICES),
    "no reduction of fsdp gradients between slices": (Fsdp, "reduce_gradient", kept, refused_by_shape, TRACE_SLICES),
    "an fsdp gradient is reduce-scattered again after the transpose of the all-gather": (
        Fsdp, "reduce_gradient", Zero1.reduce_gradient, refused_by_shape, TRACE_FSDP),
    "gradient clipping by optax": (step, "clip_by_global_norm", clip_by_optax, refused_by_type, trace_step),
    "the global norm of optax": (optimizer, "global_norm", optax.tree.norm, refused_by_type, trace_step),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_communication_is_detected(monkeypatch, mistake):
    owner, name, instead, detected, check = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, instead)
    with detected:
        check()


def test_parameters_that_are_not_marked_as_varying_over_dp_waste_communication(monkeypatch):
    """The values are right, but JAX reduces their gradients over dp in every microbatch."""
    only_others = lambda mark: lambda tree, axes: tree if isinstance(tree, Transformer) else mark(tree, axes)  # noqa: E731
    mutate(monkeypatch, step, "mark_varying", only_others)
    over_dp = [entry for entry in communication_in_jaxpr(trace_step()) if entry.axis == DP]
    assert any(entry.direction == Direction.backward and entry.count > 1 for entry in over_dp)


# A wrong declaration of how a parameter is sharded


@pytest.mark.parametrize(
    ("declared", "axes", "layer"),
    [
        (Kind.row, (None, None), "row"),
        (Kind.row, (None, MP), "gelu"),
        (Kind.column, (None, MP), "column"),
        (Kind.column, (None, None), "swiglu"),
        (embedding.VocabParallelEmbedding, (None, MP), "embedding"),
        (LayerNorm, (MP,), "layernorm"),
        (RMSNorm, (MP,), "rmsnorm"),
        (Kind.heads, (MP, None, None), "attention_alibi"),
        (Kind.heads, (None, MP, None), "parallel_block_2_of_8"),  # without replicate_if_fewer
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_a_wrong_sharding_declaration_has_the_wrong_shape(monkeypatch, declared, axes, layer):
    declare(monkeypatch, declared, *axes)
    with refused_by_shape:
        compare_layer(layer)


def test_key_value_heads_declared_as_replicated_give_wrong_values(monkeypatch):
    """All shapes fit: every device has enough heads for its queries, but not its own heads."""
    declare(monkeypatch, Kind.heads, None, None, None)
    with wrong:
        compare_layer("parallel_block_2_of_8", (4, 2))


def test_an_embedding_declared_as_replicated_wastes_communication(monkeypatch):
    """The first device finds every id and the others none: right, but every device stores and reduces the full
    table."""
    declare(monkeypatch, embedding.VocabParallelEmbedding, None, None)
    is_wasteful("embedding")


def test_an_undeclared_parameter_is_refused(monkeypatch):
    monkeypatch.setattr(LayerNorm.__dataclass_fields__["scale"], "metadata", {})
    with pytest.raises(TypeError, match=r"norm\.scale is an array that was not declared with param"):
        trace_step()


# Shards in another order


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        (linear, "key_value_2_of_8"),
        (embedding, "embedding"),
        (positions, "attention_alibi"),
        (tensor_parallel, "learned, sequence"),
        (collective_matmul, "sequential_block, collective_matmul"),
        (loss, None),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_counting_ranks_in_reverse_gives_wrong_values(monkeypatch, module, layer):
    """In every module that uses a device's index along mp."""
    with_lax(monkeypatch, module, axis_index=lambda axis: lax.axis_size(axis) - 1 - lax.axis_index(axis))
    with wrong:
        compare_loss() if layer is None else compare_layer(layer, gradients=False)


@pytest.mark.parametrize("layer", ["column", "gelu", "attention_alibi", "parallel_block_2_of_8"])
def test_using_the_columns_of_the_next_device_gives_wrong_values(monkeypatch, layer):
    """All heads, and the hidden dim of an MLP, are shifted by one device."""

    def from_next_device(x: Any) -> Any:
        size = lax.axis_size(MP)
        return lax.ppermute(x, MP, [(i, (i + 1) % size) for i in range(size)])

    def with_weight_of_next_device(call: Any) -> Any:
        return lambda self, x: call(eqx.tree_at(lambda it: it.weight, self, from_next_device(self.weight)), x)

    mutate(monkeypatch, Linear, "__call__", of_kind(Kind.column, with_weight_of_next_device))
    # its result and not its weight, which is the same on every device where mp exceeds the number of heads
    of_next_device = of_kind(Kind.heads, lambda heads: lambda self, x: from_next_device(heads(self, x)))
    mutate(monkeypatch, Linear, "__call__", of_next_device)
    with wrong:
        compare_layer(layer, gradients=False)


def test_device_order_in_the_mesh_changes_no_value():
    """Not an error: shards belong to places in the mesh, not to device ids."""
    case = LAYERS["parallel_block_2_of_8"]
    shuffled = Mesh(np.array(jax.devices())[[5, 3, 0, 6, 1, 7, 4, 2]].reshape(2, 4), (DP, MP), (AxisType.Auto,) * 2)
    arrays = *case.arrays("float64"), np.float64(sharded_harness.cotangent_of(case))
    with jax.enable_x64(True):
        on_shuffled, in_order = (jax.jit(sharded_harness.on_mesh(case, on))(*arrays) for on in (shuffled, mesh((2, 4))))
        assert_close(on_shuffled, in_order, RELATIVE["float64"])
