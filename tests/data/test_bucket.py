"""Data in a bucket: a copy on each host, or the rows of a step."""

import hashlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from shmap_tp.data import location
from shmap_tp.data.batches import Batches
from shmap_tp.data.location import prepared_directory
from shmap_tp.data.metadata import META, SPLITS
from shmap_tp.data.prepare import prepare_missing
from shmap_tp.data.token_files import open_token_file
from shmap_tp.errors import UserError
from tests.helpers.run_fixtures import BATCH, CONTEXT, complete_meta, tiny, tokens_of, write_tokens


class Bucket(MemoryFileSystem):
    """A bucket in the memory of this process, which counts what is read and can fail."""

    protocol = "gs"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    opened: ClassVar[list] = []
    failure: ClassVar[Exception | None] = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("gs:/"))

    def open(self, path: str, *arguments: Any, **more: Any) -> Any:
        self.opened.append(path.rsplit("/", 1)[-1])
        if self.failure:
            raise self.failure
        time.sleep(0.05)  # so that copies under way at the same time overlap
        return super().open(path, *arguments, **more)


@pytest.fixture
def bucket(tmp_path, monkeypatch) -> Any:
    """(a function that uploads the files of a directory to gs://bucket/data, the configuration of a run on it)."""
    monkeypatch.setattr(Bucket, "store", {})
    monkeypatch.setattr(Bucket, "opened", [])
    monkeypatch.setitem(_registry, "gs", Bucket)

    def upload(directory: Path) -> None:
        for file in directory.iterdir():
            Bucket().pipe_file(f"/bucket/data/{file.name}", file.read_bytes())
        Bucket.opened.clear()

    config = tiny(tmp_path, "data.dir=gs://bucket/data", f"data.cache={tmp_path}/cache")
    upload(tmp_path / "data")
    return upload, config


def rows(directory: Path, split: str = "train") -> list[list[int]]:
    file = open_token_file(directory, split, context=CONTEXT, vocabulary=64)
    return file.read(np.arange(len(file))).tolist()


def test_data_in_a_bucket_is_that_of_the_directory_it_was_copied_from(tmp_path, bucket):
    _, config = bucket
    batches = Batches(config, tokens_of(config))
    local = tiny(tmp_path)
    expected = Batches(local, tokens_of(local))
    assert batches.identity == expected.identity and batches.companions == {"tokenizer.json": b"{}"}
    for step in range(3):
        np.testing.assert_array_equal(batches.training(step), expected.training(step))


def test_a_host_copies_each_version_of_the_data_once(tmp_path, bucket, capsys):
    upload, config = bucket
    with ThreadPoolExecutor(4) as pool:
        found = {*pool.map(prepared_directory, [config.data] * 4)}
    assert sorted(Bucket.opened) == ["meta.json", "tokenizer.json", "train.bin", "validation.bin"]
    (directory,) = found
    assert rows(directory) == rows(tmp_path / "data")
    assert capsys.readouterr().out.count("copying gs://bucket/data to ") == 1
    upload(write_tokens(tmp_path / "new", seed=1))
    assert prepared_directory(config.data) == directory
    assert rows(directory) == rows(tmp_path / "new") != rows(tmp_path / "data")


