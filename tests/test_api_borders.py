"""What a Trainer takes from elsewhere: preference pairs, and checkpoints of other models, which it refuses."""

import math

import numpy as np
import pytest

import shmap_tp
from shmap_tp.errors import UserError

TINY = ["model=test", "model.context=16", "mesh.dp=2", "mesh.mp=2", "train.batch=4", "train.microbatches=1"]


def test_a_trainer_takes_two_documents_of_a_row_as_a_pair_whatever_their_numbers():
    trainer = shmap_tp.Trainer(shmap_tp.load_config(*TINY, "model.adapter.rank=2", "train.dpo_beta=0.1"))
    tokens = np.random.default_rng(0).integers(0, 50, (4, 17))
    segments = np.repeat([[7] * 8 + [3] * 9], 4, axis=0)
    likelihoods, _ = trainer.model().score(tokens[:, :8], np.tile(np.arange(8) > 0, (4, 1)))
    metrics = trainer.step(tokens, None, segments)
    assert float(metrics["loss"]) == pytest.approx(math.log(2))  # of the reference itself
    assert float(metrics["chosen_log_probability"]) == pytest.approx(likelihoods.mean(), rel=1e-5)
    with pytest.raises(UserError, match="the rows have no documents"):
        trainer.step(tokens)


def test_a_checkpoint_of_a_model_that_computes_something_else_is_refused_by_its_keys(tmp_path):
    """Its arrays have the same shapes."""
    shmap_tp.Trainer(shmap_tp.load_config(*TINY)).save(tmp_path)
    other = shmap_tp.Trainer(shmap_tp.load_config(*TINY, "model.norm_epsilon=0.1", "model.logit_softcap=5"))
    message = r"is of another model: model\.logit_softcap was None, is 5\.0, model\.norm_epsilon was .*, is 0\.1; give"
    with pytest.raises(UserError, match=message):
        other.restore(tmp_path)
    adapted = shmap_tp.Trainer(shmap_tp.load_config(*TINY, "model.adapter.rank=2"))
    with pytest.raises(UserError, match=r"is of another model: model\.adapter\.rank was 0, is 2; give the values"):
        adapted.restore(tmp_path)
    with pytest.raises(UserError, match="step=true must be an integer, as in step=3"):
        other.restore(tmp_path, step=True)  # the tests' type checker refuses a text
