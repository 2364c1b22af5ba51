"""Sources of text: the Python standard library of this machine, local text and .jsonl files, Hugging Face data sets.

A source is a stream of (split, document), which it tokenizes.  The split of a document follows from a hash of its path
or its text, so it is the same on every machine, and copies of a document are in one split.  Local text is divided by
size: see `divide`.
"""

import hashlib
import os
import stat
import sys
import sysconfig
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
from jaxtyping import Integer
from tqdm import tqdm

from shmap_tp.data.metadata import TOKENIZER
from shmap_tp.data.tokenizer import Tokenizer
from shmap_tp.errors import UserError, first_line
from shmap_tp.runtime.files import file_size, parse_json, reading

TRAIN, VALIDATION = "train", "validation"
JSONL, JSON = ".jsonl", ".json"
CHAT = {"messages", "conversations", "completion"}
"""Fields of records that are conversations."""
ENDINGS = (".txt", JSONL)
"""Of the files that are read in a directory."""
STDLIB_VALIDATION = 0.02
"""Fraction of the standard library used for validation."""

_GROUP = 1 << 22  # characters that are tokenized at a time
_EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_GENERATED = ("config-", "_sysconfigdata")  # written when Python was built, so different on every machine


@dataclass(frozen=True)
class TextSource:
    """A named stream of documents, each assigned to a split."""

    name: str
    """Name of the source in meta.json."""
    documents: Iterator[tuple[str, str]]
    """Pairs of ("train" or "validation", text), read lazily."""
    total: int | None
    """Number of documents, if it is known in advance."""
    marked: ClassVar[bool] = False
    """Whether only some tokens count as targets; the others then stand as -1 - id."""

    def tokenized(self, tokenizer: Tokenizer) -> Iterator[tuple[str, Integer[np.ndarray, " _"]]]:
        """(split, ids) of each document that has text; the end of text is the last id."""
        with tqdm(total=self.total, desc=self.name, unit=" documents", disable=None) as bar:
            for group in _group(self.documents):
                ids = tokenizer.encode_documents([text for _, text in group])
                for (split, _), document in zip(group, ids, strict=True):
                    if len(document):
                        yield split, np.append(document, tokenizer.end_of_text)
                bar.update(len(group))

    def companions(self, tokenizer: Tokenizer) -> dict[str, bytes]:
        """The files that belong to the token files, by name."""
        return {} if tokenizer.json is None else {TOKENIZER: tokenizer.json}


