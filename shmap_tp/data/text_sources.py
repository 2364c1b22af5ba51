"""Sources of text: the Python standard library of this machine, local .txt and .jsonl files, Hugging Face data sets.

A source is a stream of (split, document).  The split of a document is a hash of its path or its text, so it is the same
on every machine.
"""

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shmap_tp.errors import UserError

TRAIN, VALIDATION = "train", "validation"
EXTENSIONS = (".txt", ".jsonl")
STDLIB_VALIDATION = 0.02
"""Fraction of the standard library used for validation."""

_EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_GENERATED = ("config-", "_sysconfigdata")  # written when Python was built, so different on every machine


@dataclass(frozen=True)
class Source:
    """A named stream of documents, each assigned to a split."""

    name: str
    """Name of the source in meta.json."""
    documents: Iterator[tuple[str, str]]
    """Pairs of ("train" or "validation", text), read lazily."""
    total: int | None
    """Number of documents, if it is known in advance."""


def split_of(key: str, validation: float) -> str:
    """Validation if a hash of `key`, scaled to [0, 1), is below the fraction `validation`, else train."""
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
    return VALIDATION if number < validation else TRAIN


def stdlib() -> Source:
    """The .py files of the running Python's standard library without its tests, ordered by relative path.

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
    return Source(f"standard library of Python {version}", documents(), len(paths))


def text_files(given: list[Path], field: str, validation: float) -> Source:
    """Local text: a .txt file is one document, each line of a .jsonl file has one in `field`; directories are searched.

    A single .txt file is split in two instead: the last `validation` fraction of its characters is for validation.
    """
    _check_fraction(validation)
    paths = [path for each in given for path in _text_files_at(each)]

    name = ", ".join(path.name for path in given)
    if len(paths) == 1 and paths[0].suffix == ".txt":
        text = _read_text(paths[0])
        cut = round(len(text) * (1 - validation))
        return Source(name, iter([(TRAIN, text[:cut]), (VALIDATION, text[cut:])]), 2)

    def documents() -> Iterator[tuple[str, str]]:
        for path in paths:
            for text in [_read_text(path)] if path.suffix == ".txt" else _jsonl_texts(path, field):
                yield split_of(text, validation), text

    counted = all(path.suffix == ".txt" for path in paths)
    return Source(name, documents(), len(paths) if counted else None)


def hub_dataset(name: str, field: str, validation: float) -> Source:
    """A data set of the Hugging Face hub, streamed: its own train and validation splits, or a fraction of train."""
    _check_fraction(validation)
    try:
        import datasets
    except ImportError:
        raise UserError("--dataset needs `datasets`: pip install -e '.[data]'") from None
    try:
        splits = datasets.load_dataset(name, streaming=True)
    except Exception as error:  # the library raises whatever its network and file layers do
        raise UserError(f"--dataset {name} cannot be opened: {_first_line(error)}") from None
    if TRAIN not in splits:
        raise UserError(f"--dataset {name} has the splits {', '.join(splits)}; it needs a split called `{TRAIN}`")

    def documents() -> Iterator[tuple[str, str]]:
        for split in (s for s in (TRAIN, VALIDATION) if s in splits):
            for row in _streamed(splits[split], name):
                text = _text_field(row, field, f"--dataset {name}")
                yield (split if VALIDATION in splits else split_of(text, validation)), text

    return Source(name, documents(), None)


def _streamed(rows: Iterable[dict], name: str) -> Iterator[dict]:
    """`rows`, with any error of the download raised as `UserError`."""
    try:
        yield from rows
    except Exception as error:  # as above
        raise UserError(f"--dataset {name} was interrupted: {_first_line(error)}; run it again") from None


def _python_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _EXCLUDED and not name.startswith(_GENERATED)]
        yield from (Path(folder, name) for name in files if name.endswith(".py") and not name.startswith(_GENERATED))


def _text_files_at(path: Path) -> list[Path]:
    """The text files of a path on the command line: the file itself, or all in the directory."""
    endings = " or ".join(EXTENSIONS)
    if path.is_dir():
        found = sorted((p for p in path.rglob("*") if p.suffix in EXTENSIONS), key=Path.as_posix)
        if not found:
            raise UserError(f"--text {path}: no {endings} file in this directory; give files, or another directory")
        return found
    if not path.is_file():
        raise UserError(f"--text {path}: no such file or directory")
    if path.suffix not in EXTENSIONS:
        raise UserError(f"--text {path}: ends in {path.suffix!r}, but only {endings} are read; rename or convert it")
    return [path]


def _read_text(path: Path) -> str:
    """The contents of a .txt file.  Raises `UserError` if it is not UTF-8."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"--text {path}: byte {error.start} is not UTF-8; convert the file to UTF-8") from None


def _jsonl_texts(path: Path, field: str) -> Iterator[str]:
    """The text of each line of a .jsonl file."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"--text {path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{place}: not JSON: {_first_line(error)}; each line must be one object") from None
            yield _text_field(row, field, place)


def _text_field(row: object, field: str, place: str) -> str:
    """The text of one record, read at `place`.  Raises `UserError` if it has none or cannot be encoded."""
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        fields = ", ".join(row) if isinstance(row, dict) else "none"
        raise UserError(f"{place}: no text in the field {field!r} (fields: {fields}); set it with --field")
    text = row[field]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{place}: character {error.start} of {field!r} is half a surrogate pair; fix it") from None
    return text


def _check_fraction(validation: float) -> None:
    """Raise `UserError` unless the validation fraction is in (0, 1)."""
    if not 0 < validation < 1:
        raise UserError(f"--validation {validation} is not between 0 and 1; 0.01 uses 1% for validation")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
