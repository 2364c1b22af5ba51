"""Preparing data is lossless, reproducible and all-or-nothing, and every refusal says why."""

import hashlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from shmap_tp import prepare as command
from shmap_tp.data import preparation, text_sources
from shmap_tp.data.metadata import META, SPLITS, TOKENIZER, Meta, read_companions, read_meta
from shmap_tp.data.text_directory import TextDirectory
from shmap_tp.data.token_files import open_token_file
from shmap_tp.data.tokenizer import Bytes
from shmap_tp.errors import UserError
from tests.helpers.preparation import WORDS, documents, jsonl, run, texts
from tests.helpers.run_fixtures import tiny


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("data") / "stdlib"
    preparation.prepare_stdlib(out)
    return out


def test_the_prepared_library_can_be_trained_on(library):
    train, validation = (open_token_file(library, split, context=256, vocabulary=256) for split in SPLITS)
    assert train.tokens > 5_000_000
    assert 0.005 < validation.tokens / train.tokens < 0.05
    meta = json.loads((library / META).read_text())
    assert {*meta} == {*Meta.__dataclass_fields__} - {"row", "counted", "pairs"}
    assert meta["sha256"]["train"] == hashlib.sha256((library / "train.bin").read_bytes()).hexdigest()


def test_several_processes_can_prepare_the_library_at_once_and_it_is_the_same_every_time(library, tmp_path):
    out, before = tmp_path / "stdlib", (library / META).stat().st_mtime_ns
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(preparation.prepare_stdlib, [out] * 4))
    assert answers == [json.loads((library / META).read_text())] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["stdlib"]
    assert command.main(["--source", "stdlib", "--out", str(out), "--overwrite"]) == 0
    for name in ("train.bin", "validation.bin", META):
        assert (out / name).read_bytes() == (library / name).read_bytes()
    assert preparation.prepare_stdlib(library)["vocabulary"] == 256
    assert (library / META).stat().st_mtime_ns == before, "what is prepared is left as it is"


def test_a_run_prepares_the_library_with_a_tokenizer_of_its_own_as_the_command_does(tmp_path, monkeypatch):
    def some() -> text_sources.TextSource:
        return text_sources.TextSource("some", iter([("train", "def f(x):\n" * 9), ("validation", "def g")]), None)

    monkeypatch.setattr(text_sources, "stdlib", some)
    source, found, expected = "--source stdlib --train-tokenizer 260", tmp_path / "run", tmp_path / "command"
    data = replace(tiny(tmp_path).data, source=source, dir=str(found))
    for _ in range(2):  # what is there is left as it is
        preparation.prepare_missing(data)
    assert command.main([*source.split(), "--out", str(expected)]) == 0
    for name in ("train.bin", "validation.bin", META, TOKENIZER):
        assert (found / name).read_bytes() == (expected / name).read_bytes()
    assert read_meta(found).vocabulary == 260


