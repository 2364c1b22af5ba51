"""All tensor-parallel modes give the same state and the same loss curve; and errors that only the time-sharded modes
can have.

What all modes share, above all parity with the reference and the check of collectives, is in test_layers, test_model,
test_communication and test_step.
"""

from functools import cache
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
from tests.helpers.communication_checks import check_activations
from tests.helpers.model_fixtures import mesh_of
from tests.helpers.mutations import (
    compare_layer,
    is_wasteful,
    mutate,
    refused_by_shape,
    refused_by_type,
    trace_step,
    wasteful,
    wrong,
)
from tests.helpers.step_fixtures import STEPS, largest_difference, learnable_batch, step_config

BLOCKS = {"parallel": "parallel_block_2_of_8", "sequential": "sequential_block"}
SEQUENCE = {block: f"{name}, sequence" for block, name in BLOCKS.items()}
COLLECTIVE_MATMUL = {block: f"{name}, collective_matmul" for block, name in BLOCKS.items()}
MODES = ["all_reduce", "sequence", "collective_matmul"]
SEQUENCE_STEP = ["mesh.tensor_parallel=sequence", "model.context=8"]


@cache
def step_functions(mode: str) -> StepFunctions:
    """Of a model in which every kind of parameter that is replicated over mp has a gradient to reduce; one sequence per
    device."""
    overrides = "train.batch=4 model.context=8 model.positions=learned model.kv_heads=2 model.remat=all_matmuls"
    conf = step_config((2, 4), f"mesh.tensor_parallel={mode}", *overrides.split())
    return build_step_functions(conf, mesh_of(conf), jnp.dtype("float32"))


def test_all_modes_have_the_same_state():
    """Structure, shapes, dtypes and shardings: a checkpoint of one mode can be read by any other."""
    first, *others = (step_functions(mode).shapes for mode in MODES)
    for other in others:
        assert jax.tree.structure(first) == jax.tree.structure(other)
        for leaf, same in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True):
            assert (leaf.shape, leaf.dtype, leaf.sharding) == (same.shape, same.dtype, same.sharding)


def test_all_modes_have_the_same_loss_curve_over_50_steps():
    curves = {}
    for mode in MODES:
        made, losses = step_functions(mode), []
        state = made.init()
        for i in range(STEPS):
            tokens = jax.device_put(learnable_batch(i, made.tokens.shape), made.tokens.sharding)
            state, metrics = made.step(state, tokens)
            losses.append(float(metrics["loss"]))
        curves[mode] = np.array(losses)
    first, *others = curves.values()
    assert first[-1] < first[0] - 1
    for other in others:
        assert largest_difference(first[:3], other[:3]) <= 1e-6
        assert largest_difference(first, other) <= 1e-5


# Errors made on purpose, and what detects them, as in test_mutations


def local_time(y_BTD: Any) -> Any:
    """This device's T/mp positions of y."""
    size = y_BTD.shape[1] // lax.axis_size(MP)
    return lax.dynamic_slice_in_dim(y_BTD, lax.axis_index(MP) * size, size, axis=1)


@pytest.mark.parametrize("block", SEQUENCE.values())
def test_a_slice_of_the_local_partial_sum_instead_of_a_reduce_scatter_gives_wrong_values(monkeypatch, block):
    """No type detects it: the slice varies over mp, as the reduced sum does."""
    monkeypatch.setattr(SequenceParallel, "reduce", lambda self, y_BTD: local_time(y_BTD))
    with wrong:
        compare_layer(block)


def test_a_slice_of_an_all_reduce_instead_of_a_reduce_scatter_wastes_communication(monkeypatch):
    """The values are right; twice the bytes are communicated."""
    monkeypatch.setattr(SequenceParallel, "reduce", lambda self, y_BTD: local_time(lax.psum(y_BTD, MP)))
    is_wasteful(SEQUENCE["sequential"])


