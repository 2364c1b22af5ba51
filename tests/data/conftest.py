"""Fixtures shared by the tests of data."""

from pathlib import Path

import pytest

from tests.helpers.preparation import WORDS


@pytest.fixture
def subwords(tmp_path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    tokenizer.enable_truncation(4)  # as a downloaded file may request; documents must not be truncated
    tokenizer.save(str(tmp_path / "bpe.json"))
    return tmp_path / "bpe.json"
