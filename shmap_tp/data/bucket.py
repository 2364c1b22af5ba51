"""The token files of a bucket: those of a data.dir that is a URL, by fsspec.

T context, n sequences in a file.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from jaxtyping import Int, Int32

from shmap_tp.config.schema import DataConfig
from shmap_tp.data.metadata import DTYPES, META, SPLITS, TOKENIZER, Meta
from shmap_tp.errors import UserError, first_line, shown

FILES = (META, TOKENIZER, *(f"{split}.bin" for split in SPLITS))
_CHUNK = 1 << 24  # bytes that a copy reads at a time


class Bucket:
    """The files of data.dir, a URL.  Raises UserError if it cannot be read; so do all methods."""

    files: dict[str, str]
    """Those of `FILES` that are there: path by name."""

    def __init__(self, data: DataConfig):
        self._data = data
        with self._messages():
            import fsspec

            self._system, root = fsspec.core.url_to_fs(data.dir)
            library = type(self._system).__module__.partition(".")[0]
            logging.getLogger(library).addHandler(logging.NullHandler())  # else it prints a traceback, and then raises
            found = self._system.ls(root, detail=False) if self._system.exists(root) else []
        paths = {path.rsplit("/", 1)[-1]: path for path in found}
        self.files = {name: paths[name] for name in FILES if name in paths}

    def versions(self) -> dict[str, str]:
        """What identifies the present content of each file."""
        with self._messages():
            return {name: str(self._system.ukey(path)) for name, path in self.files.items()}

    def size(self, name: str) -> int:
        """Size of a file in bytes."""
        with self._messages():
            return int(self._system.size(self.files[name]))

    def chunks(self, name: str) -> Iterator[bytes]:
        """The content of a file."""
        with self._messages(), self._system.open(self.files[name], "rb") as source:
            while chunk := source.read(_CHUNK):
                yield chunk

    def ranges(self, name: str, starts: list[int], ends: list[int]) -> list[bytes]:
        """The bytes from each start to its end, requested at the same time."""
        with self._messages():
            return self._system.cat_ranges([self.files[name]] * len(starts), starts, ends, on_error="raise")

    @contextmanager
    def _messages(self) -> Iterator[None]:
        """Whatever the bucket's library raises becomes a UserError: each library has exceptions of its own."""
        url = self._data.dir
        try:
            yield
        except ImportError as error:
            extra = "gcsfs: pip install -e '.[gcs]'" if url.startswith("gs://") else first_line(error)
            raise UserError(f"data.dir={shown(url)} needs {extra}") from error
        except Exception as error:
            raise UserError(f"data.dir={shown(url)} cannot be read: {shown(first_line(error))}") from error


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

    def __init__(self, bucket: Bucket, split: str, meta: Meta, *, context: int, vocabulary: int):
        self._bucket, self._name, self._dtype = bucket, f"{split}.bin", DTYPES[meta.dtype]
        self._vocabulary = vocabulary
        if not meta.tokens or not meta.sha256 or meta.vocabulary is None:
            raise UserError(
                f"data.cache=null needs the tokens, sha256 and vocabulary in {META} of {bucket.files[META]}; "
                f"prepare the data with `python -m shmap_tp.prepare`, or set data.cache"
            )
        self.path, self.context = bucket.files[self._name], context
        self.tokens, self.sha256, self.largest = meta.tokens[split], meta.sha256[split], meta.vocabulary - 1
        size, stated = bucket.size(self._name), self.tokens * self._dtype.itemsize
        if size != stated:
            raise UserError(
                f"{self.path}: {size} bytes, but {META} says {self.tokens} tokens of {meta.dtype}, {stated} bytes; "
                "copy or prepare it again"
            )
        if self.tokens <= context or self.largest >= vocabulary:
            raise UserError(
                f"{self.path}: {self.tokens} tokens of vocabulary {meta.vocabulary}, but model.context={context} needs "
                f"{context + 1} and model.vocabulary={vocabulary} is the limit; use other data or another model"
            )

    def __len__(self) -> int:
        """Number of sequences."""
        return (self.tokens - 1) // self.context

    def read(self, indices: Int[np.ndarray, " rows"]) -> Int32[np.ndarray, "rows tokens"]:
        """The sequences at `indices`, [rows, T + 1]."""
        starts = (indices * self.context * self._dtype.itemsize).tolist()
        length = (self.context + 1) * self._dtype.itemsize
        parts = self._bucket.ranges(self._name, starts, [start + length for start in starts])
        rows = np.frombuffer(b"".join(parts), self._dtype).reshape(len(indices), self.context + 1)
        if (largest := int(rows.max(initial=0))) > self.largest:
            raise UserError(f"{self.path}: id {largest} occurs, but {META} says vocabulary {self.largest + 1}")
        return rows.astype(np.int32)
