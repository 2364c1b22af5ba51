"""A full disk ends a run with a message of two lines, and no complete file is lost; files of JSON lines are read in
bounded memory and only appended to, and lines of others are not read."""

import errno
import json
import os
import shutil
import subprocess
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmap_tp.config.compose import to_yaml
from shmap_tp.errors import StorageError, UserError
from shmap_tp.runtime import files
from shmap_tp.runtime.files import appending, read_lines, read_lines_backwards, replacing, write_atomically, writing
from shmap_tp.training import loop
from shmap_tp.training.evaluation import Evaluation
from shmap_tp.training.goodput import TimeCategory, WallClock
from shmap_tp.training.metrics import Recorder, read_metrics
from tests.helpers.run_fixtures import lines, make_runs_quick, tiny


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system with room for the run directory and two checkpoints of the tiny model."""
    disk = tmp_path / "run"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=900k", "tmpfs", disk]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_reported_when_saving_a_checkpoint_and_the_run_resumes_with_more_space(
    small_disk, tmp_path, monkeypatch, caplog
):
    make_runs_quick(monkeypatch)
    with pytest.raises(StorageError) as caught:
        loop.train(tiny(tmp_path))
    message = str(caught.value).splitlines()
    assert message[0].startswith(f"checkpoint {small_disk}/checkpoints/6 could not be written: No space left on device")
    assert len(message) == 2 and "checkpoint.resume=if_present" in message[1]
    assert caplog.text == ""  # Orbax would log a traceback in each thread

    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    assert loop.train(tiny(tmp_path, "checkpoint.resume=if_present")) == 0
    assert [(line["step"], line["segment"]) for line in lines(tmp_path)] == [(step, step // 5) for step in range(1, 9)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_reported_when_writing_metrics(tmp_path):
    config = tiny(tmp_path)
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "metrics.jsonl"
    with (
        pytest.raises(StorageError, match=rf"^{file} could not be written: No space left on device"),
        Recorder(config, 0, enabled=True) as recorder,
    ):
        recorder.validation(1, Evaluation(0.5, 1.0, None))
        recorder._stream.close()
        recorder._stream = Path("/dev/full").open("a", buffering=1)  # noqa: SIM115 - the recorder closes it
        recorder.validation(2, Evaluation(0.5, 1.0, None))
    assert [line["step"] for line in read_metrics(file)] == [1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_reported_when_writing_where_the_time_went(tmp_path):
    message = rf"^{tmp_path}/time.jsonl could not be written: No space left on device"
    with pytest.raises(StorageError, match=message), WallClock() as clock:
        clock.open(tmp_path, 0, new_run=True)
        clock._stream.close()
        clock._stream = Path("/dev/full").open("a", buffering=1)  # noqa: SIM115 - the clock closes it
        clock.switch_to(TimeCategory.evaluation)


def test_a_full_disk_leaves_the_saved_configuration_as_it_was(tmp_path, monkeypatch):
    config, file = tiny(tmp_path), tmp_path / "config.yaml"
    write_atomically(file, to_yaml(config))
    saved = file.read_text()

    def write_half(path: Path, text: str, encoding: str) -> None:
        with path.open("w", encoding=encoding) as stream:
            stream.write(text[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(StorageError, match="No space left"), writing(file):
        write_atomically(file, to_yaml(config))
    assert file.read_text() == saved


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    (tmp_path / "link").symlink_to(file := tmp_path / "file")
    for old in (None, "old"):
        with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "link") as stream:
            stream.write("half")
            stream.flush()
            raise KeyboardInterrupt
        assert (file.read_text() if file.exists() else None) == old
        with replacing(tmp_path / "link") as stream:
            stream.write("old")
    assert (tmp_path / "link").is_symlink() and {path.name for path in tmp_path.iterdir()} == {"link", "file"}


def test_a_process_lost_during_a_collective_write_is_no_storage_error():
    """Orbax reports it as a ValueError, which is passed on, so that `Peers` can wait and report the lost process."""
    lost = "UNKNOWN: Gloo all-reduce failed: Connection closed by peer"
    with pytest.raises(ValueError, match="Gloo") as caught, writing("checkpoint 26"):
        raise ValueError(lost)
    assert type(caught.value) is ValueError, "a StorageError would end this process before the lost one is known"


FOREIGN = [b"\0" * 40, b"{}", b"[]", b"", b'{"n": "many"}', b'{"n": 1' + b"0" * 5000 + b"}", b"\xff\xfe{"]
FOREIGN = [line + b"\n" for line in [*FOREIGN, b"[" * 100_000, b'{"n": 3, ']]


def is_own(line: dict[str, Any]) -> bool:
    return type(line.get("n")) is int


def own(*numbers: int) -> list[bytes]:
    return [json.dumps({"n": n}).encode() + b"\n" for n in numbers]


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
def test_lines_of_others_are_ignored_in_both_directions(tmp_path, monkeypatch, block):
    monkeypatch.setattr(files, "BLOCK", block)
    foreign = [line for line in FOREIGN if block > 7 or len(line) < 1000]
    file = tmp_path / "lines"
    file.write_bytes(b"".join([*own(1), *foreign, *own(2), *foreign, *own(3), b'{"n": 4}']))
    assert [line["n"] for line in read_lines(file, is_own)] == [1, 2, 3]
    assert [line["n"] for line in read_lines_backwards(file, is_own)] == [3, 2, 1]
    assert not list(read_lines(tmp_path / "none", is_own)) and not list(read_lines_backwards(tmp_path / "none", is_own))


@pytest.mark.parametrize("end", [b"", b'{"n": 3', b"\0\0\0", b'{"n": 1}\n'])
def test_a_start_appends_and_a_line_that_was_cut_short_is_ended(tmp_path, end):
    file = tmp_path / "lines"
    file.write_bytes(end)
    with appending(file) as stream:
        stream.write('{"n": 2}\n')
    assert file.read_bytes() == end + b"\n" * (not end.endswith(b"\n") and bool(end)) + own(2)[0]
    assert next(read_lines_backwards(file, is_own)) == {"n": 2}


def test_a_fifo_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "lines")
    for read in (read_lines, read_lines_backwards):
        with pytest.raises(UserError, match="lines is no regular file, but a file is needed"):
            next(read(tmp_path / "lines", is_own))


def test_memory_does_not_grow_with_the_file(tmp_path):
    """20 MB of lines."""
    file = tmp_path / "lines"
    with file.open("wb") as stream:
        stream.writelines(b'{"n": %d, "more": "%s"}\n' % (n, b"x" * 10_000) for n in range(2000))
    tracemalloc.start()
    try:
        for read in (read_lines, read_lines_backwards):
            assert sum(1 for _ in read(file, is_own)) == 2000
        assert tracemalloc.get_traced_memory()[1] < 8e6
    finally:
        tracemalloc.stop()
