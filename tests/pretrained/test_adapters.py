"""Runs of adapters beside pretrained weights: training, checkpoints without the weights, resuming, and PEFT's files."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import shmap_tp
from shmap_tp.command_model import model_parser, open_model
from shmap_tp.errors import UserError
from shmap_tp.model.adapters import split_factors
from shmap_tp.pretrained.__main__ import main
from shmap_tp.training.checkpoint_files import absolute, saved_state
from tests.helpers.adapter_cases import merged
from tests.helpers.assertions import assert_close, assert_same_bits, by_path
from tests.helpers.paths import ROOT
from tests.helpers.pretrained_models import read_tensors, write_directory
from tests.helpers.run_fixtures import make_runs_quick, write_tokens

FINETUNE = ROOT / "conf" / "finetune.yaml"
RUN = (
    "mesh.dp=2 mesh.mp=4 model.context=16 train.batch=8 train.steps=4 optimizer.warmup_steps=1 "
    "optimizer.learning_rate=1e-2 checkpoint.every=2 evaluate.every=0 sample.every=0 log.tensorboard=false "
    "log.every=1 run.compilation_cache=null model.adapter.rank=4"
)


@pytest.fixture(scope="module", autouse=True)
def runs_are_quick():
    with pytest.MonkeyPatch.context() as patch:
        make_runs_quick(patch)
        yield


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, data, and a run of four steps of an adapter on the mesh (2, 4)."""
    work = tmp_path_factory.mktemp("work")
    write_directory(work / "model", "llama")
    write_tokens(work / "data")
    given = [f"model.from_pretrained={work / 'model'}", f"run.dir={work / 'run'}", f"data.dir={work / 'data'}"]
    assert shmap_tp.run_training(shmap_tp.load_config(*given, *RUN.split(), file=FINETUNE))
    return work


def resumed(run: Path, *more: str) -> bool:
    given = [f"run.dir={run}", f"checkpoint.dir={run / 'checkpoints'}", "checkpoint.resume=must", *more]
    return shmap_tp.run_training(shmap_tp.load_config(*given, file=str(run / "config.yaml")))


def losses(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["split"] == "train"}


def test_a_checkpoint_has_the_adapter_alone_and_names_its_base(work):
    state = saved_state(absolute(str(work / "run/checkpoints/4")))
    saved = by_path(jax.tree.map(lambda leaf: np.zeros(leaf.shape), state))
    arrays = {name for name in saved if name.startswith("params.") or ".mu." in name or ".nu." in name}
    assert len(arrays) == 3 * 7 * 2 and all(".adapter." in name for name in arrays)
    size = sum(file.stat().st_size for file in (work / "run" / "checkpoints" / "4").rglob("*") if file.is_file())
    assert size < 4 * sum(saved[name].size for name in arrays) + 300_000


def test_a_run_is_resumed_on_another_mesh_with_the_curve_of_one_that_was_not_interrupted(work, tmp_path):
    shutil.copytree(work / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    assert resumed(tmp_path / "run", "mesh.dp=4", "mesh.mp=2", "mesh.zero=fsdp")
    whole, parts = losses(work / "run"), losses(tmp_path / "run")
    assert whole.keys() == parts.keys() and max(whole) == 4
    np.testing.assert_allclose([*parts.values()], [*whole.values()], rtol=1e-5)
    assert (tmp_path / "run" / "checkpoints" / "4").is_dir(), "step 4 was not computed again"


def test_a_base_that_was_moved_is_named_again_and_one_that_was_changed_is_refused(work, tmp_path):
    shutil.copytree(work / "run", tmp_path / "run")
    (work / "model").rename(work / "moved")
    try:
        with pytest.raises(UserError, match=r"model is not a directory.*\n.*model\.from_pretrained=DIR"):
            resumed(tmp_path / "run")
        with pytest.raises(
            UserError, match=r"base of the adapter cannot be read: .*\n.*--pretrained DIR --adapter OUT"
        ):
            shmap_tp.Model.restore(tmp_path / "run")
        assert resumed(tmp_path / "run", "train.steps=5", f"model.from_pretrained={work / 'moved'}")
        assert shmap_tp.Model.restore(tmp_path / "run", dp=1, mp=1).source is not None
    finally:
        (work / "moved").rename(work / "model")
    changed = shutil.copytree(work / "model", tmp_path / "model")
    with (changed / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"\0")
    with pytest.raises(UserError, match=r"has an adapter of other weights than those of .*model.*\n.*trained beside"):
        resumed(tmp_path / "run", f"model.from_pretrained={changed}")


def test_a_restored_model_is_the_base_with_the_trained_factors_on_any_mesh(work):
    model, base = shmap_tp.Model.restore(work / "run", dp=1, mp=1), shmap_tp.from_pretrained(work / "model", context=16)
    found = by_path(model.parameters)
    assert_same_bits({name: w for name, w in found.items() if "adapter" not in name}, by_path(base.parameters))
    assert all(w.any() for name, w in found.items() if ".adapter.b." in name)


def test_a_run_is_exported_as_an_adapter_or_merged_and_the_commands_read_it(work, tmp_path, capsys):
    assert main(["export", str(work / "run"), "--out", str(tmp_path / "out")]) == 0
    assert "checkpoints/4 as an adapter of LlamaForCausalLM, float32" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "base.json").read_text())["path"] == str(work / "model")
    assert main(["export", str(work / "run"), "--out", str(tmp_path / "merged"), "--merge"]) == 0
    expected = shmap_tp.Model.restore(work / "run", dp=1, mp=1)

    def opened(*given: str) -> shmap_tp.Model:
        return open_model(model_parser("chat", "", "", several=False).parse_args(given))

    adapter = ["--adapter", str(tmp_path / "out")]
    found = opened("--pretrained", str(work / "model"), *adapter)
    assert_same_bits(found.parameters, expected.parameters)
    whole = shmap_tp.from_pretrained(tmp_path / "merged", context=16)
    assert_close(whole.parameters, merged(by_path(expected.parameters), 16 / 4), 2e-6)
    with pytest.raises(UserError, match="--adapter is for --pretrained"):
        opened("--checkpoint", str(work / "run"), *adapter)


