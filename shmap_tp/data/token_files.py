"""Token files: the tokenized text of one split on disk, read as sequences of T + 1 tokens.

T context, n sequences in a file.

A prepared directory holds `train.bin` and `validation.bin`: token ids one after the other, little-endian uint16 (uint32
if the vocabulary needs it), the format of nanoGPT.  `meta.json` beside them states the dtype and the sha256 of each
file.  Sequence s consists of tokens s T to s T + T inclusive: T inputs and their T targets.  Neighbouring sequences
share one token, and n = (tokens - 1) // T.
"""

import hashlib
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int32

from shmap_tp.data.bucket import BucketTokenFile
from shmap_tp.data.metadata import DTYPES, META, SPLITS, Meta, read_meta
from shmap_tp.errors import UserError
from shmap_tp.runtime.files import file_size, reading

_CHUNK = 1 << 24  # bytes that the scan reads at a time
_FIRST = 1 << 20  # tokens at which a guess at another dtype looks


class TokenFile:
    """One token file as n sequences of T + 1 tokens; only the sequences that are asked for are read from disk.

    Opening reads the whole file once, to find its largest id and its sha256.
    Raises `UserError` if the file is missing, unreadable, truncated within a token, shorter than one sequence, contains
    an id outside `vocabulary`, or does not have the given `sha256`.
    """

    path: Path
    context: int
    tokens: int
    """Length of the file in tokens."""
    largest: int
    """Largest id in the file."""
    sha256: str

    def __init__(self, path: Path, *, context: int, vocabulary: int, dtype: str, sha256: str | None = None):
        self.path, self.context = path, context
        self.tokens = _count_tokens(path, DTYPES[dtype].itemsize)
        if self.tokens <= context:
            raise UserError(
                f"{path}: {self.tokens} tokens, but one sequence of model.context={context} needs {context + 1}; "
                "prepare more text or shorten model.context"
            )
        with reading(path):
            self.largest, position, self.sha256 = _scan(path, DTYPES[dtype])
            self._ids = np.memmap(path, dtype=DTYPES[dtype], mode="r")
        if sha256 not in (None, self.sha256):
            raise UserError(
                f"{path}: sha256 is {self.sha256[:12]}..., {META} says {sha256[:12]}...; the file has changed:\n"
                "copy it again, or prepare it again with `python -m shmap_tp.prepare ... --overwrite`"
            )
        if self.largest >= vocabulary:
            raise UserError(
                f"{path}: token {position} is id {self.largest}, but model.vocabulary={vocabulary} ends at "
                f"{vocabulary - 1}; "
                + (
                    _other_reading(self._ids, vocabulary)
                    or f"use model.vocabulary={self.largest + 1} or more, or the tokenizer of that vocabulary"
                )
            )

    def __len__(self) -> int:
        """Number of sequences."""
        return (self.tokens - 1) // self.context

    def read(self, indices: Int[np.ndarray, " rows"]) -> Int32[np.ndarray, "rows tokens"]:
        """The sequences at `indices`, [rows, T + 1]."""
        out = np.empty((len(indices), self.context + 1), np.int32)
        for row, index in zip(out, indices, strict=True):
            row[:] = self._ids[index * self.context : (index + 1) * self.context + 1]
        return out