def test_the_library_contains_every_text_file_except_tests(tmp_path, monkeypatch):
    (tmp_path / "lib/test").mkdir(parents=True)
    (tmp_path / "lib/json").mkdir()
    for name, content in {
        "zz.py": b"z", "a.py": b"a\r\n", "json/b.py": "é".encode(), "test/t.py": b"t", "latin.py": b"\xe9",
        "nul.py": b"a\0b", "empty.py": b"", "readme.txt": b"r", "_sysconfigdata_here.py": b"s",
    }.items():  # fmt: skip
        (tmp_path / "lib" / name).write_bytes(content)
    monkeypatch.setattr(text_sources.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    assert [text for _, text in text_sources.stdlib().documents] == ["a\r\n", "", "é", "z"]


def test_the_split_is_a_fixed_function_of_the_key():
    assert [text_sources.split_of(f"{i}", 0.3) for i in range(6)] == [
        "train", "train", "train", "train", "validation", "train",
    ]  # fmt: skip
    share = np.mean([text_sources.split_of(f"{i}", 0.02) == "validation" for i in range(20_000)])
    assert 0.017 < share < 0.023


def both_splits(directory: Path) -> list[str]:
    return sorted(texts(directory, "train") + texts(directory, "validation"))


def test_jsonl_documents_are_recovered_one_by_one_with_copies_in_one_split(tmp_path, capsys):
    given = ["--text", jsonl(tmp_path / "x.jsonl"), "--validation", "0.1", "--out"]
    code, out, err = run(capsys, *given, tmp_path / "out")
    assert (code, err) == (0, "")
    assert "training tokens" in out and str(tmp_path / "out") in out
    assert both_splits(tmp_path / "out") == sorted(WORDS)
    train = texts(tmp_path / "out", "train")
    assert train == [word for word in WORDS if word in train]  # in the order of the file
    assert_fraction(tmp_path / "out", 0.1)
    jsonl(tmp_path / "x.jsonl", WORDS * 3)
    assert run(capsys, *given, tmp_path / "copies")[0] == 0
    train, validation = (texts(tmp_path / "copies", split) for split in SPLITS)
    assert not {*train} & {*validation} and sorted(train + validation) == sorted(WORDS * 3)


def test_a_tokenizer_is_trained_on_the_training_text(tmp_path, capsys):
    pytest.importorskip("tokenizers")
    for name in ("a", "b"):
        given = ["--text", jsonl(tmp_path / "x.jsonl"), "--train-tokenizer", 300, "--validation", 0.2]
        code, printed, _ = run(capsys, *given, "--out", tmp_path / name)
        assert code == 0 and "(tokenizer.json, vocabulary 300, uint16)" in printed
    meta = read_meta(tmp_path / "a")
    tokenizer = TextDirectory(read_companions(tmp_path / "a", meta), "a").tokenizer_of_data(meta)
    found = [tokenizer.decode(ids[:-1]) for split in SPLITS for ids in documents(tmp_path / "a", split)]
    assert sorted(found) == sorted(WORDS)
    assert sum(meta.tokens.values()) < 0.5 * sum(len(text.encode()) for text in WORDS)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_named_files_and_those_of_a_directory_with_its_endings_are_documents(tmp_path, capsys):
    (tmp_path / "in/deep").mkdir(parents=True)
    for name in ("a.md", "b.py", "deep/c.txt", "Makefile"):
        (tmp_path / "in" / name).write_text(f"the text of {name}")
    jsonl(tmp_path / "in/d.jsonl", ["the body"] * 2, "body")
    for number, (given, expected) in enumerate(
        [
            ([tmp_path / "in/a.md", tmp_path / "in/Makefile"], ["the text of Makefile", "the text of a.md"]),
            ([tmp_path / "in", "--endings", ".py", ".txt"], ["the text of b.py", "the text of deep/c.txt"]),
            ([tmp_path / "in", "--field", "body"], ["the body", "the body", "the text of deep/c.txt"]),
        ]
    ):
        out = tmp_path / str(number)
        assert run(capsys, "--text", *given, "--validation", "0.4", "--out", out)[0] == 0
        joined, found = "".join(expected), "".join(both_splits(out))  # one document is cut
        assert len(found) == len(joined) and sorted(found) == sorted(joined)


def assert_fraction(directory: Path, wanted: float) -> None:
    """The share of validation among the bytes is `wanted`, within 5% of it."""
    train, validation = (len("".join(texts(directory, split)).encode()) for split in SPLITS)
    assert validation / (train + validation) == pytest.approx(wanted, rel=0.05)


SIZES = [[5000], [3000] * 2, [43_000, 57_000], [100, 200, 90_000, 300, 5, 1, 40], range(50, 150)]
SIZES.append([2**i for i in range(15)])


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)} files of {max(sizes)}")
def test_the_validation_fraction_is_met_by_size_whatever_the_number_of_files(tmp_path, capsys, sizes, fraction):
    """No text is in both splits, and at most one file is cut; the names of the files do not matter."""
    rng, written = np.random.default_rng(0), []
    for i, size in enumerate(sizes):
        written.append("".join(map(chr, rng.integers(33, 127, size))))
        for folder, name in [("in", f"{i:03}.txt"), ("renamed", f"{999 - i}.txt")]:
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / name).write_text(written[-1])
    found = []
    for folder in ("in", "renamed"):
        out = tmp_path / f"{folder}-out"
        assert run(capsys, "--text", tmp_path / folder, "--out", out, "--validation", fraction)[0] == 0
        assert_fraction(out, fraction)
        found.append([sorted(texts(out, split)) for split in SPLITS])
    train, validation = found[0]
    assert found[1] == found[0]
    whole = [text for text in train + validation if text in written]
    (head,), (tail,) = ([t for t in split if t not in written] or [""] for split in (train, validation))
    assert sorted([*whole, head + tail] if head + tail else whole) == sorted(written)


