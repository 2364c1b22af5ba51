"""Preparing data is lossless, reproducible and all-or-nothing, and every refusal says why."""

import builtins
import errno
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from shmap_tp import prepare as command
from shmap_tp.data import prepare as preparation
from shmap_tp.data import text_sources
from shmap_tp.data.metadata import DTYPES, META, SPLITS, TOKENIZER, Meta, read_meta, read_tokenizer
from shmap_tp.data.token_files import open_token_file
from shmap_tp.data.tokenizer import Bytes
from shmap_tp.errors import UserError

WORDS = [f"document {i}: the quick brown fox, naïve café {i * i}" for i in range(200)]


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = command.main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def jsonl(path: Path, texts=WORDS, field="text") -> Path:
    path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)))
    return path


def documents(directory: Path, split: str) -> list[list[int]]:
    """The documents of a prepared split, without their end-of-text tokens."""
    meta = json.loads((directory / META).read_text())
    ids = np.fromfile(directory / f"{split}.bin", DTYPES[meta["dtype"]])
    assert len(ids) == meta["tokens"][split] and ids[-1] == meta["end_of_text"]
    ends = np.flatnonzero(ids == meta["end_of_text"])
    return [part.tolist() for part in np.split(ids, ends + 1)[:-1]]


def texts(directory: Path, split: str) -> list[str]:
    return [bytes(part[:-1]).decode() for part in documents(directory, split)]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("data") / "stdlib"
    preparation.prepare_stdlib(out)
    return out


def test_the_prepared_library_can_be_trained_on(library):
    train, validation = (
        open_token_file(library, split, context=256, vocabulary=256) for split in ("train", "validation")
    )
    assert train.tokens > 5_000_000
    assert 0.005 < validation.tokens / train.tokens < 0.05
    meta = json.loads((library / META).read_text())
    assert {*meta} == {*Meta.__dataclass_fields__}
    assert meta["sha256"]["train"] == hashlib.sha256((library / "train.bin").read_bytes()).hexdigest()


def test_preparing_the_library_twice_gives_the_same_bytes(library, tmp_path):
    assert command.main(["--source", "stdlib", "--out", str(tmp_path / "again")]) == 0
    for name in ("train.bin", "validation.bin", META):
        assert (tmp_path / "again" / name).read_bytes() == (library / name).read_bytes()


def test_preparing_an_already_prepared_library_changes_nothing(library):
    before = (library / META).stat().st_mtime_ns
    assert preparation.prepare_stdlib(library)["vocabulary"] == 256
    assert (library / META).stat().st_mtime_ns == before


def test_several_processes_can_prepare_the_library_at_once(library, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(preparation.prepare_stdlib, [tmp_path / "stdlib"] * 4))
    assert answers == [json.loads((library / META).read_text())] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["stdlib"]


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


def test_jsonl_documents_are_recovered_one_by_one(tmp_path, capsys):
    code, out, err = run(
        capsys, "--text", jsonl(tmp_path / "x.jsonl"), "--out", tmp_path / "out", "--validation", "0.1"
    )
    assert (code, err) == (0, "")
    assert "training tokens" in out and str(tmp_path / "out") in out
    found = texts(tmp_path / "out", "train"), texts(tmp_path / "out", "validation")
    assert sorted(found[0] + found[1]) == sorted(WORDS)
    assert found[0] == [word for word in WORDS if word in found[0]]  # in the order of the file
    assert_fraction(tmp_path / "out", 0.1)


def test_a_directory_of_text_files_is_searched(tmp_path, capsys):
    (tmp_path / "in/deep").mkdir(parents=True)
    for i, word in enumerate(WORDS[:40]):
        (tmp_path / "in/deep" / f"{i:03}.txt").write_bytes(word.encode())
    jsonl(tmp_path / "in/a.jsonl", WORDS[40:50], "body")
    code, *_ = run(
        capsys, "--text", tmp_path / "in", "--field", "body", "--out", tmp_path / "out", "--validation", "0.2"
    )
    assert code == 0
    assert sorted(texts(tmp_path / "out", "train") + texts(tmp_path / "out", "validation")) == sorted(WORDS[:50])


