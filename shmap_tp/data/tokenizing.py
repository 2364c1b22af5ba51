"""The tokens of a source's documents, in their order: in several processes, and on from what a killed one has done.

    parts.KEY/00012.HASH    the tokenized documents of part 12, with the beginning of the sha256 of the file

A part is written under another name first, so one that has its name is complete; one that has not its hash is not used,
nor are those after it.  KEY is a hash of everything on which the parts depend, see `parts_key`.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from tqdm import tqdm

from shmap_tp.data.conversations import ChatSource
from shmap_tp.data.metadata import DTYPES, SPLITS
from shmap_tp.data.source_files import CHUNK, Chunk
from shmap_tp.data.text_sources import Division, TextFiles, TextSource, division
from shmap_tp.data.tokenizer import Tokenizer
from shmap_tp.runtime.console import write_line
from shmap_tp.runtime.workers import in_order

DocumentSource = TextSource | ChatSource
_GROUP = 1 << 22  # characters that are tokenized at a time
_PART = 16
"""Chunks of a part: what a killed preparation loses at most, beside what its processes were at."""
_WORTH, _WORTH_MEASURING = 1 << 25, 1 << 30
"""Bytes of files that are worth the start of a process: to tokenize them, and only to parse them."""
_FEW = 3
"""Processors up to which threads of the `tokenizers` library are as fast (docs/performance-notes.d/preparing.md)."""
_PARTS = "parts."
FIRST_PART = f"{_PARTS}*/00000.*"
"""Pattern of the first part's path in a directory with one of parts."""
Documents = list[tuple[str, np.ndarray]]
"""(split, ids) of each."""
_DIVISION = "division"


def id_dtype(tokenizer: Tokenizer) -> str:
    """The key of `DTYPES` for its ids."""
    return "uint16" if tokenizer.vocabulary <= 1 << 16 else "uint32"