def test_documents_survive_a_subword_tokenizer_file(tmp_path, capsys, subwords):
    import tokenizers

    spoken = [*WORDS, "a text that says <|endoftext|> itself"]
    source, out = jsonl(tmp_path / "x.jsonl", spoken), tmp_path / "out"
    arguments = ["--text", source, "--out", out, "--validation", "0.1", "--tokenizer", subwords]
    assert run(capsys, *arguments)[0] == 0
    meta = json.loads((out / META).read_text())
    decoder = tokenizers.Tokenizer.from_file(str(subwords))
    assert (meta["tokenizer"], meta["end_of_text"]) == ("bpe.json", decoder.token_to_id("<|endoftext|>"))
    assert meta["vocabulary"] == decoder.get_vocab_size() == 400
    assert read_companions(out, read_meta(out)) == {TOKENIZER: subwords.read_bytes()}
    assert meta["tokenizer_sha256"] == hashlib.sha256(subwords.read_bytes()).hexdigest()
    found = [decoder.decode(ids[:-1]) for split in SPLITS for ids in documents(out, split)]
    assert sorted(found) == sorted(spoken)


def test_a_vocabulary_above_16_bits_is_written_as_uint32(tmp_path):
    tokenizer = Bytes()
    tokenizer.vocabulary, tokenizer.end_of_text = 65537, 65536
    source = text_sources.TextSource("two", iter([("train", "abc"), ("validation", "d")]), 2)
    assert preparation.prepare(source, tokenizer, tmp_path / "out")["dtype"] == "uint32"
    file = open_token_file(tmp_path / "out", "train", context=3, vocabulary=65537)
    assert file.read(np.arange(1)).tolist() == [[97, 98, 99, 65536]]


@pytest.mark.parametrize("splits", [("train", "validation", "test"), ("train",)])
def test_a_hub_data_set_keeps_its_splits_or_is_split(tmp_path, capsys, monkeypatch, splits):
    def load_dataset(name, streaming):
        assert (name, streaming) == ("someone/small", True)
        return {split: [{"text": f"{split} {word}"} for word in WORDS] for split in splits}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    arguments = ["--dataset", "someone/small", "--out", tmp_path / "out", "--validation", "0.1"]
    assert run(capsys, *arguments)[0] == 0
    train, validation = (texts(tmp_path / "out", split) for split in SPLITS)
    if "validation" in splits:
        assert train == [f"train {word}" for word in WORDS] and validation == [f"validation {word}" for word in WORDS]
    else:
        assert sorted(train + validation) == sorted(f"train {word}" for word in WORDS)


def test_a_tokenizer_that_is_not_that_of_the_data_is_refused(tmp_path):
    tokenizer = Bytes()
    tokenizer.json, tokenizer.name = b'{"a": 1}', "words.json"
    out, source = tmp_path / "out", text_sources.TextSource("two", iter([("train", "ab"), ("validation", "c")]), 2)
    meta = preparation.prepare(source, tokenizer, out)
    assert read_companions(out, read_meta(out)) == {TOKENIZER: b'{"a": 1}'}
    (out / TOKENIZER).write_bytes(b"{}")
    with pytest.raises(UserError, match=r"tokenizer\.json: sha256 is 44136fa355b3\.\.\., meta\.json says"):
        read_companions(out, read_meta(out))
    (out / TOKENIZER).unlink()
    assert not read_companions(out, read_meta(out))
    del meta["tokenizer_sha256"]  # as in data that was prepared before it was recorded
    (out / META).write_text(json.dumps(meta))
    assert read_meta(out).tokenizer_sha256 is None and not read_companions(out, read_meta(out))
