"""A step that must not be taken leaves every bit as it was, on all devices alike; too many of them stop the run."""

import dataclasses
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from orbax.checkpoint import v1 as ocp

from shmap_tp.config.schema import GuardConfig
from shmap_tp.data.batches import Batches
from shmap_tp.errors import UserError
from shmap_tp.parallel.collectives import all_reduce, varying_axes
from shmap_tp.parallel.mesh import DP, make_mesh
from shmap_tp.runtime.exit_codes import STOPPED
from shmap_tp.training import loop as train
from shmap_tp.training import step
from shmap_tp.training.bad_steps import BadStepMonitor, BadStepState, initial_bad_step_state
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.step import Objective, State, build_step_functions
from tests.helpers.assertions import assert_same_bits, by_path
from tests.helpers.model_fixtures import config, mesh
from tests.helpers.run_fixtures import lines, state_at, tiny, values
from tests.training.test_loop import checkpoints_of, interrupt
from tests.training.test_step import assert_copies_agree, batch

GUARD = GuardConfig(loss_spike_sigmas=6.0, window=8, max_consecutive=3)


# The judgement


def judged(losses: list[float], config: GuardConfig = GUARD, norm: float = 1.0) -> tuple[list[bool], BadStepState]:
    guard, taken = initial_bad_step_state(), []
    for loss in losses:
        good, guard = guard.judge(jnp.float32(loss), jnp.float32(norm), config)
        taken.append(bool(good))
    return taken, guard


def test_what_is_not_finite_is_never_taken():
    without = GuardConfig(loss_spike_sigmas=None, window=8, max_consecutive=None)
    for loss, norm in [(np.nan, 1), (np.inf, 1), (-np.inf, 1), (1, np.nan), (1, np.inf)]:
        for rules in (GUARD, without):
            taken, guard = judged([loss], rules, norm)
            assert taken == [False] and (guard.skipped, guard.in_a_row, guard.taken) == (1, 1, 0)
    assert judged([1, 1e30, 1], without)[0] == [True] * 3


def test_mean_and_variance_are_of_the_steps_that_were_taken():
    losses = [4.0, 3.0, 3.5, 2.0, 2.5]
    _, guard = judged([4.0, np.nan, 3.0, 3.5, np.inf, 2.0, 2.5])
    assert guard.mean == pytest.approx(np.mean(losses)) and guard.variance == pytest.approx(np.var(losses), rel=1e-5)
    assert (guard.taken, guard.skipped, guard.in_a_row) == (5, 2, 0)


def test_a_spike_is_more_than_so_many_deviations_above_the_mean():
    before = [2.0, 2.2] * 4  # mean 2.1, deviation 0.1
    assert judged([*before, 2.69])[0] == [True] * 9
    assert judged([*before, 2.71])[0] == [True] * 8 + [False]
    assert judged([*before, -9.0])[0] == [True] * 9, "a loss is never too small"
    assert judged([*before[1:], 1e6])[0] == [True] * 8, "seven losses are too few to say"
    taken, guard = judged([*before, 9, 9, 2.1, 9])
    assert taken == [True] * 8 + [False, False, True, False]
    assert (guard.skipped, guard.in_a_row) == (3, 1)


def test_old_losses_are_forgotten():
    falling = [10.0] * 8 + [1.0, 1.1] * 40
    assert judged([*falling, 3.0])[0][-1] is False
    assert judged([*falling, 1.2])[0][-1] is True


def line(step: int, in_a_row: int, loss: float, norm: float = 1.0) -> dict[str, Any]:
    return {"step": step, "skipped_in_a_row": in_a_row, "loss": loss, "grad_norm": norm, "loss_limit": 2.7}


