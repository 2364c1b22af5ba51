"""Runs of several sources: what a resumed run reads, the losses of each source, and which other past is refused."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shmap_tp import evaluate
from shmap_tp.check import check
from shmap_tp.config.schema import Config
from shmap_tp.data.batches import Batches
from shmap_tp.data.metadata import META
from shmap_tp.errors import UserError
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.runtime.agreement import data_facts
from shmap_tp.training import loop
from shmap_tp.training.evaluation import Evaluation, mixed
from shmap_tp.training.step import CONFIGURED
from tests.helpers import run_fixtures as runs

WEIGHTS = {"web": "weight:{0:1,4:0.6}", "code": "weight:{4:0.3}", "math": "weight:0.1,from_step:4"}
"""Until step 4 web alone."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """The directory of the sources, web, code and math, and of a copy of web that has another name."""
    directory = tmp_path_factory.mktemp("sources")
    for seed, (name, tokens) in enumerate({"web": 3000, "code": 900, "math": 300}.items()):
        runs.write_tokens(directory / name, train=tokens, validation=600 - 100 * seed, seed=seed)
    return directory


def mixture(run: Path, data: Path, *more: str, **weights: str) -> Config:
    """The tiny run of the sources with these `weights`; their directories are `data`/NAME."""
    sources = ",".join(f"{name}:{{dir:{data / name},{weight}}}" for name, weight in weights.items())
    (run / "data").mkdir(exist_ok=True, parents=True)  # which is not read
    return runs.tiny(run, "train.microbatches=2", "data.dir=null", f"data.sources={{{sources}}}", *more)


def read_by(config: Config, steps: int) -> list:
    batches = Batches(config, runs.tokens_of(config))
    return [batches.sequences(step) for step in range(steps)]


@pytest.fixture(scope="module")
def uninterrupted(directory, tmp_path_factory) -> Path:
    """A run of the three sources from step 0 to 8."""
    run = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        runs.make_runs_quick(patch)
        assert loop.train(mixture(run, directory, **WEIGHTS)) == 0
    return run


def test_a_run_of_a_data_dir_resumed_on_another_mesh_with_more_sources_equals_one_that_always_had_them(
    directory, uninterrupted, tmp_path, capsys
):
    shutil.copytree(directory / "web", tmp_path / "data")
    assert loop.train(runs.tiny(tmp_path, "mesh.dp=8", "mesh.mp=1", "train.steps=4", "evaluate.every=0")) == 0
    config = mixture(tmp_path, directory, "checkpoint.resume=must", **WEIGHTS)
    assert loop.train(config) == 0
    losses = [[each[1] for each in runs.values(run)] for run in (tmp_path, uninterrupted)]
    assert len(losses[0]) == runs.STEPS and losses[0] == pytest.approx(losses[1], rel=1e-5)
    printed = capsys.readouterr().out
    assert f"source web ({directory}/web): 100 %, from step 4 on 60 %; 0.27 epochs of its 187 sequences" in printed
    read = read_by(config, runs.STEPS)
    assert {one.split()[0] for step in read[:4] for one in step} == {"web"}
    assert {one.split()[0] for step in read[4:] for one in step} == {"web", "code", "math"}


def test_each_source_has_its_validation_loss_beside_that_of_the_mixture(uninterrupted):
    found = runs.lines(uninterrupted, "validation")
    assert [(line["step"], line.get("source")) for line in found] == [
        (step, source) for step in (4, 8) for source in (None, "code", "math", "web")
    ]
    loss = {line.get("source"): line["loss"] for line in found[:4]}
    assert loss[None] == pytest.approx(0.6 * loss["web"] + 0.3 * loss["code"] + 0.1 * loss["math"])
    assert len({*loss.values()}) == 4


def test_the_training_loss_of_each_source_is_that_of_its_rows(directory, uninterrupted, tmp_path):
    config = mixture(tmp_path, directory, **WEIGHTS)
    functions = runs.shared_step_functions(config, make_mesh(config.mesh), jnp.float32, end_of_text=0)
    batches, state = Batches(config, functions.tokens), functions.init()
    tokens, sources = batches.training(4), batches.row_sources(4)
    names = np.array(["code", "math", "web"])[np.asarray(sources).reshape(-1)]
    assert [one.split()[0] for one in batches.sequences(4)] == names.tolist() and len({*names}) == 3
    expected = {}
    for number, name in enumerate(["code", "math", "web"]):
        others_do_not_count = jax.device_put(jnp.where(sources == number, tokens, ~tokens), tokens.sharding)
        expected[name] = float(functions.evaluate(state.params, others_do_not_count)[0])
    _, metrics = functions.step(state, tokens, None, sources)
    assert {name: float(metrics[f"{name}/loss"]) for name in expected} == pytest.approx(expected, rel=1e-6)


def test_training_lines_have_the_loss_of_each_source_or_null_where_it_had_no_row(directory, uninterrupted):
    read = read_by(mixture(uninterrupted, directory, **WEIGHTS), runs.STEPS)
    for line, sequences in zip(runs.lines(uninterrupted), read, strict=True):
        losses = {name: loss for name in WEIGHTS if (loss := line[f"{name}/loss"]) is not None}
        assert losses.keys() == {one.split()[0] for one in sequences}
        assert min(losses.values()) <= line["loss"] <= max(losses.values())


def test_the_processes_of_a_run_compare_the_files_of_each_source(directory, tmp_path):
    config = mixture(tmp_path, directory, **WEIGHTS)
    facts = data_facts(Batches(config, runs.tokens_of(config)).identity)
    assert {f"{name}/{split}.bin" for name in WEIGHTS for split in ("train", "validation")} < facts.keys()
    assert facts["web/train.bin"].startswith("3000 tokens of sha256 ")


def test_bits_per_byte_of_a_mixture_are_those_of_targets_drawn_by_the_weights():
    """One of 2 nats and 4 bytes a target, one of 1 nat and 1 byte: a quarter and three quarters of the targets."""
    found = {"a": Evaluation(20.0, 10.0, 40), "b": Evaluation(100.0, 100.0, 100)}
    both = mixed(found, {"a": 0.25, "b": 0.75})
    assert both.loss == pytest.approx(1.25) and both.bits_per_byte == pytest.approx(1.25 / np.log(2) / 1.75)
    assert mixed({"a": found["a"]}, {"a": 1.0}) == found["a"]
    assert mixed(found | {"b": Evaluation(1.0, 1.0, None)}, {"a": 0.5, "b": 0.5}).bits_per_byte is None


def test_another_past_is_refused_with_what_to_write_instead(directory, uninterrupted):
    for weights in [
        WEIGHTS | {"web": "weight:{0:1,4:0.5}", "code": "weight:{4:0.4}"},  # a share that was another
        {name: weight.replace("4", "3") for name, weight in WEIGHTS.items()},  # sources that would have begun before
        {"web": "weight:1"},  # a source that is not there any more
    ]:
        config = mixture(uninterrupted, directory, "checkpoint.resume=must", "train.steps=10", **weights)
        before = runs.file_contents(uninterrupted)
        with pytest.raises(UserError) as caught:
            loop.train(config)
        message = str(caught.value)
        assert runs.file_contents(uninterrupted) == before and len(message.splitlines()) <= 2
        assert f"{uninterrupted}/run/checkpoints/8 is of another run, which read from step " in message
        assert "Let changes begin at step 8: from_step: 8, or weight: {0: 0.7, 8: 0.5}" in message


def test_sources_that_cannot_be_mixed_are_named(directory, tmp_path):
    for name in ("web", "code"):
        shutil.copytree(directory / name, tmp_path / name)
    halves = {"web": "weight:0.5", "code": "weight:0.5"}
    meta = tmp_path / "code" / META
    meta.write_text(meta.read_text().replace('"end_of_text": 0', '"end_of_text": 1'))
    with pytest.raises(UserError, match=r"data\.sources\.web has end_of_text 0, and data\.sources\.code has 1"):
        read_by(mixture(tmp_path, tmp_path, **halves), 1)
    shutil.rmtree(tmp_path / "code")
    with pytest.raises(UserError, match=r"code/train\.bin does not exist; prepare it with .* --out .*/code"):
        read_by(mixture(tmp_path, tmp_path, **halves), 1)
    shutil.copytree(tmp_path / "web", tmp_path / "code")
    with pytest.raises(UserError, match=r"data\.sources\.code and data\.sources\.web have the same train\.bin"):
        read_by(mixture(tmp_path, tmp_path, **halves), 1)


def test_evaluate_names_the_sources_of_which_one_is_to_be_evaluated(uninterrupted, directory, capsys):
    assert evaluate.main(["--checkpoint", str(uninterrupted / "run")]) == 2
    assert f"name the directory of one with --data: {directory}/code (code), {directory}/m" in capsys.readouterr().err


def test_check_names_each_source_with_its_shares(directory, tmp_path):
    given = {"web": "weight:0.7", "code": "weight:0.2", "other": "weight:0.1,from_step:99"}
    printed = check(mixture(tmp_path, directory, **given), "", CONFIGURED)
    assert f"source web      {directory}/web: 77.78 %, from step 99 on 70 %; prepared" in printed
    assert f"{directory}/other: 0 %, from step 99 on 10 % (never read: train.steps=8); not prepared; " in printed