@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize(
    ("method", "other"),
    [
        ("reduce", lambda y, dim: lax.psum_scatter(y, MP, scatter_dimension=dim, tiled=True)),
        ("enter", lambda x, dim: lax.all_gather(x, MP, axis=dim, tiled=True)),
    ],
    ids=["reduce-scatter", "all-gather"],
)
def test_sharding_another_dim_than_time_has_the_wrong_shape(monkeypatch, method, other, dim):
    monkeypatch.setattr(SequenceParallel, method, lambda self, x: other(x, dim))
    with refused_by_shape:
        compare_layer(SEQUENCE["parallel" if dim else "sequential"])


@pytest.mark.parametrize("layer", [*SEQUENCE.values(), "head, sequence"])
def test_an_all_gather_typed_as_replicated_wastes_communication(monkeypatch, layer):
    """What it returns is the same on every device, but its gradient is not: it is reduced once for each product."""
    invariant = lambda self, x: lax.all_gather(x, MP, axis=1, tiled=True, to="invarying")  # noqa: E731
    monkeypatch.setattr(SequenceParallel, "enter", invariant)
    is_wasteful(layer)


def test_norm_scales_that_are_not_marked_as_varying_over_mp_waste_communication(monkeypatch):
    """JAX reduces their gradients over mp in every layer of every microbatch."""
    monkeypatch.setattr(SequenceParallel, "time_axes", AllReduce.time_axes)
    compare_layer(SEQUENCE["parallel"])
    all_reduces = [
        entry for entry in communication_in_jaxpr(trace_step(*SEQUENCE_STEP)) if entry.operation == Operation.all_reduce
    ]
    assert any(entry.axis == MP and entry.direction == Direction.backward and entry.count > 2 for entry in all_reduces)
    with wasteful:
        check_activations("parallel; sequence")


def test_norm_scales_whose_gradients_are_not_reduced_over_mp_do_not_type_check(monkeypatch):
    monkeypatch.setattr(shmap_tp.training.step, "reduce_partial_gradients", lambda axis, gradients, params: gradients)
    with refused_by_type:
        trace_step(*SEQUENCE_STEP)


@pytest.mark.parametrize(
    ("mutated", "block"),
    [(lambda send, x, by: x, "parallel"), (lambda send, x, by: send(x, -by), "sequential")],
    ids=["not sent", "sent the other way"],
)
def test_a_chunk_that_is_not_passed_on_along_the_ring_gives_wrong_values(monkeypatch, block, mutated):
    """No type detects it: it has the shape and type of the expected chunk."""
    module = shmap_tp.parallel.collective_matmul
    mutate(monkeypatch, module, "_send", lambda send: lambda x, by: mutated(send, x, by))
    with wrong:
        compare_layer(COLLECTIVE_MATMUL[block])


def test_positions_left_in_the_order_of_the_ring_give_wrong_values_in_attention(monkeypatch):
    """An MLP is right in any order; causal attention is not."""
    monkeypatch.setattr(CollectiveMatmul, "concat_time", lambda self, y: jnp.concatenate(y, axis=1))
    monkeypatch.setattr(CollectiveMatmul, "split_time", lambda self, y: tuple(jnp.split(y, lax.axis_size(MP), axis=1)))
    compare_layer("gelu, collective_matmul")
    with wrong:
        compare_layer(COLLECTIVE_MATMUL["parallel"])


@pytest.mark.parametrize("block", COLLECTIVE_MATMUL.values())
def test_a_collective_matmul_that_gathers_at_once_is_detected(monkeypatch, block):
    """Its values are right, but no communication overlaps a matmul."""

    def gather_at_once(self: CollectiveMatmul, x_BTD: Any, *layers: Any) -> Any:
        return tuple(self.split_time(y) for y in SequenceParallel().column_parallel(x_BTD, *layers))

    monkeypatch.setattr(CollectiveMatmul, "column_parallel", gather_at_once)
    is_wasteful(block)
