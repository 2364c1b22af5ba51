"""The library takes components of the user's, and what it offers as a loss is differentiable."""

import jax
import numpy as np
import pytest

import shmap_tp
from shmap_tp import Components, train
from shmap_tp.layers.mlp import GatedMlp
from shmap_tp.model.flops import parameters
from shmap_tp.training.components_file import load_components
from tests.helpers.assertions import assert_close, assert_same_bits
from tests.helpers.components import LoopMlp, ReGluMlp
from tests.helpers.run_fixtures import FIRST, lines, overrides, tiny

TINY = ["model=test", "mesh.dp=2", "mesh.mp=4", "train.batch=4", "train.microbatches=1", "model.context=8"]


def tokens(config: shmap_tp.Config) -> np.ndarray:
    shape = (config.train.batch, config.model.context + 1)
    return np.random.default_rng(0).integers(0, config.model.vocabulary, shape)


def test_an_mlp_given_as_a_component_is_the_one_that_the_configuration_would_name():
    named, given = (shmap_tp.load_config(*TINY, f"model.mlp={mlp}") for mlp in ("swiglu", "gelu"))
    components = shmap_tp.Components(mlp=GatedMlp)
    expected, found = shmap_tp.Model.initialize(named), shmap_tp.Model.initialize(given, components)
    assert_same_bits(found.parameters, expected.parameters)
    trainers = shmap_tp.Trainer(named), shmap_tp.Trainer(given, components=components)
    losses = [float(trainer.step(tokens(named))["loss"]) for trainer in trainers]
    assert losses[0] == losses[1]
    assert_same_bits(trainers[1].model().parameters, trainers[0].model().parameters)


def test_the_gradient_of_the_loss_is_that_of_loss_and_gradients():
    config = shmap_tp.load_config(*TINY, "train.z_loss=0.0")
    model = shmap_tp.Model.initialize(config)
    batch = tokens(config).astype(np.int32)
    gradients = jax.grad(model.functions.loss)(model.parameters, batch[None])
    assert_close(gradients, model.loss_and_gradients(batch)[1], 1e-6)


COMPONENTS = """
import shmap_tp
from shmap_tp.layers.mlp import GatedMlp
from beside import NAME

components = shmap_tp.Components(mlp=GatedMlp)
"""


def test_components_in_a_file_train_as_those_given_to_run_training(tmp_path, monkeypatch, capsys):
    """`--components FILE:NAME`, in a run that says how it is resumed with them."""
    monkeypatch.setattr("shmap_tp.training.run.machine_peak", lambda devices: None)
    (tmp_path / "own.py").write_text(COMPONENTS)
    (tmp_path / "beside.py").write_text("NAME = 'a module of the user'")
    given = [f"--components={tmp_path}/own.py:components", "--cfg", FIRST]
    short = ["train.steps=2", "evaluate.every=0", "checkpoint.every=0"]
    assert train.main([*given, *overrides(tmp_path, *short)]) == 0
    printed = capsys.readouterr().out
    assert f"--components {tmp_path}/own.py:components train.steps=4 --resume" in printed
    losses = [line["loss"] for line in lines(tmp_path)]
    assert shmap_tp.run_training(
        tiny(tmp_path, *short, f"run.dir={tmp_path / 'other' / 'run'}"), Components(mlp=GatedMlp)
    )
    assert losses == [line["loss"] for line in lines(tmp_path / "other")]


KINDS = """
import shmap_tp
block, mode = shmap_tp.Components(), shmap_tp.Components()
vars(block).update(block=3)  # the tests check types where users' programs do not
vars(mode).update(tensor_parallel="x")
"""


@pytest.mark.parametrize(
    "given, words",
    [
        ("own.py", "must be FILE.py:NAME, for example my_file.py:components"),
        ("none.py:components", "there is no file none.py; correct its path"),
        ("own.py:other", "other in own.py is nothing; write\nother = shmap_tp.Components(...) there"),
        ("own.py:config", "config in own.py is of type int; write"),
        ("broken.py:x", "broken.py, line 2: ZeroDivisionError: division by zero;\ncorrect the file"),
        ("unread.py:x", "unread.py, line 1: SyntaxError: "),
        ("ends.py:x", "ends.py, line 1: SystemExit: 3"),
        ("kinds.py:block", "block=3 must be a function or a class"),
        ("kinds.py:mode", "tensor_parallel=x must be a mode, as those of shmap_tp/parallel"),
    ],
)
def test_a_file_of_components_that_cannot_be_used_is_explained(tmp_path, monkeypatch, given, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("config = 5")
    (tmp_path / "broken.py").write_text("x = 5\ny = x / 0")
    (tmp_path / "unread.py").write_text("x = (")
    (tmp_path / "ends.py").write_text("raise SystemExit(3)")
    (tmp_path / "kinds.py").write_text(KINDS)
    with pytest.raises(shmap_tp.UserError) as raised:
        load_components(given)
    assert words in str(raised.value) and len(str(raised.value).splitlines()) <= 2


@pytest.mark.parametrize("mlp, has_mfu", [(ReGluMlp, True), (LoopMlp, False)])
def test_a_run_with_an_mlp_of_ones_own_has_an_mfu_or_says_why_not(tmp_path, capsys, mlp, has_mfu):
    """Three matrices are counted; a matmul in a while loop is not, and the run goes on without MFU."""
    config = tiny(tmp_path, "train.steps=2", "evaluate.every=0", "checkpoint.every=0")
    assert shmap_tp.run_training(config, Components(mlp=mlp))
    printed = capsys.readouterr().out
    assert ("MFU = tokens/s x model FLOPs per token" in printed) == has_mfu
    assert ("no MFU: a matmul in" in printed and "in a while, so it is unknown" in printed) != has_mfu
    model = parameters(config.model) + config.model.layers * config.model.width * config.model.ffn
    assert f"{model / 1e6:,.1f}M parameters" in printed
    assert (lines(tmp_path)[-1]["mfu"] is not None) == has_mfu