def test_the_host_says_why_a_step_was_skipped_what_it_read_and_when_it_is_enough():
    """Step s is the s-1st from 0.  Two more in a row after a stop that was gone on from stop it again."""
    watch = BadStepMonitor(
        dataclasses.replace(GUARD, max_consecutive=2), lambda step: np.arange(10 * step, 10 * step + 6), "the.bin"
    )
    assert watch.of(line(1, 0, 2.5)) == {} and watch.in_a_row == 0
    loss_spike_sigmas = watch.of(line(2, 1, 3.5))
    assert loss_spike_sigmas == {
        "why_skipped": "its loss is 3.5, above 2.7 (guard.loss_spike_sigmas=6)",
        "windows": [10, 11, 12, 13, 14, 15],
    }
    assert watch.of(line(3, 0, 2.5)) == {} and not watch.verdict
    assert watch.of(line(4, 3, 2.5, np.inf))["why_skipped"] == "its loss is 2.5, the norm of its gradient inf"
    assert not watch.verdict, "a run that goes on from its third skipped step"
    watch.of(line(5, 4, np.nan))
    assert watch.verdict == (
        "steps 2 to 5 were skipped, 4 in a row (guard.max_consecutive=2); the last read windows 40, 41, 42, 43, ... of "
        "the.bin, and its loss is nan, the norm of its gradient 1"
    )
    never = BadStepMonitor(dataclasses.replace(GUARD, max_consecutive=None), lambda step: np.arange(6), "the.bin")
    never.of(line(5, 1000, np.nan))
    assert not never.verdict


# In the step

IN_A_MICROBATCH, IN_A_SHARD = 48, 49
SETTINGS = ["mesh.zero=none", "mesh.zero=zero1", "mesh.zero=fsdp mesh.tensor_parallel=sequence model.context=8"]


def poisoned(monkeypatch, is_bad: Callable[[Any], Any]) -> None:
    """One device's part of one gradient has one NaN where `is_bad`, of the tokens of a device; one of dp and mp."""
    original = step.loss_and_gradients

    def spoilt(objective: Any, params: Any, tokens_ABT: Any) -> Any:
        loss, gradients = original(objective, params, tokens_ABT)
        dw = gradients.blocks.attention.query.weight
        here = is_bad(tokens_ABT)
        for axis in varying_axes(dw):
            here &= lax.axis_index(axis) == 1
        nan = jnp.where(here, jnp.nan, dw[0, 0, 0])
        return loss, eqx.tree_at(lambda g: g.blocks.attention.query.weight, gradients, dw.at[0, 0, 0].set(nan))

    monkeypatch.setattr(step, "loss_and_gradients", spoilt)


@pytest.mark.parametrize("given", SETTINGS)
def test_a_nan_anywhere_touches_nothing_anywhere(monkeypatch, given):
    """In one part of dp in one microbatch, or in one device's shard of one gradient; the run is then, to the bit, the
    one that never saw that batch."""
    objective = Objective.__call__

    def spoilt(self: Any, params: Any, tokens_BT: Any, counted: Any) -> Any:
        objected, loss = objective(self, params, tokens_BT, counted)
        return objected * jnp.where(jnp.any(tokens_BT[:, 0] == IN_A_MICROBATCH), jnp.nan, 1.0), loss

    monkeypatch.setattr(Objective, "__call__", spoilt)
    poisoned(monkeypatch, lambda tokens: all_reduce(jnp.sum(tokens[..., 0] == IN_A_SHARD), DP) > 0)
    conf = config("mesh.dp=2", "mesh.mp=4", "train.batch=16", "train.microbatches=2", *given.split())
    made = build_step_functions(conf, mesh((2, 4)), jnp.float32)
    program = made.step.lower(made.shapes, made.tokens).compile()

    def trained(firsts: list[int | None]) -> list[tuple[State, dict[str, Any]]]:
        """Every batch is the number's, but its one window that begins with a token that makes a NaN."""
        state, seen = made.init(), []
        for i, first in firsts:
            tokens = batch(i, made.tokens.shape) % 40
            if first is not None:
                tokens[1, 5, 0] = first  # in the second microbatch, on the second part of dp
            state, metrics = program(state, jax.device_put(tokens, made.tokens.sharding))
            assert_copies_agree(state)
            seen.append((by_path(state), {name: value.item() for name, value in metrics.items()}))
        return seen

    well, in_microbatch, in_shard, after = trained([(0, None), (1, IN_A_MICROBATCH), (2, IN_A_SHARD), (3, None)])
    for (state, metrics), row in [(in_microbatch, 1), (in_shard, 2)]:
        assert np.isfinite(metrics["loss"]) and np.isnan(metrics["grad_norm"])
        assert (metrics["skipped"], metrics["skipped_in_a_row"]) == (row, row)
        assert_same_bits(weights_and_optimizer(state), weights_and_optimizer(well[0]))
        assert state["step"] == 1 + row
    assert (after[1]["skipped"], after[1]["skipped_in_a_row"]) == (2, 0)
    _, without = trained([(0, None), (3, None)])
    assert_same_bits(weights_and_optimizer(after[0]), weights_and_optimizer(without[0]))
    assert after[1]["learning_rate"] == without[1]["learning_rate"] > 0
    assert any((after[0][path] != well[0][path]).any() for path in after[0] if path.startswith("params"))


