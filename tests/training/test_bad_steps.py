"""A skipped step changes no bit of the weights on any device; too many consecutive ones stop the run, which keeps the
checkpoints from before them, and restarts that cannot help come to an end."""

import dataclasses
import io
import re
import shutil
import signal
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from orbax.checkpoint import v1 as ocp

from shmap_tp.config.schema import Config, GuardConfig
from shmap_tp.data.batches import Batches
from shmap_tp.errors import DivergedError
from shmap_tp.model.loss import Objective
from shmap_tp.parallel.collectives import all_reduce, varying_axes
from shmap_tp.parallel.mesh import DP
from shmap_tp.runtime.exit_codes import STOPPED
from shmap_tp.training import loop, step
from shmap_tp.training.bad_steps import BadStepMonitor, BadStepState, StepOutcome, initial_bad_step_state
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.checkpoint_files import SKIPPED
from tests.helpers import run_fixtures as runs
from tests.helpers.assertions import assert_replicas_agree, assert_same_bits, by_path
from tests.helpers.checkpoint_fixtures import FACTS, checkpoint_config, random_state
from tests.helpers.model_fixtures import config
from tests.helpers.step_fixtures import Program, learnable_batch

GUARD = GuardConfig(loss_spike_sigmas=6.0, window=8, max_norm_change=10.0, max_consecutive=3)


# The decision


def run_guard(losses: list[float], config: GuardConfig = GUARD, norm: float = 1.0) -> tuple[list[bool], BadStepState]:
    """(whether each step was taken, the state after the last)."""
    guard, taken = initial_bad_step_state(), []
    for loss in losses:
        good, guard = guard.update(StepOutcome(*map(jnp.float32, (loss, norm, 1, 1))), config)
        taken.append(bool(good))
    return taken, guard


def test_a_step_with_a_non_finite_loss_or_norm_is_skipped():
    without = GuardConfig(loss_spike_sigmas=None, window=8, max_norm_change=None, max_consecutive=None)
    for loss, norm in [(np.nan, 1), (np.inf, 1), (-np.inf, 1), (1, np.nan), (1, np.inf)]:
        for rules in (GUARD, without):
            taken, guard = run_guard([loss], rules, norm)
            assert taken == [False] and (guard.skipped, guard.in_a_row, guard.taken) == (1, 1, 0)
    assert run_guard([1, 1e30, 1], without)[0] == [True] * 3


def test_mean_and_variance_exclude_skipped_steps():
    losses = [4.0, 3.0, 3.5, 2.0, 2.5]
    _, guard = run_guard([4.0, np.nan, 3.0, 3.5, np.inf, 2.0, 2.5])
    assert guard.mean == pytest.approx(np.mean(losses)) and guard.variance == pytest.approx(np.var(losses), rel=1e-5)
    assert (guard.taken, guard.skipped, guard.in_a_row) == (5, 2, 0)


def test_a_spike_is_a_loss_above_the_mean_plus_the_given_deviations():
    before = [2.0, 2.2] * 4  # mean 2.1, deviation 0.1
    assert run_guard([*before, 2.69])[0] == [True] * 9
    assert run_guard([*before, 2.71])[0] == [True] * 8 + [False]
    assert run_guard([*before, -9.0])[0] == [True] * 9, "a small loss is not a spike"
    assert run_guard([*before[1:], 1e6])[0] == [True] * 8, "seven losses are too few for a limit"
    taken, guard = run_guard([*before, 9, 9, 2.1, 9])
    assert taken == [True] * 8 + [False, False, True, False]
    assert (guard.skipped, guard.in_a_row) == (3, 1)


def test_the_running_mean_forgets_old_losses():
    falling = [10.0] * 8 + [1.0, 1.1] * 40
    assert run_guard([*falling, 3.0])[0][-1] is False
    assert run_guard([*falling, 1.2])[0][-1] is True


def line(step: int, in_a_row: int, loss: float, norm: float = 1.0) -> dict[str, Any]:
    norms = {"grad_norm": norm, "param_norm": 5.0, "updated_param_norm": 5.0}
    return {"step": step, "skipped_in_a_row": in_a_row, "loss": loss, "loss_limit": 2.7} | norms


