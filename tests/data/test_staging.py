"""A preparation is all or nothing: what is interrupted, killed or fails leaves the target as it was."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from shmap_tp.data import preparation, text_sources, tokenizing
from shmap_tp.data.preparation import staging
from shmap_tp.data.tokenizer import Bytes
from shmap_tp.errors import UserError
from tests.helpers.fresh_process import ctrl_c_of_a_terminal
from tests.helpers.preparation import WORDS, jsonl, run, texts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@ctrl_c_of_a_terminal()
def test_an_interrupted_preparation_leaves_nothing(tmp_path, capsys, monkeypatch, number):
    def some(*_):
        yield from (("train", word) for word in WORDS)
        signal.raise_signal(number)

    monkeypatch.setattr(tokenizing, "_GROUP", 100)
    monkeypatch.setattr(text_sources, "stdlib", lambda: text_sources.TextSource("cut", some(), None))
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


def make(out: Path, text: str, **more: bool) -> None:
    source = text_sources.TextSource("two", iter([("train", text), ("validation", "d")]), 2)
    preparation.prepare(source, Bytes(), out, **more)


def test_a_failed_rename_restores_the_old_data(tmp_path, monkeypatch):
    def rename(path, target, real=Path.rename):
        if path.suffix == ".partial":
            raise OSError(16, "Device or resource busy")
        return real(path, target)

    make(tmp_path / "out", "old")
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(UserError, match=r"cannot be written: .*busy"):
        make(tmp_path / "out", "new", overwrite=True)
    assert texts(tmp_path / "out", "train") == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


PREPARER = """
import sys, time
from pathlib import Path
from shmap_tp.data.preparation import staging
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


def test_what_a_killed_preparation_left_is_removed_and_one_that_lives_is_waited_for(tmp_path, capsys):
    out, other = tmp_path / "out.v1", tmp_path / ".out.v2.partial"
    other.mkdir()
    with ThreadPoolExecutor() as threads, preparing(out) as live:
        second = threads.submit(make, out, "ab")
        with pytest.raises(TimeoutError):
            second.result(0.3)
        assert (tmp_path / ".out.v1.partial/train.bin").stat().st_size == 1000
        assert capsys.readouterr().out == f"waiting for the process that has locked {tmp_path}/.out.v1.lock ...\n"
        live.kill()
    assert second.result() is None and texts(out, "train") == ["ab"]
    make(out, "xy", overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"out.v1", other.name}


def test_of_two_preparations_at_once_the_second_one_keeps_what_the_first_one_made(tmp_path):
    with ThreadPoolExecutor() as threads, staging(tmp_path / "out", overwrite=False) as first:
        second = threads.submit(make, tmp_path / "out", "second")
        (first / "train.bin").write_bytes(b"")
        time.sleep(0.2)
    with pytest.raises(UserError, match="already holds prepared data"):
        second.result()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_lock_of_another_user_is_left_and_the_preparation_refused(tmp_path, monkeypatch):
    (lock := tmp_path / ".out.lock").touch()
    monkeypatch.setattr("shmap_tp.data.preparation.locked", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(UserError, match="out cannot be written: Permission denied"):
        make(tmp_path / "out", "x")
    assert [*tmp_path.iterdir()] == [lock]


def test_data_that_a_killed_preparation_was_replacing_is_put_back(tmp_path):
    out = tmp_path / "out"
    make(out, "old")
    with preparing(out, "between the renames"):
        assert not out.exists()
    with pytest.raises(UserError, match="already holds prepared data"):
        make(out, "new")
    assert texts(out, "train") == ["old"] and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_ends_with_2_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    text = jsonl(tmp_path / "x.jsonl")
    for place, name in [(preparation.TokenWriter, "write"), (Path, "write_text")]:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, full)
            code, _, err = run(capsys, "--text", text, "--out", tmp_path / "out", "--validation", "0.1")
        assert (code, err.count("\n")) == (2, 1) and "out cannot be written: No space left on device" in err, err
        assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]
