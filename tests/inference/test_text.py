"""Tokenizers of what a model was read from: the errors, and bytes."""

import pytest

from shmap_tp.data.tokenizer import Bytes, open_tokenizer_file
from shmap_tp.errors import UserError
from shmap_tp.inference.text import tokenizer_of_pretrained


def test_bytes_of_a_text_are_its_utf8_and_other_ids_are_replaced():
    tokenizer = Bytes()
    assert tokenizer.decode(tokenizer.encode("é 1")) == "é 1" and tokenizer.byte_length(tokenizer.encode("é")) == 2
    assert tokenizer.decode([65, 300, 0xC3]) == "A\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"


def test_a_directory_without_a_tokenizer_or_with_a_damaged_file_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no tokenizer\.json; copy it there"):
        tokenizer_of_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "generation_config.json").write_bytes(b"{\xff")
    with pytest.raises(UserError, match=r"generation_config\.json"):
        tokenizer_of_pretrained(tmp_path)


def test_a_tokenizer_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        open_tokenizer_file(str(tmp_path / "none.json"))