def _group(documents: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Consecutive documents in groups: large enough to occupy a tokenizer's threads, small enough for memory."""
    group, size = [], 0
    for document in documents:
        group.append(document)
        size += len(document[1])
        if size >= _GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def split_of(key: str, validation: float) -> str:
    """Validation if a hash of `key`, scaled to [0, 1), is below the fraction `validation`, else train."""
    return VALIDATION if _hash(key.encode()) / 2**64 < validation else TRAIN


def _hash(text: bytes) -> int:
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


def divide(documents: Callable[[], Iterator[str]], validation: float) -> Iterator[tuple[str, str]]:
    """The documents, with splits such that the fraction `validation` of their bytes is for validation, within 5% of it.

    The documents are ordered by a hash of their text, and those with the lowest hashes are for validation, up to the
    wanted size.  If that misses it by more than 5%, the next document is cut in two, and its end is for validation: so
    a single document is divided, too, and no text is in both splits.  `documents` is called twice: for the sizes, which
    take 16 bytes of memory per document, and for the text.
    """
    hashes, sizes = array("Q"), array("Q")
    for text in documents():
        encoded = text.encode()
        hashes.append(_hash(encoded))
        sizes.append(len(encoded))
    boundary, cut = _boundary(np.array(hashes), np.array(sizes), validation)
    for text in documents():
        number = _hash(text.encode())
        if number != boundary:
            yield (VALIDATION if number < boundary else TRAIN), text
        else:
            place = round(len(text) * (1 - cut))
            yield from ((split, part) for split, part in ((TRAIN, text[:place]), (VALIDATION, text[place:])) if part)


def _boundary(hashes: np.ndarray, sizes: np.ndarray, validation: float) -> tuple[int, float]:
    """(the hash below which a document is for validation, the fraction of the document of that hash that is)."""
    order = np.argsort(hashes, kind="stable")
    hashes, ends = hashes[order], np.cumsum(sizes[order])
    if not len(ends) or not ends[-1]:
        return 0, 0.0
    wanted = validation * float(ends[-1])
    boundary = hashes[np.searchsorted(ends, wanted)]
    first, last = np.searchsorted(hashes, boundary), np.searchsorted(hashes, boundary, side="right") - 1
    below, through = float(ends[first - 1]) if first else 0.0, float(ends[last])
    cut = (wanted - below) / (through - below)
    if below and wanted - below <= 0.05 * wanted:
        cut = 0.0
    elif through < ends[-1] and through - wanted <= 0.05 * wanted:
        cut = 1.0
    return int(boundary), cut


def stdlib() -> TextSource:
    """The .py files of the running Python's standard library without its tests, ordered by relative path.

    Files that are not UTF-8 or that contain a NUL are excluded.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path.relative_to(root).as_posix() for path in _python_files(root))

    def documents() -> Iterator[tuple[str, str]]:
        for path in paths:
            try:
                with reading(root / path):
                    text = (root / path).read_bytes().decode()
            except UnicodeDecodeError:
                continue
            if "\0" not in text:
                yield split_of(path, STDLIB_VALIDATION), text

    version = ".".join(map(str, sys.version_info[:3]))
    return TextSource(f"standard library of Python {version}", documents(), len(paths))


def text_files(given: list[Path], field: str, validation: float, endings: Sequence[str] = ENDINGS) -> TextSource:
    """Local text: each line of a .jsonl file has a document in `field`, every other file is one document.  Directories
    are searched for files with `endings`.

    The fraction `validation` of the text, by size, is for validation (`divide`); every file is read twice.
    """
    check_fraction(validation)
    paths = [path for each in given for path in files_at(each, endings, "--text")]
    counted = not any(path.suffix == JSONL for path in paths)
    documents = partial(documents_in, paths, field)
    name = ", ".join(path.name for path in given)
    return TextSource(name, divide(documents, validation), len(paths) if counted else None)


def documents_in(paths: Iterable[Path], field: str) -> Iterator[str]:
    """The documents of text files.  Raises UserError if one cannot be read, or is not text."""
    for path in paths:
        if path.suffix == JSONL:
            yield from (_text_field(row, field, place) for place, row in records([path], "--text"))
        else:
            yield _read_text(path)


def hub_dataset(name: str, field: str, validation: float) -> TextSource:
    """A data set of the Hugging Face hub, streamed: its own train and validation splits, or a fraction of train.

    The fraction is of the number of documents and met on average, since their sizes are not known beforehand.
    """
    check_fraction(validation)
    try:
        import datasets
    except ImportError:
        raise UserError("--dataset needs `datasets`: pip install -e '.[data]'") from None
    try:
        splits = datasets.load_dataset(name, streaming=True)
    except Exception as error:  # the library raises whatever its network and file layers do
        raise UserError(f"--dataset {name} cannot be opened: {first_line(error)}") from None
    if TRAIN not in splits:
        raise UserError(f"--dataset {name} has the splits {', '.join(splits)}; it needs a split called `{TRAIN}`")

    def documents() -> Iterator[tuple[str, str]]:
        for split in (s for s in (TRAIN, VALIDATION) if s in splits):
            for row in _streamed(splits[split], name):
                text = _text_field(row, field, f"--dataset {name}")
                yield (split if VALIDATION in splits else split_of(text, validation)), text

    return TextSource(name, documents(), None)


def _streamed(rows: Iterable[dict], name: str) -> Iterator[dict]:
    """`rows`, with any error of the download raised as `UserError`."""
    try:
        yield from rows
    except Exception as error:  # as above
        raise UserError(f"--dataset {name} was interrupted: {first_line(error)}; run it again") from None


def _python_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if name not in _EXCLUDED and not name.startswith(_GENERATED)]
        yield from (Path(folder, name) for name in files if name.endswith(".py") and not name.startswith(_GENERATED))


def _refuse(error: OSError) -> None:
    """Raise the error of a directory that `os.walk` would leave out."""
    with reading(error.filename):
        raise error


def files_at(path: Path, endings: Sequence[str], option: str) -> list[Path]:
    """The files of a path that `option` names: the file itself, or all with one of `endings` in the directory."""
    with reading(path):
        is_directory = stat.S_ISDIR(path.stat().st_mode) if path.exists() else False
    if is_directory:
        walked = (Path(folder, name) for folder, _, names in os.walk(path, onerror=_refuse) for name in names)
        found = sorted((p for p in walked if p.name.endswith(tuple(endings))), key=Path.as_posix)
        if not found:
            raise UserError(
                f"{option} {path}: no {' or '.join(endings)} file in this directory; name files, of any ending"
            )
        return found
    if file_size(path) is None:
        raise UserError(f"{option} {path}: no such file or directory")
    return [path]


def _read_text(path: Path) -> str:
    """The contents of a text file.  Raises `UserError` if it is not UTF-8."""
    try:
        with _opened(path, "--text") as file:
            return file.read().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"--text {path}: byte {error.start} is not UTF-8; convert the file to UTF-8") from None


@contextmanager
def _opened(path: Path, option: str) -> Iterator[BinaryIO]:
    """The bytes of a regular file that `option` names.  Raises `UserError` if it cannot be read."""
    if file_size(path) is None:
        raise UserError(f"{option} {path}: no such file")
    with reading(path), path.open("rb") as file:
        yield file


def records(paths: Iterable[Path], option: str) -> Iterator[tuple[str, Any]]:
    """(where it is, the value) of each line of .jsonl files, and of each element of .json files that hold a list."""
    for path in paths:
        with _opened(path, option) as file:
            if path.suffix == JSON:
                rows = parse_json(file.read(), f"{option} {path}")
                rows = rows if isinstance(rows, list) else [rows]
                yield from ((f"{option} {path}, record {number}", row) for number, row in enumerate(rows, 1))
                continue
            for number, line in enumerate(file, 1):
                if line.strip():
                    place = f"{option} {path}, line {number}"
                    yield place, parse_json(line, place)


def _text_field(row: object, field: str, place: str) -> str:
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


def check_fraction(validation: float) -> None:
    """Raise `UserError` unless the validation fraction is in (0, 1)."""
    if not 0 < validation < 1:
        raise UserError(f"--validation {validation} is not between 0 and 1; 0.01 uses 1% for validation")
