"""Sequence parallelism is another way to say the same, its ring a third: one state, one curve; and the mistakes that
only they can have.

What they share with the first wire, parity and ledger above all, stands where that does: test_layers, test_model,
test_ledger, test_train.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shmap_tp.parallel.collective_matmul
import shmap_tp.training.step
from shmap_tp.parallel.mesh import MP
from shmap_tp.parallel.tensor_parallel import AllReduce, CollectiveMatmul, SequenceParallel
from shmap_tp.plan.communication.from_jaxpr import communication_in_jaxpr
from shmap_tp.plan.communication.ledger import Direction, Operation
from shmap_tp.training.step import StepFunctions, build_step_functions
from tests.helpers.model_fixtures import mesh
from tests.helpers.step_fixtures import STEPS, largest_difference, learnable_batch, step_config
from tests.plan import test_communication as test_ledger
from tests.test_mutations import compare, refused_by_shape, refused_by_type, trace_step, wrong

TENSOR_PARALLEL = ["all_reduce", "sequence", "collective_matmul"]
SEQUENCE = ["parallel_block_2_of_8, sequence", "sequential_block, sequence"]
AROUND = ["parallel_block_2_of_8, ring", "sequential_block, ring"]
SMALL_SEQUENCE = ["mesh.tensor_parallel=sequence", "model.context=8"]


def programs(wire: str) -> StepFunctions:
    """Of a step in which everything that is whole over mp has a gradient to be summed, a window at a time."""
    more = [
        "train.batch=4",
        "model.context=8",
        "model.positions=learned",
        "model.kv_heads=2",
        "model.remat=all_matmuls",
    ]
    return build_step_functions(
        step_config((2, 4), f"mesh.tensor_parallel={wire}", *more), mesh((2, 4)), jnp.dtype("float32")
    )


def test_all_wires_have_one_state():
    """Its structure, shapes, dtypes and layouts: a checkpoint is of any."""
    one, *others = (programs(wire).shapes for wire in TENSOR_PARALLEL)
    for other in others:
        assert jax.tree.structure(one) == jax.tree.structure(other)
        for leaf, same in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            assert (leaf.shape, leaf.dtype, leaf.sharding) == (same.shape, same.dtype, same.sharding)


def test_50_steps_have_one_loss_curve_by_any_wire():
    curves = {}
    for wire in TENSOR_PARALLEL:
        made, losses = programs(wire), []
        state = made.init()
        for i in range(STEPS):
            tokens = jax.device_put(learnable_batch(i, made.tokens.shape), made.tokens.sharding)
            state, metrics = made.step(state, tokens)
            losses.append(float(metrics["loss"]))
        curves[wire] = np.array(losses)
    one, *others = curves.values()
    assert one[-1] < one[0] - 1
    for other in others:
        assert largest_difference(one[:3], other[:3]) <= 1e-6
        assert largest_difference(one, other) <= 1e-5


# Mistakes, each made on purpose, and what catches it: see test_mutations


@pytest.mark.parametrize("block", SEQUENCE)
def test_a_part_of_time_that_was_not_summed_is_wrong(monkeypatch, block):
    """Each device keeping its part of its own share: varying over mp like the sum, so no type tells."""

    def keep(self: SequenceParallel, y_BTD: Any) -> Any:
        part = y_BTD.shape[1] // lax.axis_size(MP)
        return lax.dynamic_slice_in_dim(y_BTD, lax.axis_index(MP) * part, part, axis=1)

    monkeypatch.setattr(SequenceParallel, "leave", keep)
    with wrong:
        compare(block)


def test_a_part_of_time_that_was_summed_whole_is_wasteful(monkeypatch):
    """An all-reduce of which each device keeps its part: right, and twice the bytes."""

    def keep(self: SequenceParallel, y_BTD: Any) -> Any:
        part = y_BTD.shape[1] // lax.axis_size(MP)
        return lax.dynamic_slice_in_dim(lax.psum(y_BTD, MP), lax.axis_index(MP) * part, part, axis=1)

    monkeypatch.setattr(SequenceParallel, "leave", keep)
    compare(SEQUENCE[1])
    with pytest.raises(AssertionError):
        test_ledger.test_a_layer_talks_as_its_docstring_says(SEQUENCE[1], (2, 4))


@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize("block", SEQUENCE)
def test_another_dim_than_time_is_refused(monkeypatch, block, dim):
    """Entered whole in time and left cut in another, or the other way around."""
    with monkeypatch.context() as patch:
        scattered = lambda self, y: lax.psum_scatter(y, MP, scatter_dimension=dim, tiled=True)  # noqa: E731
        patch.setattr(SequenceParallel, "leave", scattered)
        with refused_by_shape:
            compare(block)
    monkeypatch.setattr(SequenceParallel, "enter", lambda self, x: lax.all_gather(x, MP, axis=dim, tiled=True))
    with refused_by_shape:
        compare(block)


@pytest.mark.parametrize("layer", [*SEQUENCE, "head, sequence"])
def test_entering_with_what_is_said_to_be_equal_is_wasteful(monkeypatch, layer):
    """What was gathered is the same on every device, but its gradient is not: each product then sums it for itself."""
    same = lambda self, x: lax.all_gather(x, MP, axis=1, tiled=True, to="invarying")  # noqa: E731
    monkeypatch.setattr(SequenceParallel, "enter", same)
    compare(layer)
    with pytest.raises(AssertionError):
        test_ledger.test_a_layer_talks_as_its_docstring_says(layer, (2, 4))


def test_scales_that_do_not_vary_over_mp_are_wasteful(monkeypatch):
    """The cast of at_home left out: JAX sums their gradients over mp, in every layer of every microbatch."""
    monkeypatch.setattr(SequenceParallel, "at_home", AllReduce.at_home)
    for block in SEQUENCE:
        compare(block)
    over_mp = [
        entry
        for entry in communication_in_jaxpr(trace_step(*SMALL_SEQUENCE))
        if entry.operation == Operation.all_reduce
    ]
    assert any(entry.axis == MP and entry.direction == Direction.backward and entry.count > 2 for entry in over_mp)
    with pytest.raises(AssertionError):
        test_ledger.test_a_step_talks_as_the_theory_says("parallel; sequence", (2, 4), "float32")


def test_scales_whose_gradients_never_meet_over_mp_are_refused(monkeypatch):
    monkeypatch.setattr(shmap_tp.training.step, "reduce_partial_gradients", lambda axis, gradients, params: gradients)
    with refused_by_type:
        trace_step(*SMALL_SEQUENCE)


@pytest.mark.parametrize(
    "passed", [lambda pass_on, x, by: x, lambda pass_on, x, by: pass_on(x, -by)], ids=["kept", "the other way"]
)
@pytest.mark.parametrize("block", AROUND)
def test_a_part_that_does_not_go_on_round_the_ring_is_wrong(monkeypatch, block, passed):
    """Of the same shape and type as the one that is waited for."""
    pass_on = shmap_tp.parallel.collective_matmul._passed
    monkeypatch.setattr(shmap_tp.parallel.collective_matmul, "_passed", lambda x, by: passed(pass_on, x, by))
    with wrong:
        compare(block)


@pytest.mark.parametrize("block", AROUND)
def test_positions_that_stay_in_the_order_of_the_ring_are_wrong(monkeypatch, block):
    """An MLP does not see it; attention takes the present for the future."""
    monkeypatch.setattr(CollectiveMatmul, "in_time", lambda self, y: jnp.concatenate(y, axis=1))
    monkeypatch.setattr(CollectiveMatmul, "in_parts", lambda self, y: tuple(jnp.split(y, lax.axis_size(MP), axis=1)))
    compare("gelu, ring")
    with wrong:
        compare(block)


@pytest.mark.parametrize("block", AROUND)
def test_a_ring_that_gathers_at_once_is_seen(monkeypatch, block):
    """Its values are right, and nothing flows under a product."""

    def without_ring(self: CollectiveMatmul, x_BTD: Any, **regions: Any) -> Any:
        return jax.tree.map(self.in_parts, SequenceParallel().into(x_BTD, **regions))

    monkeypatch.setattr(CollectiveMatmul, "into", without_ring)
    compare(block)
    with pytest.raises(AssertionError):
        test_ledger.test_a_layer_talks_as_its_docstring_says(block, (2, 4))
