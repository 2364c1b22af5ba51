"""Reductions that other frameworks left out, repeated or did over other ranks, each written as the mistake would be
made here.  docs/silent-bugs.md names the published threads, test by test."""

import jax.numpy as jnp
import pytest
from jax import lax

from shmap_tp.layers import attention, linear
from shmap_tp.layers.linear import Kind, Linear
from shmap_tp.model import loss
from shmap_tp.parallel import fsdp
from shmap_tp.parallel.collectives import mark_varying
from shmap_tp.parallel.mesh import DP, MP, token_axes
from shmap_tp.parallel.tensor_parallel import AllReduce
from shmap_tp.training import step
from tests.helpers.layer_cases import BIASES, HEAD_NORMS, MODES
from tests.helpers.model_cases import FSDP, compare_model
from tests.helpers.mutations import (
    compare_layer,
    compare_loss,
    declare,
    keep_partial,
    mutate,
    of_kind,
    refused_by_shape,
    refused_by_type,
    trace_step,
    with_lax,
    wrong,
)

BLOCK = "parallel_block_2_of_8"


@pytest.mark.parametrize("setting", ["model.qk_norm=false", "model.qk_norm=true"])
def test_replicated_norms_keep_partial_gradients(monkeypatch, setting):
    """Each device of mp normalises other positions, or other heads: its gradient of the scale is a partial sum."""
    monkeypatch.setattr(step, "reduce_partial_gradients", lambda axis, gradients, params: gradients)
    with refused_by_type:
        trace_step("mesh.tensor_parallel=sequence", "model.context=8", "model.norm=rmsnorm", setting)


def test_a_partial_gradient_is_labelled_as_complete_where_sharded_layers_begin(monkeypatch):
    mutate(monkeypatch, AllReduce, "enter", lambda enter: lambda self, x: keep_partial(enter)(x))
    with refused_by_type:
        compare_layer(BLOCK)


@pytest.mark.parametrize("case", ["key_value_2_of_8", f"{HEAD_NORMS}; all_reduce"])
def test_weights_that_all_heads_share_keep_the_gradient_of_the_heads_of_one_device(monkeypatch, case):
    """Key/value heads that several devices hold, and norms of q and k."""
    for module in (linear, attention):
        mutate(monkeypatch, module, "mark_varying", keep_partial)
    with refused_by_type:
        compare_layer(case)


def test_the_gradient_of_a_chunked_loss_is_labelled_like_its_input(monkeypatch):
    """dh, by hand, comes from the vocabulary columns of one device, while h is the same on all."""
    monkeypatch.setattr(AllReduce, "enter", lambda self, x: x)
    monkeypatch.setattr(loss, "mark_varying", lambda tree, axes: mark_varying(tree, token_axes()))
    with refused_by_type:
        compare_loss()


def test_a_reduction_is_over_other_ranks(monkeypatch):
    monkeypatch.setattr(AllReduce, "reduce", lambda self, y: lax.psum(y, DP))
    with refused_by_type:
        compare_layer(BLOCK)


def test_a_loss_is_that_of_the_vocabulary_columns_of_one_device(monkeypatch):
    with_lax(monkeypatch, loss, all_gather=lambda x, axis, to: x[None])
    with refused_by_type:
        compare_loss()
    with refused_by_type:
        trace_step()


def test_logits_are_gathered_for_a_loss_that_expects_shards(monkeypatch):
    gathered = lambda score: lambda *given: lax.all_gather(score(*given), MP, axis=1, tiled=True)  # noqa: E731
    mutate(monkeypatch, loss, "score", gathered)
    with refused_by_shape:
        compare_loss()


def test_a_gradient_is_reduced_twice(monkeypatch):
    """A sum has the type of one value, whether it is summed once or twice: only the values tell."""
    monkeypatch.setattr(fsdp, "all_reduce", lambda dw, axes: lax.psum(lax.psum(dw, axes), axes))
    with wrong:
        compare_model(FSDP)


def test_an_mlp_that_every_device_computes_in_full_is_summed(monkeypatch):
    for kind in (Kind.column, Kind.row):
        declare(monkeypatch, kind, None, None)
    with wrong:
        compare_layer("gelu", gradients=False)


@pytest.mark.parametrize("mode", MODES)
def test_a_bias_is_added_before_the_reduction(monkeypatch, mode):
    """Every device of mp adds it, so that it counts mp times."""
    add_bias = Linear.add_bias
    before = of_kind(Kind.row, lambda call: lambda self, x: add_bias(self, call(self, x)))
    mutate(monkeypatch, Linear, "__call__", before)
    mutate(monkeypatch, Linear, "add_bias", of_kind(Kind.row, lambda _: lambda self, y: y))
    with wrong:
        compare_layer(f"{BIASES}; {mode}", gradients=False)


def test_a_bias_divided_by_mp_and_added_before_the_reduction_is_right_here(monkeypatch):
    """Not an error: its gradient is summed over mp, because its use on every device says so."""
    add_bias = Linear.add_bias
    part = lambda self, y: y + add_bias(self, jnp.zeros_like(y)) / lax.axis_size(MP)  # noqa: E731
    mutate(monkeypatch, Linear, "__call__", of_kind(Kind.row, lambda call: lambda self, x: part(self, call(self, x))))
    mutate(monkeypatch, Linear, "add_bias", of_kind(Kind.row, lambda _: lambda self, y: y))
    compare_layer(f"{BIASES}; all_reduce")
