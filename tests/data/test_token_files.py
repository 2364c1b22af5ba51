"""Token files agree with meta.json, or are refused with the reason and the way out."""

import hashlib
import json
import os
import re
import subprocess
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from shmap_tp.data import token_files
from shmap_tp.data.metadata import DTYPES, META, SPLITS, Meta
from shmap_tp.data.token_files import TokenFile, data_identity, open_token_file
from shmap_tp.errors import UserError
from tests.helpers.preparation import write_ids


def write_prepared(directory: Path, ids, dtype: str = "uint16", **changes) -> Path:
    for split in SPLITS:
        write_ids(directory / f"{split}.bin", ids, DTYPES[dtype])
    digest = hashlib.sha256((directory / "train.bin").read_bytes()).hexdigest()
    meta = {"dtype": dtype, "sha256": dict.fromkeys(SPLITS, digest), **changes}
    (directory / META).write_text(json.dumps(meta))
    return directory


@pytest.mark.parametrize("dtype, stored", [("uint16", "<u2"), ("uint32", "<u4")])
def test_without_meta_a_token_file_is_refused_until_its_dtype_is_stated(tmp_path, dtype, stored):
    write_ids(tmp_path / "train.bin", [1, 2, 65535, 4, 5], stored)
    with pytest.raises(UserError, match=r"meta\.json does not exist, so the dtype of the tokens is not known") as error:
        open_token_file(tmp_path, "train", context=2, vocabulary=65536)
    advice = re.search(r"^echo .* > (\S*)", str(error.value), re.MULTILINE)
    subprocess.run(["sh", "-c", advice[0].replace("uint16", dtype)], check=True)  # as the message says
    token_file = open_token_file(tmp_path, "train", context=2, vocabulary=65536)
    assert token_file.read(np.arange(2)).tolist() == [[1, 2, 65535], [65535, 4, 5]]


RANDOM = np.random.default_rng(0).integers(0, 50_000, 4000)
ASCII = np.random.default_rng(0).integers(1, 128, 4000)
CONTRADICTIONS = [
    (ASCII, "<u4", "uint16", {}, 50_304, "probably uint32, but meta.json says uint16"),
    (RANDOM * 3, "<u4", "uint16", {}, 65536, "probably uint32, but meta.json says uint16"),
    (RANDOM, "<u2", "uint32", {}, 50_000, "ids go up to .*, but model.vocabulary=50000; (.|\n)*or the dtype in meta"),
    (RANDOM, "<u2", "uint16", {"tokens": {"train": 3999, "validation": 4000}}, 50_000,
     "8000 bytes, but meta.json says 3999 tokens of uint16, 7998 bytes"),
    (RANDOM, "<u2", "uint32", {"tokens": {"train": 4000, "validation": 4000}}, 50_000,
     "8000 bytes, but meta.json says 4000 tokens of uint32, 16000 bytes"),
    (RANDOM, "<u2", "uint16", {"vocabulary": 256}, 50_000, "ids go up to 499.., but meta.json says vocabulary 256"),
    ([], "<u2", "uint16", {}, 50_000, "train.bin: 0 tokens, but one sequence"),
]  # fmt: skip


def test_a_meta_that_contradicts_the_file_is_refused(tmp_path):
    for ids, stored, dtype, more, vocabulary, words in CONTRADICTIONS:
        write_ids(tmp_path / "train.bin", ids, stored)
        (tmp_path / META).write_text(json.dumps({"dtype": dtype, **more}))
        with pytest.raises(UserError, match=words) as error:
            open_token_file(tmp_path, "train", context=4, vocabulary=vocabulary)
        assert str(error.value).count("\n") <= 1


def test_uint16_tokens_are_not_mistaken_for_uint32(tmp_path):
    (tmp_path / META).write_text('{"dtype": "uint16"}')
    for ids in (RANDOM, ASCII, np.zeros(100), RANDOM[:2]):
        write_ids(tmp_path / "train.bin", ids)
        assert open_token_file(tmp_path, "train", context=1, vocabulary=65536).tokens == len(ids)


def test_ids_above_16_bits_are_read_as_uint32(tmp_path):
    write_prepared(tmp_path, [70000, 1, 2**20], "uint32")
    token_file = open_token_file(tmp_path, "validation", context=2, vocabulary=2**20 + 1)
    assert token_file.read(np.arange(1)).tolist() == [[70000, 1, 2**20]]


