"""Files of text, on a disk or in a bucket, read by fsspec in chunks: no file is held in memory, except one that is a
document.

What a file holds follows from its ending:

    .jsonl                a document in each line, which is a record of JSON; also .json.gz and .json.zst
    .parquet  .arrow      a document in each row of a column
    any other             one document, the text of the file

Those of the first and the last kind may be compressed: .gz or .zst.
"""

import gzip
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, IOBase
from itertools import groupby
from typing import Any

from shmap_tp.data.location import bucket_messages, open_file_system
from shmap_tp.data.tokenizer import check_text
from shmap_tp.errors import UserError, shown
from shmap_tp.runtime.files import first_contact, parse_json

CHUNK = 1 << 22
"""Bytes or characters of a chunk; one that has a longer document has only that."""
_BLOCK = 1 << 18  # bytes that are read or decompressed at a time
_ROWS = 64  # of a Parquet file that are read at a time: few, since each may be a book
_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst")
_TABLES = (".parquet", ".arrow")
JSON = ".json"
CHAT = {"messages", "conversations", "completion"}
"""Fields of records that are conversations."""
OF_DATASETS = {"dataset_info.json", "state.json", "dataset_dict.json"}
"""Files that `save_to_disk` of datasets writes beside those of the data."""
CHATS = (*_LINES, JSON, *_TABLES)
"""Endings of files of conversations."""
RECORDS = (*_LINES, *_TABLES)
"""Endings of files whose documents are records."""
ENDINGS = (".txt", ".txt.gz", ".txt.zst", *RECORDS)
"""Endings of the files that are read in a directory."""


@dataclass(frozen=True)
class SourceFile:
    """A file that exists."""

    path: str
    """A local path, or a URL."""
    size: int
    """In bytes."""
    version: str | None
    """What changes when its content does; None where that is not known."""
    split: str | None = None
    """The split of all its documents, if it is known."""
    option: str = "--text"
    """The option that named it."""

    @property
    def place(self) -> str:
        """The file in messages."""
        return f"{self.option} {shown(self.path)}"


@dataclass(frozen=True)
class Chunk:
    """Some consecutive documents of one file, or of several that are a document each."""

    file: SourceFile
    """The last one."""
    content: list[bytes] | list[str]
    """Lines of JSON, or texts."""
    first: int
    """Number of the first line, from 1."""
    end: int
    """Bytes of all files that are read up to its end."""


def files_at(given: str, endings: Sequence[str] = ENDINGS, option: str = "--text") -> list[SourceFile]:
    """The file `given`, a path or a URL, or all with one of `endings` below that directory.  Raises UserError."""

    def contact() -> tuple[Any, dict]:
        system, root = open_file_system(option, given)
        return system, system.info(root)

    with bucket_messages(option, given):
        system, info = first_contact(contact)
        is_directory = info["type"] == "directory"
        found = [*_files_below(system, info["name"], endings)] if is_directory else [info]
    other = next((info["name"] for info in found if info["type"] != "file"), None)  # a FIFO would be waited for
    if other or not found:
        others = "files, of any ending" if option == "--text" else "another"
        what = f"{shown(other)} is no regular file" if other else f"no {', '.join(endings)} file in this directory"
        raise UserError(f"{option} {given}: {what}; name {others}")
    url = system.unstrip_protocol if "://" in given else str
    files = [SourceFile(url(info["name"]), info["size"], _version(info), option=option) for info in found]
    return sorted(files, key=lambda file: file.path)


def _files_below(system: Any, directory: str, endings: Sequence[str]) -> Iterator[dict]:
    """What the file system knows of each file.  (Its own `walk` leaves out directories that it cannot list.)"""
    for info in system.ls(directory, detail=True):
        path = info["name"].rstrip("/")
        if info["type"] == "directory":
            yield from _files_below(system, path, endings) if path != directory.rstrip("/") else ()
        elif _is_text(path.rpartition("/")[2], endings):
            info = system.info(path) if info.get("islink") else info
            yield from [info] if info["type"] != "directory" else ()


def _version(info: dict) -> str | None:
    """What file systems say of a file's content."""
    known = [info[key] for key in ("etag", "ETag", "mtime", "LastModified", "updated", "created") if info.get(key)]
    return str(known[0]) if known else None


def _is_text(name: str, endings: Sequence[str]) -> bool:
    """Whether a file of a directory is read: `datasets` leaves results and descriptions of its own beside the data."""
    is_result = name.startswith("cache-") and name.endswith(".arrow")
    return name.endswith(tuple(endings)) and not is_result and name not in OF_DATASETS


