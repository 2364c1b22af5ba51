"""Fixtures shared by the tests of data: a bucket, and a tokenizer."""

import asyncio
import io
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.registry import _registry

from shmap_tp.config.schema import Config
from tests.helpers.preparation import WORDS
from tests.helpers.run_fixtures import complete_meta, tiny


class Bucket(AsyncFileSystem):
    """gs://PATH is the local /PATH.  Requests of one call overlap, as in gcsfs; it can be slow, and fail."""

    protocol, cachable = "gs", False
    opened: ClassVar[list[str]] = []
    """Names of the files that were read as a whole."""
    requests: ClassVar[list[tuple[str, int]]] = []
    """Name and number of bytes of each part that was read."""
    delay: ClassVar[float] = 0.0
    """Seconds that a request takes."""
    failure: ClassVar[Exception | None] = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("gs://").strip("/")

    async def _ls(self, path: str, detail: bool = True, **more: Any) -> list:
        found = [await self._info(str(file)) for file in Path(path).iterdir()]
        return found if detail else [one["name"] for one in found]

    async def _info(self, path: str, **more: Any) -> dict:
        kind, facts = "directory" if Path(path).is_dir() else "file", Path(path).stat()
        return {"name": path, "size": facts.st_size, "type": kind, "changed": facts.st_mtime_ns}

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        content = Path(path).read_bytes()[start:end]
        self.requests.append((Path(path).name, len(content)))
        await asyncio.sleep(self.delay)
        if self.failure:
            raise self.failure
        return content

    def _open(self, path: str, mode: str = "rb", **more: Any) -> io.BytesIO:
        self.opened.append(Path(path).name)
        time.sleep(self.delay)  # copies under way at the same time overlap
        if self.failure:
            raise self.failure
        return io.BytesIO(Path(path).read_bytes())


@pytest.fixture
def bucket(monkeypatch) -> type[Bucket]:
    for name, value in {"opened": [], "requests": [], "delay": 0.0, "failure": None}.items():
        monkeypatch.setattr(Bucket, name, value)
    monkeypatch.setitem(_registry, "gs", Bucket)
    return Bucket


@pytest.fixture
def config(tmp_path, bucket) -> Config:
    """The configuration of a run that reads its rows from a bucket, which has what is in tmp_path/data."""
    found = tiny(tmp_path, f"data.dir=gs:/{tmp_path}/data", "data.cache=null")
    complete_meta(tmp_path / "data")
    return found


@pytest.fixture
def local(tmp_path, config) -> Config:
    """The configuration of a run on the directory tmp_path/data."""
    return replace(config, data=replace(config.data, dir=f"{tmp_path}/data"))


@pytest.fixture
def subwords(tmp_path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    tokenizer.enable_truncation(4)  # as a downloaded file may request; documents must not be truncated
    tokenizer.save(str(tmp_path / "bpe.json"))
    return tmp_path / "bpe.json"
