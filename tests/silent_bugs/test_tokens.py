"""Tokens that other frameworks counted, cut, mixed or read wrongly, each written as the mistake would be made here.
docs/silent-bugs.md names the published threads, test by test."""

from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shmap_tp.layers.attention
from shmap_tp.data import order as data_order
from shmap_tp.layers.attention import Attention, Chunked
from shmap_tp.layers.causal_attention import Pattern
from shmap_tp.layers.context import Batch, Context, input_ids, next_token_batch, of_this_device
from shmap_tp.layers.positions import Alibi
from shmap_tp.model.loss import LinearCrossEntropy, Objective
from shmap_tp.parallel.context_parallel import row_order
from shmap_tp.parallel.mesh import CP, make_mesh, ranks, token_axes
from shmap_tp.training.model_functions import build_model_functions
from tests.helpers import reference, sharded_harness
from tests.helpers.assertions import assert_close
from tests.helpers.layer_cases import D, H, K, T, on_residual_stream
from tests.helpers.model_cases import FSDP, compare_model
from tests.helpers.model_fixtures import config, mesh_config, random_like
from tests.helpers.mutations import compare_loss, mutate, wrong
from tests.helpers.sharded_harness import ALL_REDUCE

FIRST = 3
"""Tokens of the first document in a row of two."""


def attend_within_documents(layer: Attention, x_BTD: Any) -> Any:
    segments_BT = jnp.broadcast_to(jnp.arange(T) >= FIRST, x_BTD.shape[:2]).astype(jnp.int32)
    return layer(x_BTD, Context(ALL_REDUCE, Alibi(H), segments=segments_BT))[0]


def each_document_alone(p: dict, x_BTD: Any) -> Any:
    attention = partial(reference.attention, positions="alibi")
    return jnp.concatenate([attention(p, x_BTD[:, :FIRST]), attention(p, x_BTD[:, FIRST:])], axis=1)


PACKED = on_residual_stream(
    partial(Attention, D, (H, H), K, Chunked(T), std=1.0, std_out=1.0), attend_within_documents, each_document_alone
)


def test_attention_ignores_the_documents_of_a_packed_row(monkeypatch):
    sharded_harness.compare(PACKED, (2, 4), "float64")

    def without_segments(pattern: Pattern, **changes: Any) -> Pattern:
        return replace(pattern, **{name: value for name, value in changes.items() if name != "segments_BT"})

    monkeypatch.setattr(shmap_tp.layers.attention, "replace", without_segments)
    with wrong:
        sharded_harness.compare(PACKED, (2, 4), "float64", gradients=False)


def loss_of_split_rows(cp: int) -> Any:
    """The loss of rows of documents that are split along time over `cp` devices."""
    conf = config(f"mesh.cp={cp}", "mesh.dp=1", "mesh.mp=1", "model.context=16", "model.layers=1")
    functions = build_model_functions(conf, make_mesh(conf.mesh, jax.devices()[:cp]), jnp.float32)
    tokens_ABT = np.arange(2 * 17).reshape(1, 2, 17) % 31
    params = random_like(functions.shapes, "float32", spread=0.1)
    return functions.loss(params, jnp.asarray(tokens_ABT), jnp.asarray(np.cumsum(tokens_ABT % 7 == 0, axis=-1)))


def test_attention_of_a_rank_leaves_out_the_positions_of_others(monkeypatch):
    whole = loss_of_split_rows(1)
    assert_close(loss_of_split_rows(2), whole, 1e-6)
    own = partial(jax.tree.map, lambda x: jnp.tile(x, (1, 2, 1, 1)))
    monkeypatch.setattr(shmap_tp.layers.attention, "whole_rows", own)
    with wrong:
        assert_close(loss_of_split_rows(2), whole, 1e-6)


def test_targets_are_shifted_within_each_shard_of_time():
    """The last target of every rank is then the first input of the same rank."""

    def targets(batch: Batch) -> tuple[jax.Array, jax.Array]:
        own = of_this_device(batch)
        return own.targets, jnp.roll(own.inputs, -1, axis=-1)

    on_four, split = make_mesh(mesh_config(1, 1, cp=4), jax.devices()[:4]), P(None, None, CP)

    @jax.jit
    def run(tokens_ABT: jax.Array) -> tuple[jax.Array, jax.Array]:
        batch = next_token_batch(tokens_ABT, on_four.axis_names)
        found = jax.shard_map(targets, mesh=on_four, in_specs=(P(),), out_specs=(split, split))(batch)
        return tuple(row_order(x, 4) for x in found)

    tokens_ABT = np.arange(2 * 17, dtype=np.int32).reshape(1, 2, 17)
    before_sharding, on_each_shard = run(tokens_ABT)
    assert_close(before_sharding, tokens_ABT[..., 1:], 0.0)
    with wrong:
        assert_close(on_each_shard, tokens_ABT[..., 1:], 0.0)


def test_each_rank_divides_by_its_own_number_of_targets(monkeypatch):
    """A mean of means: targets of ranks that have few of them count more."""

    def own(objective: Objective, batch: Batch) -> jax.Array:
        return (ranks(token_axes()) * jnp.maximum(1, jnp.sum(batch.targets >= 0))).astype(float)

    monkeypatch.setattr(Objective, "counted", own)
    with wrong:
        compare_model(FSDP, gradients=False)


def test_tokens_of_prompts_count_as_targets(monkeypatch):
    """The mark that a token does not count gets lost on its way to the loss."""
    count_all = lambda call: lambda self, h, w, targets, counted: call(self, h, w, input_ids(targets), counted)  # noqa: E731
    mutate(monkeypatch, LinearCrossEntropy, "__call__", count_all)
    with wrong:
        compare_loss()


def test_a_resumed_run_shuffles_from_its_first_epoch_again(monkeypatch):
    def order(first: int, last: int) -> np.ndarray:
        return data_order.DataOrder([10], [0], {0: [Fraction(1)]})(first, last)[1]  # of 10 sequences

    shuffled, uninterrupted = data_order.shuffled, order(0, 9000)

    def counting_from_the_start(samples: np.ndarray, counts: np.ndarray, keys: np.ndarray) -> np.ndarray:
        return shuffled(samples - samples[0] // counts * counts, counts, keys)

    np.testing.assert_array_equal(order(8500, 9000), uninterrupted[8500:])
    monkeypatch.setattr(data_order, "shuffled", counting_from_the_start)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        np.testing.assert_array_equal(order(8500, 9000), uninterrupted[8500:])