def chunks_of(files: Sequence[SourceFile], field: str) -> Iterator[Chunk]:
    """The documents of `files`, which records have in `field`, in their order.  Raises UserError if one is damaged."""
    before = 0
    for _, group in groupby(files, lambda file: file.path.endswith(RECORDS) and file.path):
        content, size, first = [], 0, 1
        for file in group:
            for document, position in _documents(file, field):
                content.append(document)
                size += len(document) + 1
                if size >= CHUNK:
                    yield Chunk(file, content, first, before + position)
                    content, size, first = [], 0, first + len(content)
            before += file.size
        yield Chunk(file, content, first, before)


def texts_of(chunk: Chunk, field: str) -> Iterator[str]:
    """The documents of a chunk.  Raises UserError if a line is no record with text in `field`."""
    if chunk.file.path.endswith(_LINES):
        for place, row in _parsed(chunk.content, chunk.first, chunk.file.place):
            yield text_field(row, field, place)
    else:
        yield from chunk.content


def records_of(files: Sequence[SourceFile]) -> Iterator[tuple[str, Any]]:
    """(where it is, the value) of each record of files of JSON lines or of tables, and of .json files with a list."""
    for file in files:
        place = file.place
        with _opened(file) as (stored, content):
            if file.path.endswith(_TABLES):
                for number, row in enumerate(_rows(stored, file.path, None), 1):
                    yield f"{place}, row {number}", _without_nulls(row)
            elif file.path.endswith(JSON):
                found = parse_json(content.read(), place)
                for number, row in enumerate(found if isinstance(found, list) else [found], 1):
                    yield f"{place}, record {number}", row
            else:
                yield from _parsed(content, 1, place)


def _parsed(lines: Iterable[bytes], first: int, place: str) -> Iterator[tuple[str, Any]]:
    """(where it is, the value) of each line that is not empty."""
    for number, line in enumerate(lines, first):
        if line.strip():
            yield f"{place}, line {number}", parse_json(line, f"{place}, line {number}")


def _without_nulls(value: Any) -> Any:
    """A table has every field of every record; one that a record lacks is null."""
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return value


def text_field(row: object, field: str, place: str) -> str:
    """The text of one record, read at `place`.  Raises `UserError` if it has none or cannot be encoded."""
    row = row if isinstance(row, dict) else {}
    if not isinstance(row.get(field), str):
        what = f"which is {shown(row[field])}" if field in row else f"fields: {', '.join(row) or 'none'}"
        way = "train on conversations with --chat" if CHAT & row.keys() else "set it with --field"
        raise UserError(f"{place}: no text in the field {field!r} ({what}); {way}")
    check_text(row[field], f"{place}: the field {field!r}")
    return row[field]


def _documents(file: SourceFile, field: str) -> Iterator[tuple[bytes | str, int]]:
    """(each document of a file, or line of JSON; how many bytes of the file are read by then)."""
    place = file.place
    with _opened(file) as (stored, content):
        if file.path.endswith(_TABLES):
            for number, row in enumerate(_rows(stored, file.path, field), 1):
                yield text_field(row, field, f"{place}, row {number}"), stored.tell()
        elif file.path.endswith(_LINES):
            for line in content:
                yield line, stored.tell()
        else:
            try:
                yield content.read().decode(), file.size
            except UnicodeDecodeError as error:
                message = f"{place}: byte {error.start} is not UTF-8; convert the file to UTF-8"
                raise UserError(message) from None


@contextmanager
def _opened(file: SourceFile) -> Iterator[tuple[IOBase, IOBase]]:
    """(a file as it is stored, its content).  Raises `UserError` if it cannot be read, is damaged or ends too early."""
    with bucket_messages(file.option, file.path):
        system, path = open_file_system(file.option, file.path)
        with system.open(path, "rb") as stored:
            yield stored, BufferedReader(_decompressed(stored, path), _BLOCK)


def _decompressed(stored: IOBase, path: str) -> Any:
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=stored)
    if path.endswith(".zst"):
        import pyarrow  # fsspec would take `zstandard`, which reads a file that ends too early without an error

        return pyarrow.CompressedInputStream(stored, "zstd")
    return stored


def _rows(stored: IOBase, path: str, field: str | None) -> Iterator[dict[str, Any]]:
    """The rows of a table, by their columns; if there is a column `field`, that alone.

    `pyarrow.dataset` does not read the streams that `datasets` saves, and holds many row groups in memory.
    """
    import pyarrow

    if path.endswith(".parquet"):
        from pyarrow.parquet import ParquetFile

        file = ParquetFile(stored, buffer_size=_BLOCK, pre_buffer=False, page_checksum_verification=True)
        columns = [field] if field in file.schema_arrow.names else None
        batches = file.iter_batches(_ROWS, columns=columns)
    else:
        random_access = stored.read(6) == b"ARROW1"
        stored.seek(0)
        file = (pyarrow.ipc.open_file if random_access else pyarrow.ipc.open_stream)(stored)
        batches = map(file.get_batch, range(file.num_record_batches)) if random_access else file
    for batch in batches:
        yield from (batch.select([field]) if field in batch.schema.names else batch).to_pylist()
