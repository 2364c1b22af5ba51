"""Files of text, on a disk or in a bucket, read in chunks: no file is held in memory, except one that is a document.

What a file holds follows from its ending:

    .jsonl                a document in each line, which is a record of JSON; also .json.gz and .json.zst
    .parquet  .arrow      a document in each row of a column (`table_files.py`)
    any other             one document, the text of the file

Those of the first and the last kind may be compressed: .gz or .zst.
"""

import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import IOBase
from itertools import groupby
from pathlib import Path
from typing import Any

from shmap_tp.data.location import bucket_messages, open_file_system
from shmap_tp.data.table_files import TABLES, read_rows, read_table
from shmap_tp.errors import UserError, first_line, shown
from shmap_tp.runtime.files import file_size, first_contact, parse_json, reading

CHUNK = 1 << 22
"""Bytes or characters of a chunk; one that has a longer document has only that."""
_BLOCK = 1 << 16  # bytes that are decompressed at a time: a small file may become a thousand times as large
_COMPRESSED = (".gz", ".zst")
_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst")
JSON = ".json"
CHAT = {"messages", "conversations", "completion"}
"""Fields of records that are conversations."""
OF_DATASETS = {"dataset_info.json", "state.json", "dataset_dict.json"}
"""Files that `save_to_disk` of datasets writes beside those of the data."""
CHATS = (*_LINES, JSON, *TABLES)
"""Of files of conversations."""
RECORDS = (*_LINES, *TABLES)
"""Of files whose documents are records."""
ENDINGS = (".txt", ".txt.gz", ".txt.zst", *RECORDS)
"""Of the files that are read in a directory."""


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
    """That of all its documents, if it is known."""
    option: str = "--text"
    """The option that named it."""

    @property
    def place(self) -> str:
        """The file in messages."""
        return f"{self.option} {shown(self.path)}"


@dataclass(frozen=True)
class Chunk:
    """Some consecutive documents of one file, or of several that are a document each."""

    place: str
    """Where they are, for messages."""
    content: bytes | list[str]
    """Lines of JSON, or texts."""
    first: int
    """Number of the first line, from 1."""
    taken: int
    """Bytes of the files that were read for it."""
    split: str | None
    """That of all its documents, if it is known."""


def files_at(given: str, endings: Sequence[str] = ENDINGS, option: str = "--text") -> list[SourceFile]:
    """The file `given`, a path or a URL, or all with one of `endings` in that directory.  Raises UserError."""
    find = _files_of_bucket if "://" in given else _local_files
    found = [replace(file, option=option) for file in find(given, endings, option)]
    if not found:
        others = "files, of any ending" if option == "--text" else "another"
        raise UserError(f"{option} {given}: no {', '.join(endings)} file in this directory; name {others}")
    return sorted(found, key=lambda file: file.path)


def chunks_of(files: Sequence[SourceFile], field: str) -> Iterator[Chunk]:
    """The documents of `files`, which records have in `field`, in their order.  Raises UserError if one is damaged."""
    for records, group in groupby(files, lambda file: file.path.endswith(RECORDS)):
        if not records:
            yield from _document_chunks(group)
            continue
        for file in group:
            yield from _table_chunks(file, field) if file.path.endswith(TABLES) else _line_chunks(file)


def texts_of(chunk: Chunk, field: str) -> Iterator[str]:
    """The documents of a chunk.  Raises UserError if a line is no record with text in `field`."""
    if isinstance(chunk.content, list):
        yield from chunk.content
    else:
        yield from (text_field(row, field, place) for place, row in _records(chunk))


def records_of(files: Sequence[SourceFile]) -> Iterator[tuple[str, Any]]:
    """(where it is, the value) of each record of files of JSON lines or of tables, and of .json files with a list."""
    for file in files:
        if file.path.endswith(TABLES):
            with _opened(file) as stream:
                for number, row in enumerate(read_rows(stream, file.path, file.place), 1):
                    yield f"{file.place}, row {number}", row
        elif file.path.endswith(JSON):
            with _opened(file) as stream:
                found = parse_json(b"".join(_blocks(file, stream)), file.place)
            for number, row in enumerate(found if isinstance(found, list) else [found], 1):
                yield f"{file.place}, record {number}", row
        else:
            for chunk in _line_chunks(file):
                yield from _records(chunk)


def _records(chunk: Chunk) -> Iterator[tuple[str, Any]]:
    """(where it is, the value) of each line."""
    for number, line in enumerate(chunk.content.split(b"\n"), chunk.first):
        if line.strip():
            place = f"{chunk.place}, line {number}"
            yield place, parse_json(line, place)


def text_field(row: object, field: str, place: str) -> str:
    """The text of one record, read at `place`.  Raises `UserError` if it has none or cannot be encoded."""
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        fields = ", ".join(row) if isinstance(row, dict) else "none"
        way = "train on conversations with --chat" if CHAT & {*fields.split(", ")} else "set it with --field"
        raise UserError(f"{place}: no text in the field {field!r} (fields: {fields}); {way}")
    text = row[field]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{place}: character {error.start} of {field!r} is half a surrogate pair; fix it") from None
    return text


def refuse(error: OSError) -> None:
    """Raise the error of a directory that `os.walk` would leave out."""
    with reading(error.filename):
        raise error


def _local_files(given: str, endings: Sequence[str], option: str) -> list[SourceFile]:
    path = Path(given)
    with reading(path):
        is_directory = stat.S_ISDIR(path.stat().st_mode) if path.exists() else False
    if not is_directory:
        return [_local_file(path, option)]
    walked = (Path(folder, name) for folder, _, names in os.walk(path, onerror=refuse) for name in names)
    return [_local_file(file, option) for file in walked if _is_text(file.name, endings)]


