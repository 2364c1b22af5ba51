"""Errors that are easy to make here, each made on purpose, and what detects it.

refused   the program does not type-check, or its shapes do not match, whatever its inputs
wrong     it runs, and the comparison with the dense reference fails
wasteful  its values are right, and the check of its collectives fails

Each test also proves that the check which it calls can fail.
"""

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

import shmap_tp.layers.attention
import shmap_tp.layers.embedding
import shmap_tp.layers.positions
import shmap_tp.model.loss
import shmap_tp.parallel.collective_matmul
import shmap_tp.parallel.fsdp
import shmap_tp.parallel.fsdp_overlap
import shmap_tp.parallel.tensor_parallel
import shmap_tp.training.optimizer
import shmap_tp.training.step
from shmap_tp.layers.attention import KeyValueHeads
from shmap_tp.layers.embedding import VocabParallelEmbedding
from shmap_tp.layers.linear import ColumnParallelLinear, RowParallelLinear
from shmap_tp.layers.norm import LayerNorm, RMSNorm
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.fsdp import Fsdp, Zero1
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.parallel.ring import RingStep
from shmap_tp.parallel.tensor_parallel import AllReduce
from shmap_tp.plan.communication.from_jaxpr import communication_in_jaxpr
from shmap_tp.plan.communication.ledger import Direction
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
    refused_by_shape,
    refused_by_type,
    trace_step,
    with_lax,
    wrong,
)

BLOCKS = ["parallel_block_2_of_8", "sequential_block"]
every_block = pytest.mark.parametrize("block", BLOCKS)


def identity(_: Any) -> Any:
    return lambda x, *_, **__: x


def kept(_: Any) -> Any:
    return lambda self, x: x


def gather_flipped(x: Any, axis: Any, dim: int) -> Any:
    return jnp.flip(lax.all_gather(x, axis, axis=dim % x.ndim, tiled=True), dim)


def local_term(term: Any, n: int, dtype: Any, send: Any) -> Any:
    """No type detects it: the local term has the shape of the sum."""
    return term(RingStep(0, [], [])).astype(dtype)


def clip_by_optax(gradients: Any, limit: float) -> tuple[Any, Any]:
    """Its norm is that of one device's shards, so that replicas of a parameter would diverge."""
    return optax.clip_by_global_norm(limit).update(gradients, optax.EmptyState())[0], optax.tree.norm(gradients)


def megatrons_g() -> Any:
    reduce = jax.custom_vjp(lambda x: lax.psum(x, MP))
    reduce.defvjp(lambda x: (lax.psum(x, MP), None), lambda _, dx: (dx,))
    return lambda self, x: reduce(x)


