"""A step whose update would spoil the weights or the optimizer state is skipped, equally on all devices."""

from typing import Any

import equinox as eqx
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
from shmap_tp.training.step import Components
from tests.helpers.assertions import assert_same_bits, by_path
from tests.helpers.model_fixtures import config
from tests.helpers.step_fixtures import Program

GUARD = GuardConfig(loss_spike_sigmas=None, window=8, max_norm_change=10.0, max_consecutive=None)
OFF = GuardConfig(loss_spike_sigmas=None, window=8, max_norm_change=None, max_consecutive=None)


def test_an_update_is_acceptable_if_finite_and_within_the_factor():
    """With a limit of 10, and without one; an update of zero leaves zeros."""
    for old, new, with_limit, without in [
        (2.0, 19.9, True, True), (2.0, 20.1, False, True), (2.0, 0.21, True, True), (2.0, 0.19, False, True),
        (2.0, 0.0, False, True), (2.0, np.inf, False, False), (2.0, np.nan, False, False), (0.0, 0.0, True, True),
        (0.0, 5.0, True, True), (0.0, np.nan, False, False),
    ]:  # fmt: skip
        outcome = StepOutcome(*map(jnp.float32, (1.0, 1.0, old, new)))
        found = bool(outcome.is_acceptable(GUARD)), bool(outcome.is_acceptable(OFF))
        assert found == (with_limit, without), (old, new)


def test_the_reason_of_a_skipped_update_is_reported():
    monitor = BadStepMonitor(GUARD, lambda step: np.arange(2), "the.bin")

    def why(new: float) -> str:
        norms = {"grad_norm": 1.0, "param_norm": 5.0, "updated_param_norm": new}
        return monitor.update({"step": 1, "skipped_in_a_row": 1, "loss": 2.5} | norms)["why_skipped"]

    large = "its update would change the norm of the weights from 5 to 51, too much (guard.max_norm_change=10)"
    assert why(51.0) == large
    assert why(np.nan) == "its update would make the weights or the optimizer state infinite or NaN"


SPOILS = {2: "large", 12: "state", 22: "nan"}
"""What the update of this number spoils."""


def spoiled(section: Any) -> Optimizer:
    """The configured optimizer, some of whose updates spoil one element on one device."""
    made = make_optimizer(section)
    configured = made.transformation

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, (adam, *rest) = configured.update(gradients, state, params)

        def with_bad(target: Any, numbers: dict[int, float]) -> Any:
            x = target.blocks.attention.query.weight
            here = jnp.array(True)
            for axis in varying_axes(x):
                here &= lax.axis_index(axis) == lax.axis_size(axis) - 1
            for number, bad in numbers.items():
                x = x.at[0, 0, 0].set(jnp.where(here & (adam.count == number), bad, x[0, 0, 0]))
            changed = jax.tree.map(lambda y: y, target)
            object.__setattr__(changed.blocks.attention.query, "weight", x)
            return changed

        adam = adam._replace(nu=with_bad(adam.nu, {12: jnp.nan}))
        return with_bad(updates, {2: 1e6, 22: jnp.nan}), (adam, *rest)

    return Optimizer(optax.GradientTransformation(configured.init, update), made.schedule)


@pytest.mark.parametrize("given", ["mesh.zero=zero1", "mesh.zero=fsdp mesh.tensor_parallel=sequence model.context=8"])
def test_a_spoiled_update_on_one_device_changes_nothing_on_any_device(given):
    conf = config("mesh.dp=2", "mesh.mp=4", "optimizer.warmup_steps=0", *given.split())
    one = Program(conf, Components(make_optimizer=spoiled))
    first = one.train(1)
    good, before = jax.device_get(first.state), norm(by_path(one.initial))
    assert first.metrics["skipped_in_a_row"] == [0]
    assert before == pytest.approx(first.metrics["param_norm"][0], rel=1e-6)
    assert first.metrics["updated_param_norm"][0] == pytest.approx(norm(by_path(good)), rel=1e-6) != before
    for number, kind in SPOILS.items():
        counts = lambda state: state.optimizer[0].count  # noqa: E731
        state = eqx.tree_at(counts, good, np.int32(number - 1))
        found = one.train(1, state)
        assert found.metrics["skipped_in_a_row"] == [1], kind
        assert np.isnan(found.metrics["updated_param_norm"][0]) == (kind != "large")
        kept = {path: leaf for path, leaf in by_path(state).items() if path.startswith(("params", "optimizer"))}
        assert_same_bits({path: by_path(found.state)[path] for path in kept}, kept)


def norm(state: dict[str, np.ndarray]) -> float:
    """The norm of all parameters of a state."""
    return float(np.sqrt(sum(np.sum(x.astype(float) ** 2) for path, x in state.items() if path.startswith("params"))))
