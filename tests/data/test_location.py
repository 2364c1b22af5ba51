"""Where a run finds its data: the command that prepares missing data, and the copy of a bucket on each host."""

import errno
import io
import os
import re
import shlex
from pathlib import Path
from typing import Any

from shmap_tp import prepare as command
from shmap_tp.config.compose import CONF, load
from shmap_tp.data import location
from shmap_tp.data.batches import Batches
from shmap_tp.data.location import prepared_directory
from shmap_tp.data.preparation import prepare_missing
from tests.helpers.config_errors import refusal
from tests.helpers.run_fixtures import FIRST, tiny, tokens_of, write_tokens

MINIPILE = "--dataset JeanKaddour/minipile --tokenizer EleutherAI/gpt-neox-20b"
COMMANDS = {
    "data=minipile": f"{MINIPILE} --out data/minipile",
    "data=minipile data.dir='some_where/x y'": f"{MINIPILE} --out 'some_where/x y'",
    "data.source='--text mine --validation 0.1' data.dir=here": "--text mine --validation 0.1 --out here",
    "data.source=null data.dir=here": "--text FILES --out here",
}


def test_missing_data_is_prepared_by_the_command_that_the_message_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given, expected in COMMANDS.items():
        message = refusal(prepared_directory, load(FIRST, re.split(" (?=data.dir)", given)).data)
        printed = re.search("`python -m shmap_tp.prepare (.*)`", message)
        assert printed[1] == expected and "\n" not in message
        command.parser().parse_args(shlex.split(printed[1]))


def test_a_file_of_the_users_own_has_its_own_command(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine.yaml").write_text(
        f"name: mine\ndir: {tmp_path}/tokens\ncache: c\nsource: --text {tmp_path}/my.txt --validation 0.3\n"
    )
    text = (CONF / "base.yaml").read_text().replace("- data: stdlib", "- data: mine")
    (tmp_path / "own.yaml").write_text(text)
    (tmp_path / "my.txt").write_text("some text " * 100)
    config = load(str(tmp_path / "own.yaml"), [])
    printed = re.search("`python -m shmap_tp.prepare (.*)`", refusal(prepared_directory, config.data))
    assert command.main(shlex.split(printed[1])) == 0
    assert prepared_directory(config.data) == tmp_path / "tokens"


def test_every_data_source_is_prepared_by_the_run_or_by_a_command():
    for file in (CONF / "data").glob("*.yaml"):
        data = load(FIRST, [f"data={file.stem}"]).data
        assert data.name == file.stem
        source = data.source
        assert source == location.STDLIB or command.parser().parse_args([*shlex.split(source), "--out", "x"])
        assert (location.stdlib_meta(data) is not None) == file.stem.startswith(location.STDLIB)


def test_a_file_of_a_run_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    config, permitted, locked = tiny(tmp_path), io.open, []

    def refusing(path: Any, *arguments: Any, **more: Any) -> Any:
        """The tests may run as root, whom no permission stops."""
        if path in locked:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return permitted(path, *arguments, **more)

    monkeypatch.setattr(io, "open", refusing)
    cases = {
        "is a directory, but a file is needed": Path.mkdir,
        "is no regular file, but a file is needed": os.mkfifo,
        "cannot be read: Too many levels of symbolic links": lambda path: path.symlink_to(path),
        "cannot be read: Permission denied": None,
    }
    for name in ("train.bin", "validation.bin", "meta.json", "tokenizer.json"):
        for words, make in cases.items():
            directory = write_tokens(tmp_path / name / words[:30])
            if make:
                (directory / name).unlink()
                make(directory / name)
            else:
                locked.append(directory / name)
            config.data.dir = str(directory)
            assert f"{name} {words}" in refusal(Batches, config, tokens_of(config))


def test_a_directory_that_cannot_be_read_is_refused(tmp_path):
    config = tiny(tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    config.data.cache = str(tmp_path / "cache")
    for directory, words in {
        f"{tmp_path}/data/train.bin": "is a file; data.dir must name a directory",
        f"{tmp_path}/" + "x" * 300: "cannot be read: File name too long",
        f"{tmp_path}/loop/x": "cannot be read: Too many levels of symbolic links",
        "a\0b": "contains a NUL",
        "foo://x": "cannot be read: Protocol not known: foo",
    }.items():
        for source in (None, location.STDLIB):
            config.data.dir, config.data.source = directory, source
            found = refusal(lambda: (prepare_missing(config.data), prepared_directory(config.data)))
            assert words in found and len(found) < 400


def test_a_vocabulary_far_above_that_of_the_data_is_warned_of(tmp_path, capsys):
    config = tiny(tmp_path)
    for vocabulary in (64, 127, 128):
        config.model.vocabulary = vocabulary
        Batches(config, tokens_of(config))
        line = (
            f"warning: {tmp_path}/data has a vocabulary of 64, tokenizer none.json, but model.vocabulary={vocabulary} "
            "(model bytes): is this the data of that model?\n"
        )
        assert capsys.readouterr().out == (line if vocabulary == 128 else "")
