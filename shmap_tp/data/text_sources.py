"""Sources of text: the Python standard library of this machine, files of text, Hugging Face data sets.

A source is a stream of (split, document).  The split of a document follows from a hash of its path or its text, so it
is the same on every machine, and copies of a document are in one split.  Files are divided by size: see `Division`.
"""

import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from shmap_tp.data.location import bucket_messages
from shmap_tp.data.metadata import TOKENIZER
from shmap_tp.data.source_files import ENDINGS, RECORDS, Chunk, SourceFile, chunks_of, files_at, text_field, texts_of
from shmap_tp.data.tokenizer import Tokenizer
from shmap_tp.errors import UserError
from shmap_tp.runtime.console import write_line

TRAIN, VALIDATION, TEST = "train", "validation", "test"
STDLIB_VALIDATION = 0.02
"""Fraction of the standard library used for validation."""

_SPLIT_NAMES = {TRAIN: "train(ing)?", VALIDATION: "(validation|valid|val|dev)", TEST: "(test(ing)?|eval(uation)?)"}
_ENDINGS = r"(\.[a-z]\w*)+$"
_EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
"""Directories of tests, of other packages, and of tables and documents that were written by programs."""
_GENERATED = ("config-", "_sysconfigdata")  # written when Python was built, so different on every machine


def split_of(key: str, validation: float) -> str:
    """Validation if a hash of `key`, scaled to [0, 1), is below the fraction `validation`, else train."""
    return VALIDATION if _hash(key.encode()) / 2**64 < validation else TRAIN


def _hash(text: bytes) -> int:
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


@dataclass(frozen=True)
class Division:
    """Which documents are for validation: a given fraction of the bytes of all, within 5% of it.

    The documents are ordered by a hash of their text, and those with the lowest hashes are for validation, up to the
    wanted size.  If that misses it by more than 5%, the next document is cut in two, and its end is for validation: so
    a single document is divided, too, and no text is in both splits.
    """

    boundary: int
    """Documents of lower hashes are for validation."""
    cut: float
    """The fraction of the document of this hash that is."""

    def parts(self, text: str) -> list[tuple[str, str]]:
        """The document as one or two pairs of (split, text)."""
        number = _hash(text.encode())
        if number != self.boundary:
            return [(VALIDATION if number < self.boundary else TRAIN, text)]
        place = round(len(text) * (1 - self.cut))
        return [(split, part) for split, part in ((TRAIN, text[:place]), (VALIDATION, text[place:])) if part]


def division(measurements: Iterable[tuple[np.ndarray, np.ndarray]], validation: float) -> Division:
    """The division of documents with these hashes and sizes (`TextFiles.measured`), in any order, into the fraction
    `validation` and the rest."""
    found = [(np.empty(0, np.uint64),) * 2, *measurements]
    hashes, sizes = (np.concatenate(part) for part in zip(*found, strict=True))
    order = np.argsort(hashes, kind="stable")
    hashes, ends = hashes[order], np.cumsum(sizes[order])
    if not len(ends) or not ends[-1]:
        return Division(0, 0.0)
    wanted = validation * float(ends[-1])
    boundary = hashes[np.searchsorted(ends, wanted)]
    first, last = np.searchsorted(hashes, boundary), np.searchsorted(hashes, boundary, side="right") - 1
    below, through = float(ends[first - 1]) if first else 0.0, float(ends[last])
    cut = (wanted - below) / (through - below)
    if below and wanted - below <= 0.05 * wanted:
        cut = 0.0
    elif through < ends[-1] and through - wanted <= 0.05 * wanted:
        cut = 1.0
    return Division(int(boundary), cut)