def _local_file(path: Path, option: str) -> SourceFile:
    if (size := file_size(path)) is None:
        raise UserError(f"{option} {path}: no such file or directory")
    return SourceFile(str(path), size, str(path.stat().st_mtime_ns))


def _files_of_bucket(url: str, endings: Sequence[str], option: str) -> list[SourceFile]:
    def listed() -> tuple[Any, dict[str, dict]]:
        system, root = open_file_system(option, url)
        if not system.exists(root):
            raise UserError(f"{option} {shown(url)}: no such file or directory")
        found = system.info(root)
        return system, system.find(root, detail=True) if found["type"] == "directory" else {"": found}

    with bucket_messages(option, url):
        system, found = first_contact(listed)
        chosen = {path: info for path, info in found.items() if not path or _is_text(path.rsplit("/", 1)[-1], endings)}
        return [
            SourceFile(system.unstrip_protocol(info["name"]), info["size"], _version(info)) for info in chosen.values()
        ]


def _version(info: dict) -> str | None:
    """What the file systems of buckets say of a file's content."""
    known = [info[key] for key in ("etag", "ETag", "mtime", "LastModified", "updated", "created") if info.get(key)]
    return str(known[0]) if known else None


def _is_text(name: str, endings: Sequence[str]) -> bool:
    """Whether a file of a directory is read: `datasets` leaves results and descriptions of its own beside the data."""
    is_result = name.startswith("cache-") and name.endswith(".arrow")
    return name.endswith(tuple(endings)) and not is_result and name not in OF_DATASETS


@contextmanager
def _opened(file: SourceFile) -> Iterator[IOBase]:
    """The bytes of a file.  Raises `UserError` if it cannot be read."""
    if "://" in file.path:
        with bucket_messages(file.option, file.path):
            system, path = open_file_system(file.option, file.path)
            with system.open(path, "rb") as stream:
                yield stream
        return
    if file_size(Path(file.path)) is None:
        raise UserError(f"{file.place}: no such file")
    with reading(file.path), open(file.path, "rb") as stream:
        yield stream


def _blocks(file: SourceFile, stream: IOBase) -> Iterator[bytes]:
    """What a file holds, decompressed.  Raises UserError if it is damaged, or ends too early."""
    if not file.path.endswith(_COMPRESSED):
        yield from iter(lambda: stream.read(CHUNK), b"")
        return
    kind = file.path.rpartition(".")[2]
    make, error_of_library = _gzip() if kind == "gz" else _zstandard(file)
    frame = None  # a file may have several, one after the other
    while block := stream.read(_BLOCK):
        while block:
            frame = frame or make()
            try:
                yield frame.decompress(block)
            except error_of_library as error:
                raise UserError(
                    f"{file.place}: damaged before byte {stream.tell()}: {first_line(error)}; copy it again"
                ) from None
            block = frame.unused_data.lstrip(b"\0") if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise UserError(f"{file.place}: ends after {file.size} bytes, within its {kind} data; copy it again")


def _gzip() -> tuple[Callable[[], Any], type[Exception]]:
    return lambda: zlib.decompressobj(wbits=31), zlib.error


def _zstandard(file: SourceFile) -> tuple[Callable[[], Any], type[Exception]]:
    try:
        import zstandard
    except ImportError:
        raise UserError(f"{file.place} needs `zstandard`: pip install -e '.[data]'") from None
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj, zstandard.ZstdError


def _whole_text(file: SourceFile) -> str:
    """The contents of a text file.  Raises `UserError` if it is not UTF-8."""
    with _opened(file) as stream:
        content = b"".join(_blocks(file, stream))
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{file.place}: byte {error.start} is not UTF-8; convert the file to UTF-8") from None


def _document_chunks(files: Iterable[SourceFile]) -> Iterator[Chunk]:
    """Files that are a document each."""
    place, texts, size, taken = "", list[str](), 0, 0
    for file in files:
        texts.append(_whole_text(file))
        place, size, taken = place or file.place, size + len(texts[-1]), taken + file.size
        if size >= CHUNK:
            yield Chunk(place, texts, 1, taken, None)
            place, texts, size, taken = "", [], 0, 0
    if texts:
        yield Chunk(place, texts, 1, taken, None)


def _line_chunks(file: SourceFile) -> Iterator[Chunk]:
    """The lines of a file."""
    first, begin, waiting, size = 1, 0, list[bytes](), 0
    with _opened(file) as stream:
        for block in _blocks(file, stream):
            end = block.rfind(b"\n") + 1
            if end and size + end >= CHUNK:
                content = b"".join([*waiting, block[:end]])
                yield Chunk(file.place, content, first, stream.tell() - begin, file.split)
                first, begin, waiting, size = first + content.count(b"\n"), stream.tell(), [], 0
                block = block[end:]
            waiting.append(block)
            size += len(block)
    yield Chunk(file.place, b"".join(waiting), first, file.size - begin, file.split)


def _table_chunks(file: SourceFile, field: str) -> Iterator[Chunk]:
    """The rows of a file."""
    texts, size, begin, taken = list[str](), 0, 0.0, 0.0
    with _opened(file) as stream:
        for rows, share in read_table(stream, file.path, field, file.place):
            texts += rows
            size, taken = size + sum(map(len, rows)), taken + share * file.size
            if size >= CHUNK:
                yield Chunk(file.place, texts, 1, int(taken) - int(begin), file.split)
                texts, size, begin = [], 0, taken
    yield Chunk(file.place, texts, 1, file.size - int(begin), file.split)
