"""Fixtures shared by the tests of training: one finished run, two checkpoints, and copies of them."""

import shutil
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.step import State, StepFunctions
from tests.helpers.checkpoint_fixtures import FACTS, checkpoint_config, random_state
from tests.helpers.run_fixtures import make_runs_quick, run_uninterrupted, shared_step_functions, tiny


@pytest.fixture(autouse=True)
def quick_runs(monkeypatch):
    make_runs_quick(monkeypatch)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory) -> Path:
    """The tiny run from step 0 to 8; this directory has `run` and `data`.  Tests must not change it."""
    return run_uninterrupted(tmp_path_factory)


@pytest.fixture
def copied(uninterrupted, tmp_path) -> Path:
    """A copy of the finished run, to be resumed or damaged."""
    return Path(shutil.copytree(uninterrupted, tmp_path / "copied"))


@pytest.fixture(scope="session")
def functions(tmp_path_factory):
    """The step functions of the tiny model, by (dp, mp)."""
    directory = tmp_path_factory.mktemp("functions")

    @cache
    def build(dp: int, mp: int) -> StepFunctions:
        config = tiny(directory, f"mesh.dp={dp}", f"mesh.mp={mp}")
        return shared_step_functions(config, make_mesh(config.mesh, jax.devices()[: dp * mp]), jnp.float32)

    return build


@pytest.fixture
def messages() -> list[str]:
    """Collects what Checkpoints reports."""
    return []


@pytest.fixture(scope="session")
def pair(functions, tmp_path_factory) -> tuple[Path, list[State]]:
    """A directory with checkpoints of steps 1 and 2, and their states.  Tests must not change it."""
    directory = tmp_path_factory.mktemp("pair")
    states = [random_state(functions(2, 4), seed) for seed in (1, 2)]
    with Checkpoints(checkpoint_config(directory), print) as checkpoints:
        for step, state in enumerate(states, start=1):
            checkpoints.save(step, state, FACTS)
    return directory, states


@pytest.fixture
def pair_copy(pair, tmp_path) -> Path:
    """A copy of the directory of `pair`, to be damaged."""
    return Path(shutil.copytree(pair[0], tmp_path / "copied"))
