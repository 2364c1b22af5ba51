"""Where an answer ends, and which ids are never drawn, by the files of a tokenizer and of a model."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import shmap_tp
from shmap_tp.data.text_directory import TextDirectory
from shmap_tp.data.tokenizer import Bytes
from shmap_tp.inference.generator import Options
from shmap_tp.inference.text import answers, tokenizer_of_model

WORDS = ["<unk>", "<end>", "a", "<turn>", "<stop>"]


@pytest.fixture
def directory(tmp_path) -> Path:
    """A Hugging Face directory whose three files each name another end."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    return tmp_path


def test_an_answer_ends_at_each_end_that_one_of_the_files_names(directory):
    assert TextDirectory.read(directory).tokenizer_of_model().stop_tokens == (1, 3, 4)
    model = SimpleNamespace(checkpoint=None, source=SimpleNamespace(directory=directory))
    assert tokenizer_of_model(model, str(directory / "tokenizer.json")).stop_tokens == (3, 4)  # a file says none


class FewBytes(Bytes):
    vocabulary = 100


@pytest.fixture(scope="module")
def model():
    config = shmap_tp.load_config("model=test", "model.vocabulary=256", "model.context=32", "mesh.mp=2")
    return shmap_tp.Model.initialize(config)


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_ids_without_a_token_are_never_drawn(model, temperature):
    given = {"max_new_tokens": 24, "temperature": temperature}
    (some,) = model.generate([[65]], **given)
    assert max(some) >= FewBytes.vocabulary
    (own,) = model.generate([[65]], vocabulary=FewBytes.vocabulary, **given)
    assert max(own) < FewBytes.vocabulary
    programs, options = model.generation_programs, Options(**given, stop_tokens=())
    ((text,),) = answers(programs, model.parameters, FewBytes(), [[65]], options)
    assert text == Bytes().decode(own[: own.index(0)] if 0 in own else own)