def test_what_counts_is_read_from_a_bucket_as_from_a_directory(tmp_path, bucket):
    upload, config = bucket
    config.data.cache, local = None, tiny(tmp_path)
    counted = {}
    for number, split in enumerate(SPLITS):
        file = tmp_path / "data" / f"{split}.counted"
        tokens = (tmp_path / "data" / f"{split}.bin").stat().st_size // 2
        file.write_bytes(np.random.default_rng(number).bytes(-(-tokens // 8)))
        counted[split] = hashlib.sha256(file.read_bytes()).hexdigest()
    complete_meta(tmp_path / "data", counted=counted)
    upload(tmp_path / "data")
    batches, expected = Batches(config, tokens_of(config)), Batches(local, tokens_of(local))
    assert batches.identity == expected.identity and batches.identity["train"]["counted"] == counted["train"]
    found = np.asarray(batches.training(1))
    assert (found < 0).any() and (found >= 0).any()
    np.testing.assert_array_equal(found, expected.training(1))
    np.testing.assert_array_equal(batches.validation(0), expected.validation(0))


def test_without_a_cache_only_the_rows_of_a_step_are_read(tmp_path, bucket, monkeypatch):
    upload, config = bucket
    complete_meta(tmp_path / "data")
    upload(tmp_path / "data")
    config.data.cache, config.train.steps, config.evaluate.batches, read = None, 3, 1, []

    def cat_file(self: Any, path: str, start: int = 0, end: int = 0, real: Any = MemoryFileSystem.cat_file) -> bytes:
        read.append((path, end - start))
        return real(self, path, start=start, end=end)

    monkeypatch.setattr(Bucket, "cat_file", cat_file)
    batches = Batches(config, tokens_of(config))
    local = tiny(tmp_path)
    expected = Batches(local, tokens_of(local))
    assert batches.identity == expected.identity and batches.companions == {"tokenizer.json": b"{}"}
    assert read == [] and not {"train.bin", "validation.bin"} & {*Bucket.opened}
    for step in range(3):
        np.testing.assert_array_equal(batches.training(step), expected.training(step))
    np.testing.assert_array_equal(batches.validation(0), expected.validation(0))
    rows = [("/bucket/data/train.bin", 2 * CONTEXT + 2)] * 3 * BATCH
    assert sorted(read) == [*rows, *[("/bucket/data/validation.bin", 2 * CONTEXT + 2)] * BATCH]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("cache", [True, False])
def test_a_source_in_a_bucket_is_mixed_with_one_on_the_disk(tmp_path, bucket, cache):
    upload, config = bucket
    for name, seed in (("data", 0), ("disk", 1)):
        write_tokens(tmp_path / name, seed=seed)
        complete_meta(tmp_path / name)
    upload(tmp_path / "data")
    config.data.cache = config.data.cache if cache else None
    found = []
    for where in ("gs://bucket/data", str(tmp_path / "data")):
        sources = {"a": {"dir": where, "weight": 0.25}, "b": {"dir": str(tmp_path / "disk"), "weight": 0.75}}
        config.data.dir, config.data.source, config.data.sources = None, None, sources
        batches = Batches(config, tokens_of(config))
        found.append((batches.identity, [*map(np.asarray, map(batches.training, range(3)))]))
        assert sum(one.startswith("a ") for one in batches.sequences(0)) == BATCH // 4
    assert found[0][0] == found[1][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"sha256": {}}, r"data\.cache=null needs the tokens, sha256 and vocabulary in meta\.json"),
        ({"tokens": {"train": 2999, "validation": 600}}, "6000 bytes, but meta.json says 2999 tokens"),
        ({"vocabulary": 65}, "of vocabulary 65, but .* model.vocabulary=64 is the limit"),
        ({"vocabulary": 40}, r"train\.bin: id \d+ occurs, but meta\.json says vocabulary 40"),
    ],
)
def test_without_a_cache_a_meta_that_contradicts_the_bucket_is_refused(tmp_path, bucket, changes, words):
    upload, config = bucket
    complete_meta(tmp_path / "data", **changes)
    if changes == {"sha256": {}}:
        (tmp_path / "data" / META).write_text('{"dtype": "uint16"}')
    upload(tmp_path / "data")
    config.data.cache = None
    with pytest.raises(UserError, match=words):
        Batches(config, tokens_of(config)).training(0)


def test_a_copy_that_was_interrupted_is_made_again(tmp_path, bucket, monkeypatch):
    _, config = bucket
    directory = prepared_directory(config.data)
    (directory / location._COPIED).unlink()
    (directory / "train.bin").write_bytes(b"half")
    assert rows(prepared_directory(config.data)) == rows(tmp_path / "data")


def test_an_empty_bucket_prints_how_to_prepare_and_copy_the_data(bucket):
    _, config = bucket
    config.data.dir, config.data.source = "gs://bucket/other/", location.STDLIB
    prepare_missing(config.data)  # not by the run: each host would prepare its own
    with pytest.raises(UserError) as error:
        prepared_directory(config.data)
    assert str(error.value).splitlines() == [
        "gs://bucket/other/train.bin does not exist; prepare it and copy it there:",
        "python -m shmap_tp.prepare --source stdlib --out data/stdlib && "
        "gcloud storage cp data/stdlib/* gs://bucket/other/",
    ]


def test_a_bucket_that_does_not_answer_is_not_waited_for(bucket, monkeypatch):
    monkeypatch.setattr("shmap_tp.runtime.files.BUCKET_SECONDS", 0.05)
    monkeypatch.setattr(Bucket, "exists", lambda *_: time.sleep(1))
    with pytest.raises(UserError, match=r"cannot be read: no answer in 0\.05 s"):
        prepared_directory(bucket[1].data)


def test_a_bucket_or_a_cache_that_fails_is_reported_in_one_line(tmp_path, bucket, monkeypatch):
    _, config = bucket

    def message() -> str:
        with pytest.raises(UserError) as error:
            prepared_directory(config.data)
        assert str(error.value).count("\n") == 0
        return str(error.value)

    monkeypatch.setattr(Bucket, "failure", TimeoutError("no answer\nin 60 s"))
    assert message() == "data.dir=gs://bucket/data cannot be read: no answer"
    monkeypatch.setattr(Bucket, "failure", None)
    config.data.cache = str(tmp_path / "data/train.bin")
    assert "train.bin cannot hold a copy of gs://bucket/data: File exists; free some space" in message()
    monkeypatch.delitem(_registry, "gs")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert message() == "data.dir=gs://bucket/data needs gcsfs: pip install -e '.[gcs]'"
