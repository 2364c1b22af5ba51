"""The library takes components of the user's, and what it offers as a loss is differentiable."""

from pathlib import Path

import jax
import numpy as np
import pytest

import shmap_tp
from shmap_tp import Components, train
from shmap_tp.command_model import model_parser, open_model
from shmap_tp.layers.mlp import MlpLayer
from shmap_tp.pretrained.writing import export_checkpoint
from shmap_tp.training.components_file import load_components, require_components
from shmap_tp.training.metrics import read_metrics
from shmap_tp.training.step import build_step_functions
from tests.helpers.assertions import assert_close, assert_same_bits
from tests.helpers.components import LoopMlp
from tests.helpers.model_fixtures import sequences
from tests.helpers.run_fixtures import FIRST, lines, make_runs_quick, overrides, tiny

TINY = ["model=test", "mesh.dp=1", "mesh.mp=2", "train.batch=4", "train.microbatches=1", "model.context=8"]
TOKENS = sequences(4, 9).astype(np.int32)


@pytest.fixture(scope="module")
def model() -> shmap_tp.Model:
    return shmap_tp.Model.initialize(shmap_tp.load_config(*TINY, "model.mlp=swiglu", "train.z_loss=0.0"))


def test_an_mlp_given_as_a_component_is_the_one_that_the_configuration_would_name(model):
    given, components = shmap_tp.load_config(*TINY, "model.mlp=gelu"), Components(mlp=MlpLayer)
    trainer = shmap_tp.Trainer(given, components=components)
    assert_same_bits(trainer.model().parameters, model.parameters)
    assert_close(trainer.step(TOKENS)["loss"], model.loss(TOKENS), 1e-6)
    assert shmap_tp.Model.initialize(given, components).functions.shapes == model.functions.shapes


def test_the_gradient_of_the_loss_is_that_of_loss_and_gradients(model):
    gradients = jax.grad(model.functions.loss)(model.parameters, TOKENS[None])
    assert_close(gradients, model.loss_and_gradients(TOKENS)[1], 1e-6)


COMPONENTS = """
import shmap_tp
from tests.helpers.components import ReGluMlp
from beside import NAME

components = shmap_tp.Components(mlp=ReGluMlp)
"""


RUN = ["mesh.dp=1", "mesh.mp=1", "train.steps=2", "evaluate.every=0", "checkpoint.every=0", "model.mlp=swiglu"]


def test_a_run_with_an_mlp_of_ones_own_goes_on_with_it_or_is_refused_by_name(tmp_path, monkeypatch, capsys):
    """ReGLU has the parameters of SwiGLU: without its component every command would compute another model.  Its three
    matrices are counted for the MFU."""
    monkeypatch.setattr("shmap_tp.hardware.devices.matmul_rate", lambda: 1e12)  # measured in a second
    make_runs_quick(monkeypatch)
    (tmp_path / "own.py").write_text(COMPONENTS)
    (tmp_path / "beside.py").write_text("NAME = 'a module of the user'")
    run, given = tmp_path / "run", f"{tmp_path}/own.py:components"
    assert train.main([f"--components={given}", "--cfg", FIRST, *overrides(tmp_path, *RUN)]) == 0
    assert f"--cfg {run}/config.yaml train.steps=4 --resume" in capsys.readouterr().out
    resumed = ["--cfg", f"{run}/config.yaml", "--resume", "train.steps=3"]
    assert train.main([*resumed, "run.components=null"]) == 2
    said = f"is of a run with mlp of its own, here there is none;\n  give --components {given}"
    assert f"checkpoint {run}/checkpoints/2 {said}" in capsys.readouterr().err
    assert train.main(resumed) == 0
    whole = tmp_path / "whole"
    settings = [*RUN[:2], *RUN[3:], "train.steps=3", f"run.dir={whole}", f"data.dir={tmp_path}/data"]
    assert shmap_tp.run_training(tiny(tmp_path, *settings), load_components(given))
    assert losses(run) == losses(whole)

    def opened(*arguments: str) -> shmap_tp.Model:
        return open_model(model_parser("chat", "", "", several=False).parse_args(arguments))

    for checkpoint, way_out in ((run, f"give --components {given}"), (whole, "give the same Components, in Python")):
        with pytest.raises(shmap_tp.UserError, match=f"with mlp of its own, here there is none;\n{way_out}"):
            opened("--checkpoint", str(checkpoint))
    model = opened("--checkpoint", str(run), "--components", given)
    tokens = sequences(4, 17).astype(np.int32)
    trainer = shmap_tp.Trainer(tiny(tmp_path, *RUN, f"run.components={given}"))
    trainer.restore(whole)
    assert_close(model.loss(tokens), trainer.model().loss(tokens), 1e-6)
    with pytest.raises(shmap_tp.UserError, match=r"with no part of its own, here there is mlp;\nleave out"):
        require_components({"components": [], "config": {}}, trainer.components, "of another run")
    for write in (model.save_pretrained, lambda out: export_checkpoint(str(run), out, None)):
        with pytest.raises(shmap_tp.UserError, match=r"has mlp of its own \(Components\), which no architecture"):
            write(tmp_path / "out")
    with pytest.raises(shmap_tp.UserError, match=r"run.components=.*own.py:components replaces parts of the model"):
        build_step_functions(trainer.config, trainer.mesh, np.float32)


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run / "metrics.jsonl") if line["split"] == "train"][::-1]


def test_a_run_with_a_matmul_in_a_loop_has_no_mfu_and_says_why(tmp_path, monkeypatch, capsys):
    make_runs_quick(monkeypatch)
    assert shmap_tp.run_training(tiny(tmp_path, *RUN), Components(mlp=LoopMlp))
    printed = capsys.readouterr().out
    assert "no MFU: a matmul in" in printed and "in a while, so it is unknown" in printed
    assert lines(tmp_path)[-1]["mfu"] is None


OF_USERS = "import shmap_tp\nx = shmap_tp.Components()\nvars(x)"
"""The tests check types where users' programs do not: the value is put in later."""


@pytest.mark.parametrize(
    "content, given, words",
    [
        ("", "own.py", "must be FILE.py:NAME, for example my_file.py:components"),
        ("", "none.py:components", "there is no file none.py; correct its path"),
        ("x = 5", "own.py:other", "other in own.py is nothing; write\nother = shmap_tp.Components(...) there"),
        ("x = 5", "own.py:x", "x in own.py is of type int; write"),
        ("x = 5\ny = x / 0", "own.py:x", "own.py, line 2: ZeroDivisionError: division by zero;\ncorrect the file"),
        ("x = (", "own.py:x", "own.py, line 1: SyntaxError: "),
        ("raise SystemExit(3)", "own.py:x", "own.py, line 1: SystemExit: 3"),
        (f"{OF_USERS}.update(block=3)", "own.py:x", "block=3 must be a function or a class"),
        (f"{OF_USERS}.update(tensor_parallel='y')", "own.py:x", "tensor_parallel=y must be a mode, as those of shmap_"),
    ],
)
def test_a_file_of_components_that_cannot_be_used_is_explained(tmp_path, monkeypatch, content, given, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(content)
    with pytest.raises(shmap_tp.UserError) as raised:
        load_components(given)
    assert words in str(raised.value) and len(str(raised.value).splitlines()) <= 2
