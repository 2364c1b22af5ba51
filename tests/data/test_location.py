"""Where a run finds its data: the command that prepares missing data, and the copy of a bucket on each host."""

import errno
import io
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from shmap_tp import prepare as command
from shmap_tp.config.compose import CONF, load
from shmap_tp.data import location
from shmap_tp.data.batches import Batches
from shmap_tp.data.location import prepared_directory
from shmap_tp.data.prepare import prepare_missing
from shmap_tp.errors import UserError
from tests.helpers.run_fixtures import FIRST, tiny, tokens_of

MINIPILE = "--dataset JeanKaddour/minipile --tokenizer EleutherAI/gpt-neox-20b"
COMMANDS = [
    (["data=minipile"], f"{MINIPILE} --out data/minipile"),
    (["data=minipile", "data.dir='some where/x'"], f"{MINIPILE} --out 'some where/x'"),
    (["data.source='--text mine --validation 0.1'", "data.dir=here"], "--text mine --validation 0.1 --out here"),
    (["data.source=null", "data.dir=here"], "--text FILES --out here"),
]


@pytest.mark.parametrize("overrides, expected", COMMANDS)
def test_missing_data_is_prepared_by_the_command_that_the_message_prints(tmp_path, monkeypatch, overrides, expected):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        prepared_directory(load(FIRST, overrides).data)
    printed = re.search("`python -m shmap_tp.prepare (.*)`", str(error.value))
    assert printed[1] == expected and "\n" not in str(error.value)
    command.parser().parse_args(shlex.split(printed[1]))


def test_a_file_of_the_users_own_has_its_own_command(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine.yaml").write_text(
        f"name: mine\ndir: {tmp_path}/tokens\ncache: c\nsource: --text {tmp_path}/my.txt --validation 0.3\n"
    )
    text = (CONF / "config.yaml").read_text().replace("- data: stdlib", "- data: mine")
    (tmp_path / "own.yaml").write_text(text)
    (tmp_path / "my.txt").write_text("some text " * 100)
    config = load(str(tmp_path / "own.yaml"), [])
    with pytest.raises(UserError) as error:
        prepared_directory(config.data)
    printed = re.search("`python -m shmap_tp.prepare (.*)`", str(error.value))
    assert command.main(shlex.split(printed[1])) == 0
    assert prepared_directory(config.data) == tmp_path / "tokens"


@pytest.mark.parametrize("file", sorted((CONF / "data").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_data_source_is_prepared_by_the_run_or_by_a_command(file):
    source = load(FIRST, [f"data={file.stem}"]).data.source
    assert source == location.STDLIB or command.parser().parse_args([*shlex.split(source), "--out", "x"])


# Unreadable data


def unreadable(case: str, path: Path) -> None:
    path.unlink()
    match case:
        case "is a directory, but a file is needed":
            path.mkdir()
        case "is a FIFO, but a file is needed":
            os.mkfifo(path)
        case "cannot be read: Too many levels of symbolic links":
            path.symlink_to(path)


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "meta.json", "tokenizer.json"])
@pytest.mark.parametrize(
    "case",
    [
        "is a directory, but a file is needed",
        "is a FIFO, but a file is needed",
        "cannot be read: Too many levels of symbolic links",
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path, case, name):
    config = tiny(tmp_path)
    unreadable(case, tmp_path / "data" / name)
    with pytest.raises(UserError, match=f"{name} {case}") as error:
        Batches(config, tokens_of(config))
    assert str(error.value).count("\n") <= 1


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "meta.json", "tokenizer.json"])
def test_a_file_without_permission_is_refused(tmp_path, monkeypatch, name):
    """The tests may run as root, whom no permission stops."""

    def refusing(path: Any, *arguments: Any, real: Any = io.open, **more: Any) -> Any:
        if Path(path).name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *arguments, **more)

    config = tiny(tmp_path)
    monkeypatch.setattr(io, "open", refusing)
    with pytest.raises(UserError, match=f"{name} cannot be read: Permission denied"):
        Batches(config, tokens_of(config))


@pytest.mark.parametrize(
    "directory, words",
    [
        ("{}/data/train.bin", "is a file; data.dir must name a directory"),
        ("{}/" + "x" * 300, "cannot be read: File name too long"),
        ("{}/loop/x", "cannot be read: Too many levels of symbolic links"),
        ("a\0b", "contains a NUL"),
        ("foo://x", "cannot be read: Protocol not known: foo"),
    ],
)
def test_a_directory_that_cannot_be_read_is_refused(tmp_path, directory, words):
    config = tiny(tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    config.data.dir, config.data.cache = directory.format(tmp_path), str(tmp_path / "cache")
    for source in (None, location.STDLIB):
        config.data.source = source
        with pytest.raises(UserError, match=words) as error:
            prepare_missing(config.data)
            prepared_directory(config.data)
        assert str(error.value).count("\n") <= 1 and len(str(error.value)) < 400


# Vocabulary


@pytest.mark.parametrize("vocabulary, warned", [(64, False), (127, False), (128, True)])
def test_a_vocabulary_far_above_that_of_the_data_is_warned_of(tmp_path, capsys, vocabulary, warned):
    config = tiny(tmp_path, f"model.vocabulary={vocabulary}")
    Batches(config, tokens_of(config))
    line = (
        f"warning: {tmp_path}/data has a vocabulary of 64, tokenizer none.json, but model.vocabulary={vocabulary} "
        "(model bytes): is this the data of that model?\n"
    )
    assert capsys.readouterr().out == (line if warned else "")
