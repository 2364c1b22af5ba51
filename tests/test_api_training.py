"""The training step of `import shmap_tp` is that of a run."""

import jax
import numpy as np
import pytest

import shmap_tp
from shmap_tp.data.batches import Batches
from tests.helpers.assertions import RELATIVE, assert_close, assert_same_bits, by_path
from tests.helpers.model_fixtures import sequences, small
from tests.helpers.run_fixtures import BATCH, CONTEXT, lines, overrides


def test_a_trainer_trains_as_a_run_does(tmp_path, monkeypatch):
    """The same losses and the same evaluation, bit for bit, on the same batches."""
    monkeypatch.setattr("shmap_tp.training.run.machine_peak", lambda devices: None)
    given = overrides(tmp_path, "train.microbatches=2", "train.steps=4")
    config = shmap_tp.load_config(*given)
    assert shmap_tp.run_training(config)
    trainer = shmap_tp.Trainer(config)
    batches = Batches(config, trainer.functions.tokens)

    def rows(batch: jax.Array) -> np.ndarray:
        return np.asarray(batch).reshape(BATCH, CONTEXT + 1)

    losses = [float(trainer.step(rows(batches.training(step)))["loss"]) for step in range(4)]
    assert losses == [line["loss"] for line in lines(tmp_path)]
    validated = [float(trainer.evaluate(rows(batches.validation(i)))) for i in range(batches.validation_count)]
    assert float(np.mean(np.float32(validated))) == lines(tmp_path, "validation")[-1]["loss"]


def test_the_model_of_a_trainer_stays_as_it_is_and_another_trainer_can_start_from_it():
    config, tokens = small(2, 4, "optimizer.warmup_steps=0"), sequences(8, 9)
    trainer = shmap_tp.Trainer(config)
    trainer.step(tokens)
    model = trainer.model()
    loss = trainer.evaluate(tokens)
    assert_close(model.loss(tokens), loss, RELATIVE["float32"])
    kept = by_path(model.parameters)
    trainer.step(tokens)
    assert_same_bits(model.parameters, kept)
    assert float(trainer.evaluate(tokens)) < float(loss)

    other = shmap_tp.Trainer(small(4, 2, "optimizer.warmup_steps=0"), model)
    assert_close(other.evaluate(tokens), loss, RELATIVE["float32"])
    other.step(tokens)
    assert_same_bits(model.parameters, kept)


def test_a_step_counts_the_same_targets_as_the_model():
    """Over two microbatches that count different numbers of targets."""
    trainer = shmap_tp.Trainer(small(2, 4, "train.microbatches=2"))
    tokens, counted = sequences(8, 9), np.random.default_rng(1).random((8, 9)) < 0.5
    counted[:3] = False
    expected = trainer.model().loss(tokens, counted)
    assert_close(trainer.evaluate(tokens, counted), expected, RELATIVE["float32"])
    assert_close(trainer.step(tokens, counted)["loss"], expected, RELATIVE["float32"])


def test_a_batch_of_another_shape_is_explained():
    trainer = shmap_tp.Trainer(small(2, 4))
    with pytest.raises(shmap_tp.UserError, match="rows have different lengths"):
        trainer.step([[1] * 9] * 7 + [[1]])
    for tokens in (sequences(7, 9), sequences(8, 8)):
        with pytest.raises(shmap_tp.UserError, match=r"a step takes \[8, 9\]: \[train.batch, model.context \+ 1\]"):
            trainer.step(tokens)
