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
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Int, Int32

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
    """One token file, on a disk or in a bucket, as n sequences of T + 1 tokens; only those that are asked for are read.

    Opening one on a disk for the first time reads the whole file, to find its largest id and its sha256 (`scan_once`).
    In a bucket both are those that meta.json states, and the ids that are read are checked.
    """

    is_remote = False
    """Whether it is in a bucket."""
    path: str | Path
    context: int
    tokens: int
    """Length of the file in tokens."""
    largest: int
    """Largest id in the file."""
    sha256: str
    counted: str | None
    """sha256 of the file that says which tokens count as targets; None: all do."""

    def __init__(self, place: Path | Bucket, split: str, meta: Meta, *, context: int, vocabulary: int):
        """The file of `split` ("train" or "validation") in a prepared directory or a bucket, whose meta.json is `meta`.

        Raises `UserError` if it is missing, unreadable, truncated within a token, shorter than one sequence, has an id
        outside `vocabulary`, or contradicts meta.json, and in a bucket if meta.json does not state all of it.
        """
        name, dtype, stated = f"{split}.bin", DTYPES[meta.dtype], meta.tokens.get(split)
        self.is_remote, self.context, self.counted = isinstance(place, Bucket), context, meta.counted.get(split)
        if self.is_remote and (stated is None or not meta.sha256 or meta.vocabulary is None):
            raise UserError(
                f"data.cache=null needs the tokens, sha256 and vocabulary in {META} of {place.files[META]}; "
                f"prepare the data with `python -m shmap_tp.prepare`, or set data.cache"
            )
        self.path = place.files[name] if self.is_remote else place / name
        size = place.size(name) if self.is_remote else _existing_size(self.path)
        if stated is not None:
            _check_size(self.path, size, stated * dtype.itemsize, f"{stated} tokens of {meta.dtype}")
        if size % dtype.itemsize:
            raise UserError(
                f"{self.path}: {size} bytes is not a multiple of the {dtype.itemsize} bytes of a token; the file is "
                f"truncated: copy or prepare it again"
            )
        self.tokens = size // dtype.itemsize
        if self.tokens <= context:
            raise UserError(
                f"{self.path}: {self.tokens} tokens, but one sequence of model.context={context} needs {context + 1}; "
                f"prepare more text or shorten model.context"
            )
        if self.is_remote:
            self.largest, self.sha256 = meta.vocabulary - 1, meta.sha256[split]
        else:
            self.largest, self.sha256 = _checked_scan(self.path, dtype, meta.sha256.get(split))
        self._check_ids(self.largest, f"model.vocabulary={vocabulary}", vocabulary)
        if meta.vocabulary is not None:
            self._check_ids(self.largest, f"{META} says vocabulary {meta.vocabulary}", meta.vocabulary)
        if not self.is_remote and split not in meta.sha256 and dtype.itemsize == 2:
            self._check_width()
        self._ids, self._bits = _ranges(place, name, dtype), None
        if self.counted is not None:
            name, dtype = f"{split}.counted", np.dtype(np.uint8)
            if not self.is_remote:
                file, wanted = place / name, -(-self.tokens // 8)
                _check_size(file, _existing_size(file), wanted, f"{self.tokens} tokens")
                _checked_scan(file, dtype, self.counted)
            self._bits = _ranges(place, name, dtype)

    def __len__(self) -> int:
        """Number of sequences."""
        return (self.tokens - 1) // self.context

    def read(self, indices: Int[np.ndarray, " rows"]) -> Int32[np.ndarray, "rows tokens"]:
        """The sequences at `indices`, [rows, T + 1]; tokens that do not count are -1 - id."""
        starts = indices * self.context
        stops = starts + self.context + 1
        rows = np.empty((len(indices), self.context + 1), np.int32)
        for row, ids in zip(rows, self._ids(starts, stops), strict=True):
            if self.is_remote:
                self._check_ids(int(ids.max()), f"{META} says vocabulary {self.largest + 1}", self.largest + 1)
            row[:] = ids
        if self._bits is not None:  # the lowest bit of a byte is that of its first token
            for row, bits, start in zip(rows, self._bits(starts // 8, -(-stops // 8)), starts, strict=True):
                uncounted = np.unpackbits(bits, bitorder="little")[start % 8 :][: len(row)] == 0
                row[uncounted] = ~row[uncounted]
        return rows

    def _check_ids(self, largest: int, limit: str, vocabulary: int) -> None:
        """`limit` says where `vocabulary` is from."""
        if largest >= vocabulary:
            raise UserError(
                f"{self.path}: ids go up to {largest}, but {limit}; use data of this vocabulary, or model.vocabulary="
                f"{largest + 1},\nor correct the vocabulary or the dtype in {META}"
            )

    def _check_width(self) -> None:
        """Raise UserError if the upper halves of tokens of uint32 would be all zero, or small where the lower ones are
        large."""
        ids = _mapped(self.path, DTYPES["uint16"])
        lower, upper = int(ids[:_FIRST:2].max()), int(ids[1:_FIRST:2].max())
        is_small = upper == 0 < lower or (len(ids) >= 1024 and upper < 32 and lower >= 4096)
        if len(ids) % 2 == 0 and is_small:
            raise UserError(
                f"{self.path}: every second uint16 is almost zero, so the tokens are probably uint32, but {META} says "
                'uint16; write {"dtype": "uint32"} there'
            )


def open_token_file(directory: Path | str, split: str, *, context: int, vocabulary: int) -> TokenFile:
    """The `TokenFile` of a prepared directory.  Raises `UserError` as it does, and if meta.json cannot be used."""
    _existing_size(Path(directory) / f"{split}.bin")  # a place without data lacks meta.json, too
    meta = read_meta(Path(directory))
    return TokenFile(Path(directory), split, meta, context=context, vocabulary=vocabulary)


Ranges = Callable[[Int[np.ndarray, " rows"], Int[np.ndarray, " rows"]], Iterable[np.ndarray]]
"""(starts, stops) -> the values of a file from each start to its stop."""


def _ranges(place: Path | Bucket, name: str, dtype: np.dtype) -> Ranges:
    """Reads ranges of the file `name`; those of a bucket are requested at the same time."""
    if isinstance(place, Bucket):
        size = dtype.itemsize
        return lambda starts, stops: (
            np.frombuffer(part, dtype) for part in place.ranges(name, (starts * size).tolist(), (stops * size).tolist())
        )
    values = _mapped(place / name, dtype)
    return lambda starts, stops: (values[start:stop] for start, stop in zip(starts, stops, strict=True))


def data_identity(
    train: TokenFile, validation: TokenFile, meta: Meta, *, seed: int, batch: int, isolated: int | None = None
) -> dict:
    """Everything that determines which tokens step s reads and what they mean, as JSON values.  Two runs with equal
    identities read the same tokens at every step.  `isolated` is the id that ends documents which are isolated."""
    files = {
        split: {"sha256": file.sha256, "tokens": file.tokens} | ({"counted": file.counted} if file.counted else {})
        for split, file in zip(SPLITS, (train, validation), strict=True)
    }
    tokenizer = {"name": meta.tokenizer, "sha256": meta.tokenizer_sha256, "end_of_text": meta.end_of_text}
    order = {"seed": seed, "batch": batch, "context": train.context, "isolated": isolated}
    return {**files, "tokenizer": tokenizer, **order}


def _check_size(path: object, size: int, stated: int, what: str) -> None:
    if size != stated:
        raise UserError(f"{path}: {size} bytes, but {META} says {what}, {stated} bytes; copy or prepare it again")


def _checked_scan(path: Path, dtype: np.dtype, stated: str | None) -> Scan:
    """The scan of a file.  Raises UserError if meta.json states another sha256."""
    with reading(path):
        found = scan_once(path, dtype)
    if stated not in (None, found.sha256):
        raise UserError(
            f"{path}: sha256 is {found.sha256[:12]}..., {META} says {stated[:12]}...; the file has changed:\n"
            "copy it again, or prepare it again with `python -m shmap_tp.prepare ... --overwrite`"
        )
    return found


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """The values of a file.  Raises UserError if it cannot be read any more, though a scan of it is remembered."""
    with reading(path):
        return np.memmap(path, dtype, "r")


def _existing_size(path: Path) -> int:
    size = file_size(path)
    if size is None:
        raise UserError(
            f"{path} does not exist; copy it there, or prepare all files again: "
            f"`python -m shmap_tp.prepare ... --out {path.parent} --overwrite`"
        )
    return size
