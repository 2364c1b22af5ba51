"""All tensor-parallel modes give the same state and the same loss curve; and errors that only the time-sharded modes
can have.

What all modes share, above all parity with the reference and the check of collectives, is in test_layers, test_model,
test_communication and test_step.
"""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shmap_tp.parallel.collective_matmul
from shmap_tp.parallel.mesh import MP
from shmap_tp.parallel.tensor_parallel import AllReduce, CollectiveMatmul, SequenceParallel
from shmap_tp.plan.ledger import Direction, Operation, communication_in_jaxpr
from shmap_tp.training.step import StepFunctions, build_step_functions
from tests.helpers.communication_checks import check_step, program_config
from tests.helpers.layer_cases import MODES
from tests.helpers.model_fixtures import mesh_of
from tests.helpers.mutations import compare_layer, is_wasteful, refused_by_shape, trace_step, wasteful, wrong
from tests.helpers.step_fixtures import STEPS, largest_difference, learnable_batch, step_config


@cache
def step_functions(mode: str) -> StepFunctions:
    """The step of a model in which every kind of parameter that is replicated over mp has a gradient to reduce; one
    sequence per device."""
    overrides = "train.batch=4 model.context=8 model.positions=learned model.kv_heads=2 model.remat=all_matmuls"
    conf = step_config((2, 4), f"mesh.tensor_parallel={mode}", *overrides.split())
    return build_step_functions(conf, mesh_of(conf), jnp.dtype("float32"))


def test_all_modes_have_the_same_state():
    """Structure, shapes, dtypes and shardings: a checkpoint of one mode can be read by any other."""
    first, *others = (jax.tree.leaves_with_path(step_functions(mode).shapes) for mode in MODES)
    for other in others:
        for (path, leaf), (same_path, same) in zip(first, other, strict=True):
            assert (path, leaf.shape, leaf.dtype, leaf.sharding) == (same_path, same.shape, same.dtype, same.sharding)


def test_all_modes_have_the_same_loss_curve_over_50_steps():
    curves = []
    for mode in MODES:
        made, losses = step_functions(mode), []
        state = step_functions("all_reduce").init()
        for i in range(STEPS):
            tokens = jax.device_put(learnable_batch(i, made.tokens.shape), made.tokens.sharding)
            state, metrics = made.step(state, tokens)
            losses.append(float(metrics["loss"]))
        curves.append(np.array(losses))
    first, *others = curves
    assert first[-1] < first[0] - 1
    for other in others:
        assert largest_difference(first[:3], other[:3]) <= 1e-6
        assert largest_difference(first, other) <= 1e-5


# Errors made on purpose, and what detects them, as in test_mutations


def local_time(y_BTD: Any) -> Any:
    """This device's T/mp positions of y."""
    size = y_BTD.shape[1] // lax.axis_size(MP)
    return lax.dynamic_slice_in_dim(y_BTD, lax.axis_index(MP) * size, size, axis=1)


def gather_at_once(self: CollectiveMatmul, x_BTD: Any, *layers: Any) -> Any:
    """No communication overlaps a matmul."""
    return tuple(self.split_time(y) for y in SequenceParallel().column_parallel(x_BTD, *layers))


def on_dim(collective: Any, **dim: int) -> Any:
    return lambda self, x: collective(x, MP, **dim, tiled=True)


ring, gather, scatter = shmap_tp.parallel.collective_matmul, lax.all_gather, lax.psum_scatter
replicated = partial(lax.all_gather, to="invarying")
WRONG, SHAPE, WASTEFUL = "wrong", "refused_by_shape", "wasteful"
MISTAKES = {
    # what is wrong: (module or type, name, what replaces it, how it is detected)
    "a slice of the local partial sum, which varies over mp as the reduced sum does": (
        SequenceParallel, "reduce", lambda self, y: local_time(y), WRONG,
    ),
    "a slice of an all-reduce, of twice the bytes": (
        SequenceParallel, "reduce", lambda self, y: local_time(lax.psum(y, MP)), WASTEFUL,
    ),
    "a reduce-scatter of rows": (SequenceParallel, "reduce", on_dim(scatter, scatter_dimension=0), SHAPE),
    "a reduce-scatter of features": (SequenceParallel, "reduce", on_dim(scatter, scatter_dimension=2), SHAPE),
    "an all-gather of rows": (SequenceParallel, "enter", on_dim(gather, axis=0), SHAPE),
    "an all-gather of features": (SequenceParallel, "enter", on_dim(gather, axis=2), SHAPE),
    "an all-gather typed as replicated, whose gradient is reduced once for each product": (
        SequenceParallel, "enter", on_dim(replicated, axis=1), WASTEFUL,
    ),
    "a chunk that is not sent along the ring": (ring, "_send", lambda x, by: x, WRONG),
    "a chunk that is sent the other way": (ring, "_send", partial(lambda send, x, by: send(x, -by), ring._send), WRONG),
    "a collective matmul that gathers at once": (CollectiveMatmul, "column_parallel", gather_at_once, WASTEFUL),
}  # fmt: skip


@pytest.mark.parametrize("block", ["parallel_block_2_of_8", "sequential_block"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_sequence_parallelism_or_a_collective_matmul_is_detected(monkeypatch, mistake, block):
    owner, name, instead, detected = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, instead)
    layer = f"{block}, {'sequence' if owner is SequenceParallel else 'collective_matmul'}"
    if detected == WASTEFUL:
        return is_wasteful(layer)
    with wrong if detected == WRONG else refused_by_shape:
        compare_layer(layer, gradients=False)


def test_an_all_gather_typed_as_replicated_wastes_communication_in_the_head(monkeypatch):
    monkeypatch.setattr(SequenceParallel, "enter", on_dim(replicated, axis=1))
    is_wasteful("head, sequence")


def test_norm_scales_that_are_not_marked_as_varying_over_mp_waste_communication(monkeypatch):
    """JAX reduces their gradients over mp in every layer of every microbatch."""
    monkeypatch.setattr(SequenceParallel, "time_axes", AllReduce.time_axes)
    compare_layer("parallel_block_2_of_8, sequence")
    entries = communication_in_jaxpr(trace_step("mesh.tensor_parallel=sequence", "model.context=8"))
    backward = [each for each in entries if (each.axis, each.direction) == (MP, Direction.backward)]
    assert any(each.operation == Operation.all_reduce and each.count > 2 for each in backward)
    with wasteful:
        check_step(program_config("parallel; sequence", (2, 4)), "float32")


@pytest.mark.parametrize("block", ["parallel_block_2_of_8", "sequential_block"])
def test_positions_left_in_the_order_of_the_ring_give_wrong_values_in_attention(monkeypatch, block):
    """An MLP is right in any order; causal attention is not."""
    monkeypatch.setattr(CollectiveMatmul, "concat_time", lambda self, y: jnp.concatenate(y, axis=1))
    monkeypatch.setattr(CollectiveMatmul, "split_time", lambda self, y: tuple(jnp.split(y, lax.axis_size(MP), axis=1)))
    compare_layer("gelu, collective_matmul", gradients=False)
    with wrong:
        compare_layer(f"{block}, collective_matmul", gradients=False)
