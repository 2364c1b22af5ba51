"""The training step of `import shmap_tp` is that of a run."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import shmap_tp
from shmap_tp.config.choices import Resume
from shmap_tp.data.batches import Batches
from tests.helpers.assertions import RELATIVE, assert_close, assert_same_bits, by_path
from tests.helpers.model_fixtures import sequences, small
from tests.helpers.run_fixtures import BATCH, CONTEXT, lines, make_runs_quick, overrides

TOKENS = sequences(8, 9)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, shmap_tp.Config]:
    """A run of four steps on four of eight devices, which has saved steps 2 and 4: the directory of `run` and `data`,
    its configuration."""
    assert len(jax.devices()) == 8  # from here on their number is fixed, as after a Trainer
    directory = tmp_path_factory.mktemp("run")
    config = shmap_tp.load_config(*overrides(directory, "mesh.mp=2", "train.microbatches=2", "train.steps=4"))
    with pytest.MonkeyPatch.context() as patch:
        make_runs_quick(patch)
        assert shmap_tp.run_training(config)
    return directory, config


@pytest.fixture(scope="module")
def trainer(run) -> shmap_tp.Trainer:
    return shmap_tp.Trainer(run[1])


@pytest.fixture(scope="module")
def small_trainer() -> shmap_tp.Trainer:
    """With two microbatches; it is trained by several tests."""
    return shmap_tp.Trainer(small(2, 4, "model.positions=learned", "train.microbatches=2", "optimizer.warmup_steps=0"))


def steps(config: shmap_tp.Config, trainer: shmap_tp.Trainer, first: int, last: int) -> list[float]:
    """The losses of training on the batches of the run."""
    batches = Batches(config, trainer.functions.tokens)
    return [float(trainer.step(*rows(batches.training(step)))["loss"]) for step in range(first, last)]


def rows(batch: jax.Array) -> tuple[np.ndarray, None, np.ndarray]:
    """(tokens, all of them count, the documents that the run isolates: 0 ends one)."""
    tokens = np.asarray(batch).reshape(BATCH, CONTEXT + 1)
    return tokens, None, np.cumsum(tokens == 0, axis=1) - (tokens == 0)


def test_a_trainer_trains_as_a_run_does_which_may_use_some_of_the_emulated_devices(run, trainer):
    """The same losses and the same evaluation, bit for bit, on the same batches; also from a checkpoint of the run."""
    directory, config = run
    assert len(jax.devices()) == 8 and {tuple(line["mesh"]) for line in lines(directory)} == {(2, 2)}
    expected = [line["loss"] for line in lines(directory)]
    assert steps(config, trainer, 0, 4) == expected
    batches = Batches(config, trainer.functions.tokens)
    validated = [rows(batches.validation(i)) for i in range(batches.validation_counts[""])]
    counted = [np.sum(np.diff(segments) == 0) for _, _, segments in validated]
    losses = [float(trainer.evaluate(*batch)) for batch in validated]
    assert np.dot(losses, counted) / np.sum(counted) == lines(directory, "validation")[-1]["loss"]
    assert trainer.restore(directory / "run", step=2) == 2
    assert steps(config, trainer, 2, 4) == expected[2:]


def test_a_trainer_continues_from_what_it_saved_on_any_mesh_and_a_run_does_not(run, trainer, tmp_path):
    """A run cannot: it would read other data."""
    directory, config = run
    trainer.restore(directory / "run", step=4)
    saved = trainer.save(tmp_path / "own")
    assert saved == f"{tmp_path}/own/4"
    mesh, train = replace(config.mesh, dp=8, mp=1), replace(config.train, microbatches=1)
    other = shmap_tp.Trainer(replace(config, mesh=mesh, train=train))
    assert other.restore(saved) == 4
    assert_same_bits(by_path(other.state), by_path(trainer.state))
    assert_same_bits(shmap_tp.Model.restore(tmp_path / "own").parameters, trainer.model().parameters)
    with pytest.raises(shmap_tp.UserError, match="has a checkpoint of step 4"):
        trainer.save(tmp_path / "own")
    with pytest.raises(shmap_tp.UserError, match="has the checkpoints of a run; save in another directory"):
        trainer.save(directory / "run" / "checkpoints")
    resumed = replace(config, checkpoint=replace(config.checkpoint, dir=str(tmp_path / "own"), resume=Resume.must))
    with pytest.raises(shmap_tp.UserError, match=r"own/4 was saved by Trainer.save .* a run cannot resume from it"):
        shmap_tp.run_training(resumed)


def test_the_model_of_a_trainer_writes_texts_with_a_tokenizer_that_it_is_given():
    model = shmap_tp.Model.initialize(shmap_tp.load_config("model=test", "mesh.mp=1", "mesh.dp=1"))
    with pytest.raises(shmap_tp.UserError, match=r"model.with_tokenizer\('bytes'\)"):
        model.generate(["a"])
    model = model.with_tokenizer("bytes")
    assert model.generate(["ab"], 2, stop_tokens=()) == model.generate([list(b"ab")], 2)


def test_two_threads_may_share_a_trainer(trainer):
    """One step donates the state that the other would read."""
    tokens = np.zeros((BATCH, CONTEXT + 1), int)
    before = int(trainer.state.step)
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(call, tokens) for _ in range(4) for call in (trainer.step, trainer.evaluate)]
    assert all(np.isfinite(float(call.result()["loss"])) for call in calls[::2])
    assert all(np.isfinite(float(call.result())) for call in calls[1::2]) and int(trainer.state.step) == before + 4


def test_a_model_of_another_shape_is_refused_by_a_trainer(small_trainer):
    wider = small(2, 4, "model.positions=learned", "model.ffn=48")
    with pytest.raises(shmap_tp.UserError, match="shape than its configuration: blocks/mlp/down/weight is "):
        shmap_tp.Trainer(wider, small_trainer.model())


def test_the_model_of_a_trainer_stays_as_it_is_and_another_trainer_can_start_from_it(small_trainer):
    model = small_trainer.model()
    loss, kept = small_trainer.evaluate(TOKENS), by_path(model.parameters)
    assert_close(model.loss(TOKENS), loss, RELATIVE["float32"])
    small_trainer.step(TOKENS)
    assert_same_bits(model.parameters, kept)
    assert float(small_trainer.evaluate(TOKENS)) < float(loss)

    other = shmap_tp.Trainer(small(4, 2, "model.positions=learned", "optimizer.warmup_steps=0"), model)
    assert_close(other.step(TOKENS)["loss"], loss, RELATIVE["float32"])
    assert_same_bits(model.parameters, kept)


def test_a_step_counts_the_same_targets_as_the_model(small_trainer):
    """Over two microbatches that count different numbers of targets."""
    counted = np.random.default_rng(1).random((8, 9)) < 0.5
    counted[:3] = False
    expected = small_trainer.model().loss(TOKENS, counted)
    assert_close(small_trainer.evaluate(TOKENS, counted), expected, RELATIVE["float32"])
    assert_close(small_trainer.step(TOKENS, counted)["loss"], expected, RELATIVE["float32"])


def test_segments_are_computed_as_if_each_were_a_row(small_trainer):
    """In a step, an evaluation, and by a model: logits, loss and scores."""
    model = small_trainer.model()
    segments = np.repeat([[0] * 5 + [1] * 4], 8, axis=0)
    parts = [TOKENS[:, :5], TOKENS[:, 5:]]
    expected = np.mean([float(model.loss(part)) * (part.shape[1] - 1) for part in parts]) * 2 / 7
    assert_close(small_trainer.evaluate(TOKENS, None, segments), expected, RELATIVE["float32"])
    assert_close(model.loss(TOKENS, segments=segments), expected, RELATIVE["float32"])
    assert_same_bits(model.loss(TOKENS, segments=segments * 2**40), model.loss(TOKENS, segments=segments))
    logits = np.concatenate([model.logits(part) for part in parts], axis=1)[:, :8]
    assert_close(model.logits(TOKENS[:, :8], segments[:, :8]), logits, RELATIVE["float32"])
    mask = np.zeros(TOKENS.shape, bool)
    mask[:, 6:] = True
    likelihood, _ = model.score(TOKENS, mask, segments)
    assert_close(likelihood, model.score(parts[1], mask[:, 5:])[0], RELATIVE["float32"])
    assert_close(small_trainer.step(TOKENS, segments=segments)["loss"], expected, RELATIVE["float32"])
    for wrong, words in (
        (segments[:, :8], r"segments must be integers \[8, 9\], one for each token, not int64\[8, 8\]"),
        (segments * 1.0, "not float64"),
        ([[0] * 9] * 7 + [[0]], "segments must be integers .* different lengths"),
        (np.where(np.arange(9) == 2, 1, segments), r"segments\[0\] returns to a number that it left"),
    ):
        with pytest.raises(shmap_tp.UserError, match=words):
            small_trainer.step(TOKENS, segments=wrong)


def test_a_batch_of_another_shape_is_explained(small_trainer):
    with pytest.raises(shmap_tp.UserError, match="rows have different lengths"):
        small_trainer.step([[1] * 9] * 7 + [[1]])
    for tokens in (sequences(7, 9), sequences(8, 8)):
        with pytest.raises(shmap_tp.UserError, match=r"not \[8, 9\] \(train.batch, context \+ 1\)"):
            small_trainer.step(tokens)