def test_a_merged_export_of_a_run_in_bfloat16_has_the_base_on_disk_and_the_products_in_float32(work, tmp_path):
    given = [f"model.from_pretrained={work / 'model'}", f"run.dir={tmp_path / 'run'}", f"data.dir={work / 'data'}"]
    given += [*RUN.split(), "train.precision=bfloat16", "train.steps=1", "mesh.dp=1", "model.adapter.matrices=[query]"]
    assert shmap_tp.run_training(shmap_tp.load_config(*given, file=FINETUNE))
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "adapter")]) == 0
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "merged"), "--merge"]) == 0
    expected, factors = read_tensors(work / "model"), read_tensors(tmp_path / "adapter")
    touched = {name: w for name, w in expected.items() if "q_proj" in name}
    for name, w in touched.items():
        a, b = (factors[f"base_model.model.{name.replace('weight', f'lora_{x}.weight')}"] for x in "AB")
        touched[name] = w + 16 / 4 * b.astype(np.float64) @ a
    found = read_tensors(tmp_path / "merged")
    of_matrices = {name: found[name] for name in touched}
    assert_same_bits(found | touched, expected | touched)
    assert_close(of_matrices, touched, 1e-6)
    shmap_tp.Model.restore(tmp_path / "run", dtype="bfloat16").save_pretrained(tmp_path / "of_model", merge=True)
    of_rounded_factors = read_tensors(tmp_path / "of_model")
    assert_close({name: of_rounded_factors[name] for name in touched}, touched, 2e-4)
    assert_same_bits(of_rounded_factors | touched, expected | touched)


def test_a_trainer_holds_the_base_in_the_dtype_of_the_activations_and_restores_the_factors(work, tmp_path):
    given = [f"model.from_pretrained={work / 'model'}", *RUN.split(), "train.precision=bfloat16"]
    trainer = shmap_tp.Trainer(shmap_tp.load_config(*given, file=FINETUNE))
    before = by_path(trainer.state.params)
    trainer.step(np.random.default_rng(0).integers(0, 97, (8, 17)))
    after = by_path(trainer.state.params)
    changed = {name for name in after if not np.array_equal(after[name], before[name])}
    assert changed == {name for name in after if ".adapter.b." in name}, "a has no gradient as long as b is zero"
    matrices = {name for name in after if name.endswith("proj.weight") or "embedding" in name}
    assert {after[name].dtype.name for name in matrices} == {"bfloat16"}
    assert trainer.restore(work / "run") == 4
    restored = shmap_tp.Model.restore(work / "run")
    assert_same_bits(*(split_factors(each.parameters)[0] for each in (trainer.model(), restored)))
    assert main(["export", trainer.save(tmp_path / "saved"), "--out", str(tmp_path / "out"), "--merge"]) == 0
    found, base = (read_tensors(directory)["lm_head.weight"] for directory in (tmp_path / "out", work / "model"))
    assert_same_bits(found, base)
