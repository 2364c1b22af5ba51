"""Token files, and which of their windows each training step reads.

T context, n windows of a file, b rows of one microbatch.

A prepared directory holds `train.bin` and `validation.bin`: token ids one after the other, little-endian uint16 (uint32
where the vocabulary needs it), the format of nanoGPT.  `meta.json` beside them states the dtype and the sha256 of each;
without it the files are taken to be uint16.  Window w is tokens w T to w T + T inclusive: T inputs and their T targets.
Neighbouring windows share one token, and n = (tokens - 1) // T.

The order is a function of (seed, step) and of nothing else: sample i = step * batch + r lies in epoch i // n, at place
i % n of that epoch's permutation.  Neither hosts nor mesh enter, so any run can be continued on any machine.
Only `device_batch` touches JAX; everything before it is numpy.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int32

from shmap_tp.errors import UserError

META = "meta.json"


SPLITS = ("train", "validation")


DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


_CHUNK = 1 << 24  # bytes read at a time by the scan


class TokenFile:
    """One token file seen as n windows of T + 1 tokens; only the windows asked for are read from disk.

    Opening reads the whole file once, for its largest id and its sha256.
    Raises `InputError` where the file is missing, torn, shorter than a window, holds an id that `vocabulary` excludes,
    or is not the file whose `sha256` is given.
    """

    path: Path
    context: int
    tokens: int
    """Length of the file in tokens."""
    sha256: str

    def __init__(self, path: Path, *, context: int, vocabulary: int, dtype: str = "uint16", sha256: str | None = None):
        self.path, self.context = path, context
        self.tokens = _length(path, DTYPES[dtype].itemsize)
        if self.tokens <= context:
            raise UserError(
                f"{path}: {self.tokens} tokens, and one window of model.context={context} needs {context + 1}; "
                "prepare more text or shorten model.context"
            )
        largest, position, self.sha256 = _scan(path, DTYPES[dtype])
        if sha256 not in (None, self.sha256):
            raise UserError(
                f"{path}: sha256 is {self.sha256[:12]}..., {META} says {sha256[:12]}...; the file has changed:\n"
                "copy it again, or prepare it again with `python -m shmap_tp.prepare ... --overwrite`"
            )
        if largest >= vocabulary:
            raise UserError(
                f"{path}: token {position} is id {largest}, model.vocabulary={vocabulary} ends at {vocabulary - 1}; "
                f"use model.vocabulary={largest + 1} or more, or the tokenizer of that vocabulary"
            )
        self._ids = np.memmap(path, dtype=DTYPES[dtype], mode="r")

    def __len__(self) -> int:
        return (self.tokens - 1) // self.context

    def read(self, windows: Int[np.ndarray, " rows"]) -> Int32[np.ndarray, "rows tokens"]:
        """The windows of those numbers, [rows, T + 1]."""
        out = np.empty((len(windows), self.context + 1), np.int32)
        for row, window in zip(out, windows, strict=True):
            row[:] = self._ids[window * self.context : (window + 1) * self.context + 1]
        return out


def open_token_file(directory: Path | str, split: str, *, context: int, vocabulary: int) -> TokenFile:
    """The windows of one split ("train" or "validation") of a prepared directory, checked against its meta.json."""
    meta = _meta(Path(directory))
    return TokenFile(
        Path(directory) / f"{split}.bin",
        context=context,
        vocabulary=vocabulary,
        dtype=meta.get("dtype", "uint16"),
        sha256=meta.get("sha256", {}).get(split),
    )


def identity(train: TokenFile, validation: TokenFile, *, seed: int, batch: int) -> dict:
    """Everything that fixes which tokens step s reads, ready for JSON; two runs that agree on it read the same."""
    files = {
        split: {"sha256": windows.sha256, "tokens": windows.tokens}
        for split, windows in zip(SPLITS, (train, validation), strict=True)
    }
    return {**files, "seed": seed, "batch": batch, "context": train.context}


def _length(path: Path, itemsize: int) -> int:
    """Tokens in a file."""
    if not path.is_file():
        raise UserError(
            f"{path} is not there; prepare it with `python -m shmap_tp.prepare --source stdlib --out {path.parent}` "
            "(--help names other sources)"
        )
    size = path.stat().st_size
    if size % itemsize:
        raise UserError(
            f"{path}: {size} bytes is not a multiple of the {itemsize} bytes of a token; the file was cut short: "
            "copy or prepare it again"
        )
    return size // itemsize


def _scan(path: Path, dtype: np.dtype) -> tuple[int, int, str]:
    """The largest id, the first position that holds it, and the sha256 of the bytes, in one pass."""
    digest, largest, position, start = hashlib.sha256(), -1, -1, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            ids = np.frombuffer(chunk, dtype)
            if (here := int(ids.max())) > largest:
                largest, position = here, start + int(ids.argmax())
            start += len(ids)
    return largest, position, digest.hexdigest()


def _meta(directory: Path) -> dict:
    """meta.json of a prepared directory; empty where there is none."""
    path = directory / META
    if not path.is_file():
        return {}
    try:
        meta = json.loads(path.read_bytes())
        known = meta["dtype"] in DTYPES and all(isinstance(meta["sha256"][split], str) for split in SPLITS)
    except (ValueError, TypeError, KeyError):
        known = False
    if not known:
        raise UserError(
            f"{path}: needs dtype ({' or '.join(DTYPES)}) and the sha256 of {' and '.join(SPLITS)}; "
            "prepare it again, or remove the file if the tokens are plain uint16"
        )
    return meta