def default_workers(source: DocumentSource, tokenizer: Tokenizer) -> int:
    """The processors of this machine, or fewer where the files are small; 1 where processes are no faster."""
    processors = len(os.sched_getaffinity(0))
    if source.files is None or tokenizer.json is None or processors <= _FEW:
        return 1
    return max(1, min(processors, source.files.size // _WORTH))


def parts_key(source: DocumentSource, tokenizer: Tokenizer) -> str | None:
    """The name of the directory of finished parts of this work; None where a part cannot be known again."""
    if source.files is None or any(file.version is None for file in source.files.files):
        return None
    files = [[file.path, file.size, file.version, file.split] for file in source.files.files]
    content = None if tokenizer.json is None else hashlib.sha256(tokenizer.json).hexdigest()
    facts = [files, source.files.field, source.files.validation, tokenizer.name, content, tokenizer.end_of_text]
    key = json.dumps([*facts, CHUNK, _PART, "whole lines"])
    return _PARTS + hashlib.sha256(key.encode()).hexdigest()[:16]


class Parts:
    """Parts in a directory, which is made for the first.  All methods raise OSError if it cannot be read or written."""

    def __init__(self, directory: Path):
        self._directory = directory

    def finished(self) -> Iterator[Documents]:
        """The documents of each part, from the first to the last before one that is missing or damaged."""
        number = 0
        while (file := self._file(f"{number:05}")) is not None:
            with np.load(file) as arrays:
                documents = np.split(arrays["ids"], np.cumsum(arrays["lengths"]))[:-1]
                splits = arrays["splits"]
            yield [(SPLITS[split], ids) for split, ids in zip(splits, documents, strict=True)]
            number += 1

    def write(self, number: int, documents: Documents) -> None:
        """Write part `number`."""
        ids = np.concatenate([np.empty(0, np.uint16), *(ids for _, ids in documents)])
        lengths = np.array([len(ids) for _, ids in documents], np.int64)
        splits = np.array([SPLITS.index(split) for split, _ in documents], np.uint8)
        with self._written(f"{number:05}") as file:
            np.savez(file, ids=ids, lengths=lengths, splits=splits)

    def division(self) -> list[Any] | None:
        """What was given to `write_division`."""
        file = self._file(_DIVISION)
        return None if file is None else json.loads(file.read_bytes())

    def write_division(self, division: list[Any]) -> None:
        """Write how the documents are divided into splits, JSON values."""
        with self._written(_DIVISION) as file:
            file.write(json.dumps(division).encode())

    @contextmanager
    def _written(self, name: str) -> Iterator[IO[bytes]]:
        """A file to write, which is called `name` and its hash at the end."""
        self._directory.mkdir(exist_ok=True)
        unfinished = self._directory / "unfinished"
        with unfinished.open("wb") as file:
            yield file
        unfinished.replace(self._directory / f"{name}.{_hash(unfinished)}")

    def _file(self, name: str) -> Path | None:
        """The intact file of this name."""
        found = self._directory.glob(f"{name}.*")
        return next((file for file in found if file.name == f"{name}.{_hash(file)}"), None)


def _hash(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:16]


def tokenized(
    source: DocumentSource, tokenizer: Tokenizer, workers: int = 1, parts: Path | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """(split, ids) of each document that has any, in the dtype of token files; the end of text is the last id.
    `workers` as of `in_order`.

    Finished parts of files are kept in the directory `parts`, and those that are there are not tokenized again.
    """
    if isinstance(source, ChatSource):
        yield from source.tokenized(tokenizer)
        return
    if source.files is not None:
        yield from _tokenized_files(source.files, source.name, tokenizer, workers, Parts(parts) if parts else None)
        return
    groups = in_order(partial(_encoded, tokenizer), _grouped(source.documents), workers)
    with tqdm(total=source.total, desc=source.name, unit=" documents", disable=None) as bar, closing(groups):
        for count, documents in groups:
            yield from documents
            bar.update(count)


def _tokenized_files(
    files: TextFiles, name: str, tokenizer: Tokenizer, workers: int, parts: Parts | None
) -> Iterator[tuple[str, np.ndarray]]:
    encode = partial(_encoded_chunk, tokenizer, files, _divided(files, name, workers, parts))
    number, count, chunks, part = 0, 0, files.chunks(), list[Documents]()
    with _bar(files, name) as bar:
        for documents in parts.finished() if parts else ():
            for chunk in islice(chunks, _PART):
                bar.update(chunk.end - bar.n)
            yield from documents
            number, count = number + 1, count + len(documents)
        if number:
            write_line(f"{name}: {count:,} documents were tokenized before an interruption; going on")
        with closing(in_order(encode, chunks, workers)) as encoded:
            for end, documents in encoded:
                yield from documents
                part.append(documents)
                if parts and len(part) == _PART:
                    parts.write(number, [each for documents in part for each in documents])
                    number, part = number + 1, []
                count += len(documents)
                bar.set_postfix_str(f"{count:,} documents", refresh=False)
                bar.update(end - bar.n)


def _divided(files: TextFiles, name: str, workers: int, parts: Parts | None) -> Division:
    """How the documents are divided, from a first reading of the files or from `parts`."""
    if all(file.split for file in files.files):
        return Division(0, 0.0)
    if known := parts and parts.division():
        return Division(*known)
    measurements = []
    workers = max(1, min(workers, files.size // _WORTH_MEASURING))
    measured = in_order(partial(_measured_chunk, files), files.chunks(), workers)
    with _bar(files, f"{name}: sizes") as bar, closing(measured):
        for end, found in measured:
            measurements.append(found)
            bar.update(end - bar.n)
    whole = division(measurements, files.validation)
    if parts:
        parts.write_division([whole.boundary, whole.cut])
    return whole


def _bar(files: TextFiles, name: str) -> tqdm:
    return tqdm(total=files.size, desc=name, unit="B", unit_scale=True, disable=None)


def _measured_chunk(files: TextFiles, chunk: Chunk) -> tuple[int, tuple[np.ndarray, np.ndarray]]:
    return chunk.end, files.measured(chunk)


def _encoded_chunk(tokenizer: Tokenizer, files: TextFiles, whole: Division, chunk: Chunk) -> tuple[int, Documents]:
    return chunk.end, _encoded(tokenizer, files.documents(whole, chunk))[1]


def _encoded(tokenizer: Tokenizer, documents: list[tuple[str, str]]) -> tuple[int, Documents]:
    """(their number, the split and ids of those that have any; the end of text is the last id)."""
    dtype = DTYPES[id_dtype(tokenizer)]
    end = np.array([tokenizer.end_of_text], dtype)
    encoded = zip(documents, tokenizer.encode_documents([text for _, text in documents]), strict=True)
    ended = [(split, np.concatenate([ids.astype(dtype), end])) for (split, _), ids in encoded if len(ids)]
    return len(documents), ended


def _grouped(documents: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Consecutive documents in groups: large enough to occupy a tokenizer's threads, small enough for memory."""
    group, size = [], 0
    for document in documents:
        group.append(document)
        if (size := size + len(document[1])) >= _GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group
