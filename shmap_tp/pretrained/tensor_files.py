"""Safetensors files: slices of tensors are read by the `safetensors` library, and written in place.

The library writes whole tensors alone, up to a whole file from the memory of one process.  Here every process writes
the parts that it has, and holds a few pieces: so a new file is laid out first.  It is the length of its header (8
bytes, little endian), the header (JSON: of each tensor its dtype, its shape, and where its bytes begin and end), and
the tensors, each in row-major order.
    https://huggingface.co/docs/safetensors
"""

import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float
from safetensors import SafetensorError, safe_open

from shmap_tp.errors import UserError, first_line, shown
from shmap_tp.runtime.files import file_size, reading

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The dtypes that weights may have, by their names in a header."""
CODES = {dtype: code for code, dtype in DTYPES.items()}

SAMPLES = 256
HASHED_BYTES = 2**24
"""How many bytes of a tensor are read at a time to hash it."""

Index = tuple[int, ...]
Box = Sequence[tuple[int, int]]
"""The range [start, stop) of each dim of a tensor, in some view of it."""


def pieces_of_array(shape: Sequence[int], itemsize: int, limit: int) -> Iterator[tuple[Index, Index]]:
    """(the first index, the size) along each dim of pieces of at most `limit` bytes, in row-major order, that together
    make up an array.  The first dims are divided first: those are layers, or rows of a file."""
    piece = [max(1, size) for size in shape]
    for dim, size in enumerate(shape):
        whole = math.prod(piece) * itemsize
        if whole > limit:
            piece[dim] = max(1, size * limit // whole)
    for first in itertools.product(*(range(0, size, step) for size, step in zip(shape, piece, strict=True))):
        yield first, tuple(min(step, size - at) for at, step, size in zip(first, piece, shape, strict=True))


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Context that reads a file.  Raises UserError if it is not there, is cut, or is no safetensors file."""
    if file_size(file) is None:
        raise UserError(f"{file} does not exist; copy it there")
    try:
        with reading(file), safe_open(file, framework="np") as content:
            yield content
    except SafetensorError as error:
        reason = first_line(error)
        raise UserError(f"{file} is truncated, or not a safetensors file: {reason}; copy it again") from error


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file.  All methods raise UserError if the file cannot be read any more."""

    file: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, box: Box) -> Float[np.ndarray, "..."]:
        """`box` of the tensor, in its own dtype.  Only the pages of the file that have it are read, and they are not
        held."""
        with _opened(self.file) as content:
            return content.get_slice(self.name)[tuple(slice(*one) for one in box)]

    def blocks(self, limit: int) -> Iterator[np.ndarray]:
        """The bytes of the tensor, in parts of at most `limit` or of one value."""
        for first, size in pieces_of_array(self.shape, self.dtype.itemsize, limit):
            box = [(at, at + count) for at, count in zip(first, size, strict=True)]
            yield self.read(box).reshape(-1).view(np.uint8)

    def sha256(self) -> bytes:
        """The hash of all bytes of the tensor."""
        digest = hashlib.sha256()
        for block in self.blocks(HASHED_BYTES):
            digest.update(block)
        return digest.digest()

    def sample(self) -> bytes:
        """At least 256 rows of the tensor, or all of a small one."""
        if not self.shape:
            return self.read(()).tobytes()
        step = max(1, self.shape[0] // SAMPLES)
        with _opened(self.file) as content:
            rows = content.get_slice(self.name)
            return b"".join(rows[at : at + 1].tobytes() for at in range(0, self.shape[0], step))


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name.

    Raises UserError if the file is not there, is not a whole safetensors file, or has a dtype that weights do not have.
    """
    tensors = {}
    with _opened(file) as content:
        for name in content.keys():  # noqa: SIM118 - a file of the library, which cannot be iterated
            stored = content.get_slice(name)
            if (code := str(stored.get_dtype())) not in DTYPES:
                raise UserError(f"{file}: {shown(name)} has the dtype {code}; weights are of {', '.join(DTYPES)}")
            tensors[name] = StoredTensor(file, name, DTYPES[code], tuple(stored.get_shape()))
    return tensors


@dataclass(frozen=True)
class NewTensor:
    """Where a tensor of a new file is: its dtype, its shape and its first byte."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    def write(self, view: Sequence[int], box: Box, values: Float[np.ndarray, "..."]) -> None:
        """Write `values` to `box` of the tensor seen with the shape `view`, cast to its dtype, into the existing
        file."""
        data = memoryview(np.ascontiguousarray(values, self.dtype).reshape(-1).view(np.uint8))
        descriptor = os.open(self.file, os.O_WRONLY)
        try:
            for start, size in self._runs(view, box):
                run, data = data[:size], data[size:]
                while run:
                    count = os.pwrite(descriptor, run, start)
                    run, start = run[count:], start + count
        finally:
            os.close(descriptor)

    def _runs(self, view: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
        """The contiguous pieces of `box`, in order: (first byte in the file, number of bytes)."""
        assert math.prod(view) == math.prod(self.shape), (view, self.shape)
        last_cut = max([i for i, (a, b) in enumerate(box) if (a, b) != (0, view[i])], default=0)
        inner = math.prod(view[last_cut + 1 :])
        start, stop = box[last_cut] if box else (0, 1)
        firsts = np.array([start * inner], np.int64)
        for dim in reversed(range(last_cut)):
            firsts = (np.arange(*box[dim])[:, None] * math.prod(view[dim + 1 :]) + firsts[None]).reshape(-1)
        size = (stop - start) * inner * self.dtype.itemsize
        for first in firsts.tolist():
            yield self.offset + first * self.dtype.itemsize, size


class NewFile:
    """A file of tensors of these shapes, in this order."""

    tensors: dict[str, NewTensor]
    size: int
    """The size of all tensors in bytes."""

    def __init__(self, file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype):
        self.path, header, end = file, {"__metadata__": {"format": "pt"}}, 0
        for name, shape in shapes.items():
            start, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
        self._header, self.size = len(text).to_bytes(8, "little") + text, end
        self.tensors = {
            name: NewTensor(file, dtype, shape, len(self._header) + header[name]["data_offsets"][0])
            for name, shape in shapes.items()
        }

    def reserve(self) -> None:
        """Make the file with the space that the header and all tensors need, so that a full disk is noticed now.

        Before `finish` no program takes it for a safetensors file: its header has no bytes.
        """
        with self.path.open("wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, len(self._header) + self.size)

    def finish(self) -> None:
        """Write the header into a file whose tensors are written, and all of it to the disk."""
        with self.path.open("r+b") as stream:
            stream.write(self._header)
            stream.flush()
            os.fsync(stream.fileno())
