"""Tokenizers of what a model was read from; and answers: what is shown while they grow, where stop texts end them, and
when a batch has ended."""

import random

import pytest

from shmap_tp.data.subwords import open_tokenizer_file
from shmap_tp.data.text_directory import TextDirectory
from shmap_tp.data.tokenizer import Bytes
from shmap_tp.errors import UserError
from shmap_tp.inference.generator import Options
from shmap_tp.inference.text import _Answer, answers


def test_bytes_of_a_text_are_its_utf8_and_other_ids_are_replaced():
    tokenizer = Bytes()
    assert tokenizer.decode(tokenizer.encode("é 1")) == "é 1"
    assert tokenizer.decode([65, 300, 0xC3]) == "A\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"


def test_a_directory_without_a_tokenizer_or_with_a_damaged_file_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no tokenizer\.json; copy it there"):
        TextDirectory.read(tmp_path).tokenizer_of_model()
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "generation_config.json").write_bytes(b"{\xff")
    with pytest.raises(UserError, match=r"generation_config\.json"):
        TextDirectory.read(tmp_path).tokenizer_of_model()


def test_a_tokenizer_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read: No such file"):
        open_tokenizer_file(str(tmp_path / "none.json"))


STOPS = ["ab", "bca", "é|", "cc\n"]


@pytest.mark.parametrize("stop", [[], STOPS], ids=["no stop texts", "stop texts"])
def test_what_is_shown_piece_by_piece_is_the_text_before_the_first_stop_text(stop):
    """Bytes in random pieces: characters and stop texts are split anywhere."""
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choices("abcé|\n\U0001f600", k=draw.randrange(1, 12)))
        answer, ids, shown = _Answer(Bytes(), stop), list(text.encode()), ""
        while ids and not answer.stopped:
            count = draw.randrange(1, 4)
            shown += answer.add(ids[:count])
            del ids[:count]
            assert text.startswith(shown)
        shown += answer.end()
        ends = [text.index(each) for each in stop if each in text]
        assert shown == answer.text == text[: min(ends, default=len(text))]


def test_a_batch_ends_once_each_answer_has_ended_by_a_stop_token_or_by_a_stop_text(model, monkeypatch):
    programs, prompts = model.generation_programs, [[65], [66]]
    first, second = model.generate(prompts, max_new_tokens=40)
    token = next(token for token in first[:8] if token not in second)
    stop = Bytes().decode(second[:8])
    calls = []
    original = programs.decode
    monkeypatch.setattr(programs, "decode", lambda *a, **k: calls.append(1) or original(*a, **k))
    options = Options(max_new_tokens=40, stop_tokens=(token,), decode_tokens=4)
    found = answers(programs, model.parameters, Bytes(), prompts, options, stop=[stop])
    assert found == [[Bytes().decode(first[: first.index(token)])], [""]]
    assert len(calls) == 2


def test_a_model_takes_prompts_as_texts_if_it_has_a_tokenizer(model, tmp_path):
    with pytest.raises(UserError, match="neither restored nor read from a Hugging Face directory has no tokenizer"):
        model.generate(["A"])
    with pytest.raises(UserError, match=r"must be a list of texts or of lists of ids; give \['A'\]"):
        model.generate("A")
