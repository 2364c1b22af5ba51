"""Token files: the tokenized text of one split on disk, read as sequences of T + 1 tokens.

T context, n sequences in a file.

A prepared directory holds `train.bin` and `validation.bin`: token ids one after the other, little-endian uint16 (uint32
if the vocabulary needs it), the format of nanoGPT.  `meta.json` beside them states the dtype and the sha256 of each
file; without it the files are taken to be uint16.  Sequence s consists of tokens s T to s T + T inclusive: T inputs and
their T targets.  Neighbouring sequences share one token, and n = (tokens - 1) // T.
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
_CHUNK = 1 << 24  # bytes that the scan reads at a time


class TokenFile:
    """One token file as n sequences of T + 1 tokens; only the sequences that are asked for are read from disk.

    Opening reads the whole file once, to find its largest id and its sha256.
    Raises `UserError` if the file is missing, truncated within a token, shorter than one sequence, contains an id
    outside `vocabulary`, or does not have the given `sha256`.
    """

    path: Path
    context: int
    tokens: int
    """Length of the file in tokens."""
    sha256: str

    def __init__(self, path: Path, *, context: int, vocabulary: int, dtype: str = "uint16", sha256: str | None = None):
        self.path, self.context = path, context
        self.tokens = _count_tokens(path, DTYPES[dtype].itemsize)
        if self.tokens <= context:
            raise UserError(
                f"{path}: {self.tokens} tokens, but one sequence of model.context={context} needs {context + 1}; "
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
                f"{path}: token {position} is id {largest}, but model.vocabulary={vocabulary} ends at "
                f"{vocabulary - 1}; use model.vocabulary={largest + 1} or more, or the tokenizer of that vocabulary"
            )
        self._ids = np.memmap(path, dtype=DTYPES[dtype], mode="r")

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
    """Open one split ("train" or "validation") of a prepared directory and check it against meta.json."""
    meta = _read_meta(Path(directory))
    return TokenFile(
        Path(directory) / f"{split}.bin",
        context=context,
        vocabulary=vocabulary,
        dtype=meta.get("dtype", "uint16"),
        sha256=meta.get("sha256", {}).get(split),
    )


def data_identity(train: TokenFile, validation: TokenFile, *, seed: int, batch: int) -> dict:
    """Everything that determines which tokens step s reads, as JSON values.  Two runs with equal identities read the
    same tokens at every step."""
    files = {
        split: {"sha256": file.sha256, "tokens": file.tokens}
        for split, file in zip(SPLITS, (train, validation), strict=True)
    }
    return {**files, "seed": seed, "batch": batch, "context": train.context}


def _count_tokens(path: Path, itemsize: int) -> int:
    """Number of tokens in a file, from its size."""
    if not path.is_file():
        raise UserError(
            f"{path} does not exist; prepare it with `python -m shmap_tp.prepare --source stdlib --out {path.parent}` "
            "(--help lists other sources)"
        )
    size = path.stat().st_size
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


def _read_meta(directory: Path) -> dict:
    """meta.json of a prepared directory; empty if there is none."""
    path = directory / META
    if not path.is_file():
        return {}
    try:
        meta = json.loads(path.read_bytes())
        valid = meta["dtype"] in DTYPES and all(isinstance(meta["sha256"][split], str) for split in SPLITS)
    except (ValueError, TypeError, KeyError):
        valid = False
    if not valid:
        raise UserError(
            f"{path}: must have dtype ({' or '.join(DTYPES)}) and the sha256 of {' and '.join(SPLITS)}; "
            "prepare it again, or remove the file if the tokens are plain uint16"
        )
    return meta
