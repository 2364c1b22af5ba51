"""Mistakes that are easy to make here, each made on purpose, and what catches it.

refused   no program comes of it, whatever its inputs
wrong     it runs, and the comparison with the dense reference sees it
wasteful  its values are right, and the ledger of collectives sees it

Each test is also the proof that the test it calls can fail.
"""

from types import SimpleNamespace
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
from shmap_tp.layers.linear import ColumnParallelHeads, ColumnParallelLinear, RowParallelLinear, into_heads
from shmap_tp.layers.norm import LayerNorm, RMSNorm
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.parallel.ring import Turn
from shmap_tp.parallel.tensor_parallel import AllReduce
from shmap_tp.plan.communication.from_jaxpr import communication_in_jaxpr
from shmap_tp.plan.communication.ledger import Direction
from shmap_tp.training.step import build_step_functions
from tests.helpers import sharded_harness as sharded
from tests.helpers.assertions import RELATIVE, assert_close
from tests.helpers.model_fixtures import config, mesh
from tests.layers import test_layers
from tests.model import test_loss, test_model
from tests.plan import test_communication as test_ledger

BLOCKS = ["parallel_block_2_of_8", "sequential_block"]


def compare(layer: str, shape: tuple[int, int] = (2, 4)) -> None:
    sharded.compare(test_layers.LAYERS[layer], shape, "float64")


def compare_loss() -> None:
    padded = "padded to 64 from 50, a third of the targets ignored, chunks of 3"
    sharded.compare(test_loss.LOSSES[padded], (2, 4), "float64")


def trace_step(*settings: str) -> Any:
    """The jaxpr of the step; nothing is compiled."""
    conf = config("mesh.dp=2", "mesh.mp=4", "train.batch=16", "train.microbatches=2", *settings)
    made = build_step_functions(conf, mesh((conf.mesh.dp, conf.mesh.mp)), jnp.float32)
    return jax.make_jaxpr(made.step)(made.shapes, made.tokens).jaxpr


refused_by_type = pytest.raises(
    (TypeError, ValueError),
    match=r"manual axis types|require replication which can't be statically|unexpected JAX type|Unsupported pcast",
)
refused_by_shape = pytest.raises((TypeError, ValueError), match=r"shape|divisible|divide|Size of label|Type-check")
wrong = pytest.raises(AssertionError, match="from its expected value")


def with_lax(monkeypatch, module: Any, **instead: Any) -> None:
    """In `module` alone, jax.lax has these functions instead of its own."""
    monkeypatch.setattr(module, "lax", SimpleNamespace(**{**vars(lax), **instead}))


def declare(monkeypatch, layer: type, *axes: str | None, **more: bool) -> None:
    """`layer` declares its one parameter with these axes."""
    (field,) = [field for field in layer.__dataclass_fields__.values() if "axes" in field.metadata]
    monkeypatch.setattr(field, "metadata", {"axes": axes, "whole_if_fewer": False} | more)


# A sum over devices, left out or made twice


@pytest.mark.parametrize("block", ["parallel", "sequential"])
def test_leaving_without_the_sum_is_refused(monkeypatch, block):
    monkeypatch.setattr(AllReduce, "leave", lambda self, x: x)
    with refused_by_type:
        trace_step(f"model.block={block}")
    with refused_by_type:
        compare(dict(zip(["parallel", "sequential"], BLOCKS, strict=True))[block])


def test_a_loss_without_its_sums_is_refused(monkeypatch):
    with_lax(monkeypatch, shmap_tp.model.loss, all_gather=lambda x, axis, to: x[None])
    with refused_by_type:
        compare_loss()
    with refused_by_type:
        trace_step()


def test_gradients_that_never_meet_over_dp_are_refused(monkeypatch):
    monkeypatch.setattr(shmap_tp.parallel.fsdp, "sum_over", lambda tree, axis: tree)
    with refused_by_type:
        trace_step()


def test_a_shared_weight_that_is_not_gathered_is_refused(monkeypatch):
    monkeypatch.setattr(shmap_tp.parallel.fsdp, "gather", lambda x, axis, dim, groups: x)
    with refused_by_shape:
        trace_step("mesh.zero=fsdp")


