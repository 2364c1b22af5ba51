"""A run on bytes, which the tests of the commands share, and a model of bytes."""

from pathlib import Path

import pytest

import shmap_tp
from tests.helpers.run_fixtures import trained_on_bytes


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on bytes."""
    return trained_on_bytes(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="session")
def model() -> shmap_tp.Model:
    """Its logits spread widely."""
    given = ["model=test", "model.layers=2", "model.vocabulary=256", "model.context=64", "model.init_std=0.5"]
    return shmap_tp.Model.initialize(shmap_tp.load_config(*given))
