"""Writes the token files of a text source: train.bin, validation.bin, meta.json and a copy of the tokenizer.

Each document is followed by an end-of-text token; meta.json describes the files, and has the sha256 of tokenizer.json.
All are written to a hidden directory beside the target, which is renamed to the target when it is complete: an
interrupted preparation leaves nothing that looks finished.  The same text always gives the same bytes.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from shmap_tp.config.schema import DataConfig
from shmap_tp.config.values import check_path
from shmap_tp.data import text_sources
from shmap_tp.data.location import FILES, STDLIB
from shmap_tp.data.metadata import DTYPES, META, SPLITS, TOKENIZER
from shmap_tp.data.packing import pack
from shmap_tp.data.staging import remove_stale, staging
from shmap_tp.data.tokenizer import Bytes, Tokenizer
from shmap_tp.data.tokenizing import id_dtype, parts_key, tokenized
from shmap_tp.errors import UserError, shown
from shmap_tp.runtime.console import print_on_process_0
from shmap_tp.runtime.files import file_size, reading

_WINDOW = 1 << 24  # tokens that are packed at a time


class TokenWriter:
    """Appends documents to one .bin file and keeps its token count and sha256."""

    def __init__(self, path: Path, dtype: np.dtype, end_of_text: int):
        self._file, self._dtype = path.open("xb"), dtype
        self._end = np.array([end_of_text], dtype)
        self.tokens, self._digest = 0, hashlib.sha256()

    def write(self, ids: np.ndarray) -> None:
        """Append one document and the end-of-text token."""
        self._append(np.concatenate([ids.astype(self._dtype), self._end]))

    def finish(self) -> None:
        """Append what is left when all documents are written."""

    def _append(self, tokens: np.ndarray) -> None:
        self._digest.update(tokens)
        self._file.write(tokens)
        self.tokens += tokens.size

    def close(self) -> None:
        """Write what is buffered.  Raises OSError if the disk refuses, and closes the file even then."""
        self._file.close()

    def sha256(self) -> str:
        """sha256 of what was written."""
        return self._digest.hexdigest()


class PackingWriter(TokenWriter):
    """Appends documents in rows of `row` tokens (`packing.py`), some millions of tokens at a time.

    The token after each row, which is its last target, is the first of the next one, or an end of text after all.
    """

    def __init__(self, path: Path, dtype: np.dtype, end_of_text: int, row: int):
        super().__init__(path, dtype, end_of_text)
        self._row, self._documents, self._waiting = row, list[np.ndarray](), 0
        self.of_documents = 0
        """Tokens that are no filling."""

    def write(self, ids: np.ndarray) -> None:
        """Append one document and the end-of-text token."""
        self._documents.append(np.concatenate([ids.astype(self._dtype), self._end]))
        self._waiting += len(ids) + 1
        if self._waiting >= _WINDOW:
            self._pack()

    def finish(self) -> None:
        if self._documents:
            self._pack()
            self._append(self._end)

    def _pack(self) -> None:
        self._append(pack(self._documents, self._row, int(self._end[0])))
        self.of_documents += self._waiting
        self._documents, self._waiting = [], 0


def prepare(
    source: text_sources.TextSource,
    tokenizer: Tokenizer,
    out: Path | str,
    *,
    row: int | None = None,
    overwrite: bool = False,
    key: str = "--out",
    workers: int = 1,
) -> dict:
    """Write the files of `source` to the directory `out`; return what meta.json holds.

    With `row` whole documents are packed into rows of so many tokens.  `workers` processes tokenize; the files are the
    same whatever their number.  What a killed preparation of the same files with the same tokenizer has finished is not
    done again; what others left behind is removed.  `key` is the option by which the user gave `out`, for messages.
     Raises `UserError` if `out` already holds files (with `overwrite`: files other than prepared data),
    cannot be written, or if a split has no document.
    """
    target = check_out(out, overwrite, key)
    name = parts_key(source, tokenizer)
    with _messages(out, key), staging(target, overwrite, name) as directory:
        parts = None if name is None else directory / name
        with closing(tokenized(source, tokenizer, workers, parts)) as documents:
            meta = _write_splits(source.name, documents, tokenizer, directory, row)
        if parts is not None:
            shutil.rmtree(parts, ignore_errors=True)
        if tokenizer.json is not None:
            (directory / TOKENIZER).write_bytes(tokenizer.json)
        (directory / META).write_text(json.dumps(meta, indent=2) + "\n")
    return meta


def check_out(out: Path | str, overwrite: bool, key: str = "--out") -> Path:
    """The real path of `out`, where data can be prepared; `key` and errors as of `prepare`."""
    if "://" in str(out):
        raise UserError(f"{key} {out} is a URL, but {key} must name a directory; copy it there when it is prepared")
    check_path(key, str(out), ())
    with _messages(out, key):
        target = Path(os.path.realpath(out))
        remove_stale(target)
        _check_free(target, overwrite, key)
        return target


@contextmanager
def _messages(out: Path | str, key: str) -> Iterator[None]:
    """Context that writes to `out`.  An error of the file system becomes a UserError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{shown(out)} cannot be written: {reason}; fix the cause, or choose another {key}") from None


