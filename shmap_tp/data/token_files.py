"""Token files: the tokenized text of one split, on disk or in a bucket, read as sequences of T + 1 tokens.

T context, n sequences in a file.

A prepared directory holds `train.bin` and `validation.bin`: token ids one after the other, little-endian uint16 (uint32
if the vocabulary needs it), the format of nanoGPT.  `meta.json` beside them states the dtype and the sha256 of each
file.  For conversations `train.counted` and `validation.counted` have a bit for each token, the lowest of a byte first:
whether it counts as a target.  Sequence s consists of tokens s T to s T + T inclusive: T inputs and their T targets.
Neighbouring sequences share one token, and n = (tokens - 1) // T.

`train.bin.scan` has what a scan of train.bin has found, with its size and modification time.  As long as these stay, a
start does not read the whole file again; `python -m shmap_tp.verify data` does.
"""

import hashlib
import json
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Int, Int32, UInt8

from shmap_tp.data.location import Bucket
from shmap_tp.data.metadata import DTYPES, META, SPLITS, Meta, read_meta
from shmap_tp.errors import UserError
from shmap_tp.runtime.files import file_size, reading

_CHUNK = 1 << 24  # bytes that the scan reads at a time
_FIRST = 1 << 20  # tokens at which a guess at another dtype looks
_RECENT = 2.0  # seconds within which a file may change again without another modification time


class Scan(NamedTuple):
    """What reading a whole file finds."""

    largest: int
    """Largest id; -1 if there is none."""
    sha256: str


def scan(stream: BinaryIO, dtype: np.dtype) -> Scan:
    """Read all ids of `stream`."""
    digest, largest = hashlib.sha256(), -1
    while chunk := stream.read(_CHUNK):
        digest.update(chunk)
        ids = np.frombuffer(chunk[: len(chunk) - len(chunk) % dtype.itemsize], dtype)
        if len(ids):
            largest = max(largest, int(ids.max()))
    return Scan(largest, digest.hexdigest())


def scan_once(path: Path, dtype: np.dtype) -> Scan:
    """The `scan` of a file: that of an earlier start, if the file has the same size and modification time.

    Written beside the file, unless the directory is read-only or the file is so new that it may still change.
    """
    status, remembered = path.stat(), path.with_name(f"{path.name}.scan")
    key = [dtype.str, status.st_size, status.st_mtime_ns]
    with suppress(OSError, ValueError, TypeError):
        found = json.loads(remembered.read_bytes())
        if found["of"] == key:
            return Scan(**found["scan"])
    is_old = time.time() - status.st_mtime > _RECENT
    with path.open("rb") as stream:
        result = scan(stream, dtype)
    if is_old:
        new = path.with_name(f".{remembered.name}.{uuid.uuid4().hex}")
        with suppress(OSError):
            new.write_text(json.dumps({"of": key, "scan": result._asdict()}))
            new.replace(remembered)
    return result