def test_a_shared_weight_gathered_out_of_order_is_wrong(monkeypatch):
    def out_of_order(x: Any, axis: str, dim: int, groups: None) -> Any:
        return jnp.flip(lax.all_gather(x, axis, axis=dim % x.ndim, tiled=True), dim)

    monkeypatch.setattr(shmap_tp.parallel.fsdp, "gather", out_of_order)
    (model,) = (model for model in test_model.MODELS if model.startswith("sharded:"))
    with wrong:
        test_model.hold(model, (2, 4), "float32")


def test_a_ring_of_gradients_that_adds_up_its_own_alone_is_wrong(monkeypatch):
    """No type sees it: what a device has of its own is as large as what it ought to get."""
    monkeypatch.setattr(
        shmap_tp.parallel.fsdp_overlap, "scattered", lambda owed, n, dtype, passed: owed(Turn(0, [], [])).astype(dtype)
    )
    (model,) = (model for model in test_model.MODELS if model.startswith("sharded over two slices"))
    with wrong:
        test_model.hold(model, (4, 2), "float32")


def test_a_ring_of_gradients_of_many_positions_is_right_too(monkeypatch):
    """It waits for nothing, then."""
    monkeypatch.setattr(shmap_tp.parallel.fsdp_overlap, "FEW", 0)
    (model,) = (model for model in test_model.MODELS if model.startswith("sharded over two slices"))
    test_model.hold(model, (4, 2), "float32")


@pytest.mark.parametrize("method", ["hold", "meet"])
def test_slices_that_do_not_meet_are_refused(monkeypatch, method):
    monkeypatch.setattr(shmap_tp.parallel.fsdp.Fsdp, method, lambda self, w: w)
    with refused_by_shape:
        trace_step("mesh.zero=fsdp", "mesh.slices=2", "mesh.dp=4", "mesh.mp=2")


def test_a_gradient_that_its_owner_scatters_twice_is_refused(monkeypatch):
    """A shared weight's gradient is met where it is gathered, and nowhere else."""
    monkeypatch.setattr(shmap_tp.parallel.fsdp.Fsdp, "meet", shmap_tp.parallel.fsdp.Zero1.meet)
    with refused_by_shape:
        trace_step("mesh.zero=fsdp")


def test_a_second_sum_is_wrong(monkeypatch):
    """JAX accepts it: the sum of mp equal values is mp times the value."""
    monkeypatch.setattr(AllReduce, "leave", lambda self, x: lax.psum(lax.psum(x, MP), MP))
    with wrong:
        compare(BLOCKS[0])


# A region entered in another way


@pytest.mark.parametrize("block", BLOCKS)
def test_entering_without_a_word_is_wasteful(monkeypatch, block):
    """The values are right, but each product that the input meets sums its gradient for itself."""
    monkeypatch.setattr(AllReduce, "enter", lambda self, x: x)
    compare(block)
    with pytest.raises(AssertionError):
        test_ledger.test_a_layer_talks_as_its_docstring_says(block, (2, 4))


@pytest.mark.parametrize("block", BLOCKS)
def test_a_classic_custom_gradient_for_entering_is_wrong(monkeypatch, block):
    """Megatron's f, right where nothing is checked: under check_vma JAX has summed already, and dx comes mp times."""
    enter = jax.custom_vjp(lambda x: x)
    enter.defvjp(lambda x: (x, None), lambda _, dx: (lax.psum(dx, MP),))
    monkeypatch.setattr(AllReduce, "enter", lambda self, x: enter(x))
    with wrong:
        compare(block)


def test_a_classic_custom_gradient_for_leaving_is_refused(monkeypatch):
    leave = jax.custom_vjp(lambda x: lax.psum(x, MP))
    leave.defvjp(lambda x: (lax.psum(x, MP), None), lambda _, dx: (dx,))
    monkeypatch.setattr(AllReduce, "leave", lambda self, x: leave(x))
    with refused_by_type:
        compare(BLOCKS[0])


def test_parameters_that_do_not_vary_over_dp_are_seen(monkeypatch):
    """Their gradients are then summed over dp by JAX, in every microbatch; right, and wasteful."""
    monkeypatch.setattr(AllReduce, "at_home", lambda self, params: params)
    over_dp = [entry for entry in communication_in_jaxpr(trace_step()) if entry.axis == DP]
    assert any(entry.direction == Direction.backward and entry.count > 1 for entry in over_dp)


