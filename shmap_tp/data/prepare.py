"""Writes the token files of a text source: train.bin, validation.bin and meta.json.

Each document is followed by an end-of-text token; meta.json describes the files.  All three are written to a hidden
directory beside the target, which is renamed to the target when it is complete: an interrupted preparation leaves
nothing that looks finished.  The same text always gives the same bytes.
"""

import hashlib
import json
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from shmap_tp.data import text_sources
from shmap_tp.data.metadata import DTYPES, META, SPLITS
from shmap_tp.data.tokenizer import Bytes, Subwords
from shmap_tp.errors import UserError

_GROUP = 1 << 22  # characters that are tokenized at a time
_FILES = {META, *(f"{split}.bin" for split in SPLITS)}


class TokenWriter:
    """Appends documents to one .bin file and keeps its token count and sha256."""

    def __init__(self, path: Path, dtype: np.dtype, end_of_text: int):
        self._file, self._dtype = path.open("xb"), dtype
        self._end = np.array([end_of_text], dtype)
        self.tokens, self._digest = 0, hashlib.sha256()

    def write(self, ids: np.ndarray) -> None:
        """Append one document and the end-of-text token."""
        document = np.concatenate([ids.astype(self._dtype), self._end])
        self._digest.update(document)
        self._file.write(document)
        self.tokens += len(document)

    def close(self) -> str:
        """Close the file and return its sha256."""
        self._file.close()
        return self._digest.hexdigest()


def prepare(
    source: text_sources.Source,
    tokenizer: Bytes | Subwords,
    out: Path | str,
    *,
    overwrite: bool = False,
    key: str = "--out",
) -> dict:
    """Write train.bin, validation.bin and meta.json of `source` to the directory `out`; return what meta.json holds.

    `key` is the option by which the user gave `out`, for messages.  Raises `UserError` if `out` already holds files
    (with `overwrite`: files other than prepared data), cannot be written, or if a split has no document.
    """
    target = Path(out).resolve()
    _check_free(target, overwrite, key)
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        partial.mkdir(parents=True)
        meta = _write_splits(source, tokenizer, partial)
        (partial / META).write_text(json.dumps(meta, indent=2) + "\n")
        _rename_into_place(partial, target, overwrite)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error}; fix the cause, or choose another {key}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return meta


def prepare_stdlib(out: Path | str) -> dict:
    """Prepare the Python standard library in the data.dir `out` unless it is there; safe in parallel processes."""
    try:
        return prepare(text_sources.stdlib(), Bytes(), out, key="data.dir")
    except UserError:
        if not (Path(out) / META).is_file():
            raise
        return json.loads((Path(out) / META).read_bytes())


def _write_splits(source: text_sources.Source, tokenizer: Bytes | Subwords, directory: Path) -> dict:
    """Write both .bin files; return the contents of meta.json."""
    dtype = "uint16" if tokenizer.vocabulary <= 1 << 16 else "uint32"
    writers = {s: TokenWriter(directory / f"{s}.bin", DTYPES[dtype], tokenizer.end_of_text) for s in SPLITS}
    try:
        with tqdm(total=source.total, desc=source.name, unit=" documents", disable=None) as bar:
            for group in _group(source.documents):
                ids = tokenizer.encode([text for _, text in group])
                for (split, _), document in zip(group, ids, strict=True):
                    if len(document):
                        writers[split].write(document)
                bar.update(len(group))
    finally:
        sha256 = {split: writer.close() for split, writer in writers.items()}
    for split, writer in writers.items():
        if not writer.tokens:
            raise UserError(
                f"{source.name}: no text for {split}.bin, but both splits need some; "
                "add documents or choose another fraction with --validation"
            )
    return {
        "vocabulary": tokenizer.vocabulary,
        "tokenizer": tokenizer.name,
        "source": source.name,
        "end_of_text": tokenizer.end_of_text,
        "dtype": dtype,
        "tokens": {split: writer.tokens for split, writer in writers.items()},
        "sha256": sha256,
    }


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


def _check_free(target: Path, overwrite: bool, key: str) -> None:
    """Raise `UserError` unless `target` is new or empty, or holds prepared data that may be replaced."""
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is a file; {key} must name a directory")
    existing = {path.name for path in target.iterdir()} if target.is_dir() else set()
    if existing - _FILES:
        raise UserError(f"{target} holds {min(existing - _FILES)}, which is not prepared data; choose another {key}")
    if existing and not overwrite:
        raise UserError(
            f"{target} already holds prepared data; choose another {key}, or replace it with "
            "`python -m shmap_tp.prepare ... --overwrite`"
        )


def _rename_into_place(partial: Path, target: Path, overwrite: bool) -> None:
    """Rename the complete directory `partial` to `target`.

    An existing `target` is deleted after the rename with `overwrite`; otherwise the rename raises `OSError`.
    """
    replaced = partial.with_suffix(".replaced")
    if overwrite and target.is_dir():
        target.rename(replaced)
    try:
        partial.rename(target)
    except OSError:
        if replaced.is_dir():
            replaced.rename(target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
