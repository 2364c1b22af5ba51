"""The notebook runs from a fresh Python, as plain code."""

import json

import pytest

from tests.helpers.fresh_process import python
from tests.helpers.run_fixtures import ROOT

NOTEBOOK = ROOT / "notebooks" / "first_steps.ipynb"


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_is_saved_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


def test_the_notebook_trains_and_prints_the_same_loss_on_two_meshes(tmp_path):
    """The code cells, executed in one namespace in a process of their own."""
    done = python(
        f"namespace = {{}}\nfor cell in {code_cells()!r}:\n    exec(cell, namespace)\n", cwd=tmp_path, MPLBACKEND="agg"
    )
    assert done.returncode == 0, done.stderr
    trained, meshes, shapes = done.stdout.splitlines()
    first, last = (float(word) for word in trained.split() if word[0].isdigit())
    assert last < 0.75 * first, trained
    here, there = map(float, meshes.split())
    assert here == pytest.approx(there, rel=1e-5)
    assert shapes.startswith("(16, 32, 256) (4, 256, 64) ") and "(None, 'mp', None)" in shapes