def test_the_monitor_reports_why_a_step_was_skipped_and_stops_after_too_many():
    """Step s reads the sequences of index s - 1.  After a resume, two more consecutive ones stop the run again."""
    guard = dataclasses.replace(GUARD, max_consecutive=2)
    monitor = BadStepMonitor(guard, lambda step: [*range(10 * step, 10 * step + 6)], "the.bin")
    assert monitor.update(line(1, 0, 2.5)) == {} and monitor.in_a_row == 0
    spike = monitor.update(line(2, 1, 3.5))
    why = "its loss is 3.5, above 2.7 (guard.loss_spike_sigmas=6)"
    assert spike == {"why_skipped": why, "sequences": [10, 11, 12, 13, 14, 15]}
    assert monitor.update(line(3, 0, 2.5)) == {} and not monitor.verdict
    assert monitor.update(line(4, 3, 2.5, np.inf))["why_skipped"] == "its loss is 2.5, its gradient norm inf"
    assert not monitor.verdict, "a run that resumes from its third skipped step"
    monitor.update(line(5, 4, np.nan))
    assert monitor.verdict == (
        "steps 2 to 5 were skipped, 4 in a row (guard.max_consecutive=2); the last read sequences 40, 41, 42, 43, ... "
        "of the.bin, and its loss is nan, its gradient norm 1"
    )
    never = BadStepMonitor(dataclasses.replace(GUARD, max_consecutive=None), lambda step: range(6), "the.bin")
    never.update(line(5, 1000, np.nan))
    assert not never.verdict


# In the compiled step

IN_A_MICROBATCH, IN_A_SHARD, SPIKE = 48, 49, 47
SETTINGS = [
    "mesh.zero=none",
    "mesh.zero=fsdp mesh.tensor_parallel=sequence model.context=8 model.block=sequential model.mlp=swiglu "
    "model.experts=8 model.router_bias_rate=0.1",
]


def put_nan_in_gradient(monkeypatch, is_bad: Callable[[Any], Any]) -> None:
    """Put one NaN into one device's shard of one gradient if `is_bad(tokens)`, of the tokens of a device."""
    monkeypatch.setattr(step, "loss_and_gradients", with_nan_in_gradient(step.loss_and_gradients, is_bad))


@cache
def with_nan_in_gradient(original: Callable[..., Any], is_bad: Callable[[Any], Any]) -> Callable[..., Any]:
    def with_nan(objective: Any, params: Any, batch: Any, *given: Any, **named: Any) -> Any:
        loss, gradients = original(objective, params, batch, *given, **named)
        dw = gradients.blocks.attention.query.weight
        here = is_bad(batch.inputs)
        for axis in varying_axes(dw):
            here &= lax.axis_index(axis) == 1
        nan = jnp.where(here, jnp.nan, dw[0, 0, 0])
        return loss, eqx.tree_at(lambda g: g.blocks.attention.query.weight, gradients, dw.at[0, 0, 0].set(nan))

    return with_nan


@pytest.mark.parametrize("given", SETTINGS)
def test_a_nan_or_a_spike_on_one_device_changes_no_weight_on_any_device(monkeypatch, given):
    """A NaN on one dp rank in one microbatch, one in one device's shard of one gradient, or a finite spike in one
    microbatch, which raises the loss of the whole step: the run is then bitwise equal to one without that batch."""
    objective = Objective.__call__

    def spoiled(self: Any, params: Any, batch: Any, *counts: Any) -> Any:
        objected, parts = objective(self, params, batch, *counts)
        objected *= jnp.where(jnp.any(batch.inputs[:, 0] == IN_A_MICROBATCH), jnp.nan, 1.0)
        times = jnp.where(jnp.any(batch.inputs[:, 0] == SPIKE), 100.0, 1.0)
        return times * objected, parts._replace(losses=times * parts.losses)

    monkeypatch.setattr(Objective, "__call__", spoiled)
    put_nan_in_gradient(monkeypatch, lambda tokens: all_reduce(jnp.sum(tokens[..., 0] == IN_A_SHARD), DP) > 0)
    guard = "guard.loss_spike_sigmas=6", "guard.window=2"
    one = Program(config("mesh.dp=2", "mesh.mp=4", "train.batch=16", "train.microbatches=2", *guard, *given.split()))

    def trained(firsts: list[tuple[int, int | None]]) -> list[tuple[dict[str, np.ndarray], dict[str, Any]]]:
        """Train on batches (number, first): `first` is a token that spoils a step, put at the start of one sequence."""
        state, seen = one.placed(one.initial), []
        for i, first in firsts:
            tokens = learnable_batch(i, one.made.tokens.shape) % 40
            if first is not None:
                tokens[1, 5, 0] = first  # in the second microbatch, on the second dp rank
            state, metrics = one.compiled(state, jax.device_put(tokens, one.made.tokens.sharding))
            assert_replicas_agree(state)
            seen.append((by_path(state), {name: value.item() for name, value in metrics.items()}))
        return seen

    well, *bad, after = trained([(0, None), (1, IN_A_MICROBATCH), (2, IN_A_SHARD), (3, None)])
    for row, (state, metrics) in enumerate(bad, start=1):
        assert np.isfinite(metrics["loss"]) and np.isnan(metrics["grad_norm"])
        assert (metrics["skipped"], metrics["skipped_in_a_row"]) == (row, row)
        assert_same_bits(weights_and_optimizer(state), weights_and_optimizer(well[0]))
        assert state["step"] == 1 + row
    assert (after[1]["skipped"], after[1]["skipped_in_a_row"]) == (2, 0)
    _, without, spike, next_ = trained([(0, None), (3, None), (1, SPIKE), (4, None)])
    assert_same_bits(weights_and_optimizer(after[0]), weights_and_optimizer(without[0]))
    assert after[1]["learning_rate"] == without[1]["learning_rate"] > 0
    assert any((after[0][path] != well[0][path]).any() for path in after[0] if path.startswith("params"))
    assert spike[1]["loss"] > 5 * without[1]["loss"] and np.isfinite(spike[1]["grad_norm"])
    assert spike[1]["skipped_in_a_row"] == 1 and (next_[1]["skipped"], next_[1]["skipped_in_a_row"]) == (1, 0)
    assert_same_bits(weights_and_optimizer(spike[0]), weights_and_optimizer(without[0]))
    assert any((next_[0][path] != spike[0][path]).any() for path in next_[0] if path.startswith("params"))