class TokenFile:
    """One token file as n sequences of T + 1 tokens; only the sequences that are asked for are read from disk.

    Opening it for the first time reads the whole file, to find its largest id and its sha256 (`scan_once`).
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
    counted: str | None
    """sha256 of the file that says which tokens count as targets; None: all do."""

    def __init__(
        self,
        path: Path,
        *,
        context: int,
        vocabulary: int,
        dtype: str,
        sha256: str | None = None,
        counted: str | None = None,
    ):
        """`counted` is the sha256 of the file that says which tokens count; None: all do."""
        self.path, self.context, self.counted = path, context, counted
        self.tokens = _count_tokens(path, DTYPES[dtype].itemsize)
        _check_length(path, self.tokens, context)
        with reading(path):
            self.largest, self.sha256 = scan_once(path, DTYPES[dtype])
            self._ids = np.memmap(path, dtype=DTYPES[dtype], mode="r")
        _check_hash(path, self.sha256, sha256)
        _check_ids(path, self.largest, f"model.vocabulary={vocabulary}", vocabulary)
        self._bits = None if counted is None else self._open_bits(path.with_suffix(".counted"), counted)

    def _open_bits(self, path: Path, sha256: str) -> np.ndarray:
        """Whether each token counts, a bit each.  Raises UserError if meta.json has another hash."""
        _check_size(path, _existing_size(path), -(-self.tokens // 8), f"{self.tokens} tokens")
        with reading(path):
            _check_hash(path, scan_once(path, np.dtype(np.uint8)).sha256, sha256)
        return np.memmap(path, np.uint8, "r")

    def __len__(self) -> int:
        """Number of sequences."""
        return (self.tokens - 1) // self.context

    def read(self, indices: Int[np.ndarray, " rows"]) -> Int32[np.ndarray, "rows tokens"]:
        """The sequences at `indices`, [rows, T + 1]; tokens that do not count are -1 - id."""
        out = np.empty((len(indices), self.context + 1), np.int32)
        for row, index in zip(out, indices, strict=True):
            start, stop = index * self.context, (index + 1) * self.context + 1
            row[:] = self._ids[start:stop]
            if self._bits is not None:
                _mark(row, self._bits[start // 8 : -(-stop // 8)], int(start))
        return out


class BucketTokenFile:
    """One token file of a bucket as n sequences of T + 1 tokens: only what `read` asks for is transferred.

    The sha256 and the largest id are those that meta.json states; the ids that are read are checked against
    `vocabulary`.  Raises UserError if meta.json lacks one of them, or the file has another size.
    """

    path: str
    context: int
    tokens: int
    largest: int
    sha256: str
    counted: str | None

    def __init__(self, bucket: Bucket, split: str, meta: Meta, *, context: int, vocabulary: int):
        self._bucket, self._name, self._dtype = bucket, f"{split}.bin", DTYPES[meta.dtype]
        if not meta.tokens or not meta.sha256 or meta.vocabulary is None:
            raise UserError(
                f"data.cache=null needs the tokens, sha256 and vocabulary in {META} of {bucket.files[META]}; "
                f"prepare the data with `python -m shmap_tp.prepare`, or set data.cache"
            )
        self.path, self.context = bucket.files[self._name], context
        self.tokens, self.sha256, self.largest = meta.tokens[split], meta.sha256[split], meta.vocabulary - 1
        self.counted = meta.counted.get(split)
        stated = f"{self.tokens} tokens of {meta.dtype}"
        _check_size(self.path, bucket.size(self._name), self.tokens * self._dtype.itemsize, stated)
        _check_length(self.path, self.tokens, context)
        _check_ids(self.path, self.largest, f"model.vocabulary={vocabulary}", vocabulary)

    def __len__(self) -> int:
        """Number of sequences."""
        return (self.tokens - 1) // self.context

    def read(self, indices: Int[np.ndarray, " rows"]) -> Int32[np.ndarray, "rows tokens"]:
        """The sequences at `indices`, [rows, T + 1]; tokens that do not count are -1 - id."""
        starts = indices * self.context
        stops, size = starts + self.context + 1, self._dtype.itemsize
        parts = self._bucket.ranges(self._name, (starts * size).tolist(), (stops * size).tolist())
        rows = np.frombuffer(b"".join(parts), self._dtype).reshape(len(indices), self.context + 1)
        vocabulary = self.largest + 1
        _check_ids(self.path, int(rows.max(initial=0)), f"{META} says vocabulary {vocabulary}", vocabulary)
        rows = rows.astype(np.int32)
        if self.counted is not None:
            name = self._name.replace(".bin", ".counted")
            bits = self._bucket.ranges(name, (starts // 8).tolist(), (-(-stops // 8)).tolist())
            for row, part, start in zip(rows, bits, starts, strict=True):
                _mark(row, np.frombuffer(part, np.uint8), int(start))
        return rows


def open_token_file(directory: Path | str, split: str, *, context: int, vocabulary: int) -> TokenFile:
    """Open one split ("train" or "validation") of a prepared directory and check it against meta.json.

    Raises `UserError` as `TokenFile` does, and if meta.json is missing, unusable or contradicts the file.
    """
    path = Path(directory) / f"{split}.bin"
    size, meta = _existing_size(path), read_meta(Path(directory))
    if meta.tokens:
        stated = f"{meta.tokens[split]} tokens of {meta.dtype}"
        _check_size(path, size, meta.tokens[split] * DTYPES[meta.dtype].itemsize, stated)
    sha256 = meta.sha256.get(split)
    given = {"dtype": meta.dtype, "sha256": sha256, "counted": meta.counted.get(split)}
    file = TokenFile(path, context=context, vocabulary=vocabulary, **given)
    if meta.vocabulary is not None:
        _check_ids(path, file.largest, f"{META} says vocabulary {meta.vocabulary}", meta.vocabulary)
    if sha256 is None and meta.dtype == "uint16" and _looks_like_uint32(file._ids):
        raise UserError(
            f"{path}: every second uint16 is almost zero, so the tokens are probably uint32, but {META} says uint16; "
            'write {"dtype": "uint32"} there'
        )
    return file


AnyTokenFile = TokenFile | BucketTokenFile
"""On a disk or in a bucket: both have `path`, `context`, `tokens`, `largest`, `sha256`, a length and `read`."""


def data_identity(
    train: AnyTokenFile, validation: AnyTokenFile, meta: Meta, *, seed: int, batch: int, isolated: int | None = None
) -> dict:
    """Everything that determines which tokens step s reads and what they mean, as JSON values.  Two runs with equal
    identities read the same tokens at every step.  `isolated` is the id that ends documents which are isolated."""
    files = {
        split: {"sha256": file.sha256, "tokens": file.tokens} | ({"counted": file.counted} if file.counted else {})
        for split, file in zip(SPLITS, (train, validation), strict=True)
    }
    tokenizer = {"name": meta.tokenizer, "sha256": meta.tokenizer_sha256, "end_of_text": meta.end_of_text}
    return {
        **files,
        "tokenizer": tokenizer,
        "seed": seed,
        "batch": batch,
        "context": train.context,
        "isolated": isolated,
    }


def _mark(row: Int32[np.ndarray, " tokens"], bits: UInt8[np.ndarray, " _"], start: int) -> None:
    """Make the tokens of `row` that do not count -1 - id; the bit of the first one is `start` % 8 of the first byte."""
    uncounted = np.unpackbits(bits, bitorder="little")[start % 8 :][: len(row)] == 0
    row[uncounted] = ~row[uncounted]


def _check_length(path: object, tokens: int, context: int) -> None:
    if tokens <= context:
        raise UserError(
            f"{path}: {tokens} tokens, but one sequence of model.context={context} needs {context + 1}; prepare more "
            f"text or shorten model.context"
        )


def _check_size(path: object, size: int, stated: int, what: str) -> None:
    if size != stated:
        raise UserError(f"{path}: {size} bytes, but {META} says {what}, {stated} bytes; copy or prepare it again")


def _check_hash(path: Path, found: str, stated: str | None) -> None:
    if stated not in (None, found):
        raise UserError(
            f"{path}: sha256 is {found[:12]}..., {META} says {stated[:12]}...; the file has changed:\n"
            "copy it again, or prepare it again with `python -m shmap_tp.prepare ... --overwrite`"
        )


def _check_ids(path: object, largest: int, limit: str, vocabulary: int) -> None:
    """`limit` says where `vocabulary` is from."""
    if largest >= vocabulary:
        raise UserError(
            f"{path}: ids go up to {largest}, but {limit}; use data of this vocabulary, or model.vocabulary="
            f"{largest + 1},\nor correct the vocabulary or the dtype in {META}"
        )


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


def _looks_like_uint32(ids: np.ndarray) -> bool:
    """Whether the upper halves, were the tokens uint32, are all zero, or small where the lower halves are large."""
    if len(ids) % 2:
        return False
    lower, upper = int(ids[:_FIRST:2].max()), int(ids[1:_FIRST:2].max())
    return upper == 0 < lower or (len(ids) >= 1024 and upper < 32 and lower >= 4096)
