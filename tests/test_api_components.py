"""The library takes components of the user's, and what it offers as a loss is differentiable."""

import jax
import numpy as np
import pytest

import shmap_tp
from shmap_tp import Components, train
from shmap_tp.layers.mlp import MlpLayer
from shmap_tp.model.flops import parameters
from shmap_tp.training.components_file import load_components
from tests.helpers.assertions import assert_close, assert_same_bits
from tests.helpers.components import LoopMlp
from tests.helpers.model_fixtures import sequences
from tests.helpers.run_fixtures import FIRST, lines, overrides, tiny

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


@pytest.mark.parametrize("has_mfu", [True, False], ids=["in a file", "given to run_training"])
def test_a_run_with_an_mlp_of_ones_own_has_an_mfu_or_says_why_not(tmp_path, monkeypatch, capsys, has_mfu):
    """Three matrices are counted; a matmul in a while loop is not, and the run goes on without MFU.  A run with
    `--components FILE:NAME` says how it is resumed with them."""
    monkeypatch.setattr("shmap_tp.hardware.devices.matmul_rate", lambda: 1e12)  # measured in a second
    given = ["mesh.dp=1", "mesh.mp=1", "train.steps=2", "evaluate.every=0", "checkpoint.every=0"]
    if has_mfu:
        (tmp_path / "own.py").write_text(COMPONENTS)
        (tmp_path / "beside.py").write_text("NAME = 'a module of the user'")
        assert (
            train.main([f"--components={tmp_path}/own.py:components", "--cfg", FIRST, *overrides(tmp_path, *given)])
            == 0
        )
    else:
        assert shmap_tp.run_training(tiny(tmp_path, *given), Components(mlp=LoopMlp))
    printed = capsys.readouterr().out
    assert ("MFU = tokens/s x model FLOPs per token" in printed) == has_mfu
    assert ("no MFU: a matmul in" in printed and "in a while, so it is unknown" in printed) != has_mfu
    assert (f"--components {tmp_path}/own.py:components train.steps=4 --resume" in printed) == has_mfu
    shape = tiny(tmp_path).model
    assert f"{(parameters(shape) + shape.layers * shape.width * shape.ffn) / 1e6:,.1f}M parameters" in printed
    assert (lines(tmp_path)[-1]["mfu"] is not None) == has_mfu


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