def weights_and_optimizer(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {path: leaf for path, leaf in state.items() if path.startswith(("params", "optimizer"))}


# In a run

BAD = [4, 5]  # a checkpoint is due after 4


@pytest.fixture(scope="module")
def batches(tmp_path_factory) -> Batches:
    """The batches of every run here."""
    conf = runs.tiny(tmp_path_factory.mktemp("batches"))
    return Batches(conf, runs.tokens_of(conf))


@pytest.fixture(scope="module")
def is_bad(batches) -> Callable[[Any], Any]:
    sums = np.array([np.sum(np.asarray(batches.training(number - 1))[..., :-1]) for number in BAD])
    return lambda tokens: jnp.any(all_reduce(jnp.sum(tokens), DP) == sums)


@pytest.fixture
def bad_steps(is_bad, monkeypatch) -> None:
    """The batches of the steps BAD cause a NaN."""
    put_nan_in_gradient(monkeypatch, is_bad)


@pytest.fixture(scope="module")
def skipping(is_bad, tmp_path_factory) -> tuple[Path, str]:
    """(the directory, what was printed) of a run from step 0 to 8 that evaluates after each, with such batches."""
    directory, printed = tmp_path_factory.mktemp("skipping"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        runs.make_runs_quick(patch)
        put_nan_in_gradient(patch, is_bad)
        assert loop.train(runs.tiny(directory, "evaluate.every=1")) == 0
    return directory, printed.getvalue()


def test_skipped_steps_are_counted_and_reported_and_leave_the_weights_unchanged(skipping, batches):
    directory, printed = skipping
    assert [line["skipped"] for line in runs.lines(directory)] == [0, 0, 0, 1, 2, 2, 2, 2]
    assert [line["skipped_in_a_row"] for line in runs.lines(directory)] == [0, 0, 0, 1, 2, 0, 0, 0]
    assert [line["step"] for line in runs.lines(directory) if line["grad_norm"] is None] == BAD
    held_out = [line["loss"] for line in runs.lines(directory, "validation")]
    assert held_out[2] == held_out[3] == held_out[4] and len(set(held_out)) == runs.STEPS - len(BAD)
    pattern = r"step (\d) is skipped, the weights are unchanged: .* gradient norm nan"
    assert re.findall(pattern, printed) == ["4", "5"]
    for line in runs.lines(directory):
        assert line.get("sequences") == (batches.sequences(line["step"] - 1) if line["step"] in BAD else None)
    assert runs.checkpoint_steps(directory) == [2, 6, 8], "a checkpoint in between would have the weights of step 3"


def test_a_run_stopped_between_skipped_steps_resumes_exactly(skipping, bad_steps, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        runs.signal_during(patch, Batches, "training", signal.SIGTERM, lambda step: step == 3)
        assert loop.train(runs.tiny(tmp_path)) == STOPPED
    assert runs.lines(tmp_path)[-1]["skipped_in_a_row"] == 1 and max(runs.checkpoint_steps(tmp_path)) == 4
    assert loop.train(runs.tiny(tmp_path, "checkpoint.resume=must")) == 0
    assert runs.state_at(tmp_path, runs.STEPS) == runs.state_at(skipping[0], runs.STEPS)
    assert runs.values(tmp_path) == runs.values(skipping[0])


def test_too_many_consecutive_skipped_steps_stop_the_run_which_can_be_resumed(skipping, bad_steps, tmp_path, capsys):
    """The loop sees the metrics of step 5 when step 6 is in flight: step 6 is kept, since it was good."""
    with pytest.raises(DivergedError) as caught:
        loop.train(runs.tiny(tmp_path, "guard.max_consecutive=2"))
    printed = str(caught.value)
    assert len(printed.splitlines()) == 2
    assert "steps 4 to 5 were skipped, 2 in a row (guard.max_consecutive=2)" in printed
    assert "gradient norm nan" in printed
    sequences = runs.lines(tmp_path)[4]["sequences"]
    assert f"sequences {', '.join(map(str, sequences[:4]))}, ... of {tmp_path}/data/train.bin" in printed
    assert f"checkpoint {tmp_path}/run/checkpoints/6 has the weights of step 6" in printed and "--resume" in printed
    assert "stopped and saved at step 6" in capsys.readouterr().out
    assert runs.checkpoint_steps(tmp_path) == [2, 6]
    assert loop.train(runs.tiny(tmp_path, "guard.max_consecutive=2", "checkpoint.resume=must")) == 0
    assert runs.state_at(tmp_path, runs.STEPS) == runs.state_at(skipping[0], runs.STEPS)


def test_a_checkpoint_without_a_bad_step_state_can_be_resumed(functions, tmp_path):
    made = functions(2, 4)
    state = eqx.tree_at(lambda state: state.guard, random_state(made, 0), initial_bad_step_state())
    older = {field: value for field, value in vars(state).items() if field != "guard"}
    ocp.save_checkpointables(tmp_path / "3", {"state": older})
    with Checkpoints(checkpoint_config(tmp_path), print) as checkpoints:
        restored = checkpoints.restore(3, made.shapes)
    assert_same_bits(restored, state)
    assert jax.tree.map(lambda leaf: leaf.sharding, restored) == jax.tree.map(lambda leaf: leaf.sharding, made.shapes)


# Restarts


def test_checkpoints_of_a_streak_replace_only_each_other(functions, tmp_path):
    """Also when each is saved by another process."""
    left = []
    for number, skipped in [(1, 0), (2, 0), (3, 0), (4, 1), (5, 2), (6, 3), (7, 0), (8, 1), (9, 0), (10, 0)]:
        with Checkpoints(checkpoint_config(tmp_path, keep=2), print) as checkpoints:
            checkpoints.save(number, random_state(functions(2, 4), number), FACTS, skipped)
            checkpoints.wait()
            left.append(checkpoints.steps())
    assert left == [[1], [2, 1], [3, 2], [4, 3, 2], [5, 3, 2], [6, 3, 2], [7, 3], [8, 7, 3], [9, 7], [10, 9]]
    assert not (tmp_path / "10" / SKIPPED).exists()


def diverging(directory: Path, *more: str) -> Config:
    """Resume the finished run of 8 steps with updates that the guard skips."""
    given = ["checkpoint.resume=must", "evaluate.every=0", "optimizer.learning_rate=1e9", "train.steps=40"]
    return runs.tiny(directory, *given, "guard.max_consecutive=2", *more)


def test_restarts_of_a_diverging_run_keep_the_good_checkpoints_and_end(copied):
    """Two skipped steps stop the run."""
    for last in (10, 12, 14):
        with pytest.raises(DivergedError, match="were skipped") as error:
            loop.train(diverging(copied))
        assert runs.checkpoint_steps(copied) == [4, 6, 8, last] and error.value.exit_code == 2
    before = runs.file_contents(copied)
    with pytest.raises(DivergedError) as error:
        loop.train(diverging(copied))
    assert runs.file_contents(copied) == before, "nothing was trained"
    assert str(error.value) == (
        f"checkpoint {copied}/run/checkpoints/14 was saved after 6 skipped steps in a row, at least 3 times "
        f"guard.max_consecutive=2: it is not resumed again.\n"
        f"Remove it to resume from an older one (8, 6, 4) with a lower optimizer.learning_rate, or raise "
        f"guard.max_consecutive"
    )
    shutil.rmtree(copied / "run" / "checkpoints" / "14")
    assert loop.train(runs.tiny(copied, "checkpoint.resume=must", "train.steps=10", "evaluate.every=0")) == 0
    assert runs.checkpoint_steps(copied) == [6, 8, 10]


def test_a_run_whose_last_steps_were_skipped_does_not_succeed(copied, capsys):
    finished = diverging(copied, "train.steps=10", "guard.max_consecutive=null")
    message = r"the last steps of the run, 9 to 10, were skipped;\ncheckpoint .*/10 has the weights of step 8"
    for _ in range(2):  # the second start has no step left to train
        with pytest.raises(DivergedError, match=message):
            loop.train(finished)
        assert "done" not in capsys.readouterr().out
    assert runs.checkpoint_steps(copied) == [4, 6, 8, 10] and len(runs.lines(copied)) == 10
    why = {line["step"]: line.get("why_skipped", "") for line in runs.lines(copied)}
    assert "would change the norm of the weights from" in why[10] and "(guard.max_norm_change=10)" in why[10]
    assert not why[8]
