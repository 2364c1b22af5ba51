"""Data in a bucket: a copy on each host, or the rows of a step."""

import hashlib
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from fsspec.registry import _registry

from shmap_tp.data import location
from shmap_tp.data.batches import Batches
from shmap_tp.data.location import prepared_directory
from shmap_tp.data.metadata import META, SPLITS
from shmap_tp.data.preparation import prepare_missing
from shmap_tp.data.token_files import open_token_file
from shmap_tp.errors import UserError
from shmap_tp.prepare import main
from tests.helpers.config_errors import refusal
from tests.helpers.run_fixtures import BATCH, CONTEXT, complete_meta, tokens_of, write_tokens


def rows(directory: Path, split: str = "train") -> list[list[int]]:
    file = open_token_file(directory, split, context=CONTEXT, vocabulary=64)
    return file.read(np.arange(len(file))).tolist()


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("counted", [True, False])
def test_a_run_on_a_bucket_reads_what_a_run_on_the_directory_reads(tmp_path, bucket, config, local, cache, counted):
    """With what counts as targets, and, without a cache, no more than the rows of its steps."""
    config.data.cache = f"{tmp_path}/cache" if cache else None
    for each in (config, local):
        each.train.steps, each.evaluate.batches = 3, 1
    hashes = {}
    for number, split in enumerate(SPLITS if counted else ()):
        file = tmp_path / "data" / f"{split}.counted"
        tokens = (tmp_path / "data" / f"{split}.bin").stat().st_size // 2
        file.write_bytes(np.random.default_rng(number).bytes(-(-tokens // 8)))
        hashes[split] = hashlib.sha256(file.read_bytes()).hexdigest()
    complete_meta(tmp_path / "data", **{"counted": hashes} if counted else {})
    batches, expected = Batches(config, tokens_of(config)), Batches(local, tokens_of(local))
    assert batches.identity == expected.identity and batches.companions == {"tokenizer.json": b"{}"}
    assert batches.identity["train"].get("counted") == hashes.get("train")
    assert bucket.requests == [] and ({"train.bin", "validation.bin"} <= {*bucket.opened}) == cache
    for step in range(3):
        found = np.asarray(batches.training(step))
        assert (found < 0).any() == counted and (found >= 0).any()
        np.testing.assert_array_equal(found, expected.training(step))
    np.testing.assert_array_equal(batches.validation(0), expected.validation(0))
    read = [("train.bin", 2 * CONTEXT + 2)] * 3 * BATCH + [("validation.bin", 2 * CONTEXT + 2)] * BATCH
    assert cache or sorted(each for each in bucket.requests if "counted" not in each[0]) == read
    assert (tmp_path / "cache").exists() == cache


def test_a_host_copies_each_version_of_the_data_once(tmp_path, bucket, config, capsys):
    config.data.cache, bucket.delay, first = f"{tmp_path}/cache", 0.05, rows(tmp_path / "data")
    with ThreadPoolExecutor(4) as pool:
        (directory,) = {*pool.map(prepared_directory, [config.data] * 4)}
    assert sorted(bucket.opened) == ["meta.json", "tokenizer.json", "train.bin", "validation.bin"]
    assert rows(directory) == first
    assert capsys.readouterr().out.count(f"copying {config.data.dir} to ") == 1
    (directory / location._COPIED).unlink()
    (directory / "train.bin").write_bytes(b"half")  # as after an interruption
    assert rows(prepared_directory(config.data)) == first
    write_tokens(tmp_path / "data", seed=1)
    assert prepared_directory(config.data) == directory
    assert rows(directory) == rows(tmp_path / "data") != first


@pytest.mark.parametrize("cache", [True, False])
def test_a_source_in_a_bucket_is_mixed_with_one_on_the_disk(tmp_path, config, cache):
    complete_meta(write_tokens(tmp_path / "disk", seed=1))
    config.data.cache = f"{tmp_path}/cache" if cache else None
    found = []
    for where in (config.data.dir, f"{tmp_path}/data"):
        sources = {"a": {"dir": where, "weight": 0.25}, "b": {"dir": f"{tmp_path}/disk", "weight": 0.75}}
        config.data.dir, config.data.source, config.data.sources = None, None, sources
        batches = Batches(config, tokens_of(config))
        found.append((batches.identity, [*map(np.asarray, map(batches.training, range(3)))]))
        assert sum(one.startswith("a ") for one in batches.sequences(0)) == BATCH // 4
    assert found[0][0] == found[1][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_without_a_cache_a_meta_that_contradicts_the_bucket_is_refused(tmp_path, config):
    meta = (tmp_path / "data" / META).read_text()
    for changes, words in [
        ({"tokens": {"train": 2999, "validation": 600}}, "6000 bytes, but meta.json says 2999 tokens"),
        ({"vocabulary": 65}, "ids go up to 64, but model.vocabulary=64"),
        ({"vocabulary": 40}, r"train\.bin: ids go up to \d+, but meta\.json says vocabulary 40"),
        (None, r"data\.cache=null needs the tokens, sha256 and vocabulary in meta\.json"),
    ]:
        (tmp_path / "data" / META).write_text(meta if changes else '{"dtype": "uint16"}')
        if changes:
            complete_meta(tmp_path / "data", **changes)
        with pytest.raises(UserError, match=words):
            Batches(config, tokens_of(config)).training(0)


GCLOUD = """#!/bin/bash
[[ "$1 $2 ${!#}" == "storage cp gs://"*/ ]] && mkdir -p "/${!#/gs:}" && cp "${@:3:$#-3}" "/${!#/gs:}"
"""


def test_an_empty_bucket_prints_how_to_prepare_and_copy_the_data(tmp_path, config, monkeypatch):
    """The commands are run as printed."""
    config.data.dir, config.data.source = "gs://bucket/other/", location.STDLIB
    prepare_missing(config.data)  # not by the run: each host would prepare its own
    assert refusal(prepared_directory, config.data).splitlines() == [
        "gs://bucket/other/train.bin does not exist; prepare it and copy it there:",
        "python -m shmap_tp.prepare --source stdlib --out data/stdlib && "
        "gcloud storage cp data/stdlib/* gs://bucket/other/",
    ]
    (tmp_path / "my.txt").write_text("".join(chr(1 + i % 62) for i in range(4000)))
    (tmp_path / "gcloud").write_text(GCLOUD)
    (tmp_path / "gcloud").chmod(0o755)
    config.data.dir, config.data.name = f"gs:/{tmp_path}/other", "mine"
    config.data.source = "--text my.txt --validation 0.2"
    prepare, copy = refusal(prepared_directory, config.data).splitlines()[1].split(" && ")
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(prepare)[3:]) == 0
    subprocess.run(["bash", "-euc", copy], env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=True)
    config.data.cache, config.model.vocabulary = f"{tmp_path}/cache", 256
    assert Batches(config, tokens_of(config)).training(0).shape == (1, BATCH, CONTEXT + 1)


def test_a_bucket_or_a_cache_that_fails_is_reported_in_one_line(tmp_path, bucket, config, monkeypatch):
    name, config.data.cache = config.data.dir, f"{tmp_path}/cache"
    monkeypatch.setattr(bucket, "failure", TimeoutError("no answer\nin 60 s"))
    assert refusal(prepared_directory, config.data) == f"data.dir={name} cannot be read: no answer"
    monkeypatch.setattr(bucket, "failure", None)
    config.data.cache = f"{tmp_path}/data/train.bin"
    words = f"train.bin cannot hold a copy of {name}: File exists; free some space"
    assert words in refusal(prepared_directory, config.data)
    with monkeypatch.context() as patch:  # an answer is not waited for
        patch.setattr("shmap_tp.runtime.files.BUCKET_SECONDS", 0.05)
        patch.setattr(bucket, "exists", lambda *_: time.sleep(1))
        assert "cannot be read: no answer in 0.05 s" in refusal(prepared_directory, config.data)
    monkeypatch.delitem(_registry, "gs")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert refusal(prepared_directory, config.data) == f"data.dir={name} needs gcsfs: pip install -e '.[gcs]'"
