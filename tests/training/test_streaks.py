"""Skipped steps in a row: no checkpoint from before them is lost, and restarts that cannot help come to an end."""

import shutil
from pathlib import Path

import pytest

from shmap_tp.config.schema import Config
from shmap_tp.errors import DivergedError
from shmap_tp.training import loop
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.checkpoint_files import SKIPPED
from tests.helpers.checkpoint_fixtures import FACTS, checkpoint_config, random_state
from tests.helpers.run_fixtures import checkpoint_steps, file_contents, lines, tiny


def test_checkpoints_of_a_streak_replace_only_each_other(functions, tmp_path):
    """Also when each is saved by another process."""
    left = []
    for step, skipped in [(1, 0), (2, 0), (3, 0), (4, 1), (5, 2), (6, 3), (7, 0), (8, 1), (9, 0), (10, 0)]:
        with Checkpoints(checkpoint_config(tmp_path, keep=2), print) as checkpoints:
            checkpoints.save(step, random_state(functions(2, 4), step), FACTS, skipped)
            checkpoints.wait()
            left.append(checkpoints.steps())
    assert left == [[1], [2, 1], [3, 2], [4, 3, 2], [5, 3, 2], [6, 3, 2], [7, 3], [8, 7, 3], [9, 7], [10, 9]]
    assert not (tmp_path / "10" / SKIPPED).exists()


def diverging(directory: Path, *more: str) -> Config:
    """Resume the finished run of 8 steps with updates that the guard skips."""
    given = ["checkpoint.resume=must", "evaluate.every=0", "optimizer.learning_rate=1e9", "train.steps=40"]
    return tiny(directory, *given, "guard.max_consecutive=2", *more)


def test_restarts_of_a_diverging_run_keep_the_good_checkpoints_and_end(copied):
    """Two skipped steps stop the run."""
    for last in (10, 12, 14):
        with pytest.raises(DivergedError, match="were skipped") as error:
            loop.train(diverging(copied))
        assert checkpoint_steps(copied) == [4, 6, 8, last] and error.value.exit_code == 2
    before = file_contents(copied)
    with pytest.raises(DivergedError) as error:
        loop.train(diverging(copied))
    assert file_contents(copied) == before, "nothing was trained"
    assert str(error.value) == (
        f"checkpoint {copied}/run/checkpoints/14 was saved after 6 skipped steps in a row, at least 3 times "
        f"guard.max_consecutive=2: it is not resumed again.\n"
        f"Remove it to resume from an older one (8, 6, 4) with a lower optimizer.learning_rate, or raise "
        f"guard.max_consecutive"
    )
    shutil.rmtree(copied / "run" / "checkpoints" / "14")
    assert loop.train(tiny(copied, "checkpoint.resume=must", "train.steps=10", "evaluate.every=0")) == 0
    assert checkpoint_steps(copied) == [6, 8, 10]


def test_a_run_whose_last_steps_were_skipped_does_not_succeed(copied, capsys):
    finished = diverging(copied, "train.steps=10", "guard.max_consecutive=null")
    message = r"the last steps of the run, 9 to 10, were skipped;\ncheckpoint .*/10 has the weights of step 8"
    for _ in range(2):  # the second start has no step left to train
        with pytest.raises(DivergedError, match=message):
            loop.train(finished)
        assert "done" not in capsys.readouterr().out
    assert checkpoint_steps(copied) == [4, 6, 8, 10] and len(lines(copied)) == 10
    why = {line["step"]: line.get("why_skipped", "") for line in lines(copied)}
    assert "would change the norm of the weights from" in why[10] and "(guard.max_norm_change=10)" in why[10]
    assert not why[8]
