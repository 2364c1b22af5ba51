"""Runs that start from pretrained weights: training, resuming without the directory, exporting, the commands."""

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import shmap_tp
from shmap_tp.check import check
from shmap_tp.data.batches import Batches, open_data
from shmap_tp.data.text_directory import open_tokenizer
from shmap_tp.data.tokenizer import Bytes
from shmap_tp.errors import UserError
from shmap_tp.pretrained.__main__ import main
from shmap_tp.training.step import CONFIGURED, build_step_functions
from tests.helpers.assertions import assert_same_bits
from tests.helpers.paths import ROOT
from tests.helpers.pretrained_models import assert_same_tensors, read_tensors, reference, write_directory
from tests.helpers.run_fixtures import make_runs_quick, write_tokens

FINETUNE = ROOT / "conf" / "finetune.yaml"
RUN = (
    "mesh.dp=2 mesh.mp=4 model.context=16 train.batch=8 train.steps=4 optimizer.warmup_steps=1 "
    "optimizer.learning_rate=1e-3 checkpoint.every=2 evaluate.every=4 evaluate.batches=1 sample.every=0 "
    "log.tensorboard=false log.every=1 run.compilation_cache=null"
)

WORDS = '{"model": {"type": "WordLevel", "vocab": {"a": 0, "b": %d}, "unk_token": "a"}}'
"""A tokenizer.json."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, data, and a run of four steps on the mesh (2, 4) from one and on the other."""
    work = tmp_path_factory.mktemp("work")
    model = write_directory(work / "model", "llama")
    (model / "tokenizer.json").write_text(WORDS % 96)
    write_tokens(work / "data")
    given = [f"model.from_pretrained={model}", f"run.dir={work / 'run'}", f"data.dir={work / 'data'}"]
    with pytest.MonkeyPatch.context() as patch:
        make_runs_quick(patch)
        assert shmap_tp.run_training(shmap_tp.load_config(*given, *RUN.split(), file=FINETUNE))
    return work


def test_data_of_another_tokenizer_than_the_models_is_warned_of(work, tmp_path, capsys):
    data = shutil.copytree(work / "data", tmp_path / "data")
    content = (work / "model" / "tokenizer.json").read_bytes()
    given = [f"model.from_pretrained={work / 'model'}", f"data.dir={data}", *RUN.split()]
    config = shmap_tp.load_config(*given, file=FINETUNE)
    tokens = build_step_functions(config, shmap_tp.make_mesh(config), np.float32).tokens
    for tokenizer in (content, content + b" "):
        (data / "tokenizer.json").write_bytes(tokenizer)
        meta = json.loads((data / "meta.json").read_text())
        meta["tokenizer_sha256"] = hashlib.sha256(tokenizer).hexdigest()
        (data / "meta.json").write_text(json.dumps(meta))
        Batches(config, tokens)
        assert ("was tokenized with another tokenizer than" in capsys.readouterr().out) == (tokenizer != content)


def test_a_check_warns_of_bytes_for_a_model_with_a_tokenizer_and_names_it_where_data_is_missing(work, tmp_path):
    given = ["data.source=stdlib", f"model.from_pretrained={work / 'model'}", *RUN.split()]
    load = partial(shmap_tp.load_config, file=FINETUNE)
    said = check(load(*given, "data.dir=data/nowhere"), "", CONFIGURED)
    assert f"was tokenized with another tokenizer than {work / 'model'}/tokenizer.json (bytes)" in said
    of_bytes = shutil.copytree(work / "model", tmp_path / "model")
    (of_bytes / "tokenizer.json").write_bytes(Bytes().file_for_export())
    given[1] = f"model.from_pretrained={of_bytes}"
    assert "another tokenizer" not in check(load(*given, "data.dir=data/nowhere"), "", CONFIGURED)
    given = [f"model.from_pretrained={work / 'model'}", "data.dir=data/nowhere", *RUN.split()]
    command = f"python -m shmap_tp.prepare --text FILES --tokenizer {work / 'model'} --out data/nowhere"
    assert f"not prepared; {command}; --help lists" in check(load(*given), "", CONFIGURED)
    with pytest.raises(UserError, match=f"prepare it with `{command}`"):
        open_data(load(*given).data, load(*given).model, ["train"])


def test_a_run_starts_from_the_weights_and_records_where_they_came_from(work):
    before, first, *_ = map(json.loads, (work / "run" / "metrics.jsonl").read_text().splitlines())
    tokens = np.fromfile(work / "data" / "train.bin", "<u2")
    assert (before["step"], before["split"]) == (0, "validation") and before["loss"] > 4
    assert first["step"] == 1 and first["loss"] > 4  # random weights of init_std=0.02 have ln 97 = 4.57
    record = json.loads((work / "run" / "pretrained" / "source.json").read_text())
    assert record["from"] == str(work / "model") and record["architecture"] == "LlamaForCausalLM"
    assert any("sha256" in key and len(value) == 64 for key, value in record.items())
    assert (work / "run" / "pretrained" / "tokenizer.json").is_file() and len(tokens)
    assert shmap_tp.Model.restore(work / "run").source.config == reference("llama")["config"]


