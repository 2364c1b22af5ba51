"""Turns text into the token files that training reads: `python -m shmap_tp.prepare --source stdlib --out data/stdlib`.

Documents follow one another in train.bin and validation.bin, an end-of-text token after each; meta.json says what they
are.  All three are written in a hidden directory beside the target, which takes the target's name when it is complete:
whatever interrupts a preparation, nothing is left that looks finished.  The same text gives the same bytes every time.
"""

import hashlib
import json
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from shmap_tp.data import text_sources as sources
from shmap_tp.data.token_files import DTYPES, META, SPLITS
from shmap_tp.data.tokenizer import Bytes, Subwords
from shmap_tp.errors import UserError

_GROUP = 1 << 22  # characters that are tokenized at a time


_FILES = {META, *(f"{split}.bin" for split in SPLITS)}


class TokenWriter:
    """Appends documents to one .bin file, keeping count and hash."""

    def __init__(self, path: Path, dtype: np.dtype, end_of_text: int):
        self._file, self._dtype = path.open("xb"), dtype
        self._end = np.array([end_of_text], dtype)
        self.tokens, self._digest = 0, hashlib.sha256()

    def write(self, ids: np.ndarray) -> None:
        document = np.concatenate([ids.astype(self._dtype), self._end])
        self._digest.update(document)
        self._file.write(document)
        self.tokens += len(document)

    def close(self) -> str:
        """Closes the file and gives its sha256."""
        self._file.close()
        return self._digest.hexdigest()


def prepare(
    source: sources.Source, tokenizer: Bytes | Subwords, out: Path | str, *, overwrite: bool = False, key: str = "--out"
) -> dict:
    """Writes `out` (train.bin, validation.bin, meta.json) from a source and returns what meta.json says.

    `key` is what the user named `out` with.  Raises `InputError` where `out` holds anything already (with `overwrite`:
    anything but prepared data), cannot be written, or one of the two splits gets no document.
    """
    target = Path(out).resolve()
    _check_free(target, overwrite, key)
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        partial.mkdir(parents=True)
        meta = _write(source, tokenizer, partial)
        (partial / META).write_text(json.dumps(meta, indent=2) + "\n")
        _put_in_place(partial, target, overwrite)
    except OSError as error:
        raise UserError(f"{out} cannot be prepared: {error}; mend that, or name another {key}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return meta


def prepare_stdlib(out: Path | str) -> dict:
    """`--source stdlib` into the data.dir `out`, unless it is prepared; several processes may do so at once."""
    try:
        return prepare(sources.stdlib(), Bytes(), out, key="data.dir")
    except UserError:
        if not (Path(out) / META).is_file():
            raise
        return json.loads((Path(out) / META).read_bytes())


def _write(source: sources.Source, tokenizer: Bytes | Subwords, directory: Path) -> dict:
    """Both .bin files; returns their meta.json."""
    dtype = "uint16" if tokenizer.vocabulary <= 1 << 16 else "uint32"
    writers = {s: TokenWriter(directory / f"{s}.bin", DTYPES[dtype], tokenizer.end_of_text) for s in SPLITS}
    try:
        with tqdm(total=source.total, desc=source.name, unit=" documents", disable=None) as bar:
            for group in _grouped(source.documents):
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
                f"{source.name}: no text for {split}.bin, and both splits need some; "
                "give more documents or another fraction with --validation"
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


def _grouped(documents: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Runs of documents, large enough to keep a tokenizer's threads busy and small enough for memory."""
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
    """Whether `target` may be written: new or empty, or prepared data that may be replaced."""
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is a file; {key} names a directory")
    held = {path.name for path in target.iterdir()} if target.is_dir() else set()
    if held - _FILES:
        raise UserError(f"{target} holds {min(held - _FILES)}, which is not prepared data; name another {key}")
    if held and not overwrite:
        raise UserError(
            f"{target} is prepared already; name another {key}, or replace it with "
            "`python -m shmap_tp.prepare ... --overwrite`"
        )


def _put_in_place(partial: Path, target: Path, overwrite: bool) -> None:
    """Gives the finished directory its name.  What had the name is removed once the new has it, or else is an error."""
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