@dataclass(frozen=True)
class TextFiles:
    """The documents of files, in chunks that any process can read."""

    files: Sequence[SourceFile]
    field: str
    """The field of records that has their text."""
    validation: float
    """Fraction for validation of the files that have no split of their own."""

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(file.size for file in self.files)

    def chunks(self) -> Iterator[Chunk]:
        """All documents.  Raises UserError if a file is damaged."""
        return chunks_of(self.files, self.field)

    def measured(self, chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
        """(hashes, sizes in bytes) of those that have no split of their own, 8 bytes each."""
        texts = [] if chunk.file.split else [text.encode() for text in texts_of(chunk, self.field)]
        return np.array([_hash(text) for text in texts], np.uint64), np.array([len(text) for text in texts], np.uint64)

    def documents(self, division: Division, chunk: Chunk) -> list[tuple[str, str]]:
        """Pairs of (split, text).  Raises UserError if a line is no record with text."""
        texts = texts_of(chunk, self.field)
        if chunk.file.split:
            return [(chunk.file.split, text) for text in texts]
        return [part for text in texts for part in division.parts(text)]

    def divided(self) -> Iterator[tuple[str, str]]:
        """`documents` of all chunks; every file is read twice, and 16 bytes of memory are needed for a document."""
        whole = division(map(self.measured, self.chunks()), self.validation)
        for chunk in self.chunks():
            yield from self.documents(whole, chunk)


@dataclass(frozen=True)
class TextSource:
    """A named stream of documents, each assigned to a split."""

    name: str
    """Name of the source in meta.json."""
    documents: Iterator[tuple[str, str]]
    """Pairs of ("train" or "validation", text), read lazily."""
    total: int | None
    """Number of documents, if it is known in advance."""
    files: TextFiles | None = None
    """Where `documents` are those of files: these, which several processes can read, and again."""
    marked: ClassVar[bool] = False
    """Whether only some tokens count as targets; the others then stand as -1 - id."""

    def companions(self, tokenizer: Tokenizer) -> dict[str, bytes]:
        """The files that belong to the token files, by name."""
        return {} if tokenizer.json is None else {TOKENIZER: tokenizer.json}


def stdlib() -> TextSource:
    """The .py files of the running Python's standard library without its tests and tables, ordered by relative path.

    Files that are not UTF-8 or that contain a NUL are excluded.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path.relative_to(root).as_posix() for path in _python_files(root))

    def documents() -> Iterator[tuple[str, str]]:
        for path in paths:
            try:
                text = (root / path).read_bytes().decode()
            except UnicodeDecodeError:
                continue
            if "\0" not in text:
                yield split_of(path, STDLIB_VALIDATION), text

    version = ".".join(map(str, sys.version_info[:3]))
    return TextSource(f"standard library of Python {version}", documents(), len(paths))


def text_files(given: Sequence[str], field: str, validation: float, endings: Sequence[str] = ENDINGS) -> TextSource:
    """Files, and those with `endings` in directories: each record has a document in `field`, every other file is one.

    The fraction `validation` of the text, by size, is for validation (`Division`).
    """
    files = [file for each in given for file in files_at(each, endings)]
    texts = TextFiles(files, field, validation)
    return TextSource(", ".join(Path(each).name for each in given), texts.divided(), None, texts)


def dataset_directory(given: str, field: str, validation: float) -> TextSource:
    """The files of a Hugging Face data set: of the hub, or as `datasets` saves it.

    The name of a file, or else of its directory, says which split it belongs to; files of the test split are left
    out.  Without a validation split the fraction `validation` of the others is for validation, by size.
    """
    root = given.rstrip("/") if "://" in given else os.path.abspath(given)
    found = [(file, split_of_name(file.path.removeprefix(root))) for file in files_at(given, RECORDS, "--dataset")]
    named = {split for _, split in found}
    if not named & {TRAIN, None}:
        raise UserError(f"--dataset {given}: only files of the splits {', '.join(sorted(named))}; it needs `train`")
    if left_out := sum(split == TEST for _, split in found):
        write_line(f"--dataset {given}: left out {left_out} file{'s' * (left_out > 1)} of the test split")
    own = VALIDATION in named
    files = [replace(file, split=(split or TRAIN) if own else None) for file, split in found if split != TEST]
    texts = TextFiles(files, field, validation)
    return TextSource(Path(given).name, texts.divided(), None, texts)


def split_of_name(path: str) -> str | None:
    """The split that the name of a file says, or the nearest of its directories that says one, in a data set.

    It is the whole name, or the last word of a file's, before the number of the file: test, test-00000-of-00002,
    c4-test.00000-of-00002, but not a-test-bed.
    """
    *directories, file = path.lower().split("/")
    for name, begin in ((file, r"(.*[-_.])?"), *((name, "") for name in reversed(directories))):
        for split, words in _SPLIT_NAMES.items():
            if re.fullmatch(rf"{begin}{words}([-_.]?\d+([-_.]of[-_.]\d+)?)?", re.sub(_ENDINGS, "", name)):
                return split
    return None


def hub_dataset(name: str, field: str, validation: float) -> TextSource:
    """A data set of the Hugging Face hub, streamed: its own train and validation splits, or a fraction of train.

    The fraction is of the number of documents and met on average, since their sizes are not known beforehand.
    """
    with bucket_messages("--dataset", name):
        import datasets

        splits = datasets.load_dataset(name, streaming=True)
    if TRAIN not in splits:
        raise UserError(f"--dataset {name} has the splits {', '.join(splits)}; it needs a split called `{TRAIN}`")

    def documents() -> Iterator[tuple[str, str]]:
        for split in (s for s in (TRAIN, VALIDATION) if s in splits):
            with bucket_messages("--dataset", name):
                for row in splits[split]:
                    text = text_field(row, field, f"--dataset {name}")
                    yield (split if VALIDATION in splits else split_of(text, validation)), text

    return TextSource(name, documents(), None)


def _python_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _EXCLUDED and not name.startswith(_GENERATED)]
        yield from (Path(folder, name) for name in files if name.endswith(".py") and not name.startswith(_GENERATED))
