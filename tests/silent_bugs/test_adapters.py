"""Mistakes of adapters that other frameworks made, each written as it would be made here.  docs/silent-bugs.md names
the published threads, test by test."""

import jax
import pytest

import shmap_tp.layers.linear
import shmap_tp.training.step
from shmap_tp.layers.linear import Adapter, Kind
from shmap_tp.model.sharded_model import ModelComponents
from shmap_tp.parallel.mesh import MP
from tests.helpers.adapter_cases import assert_base_keeps_its_bits, compare_with_merged, trained_on
from tests.helpers.mutations import declare, keep_partial, mutate, refused_by_shape, refused_by_type, trace_step, wrong

RANK = "model.adapter.rank=2"


def test_a_factor_keeps_the_gradient_of_the_features_of_one_rank(monkeypatch):
    mutate(monkeypatch, shmap_tp.layers.linear, "mark_varying", keep_partial)
    with refused_by_type:
        trace_step(RANK)


def test_a_factor_keeps_the_gradient_of_the_positions_of_one_rank(monkeypatch):
    monkeypatch.setattr(shmap_tp.training.step, "reduce_partial_gradients", lambda axis, gradients, params: gradients)
    with refused_by_type:
        trace_step("mesh.tensor_parallel=sequence", "model.context=8", RANK)


def test_the_first_factor_is_cut_in_place_of_the_second(monkeypatch):
    declare(monkeypatch, Kind.replicated, MP, None)
    with refused_by_shape:
        trace_step("model.adapter.matrices=[query]", RANK)


def test_the_scale_of_an_adapter_is_applied_to_both_factors(monkeypatch):
    monkeypatch.setattr(Adapter, "__call__", lambda self, x: self.scale * self.b(self.scale * self.a(x)))
    with wrong:
        compare_with_merged("all_reduce")


def test_the_base_is_updated_with_its_adapter(monkeypatch):
    monkeypatch.setattr(ModelComponents, "trained", lambda self, model, params: jax.tree.map(lambda _: True, params))
    before, _, after = trained_on.__wrapped__((1, 1), steps=2)
    with pytest.raises(AssertionError, match="the base is updated"):
        assert_base_keeps_its_bits(before, after)