fsdp, step = shmap_tp.parallel.fsdp, shmap_tp.training.step
between_slices = partial(trace_step, "mesh.zero=fsdp", "mesh.slices=2", "mesh.dp=4", "mesh.mp=2")
MISTAKES = {
    # what is wrong: (module or type, name, what replaces it, how it is detected, by which check)
    "gradients are not reduced over dp": (fsdp, "all_reduce", identity, refused_by_type, trace_step),
    "an fsdp weight is not gathered": (
        fsdp, "all_gather", identity, refused_by_shape, partial(trace_step, "mesh.zero=fsdp"),
    ),
    "an fsdp weight is gathered in another order": (
        fsdp, "all_gather", lambda _: gather_flipped, wrong, partial(compare_model, FSDP),
    ),
    "a gradient ring returns only the local term": (
        shmap_tp.parallel.fsdp_overlap, "ring_reduce_scatter", lambda _: local_term, wrong,
        partial(compare_model, SLICES),
    ),
    "an fsdp weight is not gathered between slices": (
        Fsdp, "gather_between_slices", kept, refused_by_shape, between_slices,
    ),
    "an fsdp gradient is not reduced between slices": (
        Fsdp, "reduce_gradient", kept, refused_by_shape, between_slices,
    ),
    "an fsdp gradient is reduce-scattered again after the transpose of the all-gather": (
        Fsdp, "reduce_gradient", lambda _: Zero1.reduce_gradient, refused_by_shape,
        partial(trace_step, "mesh.zero=fsdp"),
    ),
    "a second all-reduce after a row-parallel product, which sums mp equal values": (
        AllReduce, "reduce", lambda _: lambda self, x: lax.psum(lax.psum(x, MP), MP), wrong,
        partial(compare_layer, BLOCKS[0]),
    ),
    "a custom gradient for reduce, as Megatron's g": (
        AllReduce, "reduce", lambda _: megatrons_g(), refused_by_type, partial(compare_layer, BLOCKS[0]),
    ),
    "gradient clipping by optax": (step, "clip_by_global_norm", lambda _: clip_by_optax, refused_by_type, trace_step),
    "the global norm of optax": (
        shmap_tp.training.optimizer, "global_norm", lambda _: optax.tree.norm, refused_by_type, trace_step,
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_communication_is_detected(monkeypatch, mistake):
    owner, name, instead, detected, check = MISTAKES[mistake]
    mutate(monkeypatch, owner, name, instead)
    with detected:
        check()


@every_block
def test_a_missing_all_reduce_after_a_row_parallel_product_does_not_type_check(monkeypatch, block):
    mutate(monkeypatch, AllReduce, "reduce", kept)
    with refused_by_type:
        trace_step(f"model.block={block.partition('_')[0]}")
    with refused_by_type:
        compare_layer(block)


def test_a_gradient_ring_over_many_tokens_gives_right_values(monkeypatch):
    """Not an error: with many tokens the terms of the ring do not wait for received sums."""
    monkeypatch.setattr(shmap_tp.parallel.fsdp_overlap, "MIN_TOKENS_TO_OVERLAP", 0)
    compare_model(SLICES)


# Another cast before a column-parallel product


@every_block
def test_an_input_that_is_not_marked_as_varying_wastes_communication(monkeypatch, block):
    """The values are right, but dx is reduced once for each product that reads the input."""
    mutate(monkeypatch, AllReduce, "enter", kept)
    is_wasteful(block)


@every_block
def test_a_custom_gradient_for_enter_gives_wrong_values(monkeypatch, block):
    """Megatron's f, which is right without check_vma: with it JAX has reduced dx already, so the result is mp times
    dx."""
    enter = jax.custom_vjp(lambda x: x)
    enter.defvjp(lambda x: (x, None), lambda _, dx: (lax.psum(dx, MP),))
    monkeypatch.setattr(AllReduce, "enter", lambda self, x: enter(x))
    with wrong:
        compare_layer(block)


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
        (RowParallelLinear, (None, None), "row"),
        (RowParallelLinear, (None, MP), "gelu"),
        (ColumnParallelLinear, (None, MP), "column"),
        (ColumnParallelLinear, (None, None), "swiglu"),
        (VocabParallelEmbedding, (None, MP), "embedding"),
        (LayerNorm, (MP,), "layernorm"),
        (RMSNorm, (MP,), "rmsnorm"),
        (KeyValueHeads, (MP, None, None), "attention_alibi"),
        (KeyValueHeads, (None, MP, None), "parallel_block_2_of_8"),  # without replicate_if_fewer
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_a_wrong_sharding_declaration_has_the_wrong_shape(monkeypatch, declared, axes, layer):
    declare(monkeypatch, declared, *axes)
    with refused_by_shape:
        compare_layer(layer)


def test_key_value_heads_declared_as_replicated_give_wrong_values(monkeypatch):
    """All shapes fit: every device has enough heads for its queries, but not its own heads."""
    declare(monkeypatch, KeyValueHeads, None, None, None)
    with wrong:
        compare_layer("parallel_block_2_of_8", (4, 2))


def test_an_embedding_declared_as_replicated_wastes_communication(monkeypatch):
    """The first device finds every id and the others none: right, but every device stores and reduces the full
    table."""
    declare(monkeypatch, VocabParallelEmbedding, None, None)
    is_wasteful("embedding")


def test_an_undeclared_parameter_is_refused(monkeypatch):
    monkeypatch.setattr(LayerNorm.__dataclass_fields__["scale"], "metadata", {})
    with pytest.raises(TypeError, match=r"norm\.scale is an array that was not declared with param"):
        trace_step()


# Shards in another order


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        (shmap_tp.layers.attention, "key_value_2_of_8"),
        (shmap_tp.layers.embedding, "embedding"),
        (shmap_tp.layers.positions, "attention_alibi"),
        (shmap_tp.parallel.tensor_parallel, "learned, sequence"),
        (shmap_tp.parallel.collective_matmul, "sequential_block, collective_matmul"),
        (shmap_tp.model.loss, None),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_counting_ranks_in_reverse_gives_wrong_values(monkeypatch, module, layer):
    """In every module that uses a device's index along mp."""
    with_lax(monkeypatch, module, axis_index=lambda axis: lax.axis_size(axis) - 1 - lax.axis_index(axis))
    with wrong:
        compare_loss() if layer is None else compare_layer(layer)


@pytest.mark.parametrize("layer", ["column", "gelu", "attention_alibi", "parallel_block_2_of_8"])
def test_using_the_columns_of_the_next_device_gives_wrong_values(monkeypatch, layer):
    """All heads, and the hidden dim of an MLP, are shifted by one device."""

    def from_next_device(x: Any) -> Any:
        size = lax.axis_size(MP)
        return lax.ppermute(x, MP, [(i, (i + 1) % size) for i in range(size)])

    def with_weight_of_next_device(call: Any) -> Any:
        return lambda self, x: call(eqx.tree_at(lambda it: it.weight, self, from_next_device(self.weight)), x)

    mutate(monkeypatch, ColumnParallelLinear, "__call__", with_weight_of_next_device)
    # its result and not its weight, which is the same on every device where mp exceeds the number of heads
    mutate(monkeypatch, KeyValueHeads, "__call__", lambda heads: lambda self, x: from_next_device(heads(self, x)))
    with wrong:
        compare_layer(layer)


def test_device_order_in_the_mesh_changes_no_value():
    """Not an error: shards belong to places in the mesh, not to device ids."""
    case = LAYERS["parallel_block_2_of_8"]
    shuffled = Mesh(np.array(jax.devices())[[5, 3, 0, 6, 1, 7, 4, 2]].reshape(2, 4), (DP, MP), (AxisType.Auto,) * 2)
    arrays = *case.arrays("float64"), np.float64(sharded_harness.expected(case)[0])
    with jax.enable_x64(True):
        on_shuffled, in_order = (jax.jit(sharded_harness.on_mesh(case, on))(*arrays) for on in (shuffled, mesh((2, 4))))
        assert_close(on_shuffled, in_order, RELATIVE["float64"])