def assert_fraction(directory: Path, wanted: float) -> None:
    """That the share of validation among the bytes is `wanted`, within 5% of it."""
    train, validation = (len("".join(texts(directory, split)).encode()) for split in SPLITS)
    assert validation / (train + validation) == pytest.approx(wanted, rel=0.05)


SIZES = {
    "one file": [5000],
    "two equal files": [3000, 3000],
    "two files": [43_000, 57_000],
    "seven files, one of them most of the text": [100, 200, 90_000, 300, 5, 1, 40],
    "a hundred files": [*range(50, 150)],
    "files of sizes from 1 to 2^14": [2**i for i in range(15)],
}


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("case", SIZES)
def test_the_validation_fraction_is_met_by_size_whatever_the_number_of_files(tmp_path, capsys, case, fraction):
    """No text is in both splits, and at most one file is cut; the names of the files do not matter."""
    rng, written = np.random.default_rng(0), []
    for i, size in enumerate(SIZES[case]):
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


def test_copies_of_a_document_are_in_one_split(tmp_path, capsys):
    jsonl(tmp_path / "x.jsonl", WORDS * 3)
    assert run(capsys, "--text", tmp_path / "x.jsonl", "--out", tmp_path / "out", "--validation", "0.1")[0] == 0
    train, validation = (texts(tmp_path / "out", split) for split in SPLITS)
    assert not {*train} & {*validation} and sorted(train + validation) == sorted(WORDS * 3)


def test_a_single_text_file_is_split_in_two(tmp_path, capsys):
    (tmp_path / "x.txt").write_text("abcdefghij" * 10)
    assert run(capsys, "--text", tmp_path / "x.txt", "--out", tmp_path / "out", "--validation", "0.1")[0] == 0
    assert texts(tmp_path / "out", "train") == ["abcdefghij" * 9]
    assert texts(tmp_path / "out", "validation") == ["abcdefghij"]


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
    assert (out / TOKENIZER).read_bytes() == read_tokenizer(out, read_meta(out)) == subwords.read_bytes()
    assert meta["tokenizer_sha256"] == hashlib.sha256(subwords.read_bytes()).hexdigest()
    found = [decoder.decode(ids[:-1]) for split in SPLITS for ids in documents(out, split)]
    assert sorted(found) == sorted(spoken)


def test_a_vocabulary_above_16_bits_is_written_as_uint32(tmp_path):
    tokenizer = Bytes()
    tokenizer.vocabulary, tokenizer.end_of_text = 65537, 65536
    source = text_sources.Source("two", iter([("train", "abc"), ("validation", "d")]), 2)
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


def test_an_interrupted_preparation_leaves_nothing(tmp_path, capsys, monkeypatch):
    def some(*_):
        yield from (("train", word) for word in WORDS)
        raise KeyboardInterrupt

    monkeypatch.setattr(preparation, "_GROUP", 100)
    monkeypatch.setattr(text_sources, "stdlib", lambda: text_sources.Source("cut", some(), None))
    code, _, err = run(capsys, "--source", "stdlib", "--out", tmp_path / "out")
    assert code == 130 and "nothing was written" in err
    assert list(tmp_path.iterdir()) == []


def test_only_overwrite_replaces_data_and_only_when_complete(tmp_path, capsys):
    out, arguments = tmp_path / "out", ["--validation", "0.1", "--out", tmp_path / "out", "--text"]
    first, second = jsonl(tmp_path / "1.jsonl"), jsonl(tmp_path / "2.jsonl", WORDS[::-1])
    (tmp_path / "3.jsonl").write_text('{"text": "good"}\n{"text": 3}\n')
    assert run(capsys, *arguments, first)[0] == 0
    before = (out / "train.bin").read_bytes()
    code, _, err = run(capsys, *arguments, second)
    assert code == 2 and "already holds prepared data" in err and "--overwrite" in err
    assert run(capsys, *arguments, tmp_path / "3.jsonl", "--overwrite")[0] == 2
    assert (out / "train.bin").read_bytes() == before
    assert run(capsys, *arguments, second, "--overwrite")[0] == 0
    assert (out / "train.bin").read_bytes() != before
    assert {path.name for path in tmp_path.iterdir()} == {"1.jsonl", "2.jsonl", "3.jsonl", "out"}
    (out / "notes.md").write_text("mine")
    assert "holds notes.md" in run(capsys, *arguments, first, "--overwrite")[2]
    assert (out / "notes.md").exists()


