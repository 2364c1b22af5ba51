"""The same documents give the same tokens in whatever files they are, and damaged files are named."""

import gzip
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shmap_tp.data import source_files
from shmap_tp.data.source_files import CHATS, chunks_of, files_at, texts_of
from shmap_tp.data.text_sources import split_of_name
from shmap_tp.prepare import main
from tests.helpers.preparation import WORDS, jsonl, run, texts


def zstd(content: bytes) -> bytes:
    return pyarrow().compress(content, codec="zstd", asbytes=True)


def pyarrow() -> ModuleType:
    return pytest.importorskip("pyarrow")


def table(values: Sequence[Any] = WORDS, name: str = "text") -> Any:
    return pyarrow().table({"id": range(len(values)), name: values})


def write_parquet(path: Path, content: Any) -> None:
    pytest.importorskip("pyarrow.parquet").write_table(content, path, row_group_size=30)


def write_arrow(path: Path, content: Any, file: bool = False) -> None:
    """As `datasets` saves it, or in the format with random access."""
    with (pyarrow().ipc.new_file if file else pyarrow().ipc.new_stream)(str(path), content.schema) as writer:
        writer.write_table(content, max_chunksize=30)


def write_compressed(path: Path, compress: Any) -> None:
    """In two pieces that are compressed apart, one after the other."""
    lines = jsonl(path.with_name("lines")).read_bytes()
    path.with_name("lines").unlink()
    path.write_bytes(compress(lines[:3001]) + compress(lines[3001:]))


