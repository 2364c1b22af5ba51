"""A model from nothing is exported with its tokenizer, and the ids that begin and end a text are those of its run."""

import json
from pathlib import Path

import pytest

import shmap_tp
from shmap_tp.data.subwords import read_subwords, train_tokenizer
from shmap_tp.data.text_directory import TextDirectory
from shmap_tp.data.text_sources import TRAIN, TextSource
from shmap_tp.data.tokenizer import END_OF_TEXT, Bytes
from shmap_tp.pretrained.writing import export_checkpoint
from tests.helpers.chat_templates import FAMILIES, write_chat_model
from tests.helpers.run_fixtures import tiny

tokenizers = pytest.importorskip("tokenizers")

TEXT = "def é(x):\n\treturn '\N{SNOWMAN}' * x  # \x01\x7f\xa0\xad\xff"


def written(directory: Path, files: dict[str, bytes]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory


def exported(tokenizer, given: dict[str, bytes] = {}) -> tuple[TextDirectory, dict]:  # noqa: B006
    found = TextDirectory(given, "data").for_export(tokenizer, 64)
    return found, found.values("config.json")


def subwords(tmp_path: Path) -> object:
    source = TextSource(name="a", documents=iter([(TRAIN, TEXT * 3)]), total=1)
    return train_tokenizer(source, 270)


def test_a_tokenizer_of_bytes_becomes_a_file_with_the_same_ids(tmp_path):
    text, ids = exported(Bytes())
    found = tokenizers.Tokenizer.from_str(text.files["tokenizer.json"].decode())
    assert found.encode(TEXT).ids == Bytes().encode(TEXT) and found.decode(list(TEXT.encode())) == TEXT
    assert sorted(found.get_vocab().values()) == list(range(256)) and found.token_to_id(END_OF_TEXT) == 0
    assert ids == {"eos_token_id": 0, "bos_token_id": None, "pad_token_id": None}
    assert text.values("generation_config.json") == ids
    assert text.values("tokenizer_config.json")["eos_token"] == END_OF_TEXT


def test_what_is_exported_adds_no_token_that_the_data_had_not(tmp_path):
    directory = write_chat_model(tmp_path / "model", FAMILIES["llama3"])
    made = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    begin = "<|begin_of_text|>", made.token_to_id("<|begin_of_text|>")
    made.post_processor = tokenizers.processors.TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    tokenizer = read_subwords(made.to_str().encode(), "t", end_of_text=257)
    tokenizer.stop_tokens = 257, 260
    given = json.dumps({"eos_token": "<|eot_id|>", "bos_token": begin[0], "add_bos_token": True, "model_max_length": 9})
    text, ids = exported(tokenizer, {"tokenizer_config.json": given.encode()})
    again = tokenizers.Tokenizer.from_str(text.files["tokenizer.json"].decode())
    assert made.encode("a").ids != again.encode("a").ids == tokenizer.encode("a")
    assert ids == {"eos_token_id": [257, 260], "bos_token_id": begin[1], "pad_token_id": None}
    config = text.values("tokenizer_config.json")
    assert config.pop("tokenizer_class")
    assert config == {"eos_token": "<|eot_id|>", "bos_token": begin[0], "model_max_length": 64}


@pytest.mark.parametrize("make", [lambda _: Bytes(), subwords], ids=["bytes", "subwords"])
def test_transformers_reads_the_same_tokenizer(make, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = make(tmp_path)
    directory = written(tmp_path / "out", exported(tokenizer)[0].files)
    (directory / "config.json").unlink()
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    assert theirs(TEXT).input_ids == tokenizer.encode(TEXT) and theirs.decode(tokenizer.encode(TEXT)) == TEXT
    assert theirs.eos_token_id == tokenizer.end_of_text and theirs.bos_token_id is None


def test_transformers_generates_what_we_do_from_a_run_from_nothing_that_is_exported_as_typed(tmp_path, monkeypatch):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    from shmap_tp import prepare

    (tmp_path / "a.txt").write_text(TEXT * 200)
    data = tmp_path / "data"
    given = ["--text", str(tmp_path / "a.txt"), "--validation", "0.2", "--train-tokenizer", "270", "--out", str(data)]
    assert prepare.main(given) == 0
    model = ["model=bytes_llama", "model.vocabulary=270", "model.layers=1", "model.context=16", "data.source=null"]
    config = tiny(tmp_path / "run", *model, f"data.dir={data}", "train.steps=2", "optimizer.warmup_steps=1")
    assert shmap_tp.run_training(config)
    (data / "meta.json").unlink()  # the run is enough
    export_checkpoint(config.run.dir, tmp_path / "out", None)
    ours = shmap_tp.Model.restore(config.run.dir, dp=1, mp=1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ends = {theirs.config.eos_token_id, theirs.generation_config.eos_token_id, words.eos_token_id}
    assert ends == {*ours.tokenizer.stop_tokens} and theirs.config.bos_token_id is theirs.config.pad_token_id is None
    (prompt,), given = ["def"], {"max_new_tokens": 8, "do_sample": False}
    with torch.no_grad():
        found = theirs.generate(**words(prompt, return_tensors="pt"), **given)[0].tolist()
    assert found == [*ours.tokenizer.encode(prompt), *ours.generate([prompt], 8)[0]][: len(found)]
