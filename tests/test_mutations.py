"""Errors that are easy to make here, each made on purpose, and what detects it.

refused   the program does not type-check, or its shapes do not match, whatever its inputs
wrong     it runs, and the comparison with the dense reference fails
wasteful  its values are right, and the check of its collectives fails

Each test also proves that the check which it calls can fail.
"""

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
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.parallel.ring import RingStep
from shmap_tp.parallel.tensor_parallel import AllReduce
from shmap_tp.plan.communication.from_jaxpr import communication_in_jaxpr
from shmap_tp.plan.communication.ledger import Direction
from tests.helpers import sharded_harness
from tests.helpers.assertions import RELATIVE, assert_close
from tests.helpers.communication_checks import check_layer
from tests.helpers.layer_cases import LAYERS
from tests.helpers.model_cases import FSDP, FSDP_RING_TWO_SLICES, compare_model
from tests.helpers.model_fixtures import mesh
from tests.helpers.mutations import (
    compare_layer,
    compare_loss,
    declare,
    refused_by_shape,
    refused_by_type,
    trace_step,
    wasteful,
    with_lax,
    wrong,
)

BLOCKS = {"parallel": "parallel_block_2_of_8", "sequential": "sequential_block"}
every_block = pytest.mark.parametrize("block", BLOCKS)

# A missing or repeated reduction


@every_block
def test_a_missing_all_reduce_after_a_row_parallel_product_does_not_type_check(monkeypatch, block):
    monkeypatch.setattr(AllReduce, "reduce", lambda self, x: x)
    with refused_by_type:
        trace_step(f"model.block={block}")
    with refused_by_type:
        compare_layer(BLOCKS[block])


def test_gradients_that_are_not_reduced_over_dp_do_not_type_check(monkeypatch):
    monkeypatch.setattr(shmap_tp.parallel.fsdp, "all_reduce", lambda tree, axis: tree)
    with refused_by_type:
        trace_step()


def test_an_fsdp_weight_that_is_not_gathered_has_the_wrong_shape(monkeypatch):
    monkeypatch.setattr(shmap_tp.parallel.fsdp, "all_gather", lambda x, axis, dim: x)
    with refused_by_shape:
        trace_step("mesh.zero=fsdp")


def test_an_fsdp_weight_gathered_in_another_order_gives_wrong_values(monkeypatch):
    def gather_flipped(x: Any, axis: Any, dim: int) -> Any:
        return jnp.flip(lax.all_gather(x, axis, axis=dim % x.ndim, tiled=True), dim)

    monkeypatch.setattr(shmap_tp.parallel.fsdp, "all_gather", gather_flipped)
    with wrong:
        compare_model(FSDP, (2, 4), "float32")


def test_a_gradient_ring_that_returns_only_the_local_term_gives_wrong_values(monkeypatch):
    """No type detects it: the local term has the shape of the sum."""

    def local_term(term: Any, n: int, dtype: Any, send: Any) -> Any:
        return term(RingStep(0, [], [])).astype(dtype)

    monkeypatch.setattr(shmap_tp.parallel.fsdp_overlap, "ring_reduce_scatter", local_term)
    with wrong:
        compare_model(FSDP_RING_TWO_SLICES, (4, 2), "float32")


def test_a_gradient_ring_over_many_tokens_gives_right_values(monkeypatch):
    """Not an error: with many tokens the terms of the ring do not wait for received sums."""
    monkeypatch.setattr(shmap_tp.parallel.fsdp_overlap, "MIN_TOKENS_TO_OVERLAP", 0)
    compare_model(FSDP_RING_TWO_SLICES, (4, 2), "float32")


@pytest.mark.parametrize("method", ["gather_between_slices", "reduce_gradient"])
def test_fsdp_without_communication_between_slices_has_the_wrong_shape(monkeypatch, method):
    monkeypatch.setattr(shmap_tp.parallel.fsdp.Fsdp, method, lambda self, w: w)
    with refused_by_shape:
        trace_step("mesh.zero=fsdp", "mesh.slices=2", "mesh.dp=4", "mesh.mp=2")


def test_an_fsdp_gradient_that_is_reduce_scattered_twice_has_the_wrong_shape(monkeypatch):
    """The transpose of the all-gather reduces it already."""
    monkeypatch.setattr(shmap_tp.parallel.fsdp.Fsdp, "reduce_gradient", shmap_tp.parallel.fsdp.Zero1.reduce_gradient)
    with refused_by_shape:
        trace_step("mesh.zero=fsdp")