CONTAINERS = {
    "x.jsonl.gz": lambda path: write_compressed(path, gzip.compress),
    "x.json.gz": lambda path: write_compressed(path, gzip.compress),
    "x.jsonl.zst": lambda path: write_compressed(path, zstd),
    "x.parquet": lambda path: write_parquet(path, table()),
    "dictionary.parquet": lambda path: write_parquet(path, table(pyarrow().array(WORDS).dictionary_encode())),
    "x.arrow": lambda path: write_arrow(path, table()),
    "random-access.arrow": lambda path: write_arrow(path, table(), file=True),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> Path:
    """WORDS, prepared from a .jsonl file."""
    directory = tmp_path_factory.mktemp("jsonl")
    given = ["--text", str(jsonl(directory / "x.jsonl")), "--validation", "0.1", "--out", str(directory / "out")]
    assert main(given) == 0
    return directory / "out"


@pytest.mark.parametrize("place", ["file", "directory", "bucket"])
@pytest.mark.parametrize("name", CONTAINERS)
def test_the_same_documents_give_the_same_tokens_in_any_file(tmp_path, capsys, monkeypatch, expected, name, place):
    monkeypatch.setattr(source_files, "CHUNK", 1000)
    (tmp_path / "in").mkdir()
    CONTAINERS[name](tmp_path / "in" / name)
    given = tmp_path / "in" / name if place == "file" else tmp_path / "in"
    if place == "bucket":
        monkeypatch.setattr(MemoryFileSystem, "store", {})
        MemoryFileSystem().put(str(tmp_path / "in"), "/texts", recursive=True)
        given = "memory://texts"
    code, _, err = run(capsys, "--text", given, "--validation", "0.1", "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    for split in ("train.bin", "validation.bin"):
        assert (tmp_path / "out" / split).read_bytes() == (expected / split).read_bytes()


@pytest.mark.parametrize("ending, compress", [("gz", gzip.compress), ("zst", zstd)])
def test_a_compressed_text_file_is_a_document(tmp_path, capsys, ending, compress):
    (tmp_path / f"a.txt.{ending}").write_bytes(compress("naïve ".encode() * 1000))
    assert run(capsys, "--text", tmp_path, "--validation", "0.1", "--out", tmp_path / "out")[0] == 0
    assert texts(tmp_path / "out", "train") + texts(tmp_path / "out", "validation") == ["naïve " * 900, "naïve " * 100]


@pytest.mark.parametrize("name", ["x.jsonl", *CONTAINERS])
def test_a_file_is_read_in_chunks_that_know_their_lines(tmp_path, monkeypatch, name):
    CONTAINERS.get(name, jsonl)(tmp_path / name)
    monkeypatch.setattr(source_files, "CHUNK", 1000)
    monkeypatch.setattr(source_files, "_ROWS", 10)
    (file,) = files_at(str(tmp_path / name))
    chunks = list(chunks_of([file], "text"))
    assert [text for chunk in chunks for text in texts_of(chunk, "text")] == WORDS
    ends = [chunk.end for chunk in chunks]
    assert ends == sorted(ends) and ends[-1] == file.size
    firsts = [1 + sum(len(chunk.content) for chunk in chunks[:i]) for i in range(len(chunks))]
    assert [chunk.first for chunk in chunks] == firsts
    assert max(sum(map(len, chunk.content)) for chunk in chunks) < 1000 + 100 and len(chunks) > 5


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def spoil(path: Path, begin: int, length: int = 40) -> None:
    content = bytearray(path.read_bytes())
    content[begin : begin + length] = b"\xff" * length
    path.write_bytes(content)


def damaged(path: Path, damage: Any, *where: int) -> None:
    CONTAINERS[path.name](path)
    damage(path, *where)


DAMAGES = [
    (
        "x.jsonl.gz",
        lambda p: damaged(p, cut, -500),
        r"x\.jsonl\.gz cannot be read: Compressed file ended before the en",
    ),
    ("x.jsonl.gz", lambda p: damaged(p, spoil, 0), r"x\.jsonl\.gz cannot be read: Not a gzipped file"),
    ("x.jsonl.gz", lambda p: damaged(p, spoil, 300), r"x\.jsonl\.gz cannot be read: "),
    (
        "x.jsonl.gz",
        lambda p: p.write_bytes(gzip.compress(b'{"text": "a"}\n{"text": 3}')),
        r"line 2: no text in the field 'text' .which is 3",
    ),
    ("x.txt.gz", lambda p: p.write_bytes(gzip.compress(b"ab\xff")), r"x\.txt\.gz: byte 2 is not UTF-8"),
    ("x.jsonl.zst", lambda p: damaged(p, cut, -500), r"x\.jsonl\.zst cannot be read: Truncated compressed stream"),
    ("x.jsonl.zst", lambda p: damaged(p, spoil, 0), r"x\.jsonl\.zst cannot be read: ZSTD decompress failed"),
    ("x.parquet", lambda p: damaged(p, cut, -500), r"x\.parquet cannot be read: "),
    ("x.parquet", lambda p: damaged(p, spoil, 1000, 300), r"x\.parquet cannot be read: "),
    (
        "x.parquet",
        lambda p: write_parquet(p, table(name="body")),
        r"row 1: no text in the field 'text' \(fields: id, bod",
    ),
    ("x.parquet", lambda p: write_parquet(p, table([1, 2])), r"row 1: no text in the field 'text' .which is 1"),
    (
        "x.parquet",
        lambda p: write_parquet(p, table(["a"] * 40 + [None])),
        r"row 41: no text in the field 'text' .which is null",
    ),
    ("x.arrow", lambda p: damaged(p, cut, -500), r"x\.arrow cannot be read: "),
]


@pytest.mark.parametrize("name, write, words", DAMAGES, ids=[f"{i}-{each[0]}" for i, each in enumerate(DAMAGES)])
def test_a_damaged_file_is_named_with_the_place(tmp_path, capsys, name, write, words):
    write(tmp_path / name)
    code, out, err = run(capsys, "--text", tmp_path / name, "--out", tmp_path / "out")
    assert (code, out) == (2, "") and re.search(words, err) and err.count("\n") == 1, err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_missing_library_is_named_with_what_installs_it_and_an_empty_url_as_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for given, words in {
        tmp_path / "x.jsonl.zst": "x.jsonl.zst needs `pyarrow`: pip install -e '.[data]'",
        tmp_path / "x.parquet": "x.parquet needs `pyarrow`: pip install -e '.[data]'",
        "memory://nothing": "--text=memory://nothing cannot be read: No such file or directory",
    }.items():
        if isinstance(given, Path):
            given.write_bytes(b"anything")
        code, _, err = run(capsys, "--text", given, "--out", tmp_path / "out")
        assert code == 2 and words in err and err.count("\n") == 1


def test_a_directory_is_read_with_links_to_files_and_without_links_to_directories(tmp_path):
    """So is the cache of the hub laid out; a link to a directory above would never end."""
    (tmp_path / "in/deep").mkdir(parents=True)
    jsonl(tmp_path / "blob")
    (tmp_path / "in/deep/a.jsonl").symlink_to(tmp_path / "blob")
    (tmp_path / "in/deep/up.jsonl").symlink_to(tmp_path / "in")
    (tmp_path / "in/deep/up").symlink_to(tmp_path / "in")
    (file,) = files_at(str(tmp_path / "in"))
    assert (file.path, file.size) == (f"{tmp_path}/in/deep/a.jsonl", (tmp_path / "blob").stat().st_size)
    assert file.version == str((tmp_path / "blob").stat().st_mtime)


def test_the_name_of_a_file_says_its_split():
    splits = {
        "train": ["data/train-00000-of-00002.parquet", "c4-train.00001-of-01024.json.gz"],
        "validation": ["/validation/data-00000-of-00001.arrow", "train/dev.jsonl.gz", "my_valid.jsonl.zst"],
        "test": ["test/data-00000-of-00001.arrow"],
        None: ["trained/latest.jsonl", "a-test-bed.parquet", "unit-test/data.parquet"],
    }
    found = {split: [each for each in paths if split_of_name(each) == split] for split, paths in splits.items()}
    assert found == splits


def saved(directory: Path, **splits: Sequence[str]) -> Path:
    """As `datasets.DatasetDict.save_to_disk` lays it out."""
    for split, content in splits.items():
        (directory / split).mkdir(parents=True)
        write_arrow(directory / split / "data-00000-of-00001.arrow", table(content))
        shutil.copy(directory / split / "data-00000-of-00001.arrow", directory / split / "cache-0f1e.arrow")
        for name in ("state.json", "dataset_info.json"):
            (directory / split / name).write_text(json.dumps({"_data_files": []}))
    (directory / "dataset_dict.json").write_text(json.dumps({"splits": [*splits]}))
    return directory


def test_the_directory_of_a_data_set_keeps_its_splits_without_that_of_tests(tmp_path, capsys):
    whole = saved(tmp_path / "set", train=WORDS[:100], validation=WORDS[100:120], test=WORDS[120:])
    code, printed, _ = run(capsys, "--dataset", whole, "--out", tmp_path / "out")
    assert code == 0 and "left out 1 file of the test split" in printed
    assert texts(tmp_path / "out", "train") == WORDS[:100]
    assert texts(tmp_path / "out", "validation") == WORDS[100:120]
    assert [Path(file.path).name for file in files_at(str(whole / "train"), CHATS)] == ["data-00000-of-00001.arrow"]


def test_the_directory_of_a_data_set_without_a_validation_split_is_divided_by_size(tmp_path, capsys, expected):
    whole = saved(tmp_path / "set", train=WORDS, test=["of the tests"])
    assert run(capsys, "--dataset", whole, "--validation", "0.1", "--out", tmp_path / "out")[0] == 0
    for split in ("train.bin", "validation.bin"):
        assert (tmp_path / "out" / split).read_bytes() == (expected / split).read_bytes()
    shutil.rmtree(whole / "train")
    code, _, err = run(capsys, "--dataset", whole, "--out", tmp_path / "other")
    assert code == 2 and "only files of the splits test; it needs `train`" in err
    (whole / "train.jsonl").write_text("{}")
    code, _, err = run(capsys, "--dataset", whole, "--out", tmp_path / "other")
    assert code == 2 and f"error: --dataset {whole}/train.jsonl, line 1: no text in the field" in err