def test_a_spike_in_one_microbatch_touches_nothing_either(monkeypatch):
    """Finite, in the second microbatch, on one part of dp: the loss of the step says so."""
    objective = Objective.__call__

    def raised(self: Any, params: Any, tokens_BT: Any, counted: Any) -> Any:
        times = jnp.where(jnp.any(tokens_BT[:, 0] == IN_A_MICROBATCH), 100.0, 1.0)
        return tuple(times * each for each in objective(self, params, tokens_BT, counted))

    monkeypatch.setattr(Objective, "__call__", raised)
    conf = config(
        "mesh.dp=2",
        "mesh.mp=4",
        "train.batch=16",
        "train.microbatches=2",
        "guard.loss_spike_sigmas=6",
        "guard.window=2",
    )
    made = build_step_functions(conf, mesh((2, 4)), jnp.float32)
    state, states, seen = made.init(), [], []
    for i in range(4):
        tokens = batch(i, made.tokens.shape) % 40
        if i == 2:
            tokens[1, 5, 0] = IN_A_MICROBATCH
        state, metrics = made.step(state, jax.device_put(tokens, made.tokens.sharding))
        assert_copies_agree(state)
        states.append(by_path(state))
        seen.append({name: value.item() for name, value in metrics.items()})
    assert seen[2]["loss"] > 5 * seen[1]["loss"] and np.isfinite(seen[2]["grad_norm"])
    assert [one["skipped_in_a_row"] for one in seen] == [0, 0, 1, 0] and seen[3]["skipped"] == 1
    assert_same_bits(weights_and_optimizer(states[2]), weights_and_optimizer(states[1]))
    assert any((states[3][path] != states[2][path]).any() for path in states[3] if path.startswith("params"))