def test_data_identity_contains_everything_that_determines_the_data_order(tmp_path):
    opened = [open_token_file(write_prepared(tmp_path, range(50)), split, context=4, vocabulary=50) for split in SPLITS]
    meta = Meta(dtype="uint16", tokenizer="words.json", tokenizer_sha256="12ab", end_of_text=9)
    file = {"sha256": hashlib.sha256((tmp_path / "train.bin").read_bytes()).hexdigest(), "tokens": 50}
    tokenizer = {"name": "words.json", "sha256": "12ab", "end_of_text": 9}
    expected = {"train": file, "validation": file, "tokenizer": tokenizer, "seed": 3, "batch": 2, "context": 4}
    answer = data_identity(*opened, meta, seed=3, batch=2, isolated=7)
    assert json.loads(json.dumps(answer)) == expected | {"isolated": 7}


def test_the_scan_reads_all_chunks_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "_CHUNK", 16)
    path = write_ids(tmp_path / "train.bin", [*range(20), 300, 1])
    whole = TokenFile(tmp_path, "train", Meta(dtype="uint16"), context=4, vocabulary=301)
    assert whole.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(UserError, match=r"ids go up to 300, but model.vocabulary=300; use .*=301"):
        TokenFile(tmp_path, "train", Meta(dtype="uint16"), context=4, vocabulary=300)


FAULTS = {
    r"train\.bin does not exist; .* `python -m shmap_tp\.prepare .* --out .* --overwrite`": Path.unlink,
    r"train\.bin: 99 bytes is not a multiple of the 2 bytes of a token": lambda train: os.truncate(train, 99),
    r"train\.bin: 4 tokens, but one sequence of model\.context=4 needs 5": lambda train: os.truncate(train, 8),
    r"train\.bin: sha256 is \w{12}\.\.\., meta\.json says \w{12}\.\.\.": lambda train: write_ids(train, range(1, 51)),
}
METAS = {
    r"meta\.json: not JSON: ": b"{",
    r"meta\.json: dtype is 'int8', but must be uint16 or uint32": b'{"dtype": "int8"}',
    r"meta\.json: dtype is None, but must be uint16 or uint32": b"{}",
    r"meta\.json: row is 0, but must be at least 1": b'{"dtype": "uint16", "vocabulary": 50, "row": 0}',
    r"meta\.json: vocabulary is '50', but must be of type int": b'{"dtype": "uint16", "vocabulary": "50"}',
    r"meta\.json: tokens must have train and validation, each": b'{"dtype": "uint16", "tokens": [50, 50]}',
    r"meta\.json: not JSON: it is nested too deeply": b"[" * 100_000,
    r"meta\.json: not JSON: 'utf-8' codec": b'{"dtype": "\xff\xfe"}',
}


def test_errors_of_a_bad_directory_name_the_file_and_the_fix(tmp_path):
    for words in (*FAULTS, *METAS):
        write_prepared(tmp_path, range(50))
        if words in FAULTS:
            FAULTS[words](tmp_path / "train.bin")
        else:
            (tmp_path / META).write_bytes(METAS[words])
        with pytest.raises(UserError, match=words) as error:
            open_token_file(tmp_path, "train", context=4, vocabulary=50)
        assert str(error.value).count("\n") <= 1


def test_a_file_that_cannot_be_read_any_more_is_refused_although_its_scan_is_remembered(tmp_path, monkeypatch):
    os.utime(write_prepared(tmp_path, range(50)) / "train.bin", (1e9, 1e9))
    open_token_file(tmp_path, "train", context=4, vocabulary=50)
    monkeypatch.setattr(np, "memmap", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(UserError, match=r"train\.bin cannot be read: Permission denied"):
        open_token_file(tmp_path, "train", context=4, vocabulary=50)


def test_a_file_is_scanned_once_and_again_only_when_its_size_or_modification_time_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "scan", lambda *given, real=token_files.scan: scans.append(given) or real(*given))
    for where in ("uint16", "uint32"):
        (directory := tmp_path / where).mkdir()
        path, scans = write_prepared(directory, range(50), where) / "train.bin", []

        def opened(where: str = where, path: Path = path) -> TokenFile:
            return open_token_file(path.parent, "train", context=4, vocabulary=50)

        opened(), opened()
        assert len(scans) == 2 and not path.with_suffix(".bin.scan").exists(), "a file may still change in this moment"
        os.utime(path, (1e9, 1e9))
        found = [(file.largest, file.sha256) for file in (opened(), opened(), opened())]
        assert len(scans) == 3 and found == [(49, hashlib.sha256(path.read_bytes()).hexdigest())] * 3
        with pytest.raises(UserError, match=r"ids go up to 49, but model\.vocabulary=49"):
            open_token_file(directory, "train", context=4, vocabulary=49)
        path.with_suffix(".bin.scan").write_bytes(b"{")
        opened()
        assert len(scans) == 4, "a damaged one is made again"
        write_ids(path, range(1, 51), DTYPES[where])
        with pytest.raises(UserError, match="sha256 is"):
            opened()
        os.utime(path, (1e9, 1e9 + 1))
        with pytest.raises(UserError, match="sha256 is"):
            opened()
