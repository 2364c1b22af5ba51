"""Safetensors files: their headers, and parts of their tensors read and written in place.

A file is the length of its header (8 bytes, little endian), the header (JSON: of each tensor its dtype, its shape, and
where its bytes begin and end), and the tensors, each in row-major order.  Because the places are known, a device's
shard is a list of byte ranges: only those are read, and every process writes those that it has into the same file.
The `safetensors` library reads byte ranges of some dtypes and writes whole files; it is not used here.
    https://huggingface.co/docs/safetensors
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float

from shmap_tp.errors import UserError, shown
from shmap_tp.runtime.files import file_size

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The dtypes that weights may have, by their names in a header."""
CODES = {dtype: code for code, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
MAX_TENSORS = 100_000
"""Tensors of one file: a header of a million takes half a minute to check."""

SAMPLES, SAMPLE_BYTES = 256, 4096
HASHED_BYTES = 2**24
"""How many bytes of a tensor are read at a time to hash it."""

Box = Sequence[tuple[int, int]]
"""The range [start, stop) of each dim of a tensor, in some view of it."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is: its file, dtype, shape and first byte."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, view: Sequence[int], box: Box) -> Float[np.ndarray, "..."]:
        """`box` of the tensor seen with the shape `view`, in its own dtype.  Only these bytes are read.

        Raises UserError if the file ends before them.
        """
        count = math.prod(stop - start for start, stop in box)
        buffer = np.empty(count * self.dtype.itemsize, np.uint8)
        done, descriptor = 0, os.open(self.file, os.O_RDONLY)
        try:
            for start, size in self._runs(view, box):
                _read_at(descriptor, memoryview(buffer)[done : done + size], start, self.file)
                done += size
        finally:
            os.close(descriptor)
        return buffer.view(self.dtype).reshape([stop - start for start, stop in box])

    def first_bytes(self, count: int) -> bytes:
        """Up to `count` bytes of the tensor."""
        with self.file.open("rb") as stream:
            return os.pread(stream.fileno(), min(count, self.size), self.offset)

    def sha256(self) -> bytes:
        """The hash of all bytes of the tensor."""
        digest = hashlib.sha256()
        with self.file.open("rb") as stream:
            for at in range(0, self.size, HASHED_BYTES):
                digest.update(os.pread(stream.fileno(), min(HASHED_BYTES, self.size - at), self.offset + at))
        return digest.digest()

    def sample(self) -> bytes:
        """4096 bytes at each of up to 256 places of the tensor, or the whole of a small one."""
        step = max(SAMPLE_BYTES, self.size // SAMPLES // SAMPLE_BYTES * SAMPLE_BYTES)
        with self.file.open("rb") as stream:
            return b"".join(
                os.pread(stream.fileno(), min(SAMPLE_BYTES, self.size - at), self.offset + at)
                for at in range(0, self.size, step)
            )

    def write(self, view: Sequence[int], box: Box, values: Float[np.ndarray, "..."]) -> None:
        """Write `values` to `box` of the tensor seen with the shape `view`, cast to its dtype, into the existing
        file."""
        data = memoryview(np.ascontiguousarray(values, self.dtype).reshape(-1).view(np.uint8))
        done, descriptor = 0, os.open(self.file, os.O_WRONLY)
        try:
            for start, size in self._runs(view, box):
                _write_at(descriptor, data[done : done + size], start)
                done += size
        finally:
            os.close(descriptor)

    def _runs(self, view: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
        """The contiguous pieces of `box`, in order: (first byte in the file, number of bytes)."""
        assert math.prod(view) == math.prod(self.shape), (view, self.shape)
        if any(start == stop for start, stop in box):
            return
        last_cut = max([i for i, (a, b) in enumerate(box) if (a, b) != (0, view[i])], default=0)
        inner = math.prod(view[last_cut + 1 :])
        start, stop = box[last_cut] if box else (0, 1)
        strides = [math.prod(view[i + 1 :]) for i in range(last_cut)]
        firsts = np.array([start * inner], np.int64)
        for stride, (low, high) in zip(reversed(strides), reversed(list(box[:last_cut])), strict=True):
            firsts = (np.arange(low, high)[:, None] * stride + firsts[None]).reshape(-1)
        size = (stop - start) * inner * self.dtype.itemsize
        for first in firsts.tolist():
            yield self.offset + first * self.dtype.itemsize, size


def _read_at(descriptor: int, into: memoryview, offset: int, file: Path) -> None:
    while into:
        count = os.preadv(descriptor, [into], offset)
        if count == 0:
            raise UserError(f"{file} ends at byte {offset}, before a tensor that its header names; copy it again")
        into, offset = into[count:], offset + count


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name.

    Raises UserError if the file is not there, is not a safetensors file, is truncated or has bytes that no tensor has,
    if tensors overlap, or if one has a dtype that weights do not have.
    """
    header, first, end = _header(file)
    tensors, ranges = {}, []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            code, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise UserError(f"{file}: the header's entry of {name} has no dtype, shape and data_offsets") from None
        if code not in list(DTYPES):
            raise UserError(f"{file}: {name} has the dtype {shown(code)}; weights must be one of {', '.join(DTYPES)}")
        if not all(type(value) is int and value >= 0 for value in (*shape, start, stop)):
            raise UserError(f"{file}: the header's shape or data_offsets of {name} are not integers; copy it again")
        if stop - start != math.prod(shape) * DTYPES[code].itemsize:
            raise UserError(f"{file}: {name} has {stop - start} bytes, which is not the size of {code}{list(shape)}")
        tensors[name] = StoredTensor(file, DTYPES[code], shape, first + start)
        ranges.append((start, stop, name))
    _check_ranges(file, sorted(ranges), end - first)
    return tensors


def _header(file: Path) -> tuple[dict[str, Any], int, int]:
    """(the header, the byte where tensors begin, the size of the file)."""
    size = file_size(file)
    if size is None:
        raise UserError(f"{file} does not exist; copy it there")
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise UserError(
                    f"{file} is truncated or not a safetensors file: it has {size} bytes, and a header of {length}"
                )
            text = stream.read(length)
        if (count := text.count(b'"data_offsets"')) > MAX_TENSORS:
            raise UserError(
                f"{file} names {count:,} tensors, but no model has more than {MAX_TENSORS:,}; copy it again"
            )
        header = json.loads(text)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not a safetensors file: its header is not JSON") from error
    if not isinstance(header, dict):
        raise UserError(f"{file} is not a safetensors file: its header is not an object")
    return header, 8 + length, size


def _check_ranges(file: Path, ranges: list[tuple[int, int, str]], size: int) -> None:
    """Check that the tensors lie one after the other and fill the file."""
    end, before = 0, "the header"
    for start, stop, name in ranges:
        if start != end:
            relation = "overlaps" if start < end else "does not follow"
            raise UserError(f"{file}: {name}, which begins at byte {start} of the data, {relation} {before}")
        end, before = stop, name
    if end != size:
        what = "is truncated" if size < end else "has bytes that belong to no tensor"
        raise UserError(f"{file} {what}: its header names {end} bytes of data, it has {size}; copy it again")


def place_tensors(file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype) -> dict[str, StoredTensor]:
    """Where tensors of these shapes are in a new `file`, in this order."""
    offset, tensors = len(_header_bytes(shapes, dtype)), {}
    for name, shape in shapes.items():
        tensors[name] = StoredTensor(file, dtype, shape, offset)
        offset += math.prod(shape) * dtype.itemsize
    return tensors


def reserve(file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype) -> None:
    """Make a new file with the space that the header and all tensors need, so that a full disk is noticed now.

    Before `write_header` no program takes it for a safetensors file: its header has no bytes.
    """
    size = len(_header_bytes(shapes, dtype)) + sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    with file.open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, size)


def write_header(file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype) -> None:
    """Write the header of `place_tensors` into a file whose tensors are written, and all of it to the disk."""
    with file.open("r+b") as stream:
        stream.write(_header_bytes(shapes, dtype))
        stream.flush()
        os.fsync(stream.fileno())


def _header_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype) -> bytes:
    offset, header = 0, {"__metadata__": {"format": "pt"}}
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text
