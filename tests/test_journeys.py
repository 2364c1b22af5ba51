"""docs/architecture.md tells through which files a batch goes to its loss; here the files that run are recorded."""

import re
import sys
from functools import cache
from pathlib import Path

import jax
import pytest

from shmap_tp.training.step import build_step_functions
from tests.helpers.model_fixtures import mesh
from tests.helpers.paths import ROOT
from tests.helpers.step_fixtures import step_config

DOCUMENT = ROOT / "docs" / "architecture.md"
MAX_FILES, MAX_FILES_THAT_RUN = 9, 20


def journey_of_a_batch() -> str:
    return DOCUMENT.read_text().split("### A batch")[1].split("### A weight")[0]


@cache
def files_that_run(*overrides: str) -> set[str]:
    """Files of shmap_tp of which a function is called by the evaluation of a batch on a (2, 4) mesh, while it is
    traced."""
    config, found = step_config((2, 4), *overrides), set()
    functions = build_step_functions(config, mesh((2, 4)), jax.numpy.float32)
    before = sys.gettrace()
    sys.settrace(lambda frame, *_: found.add(frame.f_code.co_filename))
    try:
        jax.eval_shape(functions.evaluate, functions.shapes.params, functions.tokens)
    finally:
        sys.settrace(before)
    return {str(Path(file).relative_to(ROOT)) for file in found if Path(file).is_relative_to(ROOT / "shmap_tp")}


OTHERS = "model.positions=rotary model.block=sequential model.mlp=swiglu model.remat=full mesh.zero=fsdp"


@pytest.mark.parametrize("overrides", ["", f"{OTHERS} model.norm=rmsnorm"])
def test_every_file_between_a_batch_and_its_loss_is_named(overrides):
    assert len(files_that_run(*overrides.split())) <= MAX_FILES_THAT_RUN
    named = set(re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", journey_of_a_batch()))
    assert not {file for file in files_that_run(*overrides.split()) if Path(file).name not in named}


def test_the_steps_of_a_batch_name_at_most_nine_files():
    steps = re.findall(r"^\d+\..*?(?=^\d+\.|^$)", journey_of_a_batch(), re.MULTILINE | re.DOTALL)[1:]
    files = {file for step in steps for file in re.findall(r"`(shmap_tp/[\w/]+\.py)`", step)}
    assert len(files) <= MAX_FILES and files - {"shmap_tp/data/batches.py"} <= files_that_run()