def test_a_second_all_reduce_after_a_row_parallel_product_gives_wrong_values(monkeypatch):
    """JAX accepts it: the sum of mp equal values is mp times the value."""
    monkeypatch.setattr(AllReduce, "reduce", lambda self, x: lax.psum(lax.psum(x, MP), MP))
    with wrong:
        compare_layer(BLOCKS["parallel"])


# Another cast before a column-parallel product


@every_block
def test_an_input_that_is_not_marked_as_varying_wastes_communication(monkeypatch, block):
    """The values are right, but dx is reduced once for each product that reads the input."""
    monkeypatch.setattr(AllReduce, "enter", lambda self, x: x)
    compare_layer(BLOCKS[block])
    with wasteful:
        check_layer(BLOCKS[block], (2, 4))


@every_block
def test_a_custom_gradient_for_enter_gives_wrong_values(monkeypatch, block):
    """Megatron's f, which is right without check_vma: with it JAX has reduced dx already, so the result is mp times
    dx."""
    enter = jax.custom_vjp(lambda x: x)
    enter.defvjp(lambda x: (x, None), lambda _, dx: (lax.psum(dx, MP),))
    monkeypatch.setattr(AllReduce, "enter", lambda self, x: enter(x))
    with wrong:
        compare_layer(BLOCKS[block])


def test_a_custom_gradient_for_reduce_does_not_type_check(monkeypatch):
    """Megatron's g."""
    reduce = jax.custom_vjp(lambda x: lax.psum(x, MP))
    reduce.defvjp(lambda x: (lax.psum(x, MP), None), lambda _, dx: (dx,))
    monkeypatch.setattr(AllReduce, "reduce", lambda self, x: reduce(x))
    with refused_by_type:
        compare_layer(BLOCKS["parallel"])


def test_parameters_that_are_not_marked_as_varying_over_dp_waste_communication(monkeypatch):
    """The values are right, but JAX reduces their gradients over dp in every microbatch."""
    mark_others = shmap_tp.training.step.mark_varying
    only_others = lambda tree, axes: tree if isinstance(tree, Transformer) else mark_others(tree, axes)  # noqa: E731
    monkeypatch.setattr(shmap_tp.training.step, "mark_varying", only_others)
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
    compare_layer("embedding")
    with wasteful:
        check_layer("embedding", (2, 4))


def test_an_undeclared_parameter_is_refused(monkeypatch):
    field = LayerNorm.__dataclass_fields__["scale"]
    monkeypatch.setattr(field, "metadata", {})
    with pytest.raises(TypeError, match=r"norm\.scale is an array that was not declared with param"):
        trace_step()


# A norm of one device's shards


def test_gradient_clipping_by_optax_does_not_type_check(monkeypatch):
    """Its norm is that of one device's shards, so that replicas of a parameter would diverge."""

    def clip(gradients: Any, limit: float) -> tuple[Any, Any]:
        return optax.clip_by_global_norm(limit).update(gradients, optax.EmptyState())[0], optax.tree.norm(gradients)

    monkeypatch.setattr(shmap_tp.training.step, "clip_by_global_norm", clip)
    with refused_by_type:
        trace_step()


def test_the_global_norm_of_optax_does_not_type_check(monkeypatch):
    monkeypatch.setattr(shmap_tp.training.optimizer, "global_norm", optax.tree.norm)
    with refused_by_type:
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

    with_another = with_weight_of_next_device(ColumnParallelLinear.__call__)
    monkeypatch.setattr(ColumnParallelLinear, "__call__", with_another)
    heads = KeyValueHeads.__call__
    # its result and not its weight, which is the same on every device where mp exceeds the number of heads
    monkeypatch.setattr(KeyValueHeads, "__call__", lambda self, x: from_next_device(heads(self, x)))
    with wrong:
        compare_layer(layer)


def test_device_order_in_the_mesh_changes_no_value():
    """Not an error: shards belong to places in the mesh, not to device ids."""
    case = LAYERS["parallel_block_2_of_8"]
    shuffled = np.array(jax.devices())[[5, 3, 0, 6, 1, 7, 4, 2]].reshape(2, 4)
    params, inputs = case.arrays("float64")
    cotangent, _ = sharded_harness.expected(case, "float64")
    with jax.enable_x64(True):
        shuffled_mesh = Mesh(shuffled, (DP, MP), axis_types=(AxisType.Auto,) * 2)
        on_shuffled = jax.jit(sharded_harness.on_mesh(case, shuffled_mesh))
        in_order = jax.jit(sharded_harness.on_mesh(case, mesh((2, 4))))
        assert_close(on_shuffled(params, inputs, cotangent), in_order(params, inputs, cotangent), RELATIVE["float64"])
