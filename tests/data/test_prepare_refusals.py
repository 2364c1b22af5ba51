"""Every refusal of a preparation says why, in one line, and leaves nothing behind."""

import errno
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.preparation import jsonl, run

UNREADABLE = {
    "a FIFO": (os.mkfifo, "in/a.txt is no regular file; name files"),
    "a broken link": (lambda path: path.symlink_to("absent"), "cannot be read: No such file or directory: .*in/a.txt"),
}


@pytest.mark.parametrize("make, words", UNREADABLE.values(), ids=UNREADABLE)
def test_a_file_that_cannot_be_read_is_refused_instead_of_left_out(tmp_path, capsys, make, words):
    """Named itself, or found in a directory."""
    (tmp_path / "in").mkdir()
    make(tmp_path / "in/a.txt")
    (tmp_path / "in/b.txt").write_text("b" * 50)
    for each in (tmp_path / "in", tmp_path / "in/a.txt"):
        code, out, err = run(capsys, "--text", each, "--out", tmp_path / "out", "--validation", "0.1")
        assert (code, out, err.count("\n")) == (2, "", 1) and re.search(words, err), err
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
    assert code == 2 and f"cannot be read: Permission denied: '{tmp_path}/in/deep'" in err and err.count("\n") == 1


ODD_NAMES = {
    "x" * 256: "cannot be written: File name too long",
    "gs://bucket/x": "is a URL, but --out must name a directory",
    "fifo": "is a file; --out must name a directory",
}


def test_a_place_that_cannot_hold_data_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    before = {*tmp_path.iterdir()}
    for out, words in ODD_NAMES.items():
        code, _, err = run(capsys, "--source", "stdlib", "--out", out)
        assert code == 2 and words in err and err.count("\n") == 1, err
        assert {*tmp_path.iterdir()} == before


REFUSALS = [
    ("x.pdf", b"%PDF-\xe2", [], r"x\.pdf: byte 5 is not UTF-8"),
    ("x.txt", b"abc", ["--train-tokenizer", "256"], r"--train-tokenizer 256 must be at least 257, 256 bytes"),
    ("x.txt", b"abc", ["--train-tokenizer", "9" * 30], r"and at most 1,048,576"),
    ("x.txt", b"abc", ["--train-tokenizer", "300", "--end-of-text", "a"], r"--end-of-text a is ordinary text"),
    ("x.txt", b"", [], r"no text for train\.bin"),
    ("x.txt", b"ab\xff", [], r"x\.txt: byte 2 is not UTF-8"),
    ("x.txt", b"a\0b", ["--validation", "0.4"], r"contains a NUL"),
    ("x.txt", b"abc", ["--validation", "1.5"], r"--validation 1\.5 is not between 0 and 1"),
    ("x.txt", b"abc", ["--tokenizer", ""], "--tokenizer has no name; give bytes"),
    ("x.txt", b"abc", ["--tokenizer", "none.json"], r"--tokenizer none\.json cannot be read: No such file"),
    ("x.jsonl", b'{"text": "a"}\n', [], r"no text for validation\.bin"),
    ("x.jsonl", b'{"text": "a"}\n\n{"txt": "b", "id": 1}\n', [], r"line 3: no text in the field 'text' .*: txt, id\)"),
    ("x.jsonl", b'{"text": "a"}\n{"text"\n', [], r"line 2: not JSON"),
    ("x.jsonl", b"[" * 100_000, [], r"line 1: not JSON: it is nested too deeply"),
    ("x.jsonl", b"[1]\n", [], r"line 1: no text in the field 'text'"),
    ("x.jsonl", b'{"text": "a\\ud800"}\n', [], r"line 1: the field 'text' has bytes that are not UTF-8"),
]


@pytest.mark.parametrize("name, content, more, words", REFUSALS)
def test_a_refusal_names_the_place_and_leaves_nothing(tmp_path, capsys, name, content, more, words):
    if {"--tokenizer", "--train-tokenizer"} & {*more}:
        pytest.importorskip("tokenizers")
    (tmp_path / name).write_bytes(content)
    code, out, err = run(capsys, "--text", tmp_path / name, "--out", tmp_path / "deep/out", *more)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") <= 2
    assert re.search(words, err), err
    assert not list(tmp_path.rglob("*.bin*")) and not list(tmp_path.rglob("*.partial"))


def test_absent_texts_and_places_that_cannot_be_written_are_refused(tmp_path, capsys):
    good, file = jsonl(tmp_path / "x.jsonl"), tmp_path / "file"
    file.touch()
    (tmp_path / "empty").mkdir()
    for text, out, words in [
        (tmp_path / "absent", "out", "cannot be read: No such file or directory"),
        (tmp_path / "empty", "out", "no .txt, .txt.gz, .txt.zst, .jsonl, "),
        (good, "file", "is a file; --out must name a directory"),
        (good, "file/out", "cannot be written"),
    ]:
        code, _, err = run(capsys, "--text", text, "--out", tmp_path / out, "--validation", "0.1")
        assert code == 2 and words in err, err
    assert file.read_bytes() == b""


def test_a_missing_python_package_is_reported_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    code, _, err = run(capsys, "--dataset", "a/b", "--out", tmp_path / "out")
    assert code == 2 and "needs `datasets`: pip install -e '.[data]'" in err and err.count("\n") == 1


def test_a_failing_data_set_and_options_without_effect_are_reported(tmp_path, capsys, monkeypatch, subwords):
    def broken():
        yield {"text": "a"}
        raise TimeoutError("the read timed out\nlong story")

    def offline(name, streaming):
        raise ConnectionError("no route to host\nlong story")

    for load, words in [
        (offline, "--dataset=a/b cannot be read: no route to host"),
        (lambda name, streaming: {"train": broken()}, "--dataset=a/b cannot be read: the read timed out"),
        (lambda name, streaming: {"all": []}, "--dataset a/b has the splits all"),
    ]:
        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
        code, _, err = run(capsys, "--dataset", "a/b", "--out", tmp_path / "out")
        assert code == 2 and words in err and err.count("\n") == 1
    for options, words in [
        (["--tokenizer", subwords, "--end-of-text", "</s>"], "has no token '</s>'"),
        (["--field", "body"], "--field does not apply to --source stdlib"),
    ]:
        code, _, err = run(capsys, "--source", "stdlib", "--out", tmp_path / "out", *options)
        assert code == 2 and words in err and not (tmp_path / "out").exists()
