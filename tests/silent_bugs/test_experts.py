"""Published silent bugs of mixtures of experts, made on purpose.  docs/silent-bugs.md names the threads."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from jax import lax

import shmap_tp.layers.experts
import shmap_tp.training.step
from shmap_tp.layers import expert_dispatch
from shmap_tp.layers.experts import Router, RouterStatistics
from shmap_tp.parallel.mesh import MP
from tests.helpers.expert_cases import experts_case
from tests.helpers.mutations import keep_partial, mutate, refused_by_type, trace_step, with_lax, wrong
from tests.helpers.sharded_harness import compare

STEP = ["model.block=sequential", "model.mlp=swiglu", "model.experts=8", "model.norm=rmsnorm"]


def comparison(*, gradients: bool = False) -> None:
    compare(experts_case("two of eight", "all_reduce"), (2, 4), "float64", gradients=gradients)


def test_the_partial_gradient_of_a_router_is_labelled_as_complete(monkeypatch):
    """Each device of mp has that which comes through its own experts."""
    share = lambda mark: lambda w, axes: keep_partial(mark)(w) if axes == MP else w  # noqa: E731
    mutate(monkeypatch, shmap_tp.layers.experts, "mark_varying", share)
    with refused_by_type:
        comparison(gradients=True)


def test_the_partial_gradient_of_a_router_is_not_summed_at_the_end_of_a_step(monkeypatch):
    name = "shmap_tp.training.step.reduce_partial_gradients"
    monkeypatch.setattr(name, lambda axis, gradients, params: gradients)
    with refused_by_type:
        trace_step(*STEP, "mesh.tensor_parallel=sequence", "model.context=8")


def test_an_auxiliary_loss_that_every_rank_has_is_summed_over_ranks(monkeypatch):
    with_lax(monkeypatch, shmap_tp.layers.experts, pmean=lax.psum)
    with wrong:
        comparison()


def test_an_auxiliary_loss_that_every_rank_has_is_taken_as_a_share(monkeypatch):
    with_lax(monkeypatch, shmap_tp.layers.experts, pmean=lambda loss, axis: loss)
    with refused_by_type:
        comparison()


def test_the_weights_of_chosen_experts_are_not_normalised(monkeypatch):
    without = lambda found: found._replace(weights_NC=jnp.take_along_axis(found.scores_NE, found.experts_NC, 1))  # noqa: E731
    mutate(monkeypatch, Router, "__call__", lambda route: lambda self, x: without(route(self, x)))
    with wrong:
        comparison()


def test_tokens_go_to_the_expert_beside_the_chosen_one(monkeypatch):
    mutate(monkeypatch, expert_dispatch, "sort_by_expert", lambda sort: lambda chosen, n: sort((chosen + 1) % 8, n))
    with wrong:
        comparison()


def test_the_balance_loss_depends_on_how_the_batch_is_divided(monkeypatch):
    """The product of two means over the tokens of a rank, instead of over those of each sequence."""
    over_a_rank = lambda balance: lambda routing, *_: balance(routing, 1)  # noqa: E731
    mutate(monkeypatch, shmap_tp.layers.experts, "balance_loss", over_a_rank)
    with wrong:
        comparison()


def comparison_over_tokens() -> None:
    compare(experts_case("two of eight", "all_reduce"), (4, 2), "float64", gradients=False, ep=2)


def test_results_come_back_in_the_order_of_experts_instead_of_that_of_tokens(monkeypatch):
    mutate(monkeypatch, expert_dispatch, "_inverse", lambda inverse: lambda order: jnp.arange(len(order)))
    with wrong:
        comparison_over_tokens()


def test_tokens_are_sent_over_another_axis_of_as_many_ranks(monkeypatch):
    with_lax(monkeypatch, expert_dispatch, all_to_all=lambda x, axis, *dims, **how: lax.all_to_all(x, MP, *dims, **how))
    with wrong:
        comparison_over_tokens()


def test_the_weights_of_rows_stay_behind_when_rows_are_sent(monkeypatch):
    is_weights = lambda x: x.ndim == 1 and jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    mutate(monkeypatch, expert_dispatch, "_all_to_all", lambda send: lambda x: x if is_weights(x) else send(x))
    with wrong:
        comparison_over_tokens()


BIASED = [*STEP, "model.router_bias_rate=0.1"]


def test_the_bias_of_a_router_follows_the_load_of_one_rank(monkeypatch):
    """The loads are not summed over ranks."""
    local = lambda reduce: lambda x, axes: x if isinstance(x, RouterStatistics) else reduce(x, axes)  # noqa: E731
    mutate(monkeypatch, shmap_tp.training.step, "all_reduce", local)
    with refused_by_type:
        trace_step(*BIASED)


def test_the_bias_of_a_router_has_a_gradient(monkeypatch):
    """It is declared as a weight: it would be decayed, and have moments; its gradient is zero."""
    field = Router.__dataclass_fields__["choice_bias"]
    declared = field.metadata["declaration"]
    trained = lambda router: replace(declared(router), trained=True)  # noqa: E731
    monkeypatch.setattr(field, "metadata", {**field.metadata, "declaration": trained})
    with pytest.raises(TypeError, match="NoneType"):
        trace_step(*BIASED)