def weights_and_optimizer(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {path: leaf for path, leaf in state.items() if path.startswith(("params", "optimizer"))}


# In a run

STEPS = 8  # of the tiny run, which evaluates at 4 and 8 and saves at 2, 4, 6 and 8
BAD = [4, 5]  # of which 4 would be saved


@pytest.fixture
def spoilt(tmp_path, monkeypatch) -> Path:
    """A directory in which the batches of the steps BAD make a NaN."""
    monkeypatch.setattr(train, "machine_peak", lambda devices: None)
    conf = tiny(tmp_path)
    made = build_step_functions(conf, make_mesh(conf.mesh), jnp.float32)
    batches = Batches(conf, made.tokens)
    sums = np.array([np.sum(np.asarray(batches.training(number - 1))) for number in BAD])
    poisoned(monkeypatch, lambda tokens: jnp.any(all_reduce(jnp.sum(tokens), DP) == sums))
    return tmp_path


def test_skipped_steps_are_counted_told_and_leave_the_weights(spoilt, capsys):
    assert train.train(tiny(spoilt, "evaluate.every=1")) == 0
    assert [line["skipped"] for line in lines(spoilt)] == [0, 0, 0, 1, 2, 2, 2, 2]
    assert [line["skipped_in_a_row"] for line in lines(spoilt)] == [0, 0, 0, 1, 2, 0, 0, 0]
    assert [line["grad_norm"] is None for line in lines(spoilt)] == [line["step"] in BAD for line in lines(spoilt)]
    held_out = [line["loss"] for line in lines(spoilt, "validation")]
    assert held_out[2] == held_out[3] == held_out[4] and len(set(held_out)) == STEPS - len(BAD)
    said = capsys.readouterr().out
    assert re.findall(r"step (\d) is skipped, the weights stay as they are: .* gradient nan", said) == ["4", "5"]
    batches = Batches(
        tiny(spoilt), build_step_functions(tiny(spoilt), make_mesh(tiny(spoilt).mesh), jnp.float32).tokens
    )
    for line in lines(spoilt):
        assert line.get("windows") == (batches.sequence_indices(line["step"] - 1).tolist() if line["step"] in BAD else None)
    assert checkpoints_of(spoilt) == [2, 6, 8], "a checkpoint in between would have had the weights of step 3"


def test_a_run_stopped_between_skipped_steps_goes_on_as_if_it_had_not_been(spoilt, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt(patch, Batches, "training", signal.SIGTERM, lambda step: step == 3)
        assert train.train(tiny(spoilt)) == STOPPED
    assert lines(spoilt)[-1]["skipped_in_a_row"] == 1 and max(checkpoints_of(spoilt)) == 4
    assert train.train(tiny(spoilt, "checkpoint.resume=must")) == 0
    straight = spoilt / "straight"
    shutil.copytree(spoilt / "data", straight / "data")
    assert train.train(tiny(straight)) == 0
    assert state_at(spoilt, STEPS) == state_at(straight, STEPS)
    assert values(spoilt) == values(straight)


def test_too_many_in_a_row_stop_the_run_which_can_go_on_behind_them(spoilt, capsys):
    """The loop hears of step 5 when step 6 is under way: that one is kept, since it was good."""
    with pytest.raises(UserError) as caught:
        train.train(tiny(spoilt, "guard.max_consecutive=2"))
    said = str(caught.value)
    assert len(said.splitlines()) == 2
    assert "steps 4 to 5 were skipped, 2 in a row (guard.max_consecutive=2)" in said and "gradient nan" in said
    windows = lines(spoilt)[4]["windows"]
    assert f"windows {', '.join(map(str, windows[:4]))}, ... of {spoilt}/data/train.bin" in said
    assert f"checkpoint {spoilt}/run/checkpoints/6 has the weights of step 6" in said and "--resume" in said
    assert "stopped and saved at step 6" in capsys.readouterr().out
    assert checkpoints_of(spoilt) == [2, 6]
    assert train.train(tiny(spoilt, "guard.max_consecutive=2", "checkpoint.resume=must")) == 0
    straight = spoilt / "straight"
    shutil.copytree(spoilt / "data", straight / "data")
    assert train.train(tiny(straight)) == 0
    assert state_at(spoilt, STEPS) == state_at(straight, STEPS)


def test_a_checkpoint_from_before_there_was_a_guard_is_gone_on_from(spoilt):
    conf = tiny(spoilt)
    made = build_step_functions(conf, make_mesh(conf.mesh), jnp.float32)
    state = made.init()
    older = {field: value for field, value in vars(state).items() if field != "guard"}
    ocp.save_checkpointables(spoilt / "3", {"state": older})
    with Checkpoints(dataclasses.replace(conf.checkpoint, dir=str(spoilt)), print) as checkpoints:
        restored = checkpoints.restore(3, made.shapes)
    assert_same_bits(restored, state)
    train_on = made.step.lower(made.shapes, made.tokens).compile()
    train_on(restored, Batches(conf, made.tokens).training(0))
    assert jax.tree.map(lambda leaf: leaf.sharding, restored) == jax.tree.map(lambda leaf: leaf.sharding, made.shapes)