def prepare_missing(data: DataConfig) -> None:
    """Prepare data.dir if it is empty and data.source names what this machine has; safe in parallel processes."""
    if data.source == STDLIB and "://" not in data.dir and file_size(Path(data.dir) / "train.bin") is None:
        print_on_process_0(f"preparing {data.dir} from the Python standard library of this machine ...")
        prepare_stdlib(data.dir)


def prepare_stdlib(out: Path | str) -> dict:
    """Prepare the Python standard library in the data.dir `out` unless it is there; safe in parallel processes."""
    try:
        return prepare(text_sources.stdlib(), Bytes(), out, key="data.dir")
    except UserError:
        if file_size(meta := Path(out) / META) is None:
            raise
        with reading(meta):
            return json.loads(meta.read_bytes())


def _write_splits(
    name: str, documents: Iterable[tuple[str, np.ndarray]], tokenizer: Tokenizer, directory: Path, row: int | None
) -> dict:
    """Write both .bin files; return the contents of meta.json."""
    dtype = id_dtype(tokenizer)
    make = TokenWriter if row is None else partial(PackingWriter, row=row)
    with ExitStack() as closing_files:
        writers = {s: make(directory / f"{s}.bin", DTYPES[dtype], tokenizer.end_of_text) for s in SPLITS}
        for writer in writers.values():
            closing_files.callback(writer.close)
        for split, ids in documents:
            writers[split].write(ids)
        for writer in writers.values():
            writer.finish()
    for split, writer in writers.items():
        if not writer.tokens:
            raise UserError(
                f"{name}: no text for {split}.bin, but both splits need some; "
                "add documents or choose another fraction with --validation"
            )
    packed = {} if row is None else {"row": row, "of_documents": {s: each.of_documents for s, each in writers.items()}}
    return {
        "vocabulary": tokenizer.vocabulary,
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": None if tokenizer.json is None else hashlib.sha256(tokenizer.json).hexdigest(),
        "source": name,
        "end_of_text": tokenizer.end_of_text,
        "dtype": dtype,
        "tokens": {split: writer.tokens for split, writer in writers.items()},
        "sha256": {split: writer.sha256() for split, writer in writers.items()},
    } | packed


def _check_free(target: Path, overwrite: bool, key: str) -> None:
    """Raise `UserError` unless `target` is new or empty, or holds prepared data that may be replaced."""
    if os.path.lexists(target) and not target.is_dir():
        kind = "a symlink loop" if target.is_symlink() else "a file"
        raise UserError(f"{target} is {kind}; {key} must name a directory")
    existing = {path.name for path in target.iterdir()} if target.is_dir() else set()
    if foreign := existing.difference(FILES):
        raise UserError(f"{target} holds {shown(min(foreign))}, which is not prepared data; choose another {key}")
    if existing and not overwrite:
        raise UserError(
            f"{target} already holds prepared data; choose another {key}, or replace it with "
            "`python -m shmap_tp.prepare ... --overwrite`"
        )
