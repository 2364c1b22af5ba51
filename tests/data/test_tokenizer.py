"""The bytes of text that tokens stand for."""

import hashlib

import numpy as np
import pytest

from shmap_tp.data import subwords as subwords_module
from shmap_tp.data.metadata import Meta
from shmap_tp.data.subwords import has_tokenized, read_subwords
from shmap_tp.data.tokenizer import Bytes, TextBytes
from shmap_tp.errors import UserError

tokenizers = pytest.importorskip("tokenizers", reason="pip install -e '.[data]'")

DOCUMENTS = ["三个和尚没水喝。", "naïve café, 1 + 1", "\U0001f600\U0001f601 ok \ufffd 一", "a  b\n\n c"] * 8
END = "<|endoftext|>"


def byte_level() -> "tokenizers.Tokenizer":
    """Byte-level BPE of few merges: most Chinese characters are two or three tokens."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=290, special_tokens=[END], initial_alphabet=alphabet)
    made.train_from_iterator(DOCUMENTS, trainer)
    return made


def byte_fallback() -> "tokenizers.Tokenizer":
    """As in Llama 2: a space before each text, which decoding strips, and bytes for what is not in the vocabulary."""
    words = [END, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abcdefkno1+,.\n", "\u2581a"]
    vocabulary = {word: number for number, word in enumerate(words)}
    bpe = tokenizers.models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True)
    made = tokenizers.Tokenizer(bpe)
    prepend, replace = tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")
    made.normalizer = tokenizers.normalizers.Sequence([prepend, replace])
    de = tokenizers.decoders
    made.decoder = de.Sequence([de.Replace("\u2581", " "), de.ByteFallback(), de.Fuse(), de.Strip(" ", 1, 0)])
    made.add_special_tokens([END])
    return made


def words() -> "tokenizers.Tokenizer":
    """Words and their parts, as in BERT: decoding puts the spaces."""
    letters = sorted({*"".join(DOCUMENTS)} - {*" \n"})
    vocabulary = {word: number for number, word in enumerate([END, "[UNK]", *letters, *("##" + c for c in letters)])}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.decoder = tokenizers.decoders.WordPiece(cleanup=False)
    return made


@pytest.mark.parametrize("made", [byte_level, byte_fallback, words])
def test_bytes_of_rows_are_those_of_the_text_wherever_rows_cut_it(made):
    tokenizer = read_subwords(made().to_str().encode(), "tokenizer.json")
    end = tokenizer.id_of(END)
    ids = [tokenizer.encode_documents([text])[0].tolist() for text in DOCUMENTS]
    text = [tokenizer.decode(each) for each in ids]
    if made is not words:
        assert text == DOCUMENTS
    stream = [end, *(token for each in ids for token in [*each, end])]
    for length in (1, 5, 7):
        rows = [stream[first : first + length + 1] for first in range(0, len(stream) - 1, length)]
        counted = TextBytes(tokenizer, end)
        assert sum(counted(np.array([row])) for row in rows) == sum(len(each.encode()) for each in text)


def test_a_tokenizer_that_fails_when_it_encodes_is_an_error_of_the_user():
    vocabulary = tokenizers.models.WordLevel({"a": 0}, unk_token="<unk>")  # which is not in it
    tokenizer = read_subwords(tokenizers.Tokenizer(vocabulary).to_str().encode(), "tokenizer.json")
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_documents([text])):
        with pytest.raises(UserError, match=r"the tokenizer tokenizer\.json fails: .*Missing \[UNK\] token"):
            encode("b")


def test_a_tokenizer_that_the_library_has_written_again_is_the_same():
    content = byte_level().to_str(pretty=True).encode()
    hub = tokenizers.Tokenizer.from_str(content.decode()).to_str().encode()
    for text, expected in ((content, True), (hub, True), (words().to_str().encode(), False)):
        meta = Meta(dtype="uint16", tokenizer="a/b", tokenizer_sha256=hashlib.sha256(text).hexdigest())
        assert has_tokenized(read_subwords(content, "tokenizer.json"), meta) == expected


def test_each_byte_but_the_end_of_text_counts_one():
    assert TextBytes(Bytes(), None)(np.array([[65, 66, 0, 67]])) == 2


@pytest.mark.parametrize("pre_tokenizer", ["ByteLevel", "Metaspace"])
@pytest.mark.parametrize("spaces", [True, False])
def test_a_long_text_has_the_ids_of_the_whole_in_memory_for_a_part(pre_tokenizer, spaces, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    random = np.random.default_rng(0)
    words = ["".join(random.choice([*"abcé☃"], size)) for size in random.integers(1, 7, 900)]
    text = (" " if spaces else "").join(words)
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = getattr(tokenizers.pre_tokenizers, pre_tokenizer)()
    trained = tokenizers.trainers.BpeTrainer(vocab_size=400, show_progress=False, max_token_length=8)
    made.train_from_iterator([" ".join(words)], trained)
    found = read_subwords(made.to_str().encode(), "t")
    (whole,) = found.encode_documents([text])
    sizes = []
    piece = type(found._tokenizer).encode
    monkeypatch.setattr(subwords_module, "LONG", 256)
    monkeypatch.setattr(subwords_module, "OVERLAP", 64)

    class Counting:
        def __getattr__(self, name):
            return getattr(made, name)

        def encode(self, text, **given):
            sizes.append(len(text))
            return piece(made, text, **given)

    found._tokenizer = Counting()
    short, long = found.encode_documents(["a", text])
    assert (long == whole).all() and len(short) == 1 and max(sizes) == 256 and len(sizes) > 9