def test_a_run_is_resumed_without_the_directory(work, tmp_path, monkeypatch):
    make_runs_quick(monkeypatch)
    shutil.copytree(work / "run", tmp_path / "run")
    (work / "model").rename(work / "moved")
    try:
        given = [f"run.dir={tmp_path / 'run'}", "train.steps=6", "checkpoint.resume=must"]
        given += [f"checkpoint.dir={tmp_path / 'run' / 'checkpoints'}"]
        assert shmap_tp.run_training(shmap_tp.load_config(*given, file=str(tmp_path / "run" / "config.yaml")))
        new = [f"run.dir={tmp_path / 'new'}", f"checkpoint.dir={tmp_path / 'new'}", "checkpoint.resume=never"]
        with pytest.raises(UserError, match=r"model is not a directory; name one with config.json"):
            shmap_tp.run_training(shmap_tp.load_config(*new, file=str(tmp_path / "run" / "config.yaml")))
    finally:
        (work / "moved").rename(work / "model")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(line["step"] for line in lines) == 6


def test_a_checkpoint_is_exported_with_its_bits_its_config_and_its_tokenizer(work, tmp_path, capsys):
    """Named by run.dir, checkpoint.dir or itself; and an earlier one in another dtype."""
    run, out = work / "run", tmp_path / "out"
    for number, which in enumerate((run, run / "checkpoints", run / "checkpoints" / "4")):
        assert main(["export", str(which), "--out", str(tmp_path / str(number))]) == 0
        assert "checkpoints/4 as LlamaForCausalLM, float32" in capsys.readouterr().out
        assert_same_tensors(tmp_path / str(number), tmp_path / "0")
    assert json.loads((tmp_path / "0" / "config.json").read_text()) == reference("llama")["config"]
    assert (tmp_path / "0" / "tokenizer.json").is_file()
    restored = shmap_tp.Model.restore(run)
    assert_same_bits(shmap_tp.from_pretrained(tmp_path / "0", dp=2, mp=4).parameters, restored.parameters)
    before, after = read_tensors(work / "model"), read_tensors(tmp_path / "0")
    assert before.keys() == after.keys() and all((before[name] != after[name]).any() for name in before)
    assert main(["export", str(run), "--out", str(out), "--step", "2", "--dtype", "bfloat16"]) == 0
    assert {values.dtype.name for values in read_tensors(out).values()} == {"bfloat16"}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_bad_input_of_the_commands_is_explained(work, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    for arguments, message in [
        (["export", str(tmp_path), "--out", str(tmp_path / "x")], "holds no checkpoint; name the run.dir"),
        (["export", str(work / "run"), "--out", str(tmp_path / "x"), "--step", "3"], "no checkpoint of step 3; it has"),
        (["export", str(work / "run"), "--out", str(tmp_path / "out")], "exists and is not an empty directory"),
        (["inspect", str(tmp_path / "nothere")], "is not a directory; name one with config.json"),
        (["inspect", str(tmp_path)], "has no config.json"),
    ]:
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and message in said and len(said.splitlines()) <= 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_inspect_prints_shape_parameters_and_meshes(work, tmp_path, capsys):
    assert main(["inspect", str(work / "model")]) == 0
    said = capsys.readouterr().out
    total = sum(values.size for values in read_tensors(work / "model").values())
    assert "LlamaForCausalLM" in said and "kv_heads=2" in said and "mesh.mp in {1, 2, 4, 8}" in said
    assert f"{total:,}" in said and "ids up to 96" in said and "complete" in said
    assert "embedding_scale" not in said and max(map(len, said.splitlines()[1:])) <= 120
    directory = tmp_path / "larger"
    shutil.copytree(work / "model", directory)
    (directory / "tokenizer.json").write_text(WORDS % 97)
    assert main(["inspect", str(directory)]) == 2
    assert "tokenizer.json has the id 97, but vocab_size=97 of the model must be above it" in capsys.readouterr().err


def test_the_tokenizer_of_a_directory_has_its_own_end_of_text_and_fits_the_model(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"a": 0, "b": 1, "</s>": 2}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    (tmp_path / "config.json").write_text('{"vocab_size": 3}')
    found = open_tokenizer(str(tmp_path), None)
    assert (found.vocabulary, found.end_of_text, found.name) == (3, 2, "tokenizer.json")
    assert open_tokenizer(str(tmp_path), "b").end_of_text == 1
    (tmp_path / "config.json").write_text('{"vocab_size": 2}')
    with pytest.raises(UserError, match="has ids up to 2, but the model's vocab_size is 2; name the tokenizer that"):
        open_tokenizer(str(tmp_path), None)