def open_token_file(directory: Path | str, split: str, *, context: int, vocabulary: int) -> TokenFile:
    """Open one split ("train" or "validation") of a prepared directory and check it against meta.json.

    Raises `UserError` as `TokenFile` does, and if meta.json is missing, unusable or contradicts the file.
    """
    path = Path(directory) / f"{split}.bin"
    size, meta = _existing_size(path), read_meta(Path(directory))
    stated = meta.tokens[split] * DTYPES[meta.dtype].itemsize if meta.tokens else size
    if size != stated:
        raise UserError(
            f"{path}: {size} bytes, but {META} says {meta.tokens[split]} tokens of {meta.dtype}, {stated} bytes; "
            "copy or prepare it again"
        )
    sha256 = meta.sha256.get(split)
    file = TokenFile(path, context=context, vocabulary=vocabulary, dtype=meta.dtype, sha256=sha256)
    if meta.vocabulary is not None and file.largest >= meta.vocabulary:
        raise UserError(
            f"{path}: id {file.largest} occurs, but {META} says vocabulary {meta.vocabulary}; prepare the data again"
        )
    if sha256 is None and meta.dtype == "uint16" and _looks_like_uint32(file._ids):
        raise UserError(
            f"{path}: every second uint16 is almost zero, so the tokens are probably uint32, but {META} says uint16; "
            'write {"dtype": "uint32"} there'
        )
    return file


AnyTokenFile = TokenFile | BucketTokenFile
"""On a disk or in a bucket: both have `path`, `context`, `tokens`, `largest`, `sha256`, a length and `read`."""


def data_identity(train: AnyTokenFile, validation: AnyTokenFile, meta: Meta, *, seed: int, batch: int) -> dict:
    """Everything that determines which tokens step s reads and what they mean, as JSON values.  Two runs with equal
    identities read the same tokens at every step."""
    files = {
        split: {"sha256": file.sha256, "tokens": file.tokens}
        for split, file in zip(SPLITS, (train, validation), strict=True)
    }
    tokenizer = {"name": meta.tokenizer, "sha256": meta.tokenizer_sha256}
    return {**files, "tokenizer": tokenizer, "seed": seed, "batch": batch, "context": train.context}


def _existing_size(path: Path) -> int:
    size = file_size(path)
    if size is None:
        raise UserError(
            f"{path} does not exist; copy it there, or prepare all files again: "
            f"`python -m shmap_tp.prepare ... --out {path.parent} --overwrite`"
        )
    return size


def _count_tokens(path: Path, itemsize: int) -> int:
    """Number of tokens in a file, from its size."""
    size = _existing_size(path)
    if size % itemsize:
        raise UserError(
            f"{path}: {size} bytes is not a multiple of the {itemsize} bytes of a token; the file is truncated: "
            "copy or prepare it again"
        )
    return size // itemsize


def _scan(path: Path, dtype: np.dtype) -> tuple[int, int, str]:
    """(largest id, its first position, sha256 of the bytes), in one pass over the file."""
    digest, largest, position, start = hashlib.sha256(), -1, -1, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            ids = np.frombuffer(chunk, dtype)
            if (chunk_largest := int(ids.max())) > largest:
                largest, position = chunk_largest, start + int(ids.argmax())
            start += len(ids)
    return largest, position, digest.hexdigest()


def _other_reading(ids: np.ndarray, vocabulary: int) -> str | None:
    """Advice if the first ids would be in the vocabulary in the other byte order or in the other dtype."""
    first = np.array(ids[: _FIRST - _FIRST % 2])
    if first.byteswap().max() < vocabulary:
        swapped = first.dtype.newbyteorder(">").str
        return (
            f"big-endian ids would be below it: if they are,\n"
            f"convert the file with np.fromfile(file, {swapped!r}).astype({first.dtype.str!r}).tofile(file)"
        )
    for name, dtype in DTYPES.items():
        if dtype != first.dtype and first.nbytes % dtype.itemsize == 0 and first.view(dtype).max() < vocabulary:
            return f"as {name} they would be below it: if that is their dtype, correct {META}"
    return None


def _looks_like_uint32(ids: np.ndarray) -> bool:
    """Whether the upper halves, were the tokens uint32, are all zero, or small where the lower halves are large."""
    if len(ids) % 2:
        return False
    lower, upper = int(ids[:_FIRST:2].max()), int(ids[1:_FIRST:2].max())
    return upper == 0 < lower or (len(ids) >= 1024 and upper < 32 and lower >= 4096)