# A declaration that lies about where a parameter is


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
        (KeyValueHeads, (None, MP, None), "parallel_block_2_of_8"),  # not whole where mp is more than its heads
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_a_spec_that_lies_is_refused(monkeypatch, declared, axes, layer):
    declare(monkeypatch, declared, *axes)
    with refused_by_shape:
        compare(layer)


def test_key_value_heads_said_to_be_whole_are_wrong(monkeypatch):
    """All shapes fit: every device has heads enough for its queries, but not all of them its own."""
    declare(monkeypatch, KeyValueHeads, None, None, None)
    with wrong:
        compare("parallel_block_2_of_8", (4, 2))


def test_a_table_said_to_be_whole_is_wasteful(monkeypatch):
    """The first device then finds every id and the others none: right, and every device holds and sums all of it."""
    declare(monkeypatch, VocabParallelEmbedding, None, None)
    compare("embedding")
    with pytest.raises(AssertionError):
        test_ledger.test_a_layer_talks_as_its_docstring_says("embedding", (2, 4))


def test_an_undeclared_parameter_is_refused(monkeypatch):
    (field,) = LayerNorm.__dataclass_fields__.values()
    monkeypatch.setattr(field, "metadata", {})
    with pytest.raises(TypeError, match=r"norm\.scale is an array that was not declared with param"):
        trace_step()


# A norm that only one device knows


def test_the_clip_of_optax_is_refused(monkeypatch):
    """It takes one device's shards for the whole gradient, so that copies of a parameter would drift apart."""

    def clip(gradients: Any, limit: float) -> tuple[Any, Any]:
        return optax.clip_by_global_norm(limit).update(gradients, optax.EmptyState())[0], optax.tree.norm(gradients)

    monkeypatch.setattr(shmap_tp.training.step, "clip_by_global_norm", clip)
    with refused_by_type:
        trace_step()


def test_the_norm_of_optax_is_refused(monkeypatch):
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
def test_counting_devices_from_the_other_end_is_wrong(monkeypatch, module, layer):
    """Wherever a device asks which one it is."""
    with_lax(monkeypatch, module, axis_index=lambda axis: lax.axis_size(axis) - 1 - lax.axis_index(axis))
    with wrong:
        compare_loss() if layer is None else compare(layer)


@pytest.mark.parametrize("layer", ["column", "gelu", "attention_alibi", "parallel_block_2_of_8"])
def test_the_columns_of_a_neighbour_are_wrong(monkeypatch, layer):
    """The heads, or the hidden dim of an MLP, moved on by one device."""

    def neighbours(weight: Any) -> Any:
        size = lax.axis_size(MP)
        return lax.ppermute(weight, MP, [(i, (i + 1) % size) for i in range(size)])

    def of_neighbours(call: Any) -> Any:
        return lambda self, *args: call(eqx.tree_at(lambda it: it.weight, self, neighbours(self.weight)), *args)

    for columns in (ColumnParallelLinear, ColumnParallelHeads):
        monkeypatch.setattr(columns, "__call__", of_neighbours(columns.__call__))
    monkeypatch.setattr(shmap_tp.layers.attention, "into_heads", lambda x, w: into_heads(x, neighbours(w)))
    with wrong:
        compare(layer)


def test_the_order_of_the_devices_in_a_mesh_does_not_matter():
    """Shuffled devices compute what they do in order: parts go by their place in the mesh, not by a device's number."""
    case = test_layers.LAYERS["parallel_block_2_of_8"]
    shuffled = np.array(jax.devices())[[5, 3, 0, 6, 1, 7, 4, 2]].reshape(2, 4)
    params, inputs = case.arrays("float64")
    cotangent, _ = sharded.expected(case, "float64")
    with jax.enable_x64(True):
        on_shuffled = jax.jit(sharded.on_mesh(case, Mesh(shuffled, (DP, MP), axis_types=(AxisType.Auto,) * 2)))
        in_order = jax.jit(sharded.on_mesh(case, mesh((2, 4))))
        assert_close(on_shuffled(params, inputs, cotangent), in_order(params, inputs, cotangent), RELATIVE["float64"])