def test_a_failed_rename_restores_the_old_data(tmp_path, monkeypatch):
    def make(text, **more):
        source = text_sources.Source("two", iter([("train", text), ("validation", "d")]), 2)
        return preparation.prepare(source, Bytes(), tmp_path / "out", **more)

    def rename(path, target, real=Path.rename):
        if path.suffix == ".partial":
            raise OSError(16, "Device or resource busy")
        return real(path, target)

    make("old")
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(UserError, match=r"cannot be written: .*busy"):
        make("new", overwrite=True)
    assert texts(tmp_path / "out", "train") == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_tokenizer_that_is_not_that_of_the_data_is_refused(tmp_path):
    tokenizer = Bytes()
    tokenizer.json, tokenizer.name = b'{"a": 1}', "words.json"
    out, source = tmp_path / "out", text_sources.Source("two", iter([("train", "ab"), ("validation", "c")]), 2)
    meta = preparation.prepare(source, tokenizer, out)
    assert read_tokenizer(out, read_meta(out)) == b'{"a": 1}'
    (out / TOKENIZER).write_bytes(b"{}")
    with pytest.raises(UserError, match=r"tokenizer\.json: sha256 is 44136fa355b3\.\.\., meta\.json says"):
        read_tokenizer(out, read_meta(out))
    (out / TOKENIZER).unlink()
    assert read_tokenizer(out, read_meta(out)) is None
    del meta["tokenizer_sha256"]  # as in data that was prepared before it was recorded
    (out / META).write_text(json.dumps(meta))
    assert read_meta(out).tokenizer_sha256 is None and read_tokenizer(out, read_meta(out)) is None


PREPARER = """
import sys, time
from pathlib import Path
from shmap_tp.data.staging import staging
with staging(Path(sys.argv[1]), overwrite=True) as directory:
    (directory / "train.bin").write_bytes(bytes(1000))
    if len(sys.argv) > 2:  # as between the two renames
        Path(sys.argv[1]).rename(directory.with_suffix(".replaced"))
    print("writing", flush=True)
    time.sleep(1000)
"""


