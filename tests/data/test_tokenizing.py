"""Tokenizing in several processes, and going on after a kill, give the bytes of an uninterrupted preparation."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmap_tp.data import source_files, text_sources, tokenizing
from shmap_tp.data.tokenizer import Bytes
from shmap_tp.data.tokenizing import Parts
from shmap_tp.errors import LostProcessError, UserError
from tests.helpers.paths import ROOT
from tests.helpers.preparation import WORDS, jsonl, run


def content(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def hidden(directory: Path) -> list[str]:
    """Files of preparations that were interrupted."""
    return sorted(str(file.relative_to(directory)) for file in directory.glob(".*/**/*") if file.is_file())


def test_the_result_is_the_same_for_any_number_of_processes(tmp_path, command, subwords, monkeypatch):
    monkeypatch.setattr(tokenizing, "_WORTH_MEASURING", 1)
    for workers in (1, 2):
        assert command(str(workers), "--tokenizer", subwords, "--workers", workers)[::2] == (0, "")
    assert content(tmp_path / "1") == content(tmp_path / "2") and hidden(tmp_path) == []


def test_processes_are_started_only_where_they_are_faster(tmp_path, monkeypatch):
    (tmp_path / "x.jsonl").touch()
    os.truncate(tmp_path / "x.jsonl", 3 << 25)
    source = text_sources.text_files([str(tmp_path / "x.jsonl")], "text", 0.1)
    subwords = Bytes()
    subwords.json = b"{}"
    for processors, expected in [(2, 1), (16, 3)]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=processors: range(count))
        assert tokenizing.default_workers(source, subwords) == expected
        assert tokenizing.default_workers(source, Bytes()) == 1


class Command:
    """Runs the command on x.jsonl as `--out NAME`; `error` is raised once it has tokenized `limit` chunks.

    Parts are of two chunks, of some twenty documents each; `calls` counts the chunks of the last call."""

    def __init__(self, directory: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch):
        self.directory, self.capsys, self.calls, encode = directory, capsys, 0, Bytes.encode_documents
        jsonl(directory / "x.jsonl")
        for place, name, value in [
            (source_files, "CHUNK", 1000),
            (tokenizing, "CHUNK", 1000),
            (tokenizing, "_PART", 2),
        ]:
            monkeypatch.setattr(place, name, value)

        def counted(tokenizer: Bytes, texts: list[str]) -> list:
            if self.calls == self.limit:
                raise self.error
            self.calls += 1
            return encode(tokenizer, texts)

        monkeypatch.setattr(Bytes, "encode_documents", counted)

    def __call__(self, name: str, *more: object, limit: int = -1, error: BaseException | None = None) -> tuple:
        self.calls, self.limit, self.error = 0, limit, error or KeyboardInterrupt()
        given = ["--validation", "0.1", "--text", self.directory / "x.jsonl", "--out", self.directory / name]
        return run(self.capsys, *given, *more)


@pytest.fixture
def command(tmp_path, capsys, monkeypatch) -> Command:
    return Command(tmp_path, capsys, monkeypatch)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), LostProcessError("lost")], ids=["interrupted", "lost"])
def test_the_same_command_goes_on_from_the_finished_parts(tmp_path, command, error):
    assert command("whole")[0] == 0
    chunks = command.calls
    code, _, err = command("out", limit=7, error=error)
    assert code in (130, 69) and not (tmp_path / "out").exists()
    assert ("the same command goes on from the parts that are finished" in err) == (code == 130)
    assert [Path(name).name.partition(".")[0] for name in hidden(tmp_path)] == ["00000", "00001", "00002", "division"]
    code, out, _ = command("out", "--pack", 64)  # how the tokens are written is no part of the work
    assert code == 0 and "documents were tokenized before an interruption; going on" in out
    assert command.calls == chunks - 6 and [*tmp_path.glob(".*")] == []
    assert command("packed", "--pack", 64)[0] == 0
    assert content(tmp_path / "out") == content(tmp_path / "packed")


@pytest.mark.parametrize("limit, error", [(1, KeyboardInterrupt()), (7, UserError("bad"))], ids=["early", "an error"])
def test_an_early_interruption_and_an_error_leave_nothing(tmp_path, command, limit, error):
    code, _, err = command("out", limit=limit, error=error)
    assert code in (130, 2) and err.count("\n") == 1 and "goes on" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


@pytest.mark.parametrize("change, done_again", [("text", 6), ("field", 6), ("a damaged part", 4)])
def test_parts_of_other_work_and_damaged_ones_are_not_used(tmp_path, command, change, done_again):
    command("out", limit=7)
    more = []
    if change == "text":
        jsonl(tmp_path / "x.jsonl", WORDS[::-1])
    elif change == "field":
        jsonl(tmp_path / "x.jsonl", field="body")
        more = ["--field", "body"]
    else:
        (part,) = tmp_path.glob(".out.*/parts.*/00001.*")
        part.write_bytes(part.read_bytes()[:-1])
    assert command("out", *more)[0] == 0 and [*tmp_path.glob(".*")] == []
    again = command.calls
    assert command("whole", *more)[0] == 0
    assert again == command.calls - 6 + done_again
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_part_without_documents_is_a_part(tmp_path):
    parts = Parts(tmp_path / "parts.x")
    assert [*parts.finished()] == [] and parts.division() is None
    ids = [np.arange(70_000, 70_003, dtype="<u4"), np.arange(1, dtype="<u4")]
    parts.write(0, [])
    parts.write(1, [("validation", ids[0]), ("train", ids[1])])
    first, ((one, found), (other, _)) = parts.finished()
    assert first == [] and (one, other) == ("validation", "train") and (found == ids[0]).all()


KILLED = """
import os, signal, sys
from shmap_tp import prepare
from shmap_tp.data import source_files, tokenizing
from shmap_tp.data.tokenizing import Parts
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started the tests with &
source_files.CHUNK = tokenizing.CHUNK = 1000
tokenizing._PART = 2
def write(parts, number, documents, write=Parts.write):
    write(parts, number, documents)
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "SIGKILL" else os.killpg(0, getattr(signal, sys.argv[1]))
Parts.write = write
sys.exit(prepare.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("name, code", [("SIGKILL", -9), ("SIGINT", 130), ("SIGTERM", 130)])
def test_a_killed_preparation_ends_its_processes_and_is_gone_on_with(tmp_path, command, name, code):
    """SIGINT and SIGTERM reach all processes, as Ctrl-C and the end of a job do."""
    given = ["--validation", "0.1", "--text", f"{tmp_path}/x.jsonl", "--out", f"{tmp_path}/out", "--workers", "2"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    start = {"stderr": subprocess.PIPE, "text": True, "env": environment, "start_new_session": True}
    process = subprocess.Popen([sys.executable, "-c", KILLED, name, *given], **start)
    err = process.communicate()[1]  # returns when no process holds stderr any more
    assert process.returncode == code and "Traceback" not in err, err
    assert not (tmp_path / "out").exists()
    assert command("whole")[0] == 0
    chunks = command.calls
    assert command("out")[0] == 0 and command.calls == chunks - 6
    assert content(tmp_path / "out") == content(tmp_path / "whole") and [*tmp_path.glob(".*")] == []
