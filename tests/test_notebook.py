"""The notebooks run from a fresh Python, as plain code; the first is saved with what it shows."""

import json

import pytest

from tests.helpers.fresh_process import python
from tests.helpers.run_fixtures import ROOT

NOTEBOOK = ROOT / "notebooks" / "first_steps.ipynb"


CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
RUN_AGAIN = "run: jupyter nbconvert --to notebook --execute --inplace notebooks/first_steps.ipynb"


def test_the_notebook_is_saved_with_the_outputs_of_its_cells():
    """What a reader sees without running it."""
    assert [cell["execution_count"] for cell in CELLS] == [*range(1, len(CELLS) + 1)], RUN_AGAIN
    outputs = [output for cell in CELLS for output in cell["outputs"]]
    assert not [each for each in outputs if each["output_type"] == "error" or each.get("name") == "stderr"], RUN_AGAIN
    assert any("image/png" in output.get("data", {}) for output in outputs), RUN_AGAIN
    check_printed("".join("".join(output.get("text", "")) for output in outputs))


@pytest.mark.slow
def test_the_notebook_trains_and_prints_the_same_loss_on_two_meshes(tmp_path):
    """The code cells, executed in one namespace in a process of their own."""
    sources = ["".join(cell["source"]) for cell in CELLS]
    run = f"namespace = {{}}\nfor cell in {sources!r}:\n    exec(cell, namespace)\n"
    done = python(run, cwd=tmp_path, MPLBACKEND="agg")
    assert done.returncode == 0, done.stderr
    check_printed(done.stdout)


@pytest.mark.slow
def test_the_notebook_for_a_tpu_runtime_trains_reports_and_writes_on_emulated_devices(tmp_path):
    cells = json.loads((NOTEBOOK.parent / "tpu_runtime.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    stand_in = "import sys, types; sys.modules['IPython.display'] = types.SimpleNamespace(HTML=len)"
    run = f"{stand_in}\nnamespace = {{}}\nfor cell in {sources!r}:\n    exec(cell, namespace)\n"
    done = python(f"{run}assert namespace['finished']", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("8 cpu\n") and "step 12  validation loss" in done.stdout
    assert "step 12 of 12" in done.stdout and "\ndef " in done.stdout
    assert (tmp_path / "runs" / "tpu" / "report.html").is_file()


def check_printed(text: str) -> None:
    trained, meshes, shapes = text.splitlines()
    first, last = (float(word) for word in trained.split() if word[0].isdigit())
    assert last < 0.75 * first, trained
    here, there = map(float, meshes.split())
    assert here == pytest.approx(there, rel=1e-5)
    assert shapes.startswith("(16, 32, 256) (4, 256, 64) ") and "(None, 'mp', None)" in shapes
