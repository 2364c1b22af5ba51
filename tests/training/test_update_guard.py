"""A step whose update would spoil the weights or the optimizer state is skipped, equally on all devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from shmap_tp.config.schema import GuardConfig
from shmap_tp.parallel.collectives import varying_axes
from shmap_tp.training.bad_steps import BadStepMonitor, StepOutcome
from shmap_tp.training.optimizer import Optimizer, make_optimizer
from shmap_tp.training.step import Components, build_step_functions
from tests.helpers.assertions import assert_replicas_agree, assert_same_bits, by_path
from tests.helpers.model_fixtures import config, mesh_of
from tests.helpers.step_fixtures import learnable_batch

GUARD = GuardConfig(loss_spike_sigmas=None, window=8, max_norm_change=10.0, max_consecutive=None)
OFF = GuardConfig(loss_spike_sigmas=None, window=8, max_norm_change=None, max_consecutive=None)


@pytest.mark.parametrize(
    "old, new, with_limit, without",
    [
        (2.0, 19.9, True, True),
        (2.0, 20.1, False, True),
        (2.0, 0.21, True, True),
        (2.0, 0.19, False, True),
        (2.0, 0.0, False, True),
        (2.0, np.inf, False, False),
        (2.0, np.nan, False, False),
        (0.0, 0.0, True, True),  # an update of zero leaves zeros
        (0.0, 5.0, True, True),
        (0.0, np.nan, False, False),
    ],
)
def test_an_update_is_acceptable_if_finite_and_within_the_factor(old, new, with_limit, without):
    outcome = StepOutcome(*map(jnp.float32, (1.0, 1.0, old, new)))
    assert (bool(outcome.is_acceptable(GUARD)), bool(outcome.is_acceptable(OFF))) == (with_limit, without)


def test_the_reason_of_a_skipped_update_is_reported():
    monitor = BadStepMonitor(GUARD, lambda step: np.arange(2), "the.bin")

    def why(new: float) -> str:
        norms = {"grad_norm": 1.0, "param_norm": 5.0, "updated_param_norm": new}
        return monitor.update({"step": 1, "skipped_in_a_row": 1, "loss": 2.5} | norms)["why_skipped"]

    large = "its update would change the norm of the weights from 5 to 51, too much (guard.max_norm_change=10)"
    assert why(51.0) == large
    assert why(np.nan) == "its update would make the weights or the optimizer state infinite or NaN"


def spoiled(kind: str) -> Callable[[Any], Optimizer]:
    """The configured optimizer, which in its second update spoils one element on one device."""

    def make(section: Any) -> Optimizer:
        made = make_optimizer(section)
        configured = made.transformation

        def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
            updates, (adam, *rest) = configured.update(gradients, state, params)
            target = adam.nu if kind == "state" else updates
            x = target.blocks.attention.query.weight
            here = adam.count == 2
            for axis in varying_axes(x):
                here &= lax.axis_index(axis) == lax.axis_size(axis) - 1
            x = x.at[0, 0, 0].set(jnp.where(here, jnp.nan if kind != "large" else 1e6, x[0, 0, 0]))
            changed = jax.tree.map(lambda y: y, target)
            object.__setattr__(changed.blocks.attention.query, "weight", x)
            return (updates, (adam._replace(nu=changed), *rest)) if kind == "state" else (changed, (adam, *rest))

        return Optimizer(optax.GradientTransformation(configured.init, update), made.schedule)

    return make


@pytest.mark.parametrize(
    "given, kind",
    [
        ("mesh.zero=none", "large"),
        ("mesh.zero=zero1", "state"),
        ("mesh.zero=fsdp mesh.tensor_parallel=sequence model.context=8", "nan"),
    ],
)
def test_a_spoiled_update_on_one_device_changes_nothing_on_any_device(given, kind):
    conf = config("mesh.dp=2", "mesh.mp=4", "optimizer.warmup_steps=0", *given.split())
    made = build_step_functions(conf, mesh_of(conf), jnp.float32, Components(make_optimizer=spoiled(kind)))
    state, states, seen = made.init(), [by_path(made.init())], []
    for i in range(2):
        tokens = jax.device_put(learnable_batch(i, made.tokens.shape), made.tokens.sharding)
        state, metrics = made.step(state, tokens)
        assert_replicas_agree(state)
        states.append(by_path(state))
        seen.append({name: value.item() for name, value in metrics.items()})
    assert [one["skipped_in_a_row"] for one in seen] == [0, 1]
    assert np.isnan(seen[1]["updated_param_norm"]) == (kind != "large")
    kept = [path for path in states[1] if path.startswith(("params", "optimizer"))]
    assert_same_bits({path: states[2][path] for path in kept}, {path: states[1][path] for path in kept})
    for before, after, one in zip(states[:1], states[1:], seen, strict=False):
        assert one["param_norm"] == pytest.approx(norm(before), rel=1e-6)
        assert one["updated_param_norm"] == pytest.approx(norm(after), rel=1e-6) != one["param_norm"]


def norm(state: dict[str, np.ndarray]) -> float:
    """The norm of all parameters of a state."""
    return float(np.sqrt(sum(np.sum(x.astype(float) ** 2) for path, x in state.items() if path.startswith("params"))))