@contextmanager
def preparing(target: Path, *more: str) -> Iterator[subprocess.Popen]:
    """A process that is in the middle of preparing `target`."""
    command = [sys.executable, "-c", PREPARER, str(target), *more]
    environment = {**os.environ, "PYTHONPATH": str(Path(preparation.__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout.readline() == "writing\n"
        try:
            yield process
        finally:
            process.kill()


def source_of_two(text: str = "ab") -> text_sources.Source:
    return text_sources.Source("two", iter([("train", text), ("validation", "c")]), 2)


def test_what_a_killed_preparation_left_is_removed_and_a_live_one_is_not_touched(tmp_path):
    out = tmp_path / "out.v1"
    with preparing(out) as killed:
        killed.kill()
    (tmp_path / ".out.v1.0123abcd.partial").mkdir()  # of a version that had no lock
    others = [tmp_path / ".out.v2.0123abcd.partial", tmp_path / ".out.v1.mine.partial", tmp_path / "out.v1.partial"]
    for other in others:
        other.mkdir()
    with preparing(out):
        left = {path.name for path in tmp_path.iterdir()}
        assert len(left - {path.name for path in others}) == 5, left
        preparation.prepare(source_of_two(), Bytes(), out)
        (live,) = {path.name for path in tmp_path.glob(".out.v1.*.partial")} - {others[1].name}
        assert (tmp_path / live / "train.bin").stat().st_size == 1000
    assert texts(out, "train") == ["ab"]
    preparation.prepare(source_of_two("xy"), Bytes(), out, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"out.v1", *(path.name for path in others)}


def test_data_that_a_killed_preparation_was_replacing_is_put_back(tmp_path):
    out = tmp_path / "out"
    preparation.prepare(source_of_two("old"), Bytes(), out)
    with preparing(out, "between the renames"):
        assert not out.exists()
    with pytest.raises(UserError, match="already holds prepared data"):
        preparation.prepare(source_of_two("new"), Bytes(), out)
    assert texts(out, "train") == ["old"] and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_ends_with_2_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    def full(writer, *_):
        if isinstance(writer, preparation.TokenWriter):
            writer._file.close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    text = jsonl(tmp_path / "x.jsonl")
    for place, name in [(preparation.TokenWriter, "write"), (preparation.TokenWriter, "close"), (Path, "write_text")]:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, full)
            code, _, err = run(capsys, "--text", text, "--out", tmp_path / "out", "--validation", "0.1")
        assert (code, err.count("\n")) == (2, 1) and "out cannot be written: No space left on device" in err, err
        assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


def fifo(path: Path) -> None:
    os.mkfifo(path)


def symlink_loop(path: Path) -> None:
    path.symlink_to(path)


UNREADABLE = {
    "a FIFO": (fifo, "is a FIFO, but a file is needed"),
    "a symlink loop": (symlink_loop, "cannot be read: Too many levels of symbolic links"),
    "no permission": (Path.touch, "cannot be read: Permission denied"),
}


@pytest.fixture
def refused_files(monkeypatch) -> set[str]:
    """Names of files that `open` refuses, as the tests may run as root, whom no permission stops."""
    names: set[str] = set()

    def refusing(real):
        def opened(path, *arguments, **more):
            if Path(path).name in names:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(path, *arguments, **more)

        return opened

    monkeypatch.setattr(io, "open", refusing(io.open))  # what pathlib uses
    monkeypatch.setattr(builtins, "open", refusing(open))
    return names


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("case", UNREADABLE)
def test_an_unreadable_source_ends_with_2_and_leaves_nothing(tmp_path, capsys, refused_files, case, name):
    """Named itself, or found in a directory."""
    make, words = UNREADABLE[case]
    (tmp_path / "in").mkdir()
    make(tmp_path / "in" / name)
    refused_files |= {name} if case == "no permission" else set()
    (tmp_path / "in/b.txt").write_text("b" * 50)
    for text in ("in", f"in/{name}"):
        code, out, err = run(capsys, "--text", tmp_path / text, "--out", tmp_path / "out", "--validation", "0.1")
        assert (code, out, err.count("\n")) == (2, "", 1) and words in err, err
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


def test_a_directory_that_cannot_be_listed_is_refused_instead_of_left_out(tmp_path, capsys, monkeypatch):
    def scandir(path, real=os.scandir):
        if Path(path).name == "deep":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    (tmp_path / "in/deep").mkdir(parents=True)
    jsonl(tmp_path / "in/x.jsonl")
    monkeypatch.setattr(os, "scandir", scandir)
    code, _, err = run(capsys, "--text", tmp_path / "in", "--out", tmp_path / "out")
    assert code == 2 and "in/deep cannot be read: Permission denied" in err and err.count("\n") == 1


ODD_NAMES = {
    "a long name": ("x" * 256, "File name too long"),
    "a URL": ("gs://bucket/x", "is a URL, but --out must name a directory"),
    "a FIFO": ("fifo", "is a file; --out must name a directory"),
    "a symlink loop": ("loop", "is a symlink loop; --out must name a directory"),
}


@pytest.mark.parametrize("case", ODD_NAMES)
def test_a_place_that_cannot_hold_data_is_refused(tmp_path, capsys, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    fifo(Path("fifo"))
    symlink_loop(Path("loop"))
    out, words = ODD_NAMES[case]
    before = {*tmp_path.iterdir()}
    code, _, err = run(capsys, "--source", "stdlib", "--out", out)
    assert code == 2 and words in err and err.count("\n") == 1, err
    assert {*tmp_path.iterdir()} == before


def bad_text(directory: Path, name: str, content: bytes) -> Path:
    (directory / name).write_bytes(content)
    return directory / name


REFUSALS = [
    ("x.md", b"abc", [], r"ends in '\.md', but only \.txt or \.jsonl are read"),
    ("x.txt", b"", [], r"no text for train\.bin"),
    ("x.txt", b"ab\xff", [], r"x\.txt: byte 2 is not UTF-8"),
    ("x.txt", b"a\0b", ["--validation", "0.4"], r"contains a NUL"),
    ("x.txt", b"abc", ["--validation", "1.5"], r"--validation 1\.5 is not between 0 and 1"),
    ("x.txt", b"abc", ["--tokenizer", "none.json"], r"--tokenizer none\.json cannot be opened"),
    ("x.jsonl", b'{"text": "a"}\n', [], r"no text for validation\.bin"),
    ("x.jsonl", b'{"text": "a"}\n\n{"txt": "b", "id": 1}\n', [], r"line 3: no text in the field 'text' .*: txt, id\)"),
    ("x.jsonl", b'{"text": "a"}\n{"text"\n', [], r"line 2: not JSON"),
    ("x.jsonl", b"[1]\n", [], r"line 1: no text in the field 'text'"),
    ("x.jsonl", b'{"text": "a\\ud800"}\n', [], r"line 1: character 1 of 'text' is half a surrogate pair"),
]


@pytest.mark.parametrize("name, content, more, words", REFUSALS)
def test_a_refusal_names_the_place_and_leaves_nothing(tmp_path, capsys, name, content, more, words):
    if "--tokenizer" in more:
        pytest.importorskip("tokenizers")
    arguments = ["--text", bad_text(tmp_path, name, content), "--out", tmp_path / "deep/out", *more]
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") <= 2
    assert re.search(words, err), err
    assert not list(tmp_path.rglob("*.bin*")) and not list(tmp_path.rglob("*.partial"))


def test_unreadable_inputs_and_unwritable_outputs_are_refused(tmp_path, capsys):
    good, file = jsonl(tmp_path / "x.jsonl"), bad_text(tmp_path, "file", b"")
    (tmp_path / "empty").mkdir()
    for text, out, words in [
        (tmp_path / "absent", "out", "no such file or directory"),
        (tmp_path / "empty", "out", "no .txt or .jsonl file in this directory"),
        (good, "file", "is a file; --out must name a directory"),
        (good, "file/out", "cannot be written"),
    ]:
        code, _, err = run(capsys, "--text", text, "--out", tmp_path / out, "--validation", "0.1")
        assert code == 2 and words in err, err
    assert file.read_bytes() == b""


def test_a_missing_python_package_is_reported_in_one_line(tmp_path, capsys, monkeypatch):
    for module, arguments in {
        "datasets": ["--dataset", "a/b"],
        "tokenizers": ["--source", "stdlib", "--tokenizer", "a/b"],
    }.items():
        monkeypatch.setitem(sys.modules, module, None)
        code, _, err = run(capsys, *arguments, "--out", tmp_path / "out")
        assert code == 2 and f"needs `{module}`: pip install -e '.[data]'" in err and err.count("\n") == 1


def test_a_failing_data_set_is_reported_in_one_line(tmp_path, capsys, monkeypatch, subwords):
    def broken():
        yield {"text": "a"}
        raise TimeoutError("the read timed out\nlong story")

    def offline(name, streaming):
        raise ConnectionError("no route to host\nlong story")

    for load, words in [
        (offline, "--dataset a/b cannot be opened: no route to host"),
        (lambda name, streaming: {"train": broken()}, "--dataset a/b was interrupted: the read timed out"),
        (lambda name, streaming: {"all": []}, "--dataset a/b has the splits all"),
    ]:
        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
        code, _, err = run(capsys, "--dataset", "a/b", "--out", tmp_path / "out")
        assert code == 2 and words in err and err.count("\n") == 1
    arguments = ["--tokenizer", subwords, "--end-of-text", "</s>", "--source", "stdlib", "--out", tmp_path / "out"]
    code, _, err = run(capsys, *arguments)
    assert code == 2 and "has no token '</s>'" in err
