"""Where text comes from: the Python library of this machine, local .txt and .jsonl files, a Hugging Face data set.

A source is a stream of (split, document).  Whether a document trains or validates is decided by a hash of its path or
its text, never by chance or position: the split is the same on every machine.
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


_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


_GENERATED = ("config-", "_sysconfigdata")  # written when Python was built: other text on every machine


@dataclass(frozen=True)
class Source:
    name: str
    """What meta.json calls it."""
    documents: Iterator[tuple[str, str]]
    """Pairs of "train" or "validation" and a text, each read when it is asked for."""
    total: int | None
    """How many documents there are, where that is known beforehand."""


def split_of(key: str, validation: float) -> str:
    """The split of the document named `key`: a fixed hash of it, as a number in [0, 1), below `validation` or not."""
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
    return VALIDATION if number < validation else TRAIN


def stdlib() -> Source:
    """The .py files of the running Python's standard library in the order of their relative paths, without its tests.

    Files that are not UTF-8 or that contain a NUL are left out.
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
    """Local text: a .txt file is a document, a line of a .jsonl file holds one in `field`; directories are searched.

    A single .txt file is cut instead: its last part, `validation` of its characters, is what validates.
    """
    _check_fraction(validation)
    paths = [path for each in given for path in _found(each)]

    name = ", ".join(path.name for path in given)
    if len(paths) == 1 and paths[0].suffix == ".txt":
        text = _text(paths[0])
        cut = round(len(text) * (1 - validation))
        return Source(name, iter([(TRAIN, text[:cut]), (VALIDATION, text[cut:])]), 2)

    def documents() -> Iterator[tuple[str, str]]:
        for path in paths:
            for text in [_text(path)] if path.suffix == ".txt" else _lines(path, field):
                yield split_of(text, validation), text

    counted = all(path.suffix == ".txt" for path in paths)
    return Source(name, documents(), len(paths) if counted else None)


def hub_dataset(name: str, field: str, validation: float) -> Source:
    """A data set of the Hugging Face hub, streamed: its own train and validation splits, or `validation` of train."""
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
        raise UserError(f"--dataset {name} has the splits {', '.join(splits)}; a split called `{TRAIN}` is needed")

    def documents() -> Iterator[tuple[str, str]]:
        for split in (s for s in (TRAIN, VALIDATION) if s in splits):
            for row in _streamed(splits[split], name):
                text = _field(row, field, f"--dataset {name}")
                yield (split if VALIDATION in splits else split_of(text, validation)), text

    return Source(name, documents(), None)


def _streamed(rows: Iterable[dict], name: str) -> Iterator[dict]:
    try:
        yield from rows
    except Exception as error:  # as above, at any moment of the download
        raise UserError(f"--dataset {name} broke off: {_first_line(error)}; run it again") from None


def _python_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT and not name.startswith(_GENERATED)]
        yield from (Path(folder, name) for name in files if name.endswith(".py") and not name.startswith(_GENERATED))


def _found(path: Path) -> list[Path]:
    """The text files that a path on the command line stands for."""
    endings = " or ".join(EXTENSIONS)
    if path.is_dir():
        found = sorted((p for p in path.rglob("*") if p.suffix in EXTENSIONS), key=Path.as_posix)
        if not found:
            raise UserError(f"--text {path}: no {endings} file in this directory; name files, or another directory")
        return found
    if not path.is_file():
        raise UserError(f"--text {path}: there is no such file or directory")
    if path.suffix not in EXTENSIONS:
        raise UserError(f"--text {path}: ends in {path.suffix!r}, and only {endings} are read; rename or convert it")
    return [path]


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"--text {path}: byte {error.start} is not UTF-8; convert the file to UTF-8") from None


def _lines(path: Path, field: str) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"--text {path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{place}: not JSON: {_first_line(error)}; each line must be one object") from None
            yield _field(row, field, place)


def _field(row: object, field: str, place: str) -> str:
    """The text of one record."""
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        fields = ", ".join(row) if isinstance(row, dict) else "none"
        raise UserError(f"{place}: no text in the field {field!r} (fields: {fields}); name the right one with --field")
    text = row[field]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{place}: character {error.start} of {field!r} is half a surrogate pair; repair it") from None
    return text


def _check_fraction(validation: float) -> None:
    if not 0 < validation < 1:
        raise UserError(f"--validation {validation} is not between 0 and 1; 0.01 keeps a hundredth for validation")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
