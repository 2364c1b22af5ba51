"""Safetensors files: parts are read and written in place, and damaged files are refused."""

import hashlib
import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest

from shmap_tp.errors import UserError
from shmap_tp.pretrained import tensor_files
from shmap_tp.pretrained.layout import Layout
from shmap_tp.pretrained.tensor_files import DTYPES, place_tensors, read_header, reserve, write_header
from tests.helpers.pretrained_models import write_tensors

SIZES = {"d": 6, "h": 4, "n": 2, "k": 3, "f": 10, "v": 7, "t": 5}
VALUES = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(
    "box", [[(0, 2), (0, 3), (0, 4), (0, 5)], [(1, 2), (0, 3), (1, 3), (0, 5)], [(0, 2), (1, 2), (0, 4), (2, 4)]]
)
def test_a_box_of_a_tensor_is_read(tmp_path, box, dtype):
    write_tensors(tmp_path / "a", {"before": np.ones(3), "x": VALUES, "after": np.ones(2)}, dtype)
    found = read_header(tmp_path / "a")["x"].read(VALUES.shape, box)
    assert np.array_equal(found.astype(np.float32), VALUES[tuple(slice(*one) for one in box)])


def test_boxes_are_written_where_they_are_read(tmp_path):
    shapes = {"x": (6, 20), "y": (3,)}
    reserve(tmp_path / "a", shapes, DTYPES["F32"])
    tensor = place_tensors(tmp_path / "a", shapes, DTYPES["F32"])["x"]
    for rows in range(2):
        for columns in ((0, 2), (2, 5)):
            box = [(rows, rows + 1), (0, 3), (0, 4), columns]
            tensor.write(VALUES.shape, box, VALUES[tuple(slice(*one) for one in box)])
    with pytest.raises(UserError, match="is not a safetensors file: its header is not JSON"):
        read_header(tmp_path / "a")
    write_header(tmp_path / "a", shapes, DTYPES["F32"])
    assert np.array_equal(read_header(tmp_path / "a")["x"].read((2, 3, 4, 5), [(0, n) for n in VALUES.shape]), VALUES)
    assert not read_header(tmp_path / "a")["y"].read((3,), [(0, 3)]).any()


def test_a_fifo_and_a_header_of_too_many_tensors_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UserError, match="fifo is a FIFO, but a file is needed"):
        read_header(tmp_path / "fifo")
    text = b'"data_offsets"' * 100_001
    (tmp_path / "many").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(UserError, match="many names 100,001 tensors, but no model has more than 100,000"):
        read_header(tmp_path / "many")


PATTERNS = {
    "v d -> v d": ((7, 6), lambda x: x),
    "d f -> f d": ((6, 10), lambda x: x.T),
    "(n k) d -> d n k": ((6, 6), lambda x: x.reshape(2, 3, 6).transpose(2, 0, 1)),
    "d (h k) -> (h k) d": ((6, 12), lambda x: x.T),
    "(h 1/3 k) d -> (h k) d": ((36, 6), lambda x: x.reshape(4, 3, 3, 6)[:, 1].reshape(12, 6)),
    "d (2/3 h k) -> (h k) d": ((6, 36), lambda x: x[:, 24:36].T),
    "(1/h+n+n k) d -> d n k": ((24, 6), lambda x: x[12:18].reshape(2, 3, 6).transpose(2, 0, 1)),
    "(1/3 n k) -> n k": ((18,), lambda x: x[6:12].reshape(2, 3)),
}
"""The shape of the tensor, and our array of it by the definition of the pattern."""


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_slice_of_a_parameter_is_read_from_its_place_and_written_to_it(tmp_path, pattern):
    """Also slices that begin inside a head, as FSDP makes them."""
    shape, dense = PATTERNS[pattern]
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    write_tensors(tmp_path / "a", {"x": values})
    tensor, layout = read_header(tmp_path / "a")["x"], Layout(pattern, SIZES)
    ours = dense(values)
    assert layout.file_shape == values.shape and layout.our_shape == ours.shape
    reserve(tmp_path / "b", {"x": values.shape}, DTYPES["F32"])
    copy = place_tensors(tmp_path / "b", {"x": values.shape}, DTYPES["F32"])["x"]
    for pieces in range(1, 5):
        cuts = np.linspace(0, ours.shape[0], pieces + 1).astype(int).tolist()
        for start, stop in itertools.pairwise(cuts):
            ranges = ((start, stop), *((0, size) for size in ours.shape[1:]))
            part = layout.read(tensor, ranges, np.dtype(np.float32))
            assert np.array_equal(part, ours[start:stop]), (pieces, start)
            layout.write(copy, ranges, part)
    whole = tuple((0, size) for size in ours.shape)
    assert np.array_equal(layout.read(copy, whole, np.dtype(np.float32)), ours)


def test_the_hash_of_a_tensor_is_that_of_all_of_its_bytes_a_block_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "HASHED_BYTES", 100)
    write_tensors(tmp_path / "a", {"before": np.ones(3), "x": VALUES, "after": np.ones(2)})
    assert read_header(tmp_path / "a")["x"].sha256() == hashlib.sha256(VALUES.tobytes()).digest()


def test_padding_of_the_vocabulary_is_zero_and_is_not_written(tmp_path):
    values = np.random.default_rng(0).normal(size=(7, 6)).astype(np.float32)
    write_tensors(tmp_path / "a", {"x": values, "next": np.ones(4)})
    tensor, layout = read_header(tmp_path / "a")["x"], Layout("v d -> v d", SIZES)
    padded = layout.read(tensor, ((4, 12), (0, 6)), np.dtype(np.float32))
    assert np.array_equal(padded[:3], values[4:]) and not padded[3:].any()
    layout.write(tensor, ((4, 12), (0, 6)), padded + 1)
    assert np.array_equal(read_header(tmp_path / "a")["next"].read((4,), [(0, 4)]), np.ones(4))


def header(**tensors: tuple) -> bytes:
    text = json.dumps(
        {name: {"dtype": code, "shape": shape, "data_offsets": at} for name, (code, shape, at) in tensors.items()}
    ).encode()
    return len(text).to_bytes(8, "little") + text


DAMAGED = {
    "is truncated: its header names 8 bytes of data, it has 4": header(x=("F32", [2], [0, 8])) + bytes(4),
    "has bytes that belong to no tensor": header(x=("F32", [2], [0, 8])) + bytes(12),
    "y, which begins at byte 4 of the data, overlaps x": header(x=("F32", [2], [0, 8]), y=("F32", [2], [4, 12]))
    + bytes(12),
    "y, which begins at byte 12 of the data, does not follow x": header(
        x=("F32", [2], [0, 8]), y=("F32", [1], [12, 16])
    )
    + bytes(16),
    "x has 8 bytes, which is not the size of F32[3]": header(x=("F32", [3], [0, 8])) + bytes(8),
    "x has the dtype I64; weights must be one of F64, F32, F16, BF16": header(x=("I64", [1], [0, 8])) + bytes(8),
    "is truncated or not a safetensors file: it has 7 bytes": bytes(7),
    "its header is not JSON": (5).to_bytes(8, "little") + b"{{{{{",
    "its header is not an object": (2).to_bytes(8, "little") + b"[]",
    "the header's entry of x has no dtype, shape and data_offsets": (7).to_bytes(8, "little") + b'{"x":1}',
}


@pytest.mark.parametrize("message", DAMAGED)
def test_a_damaged_file_is_refused(tmp_path, message):
    (tmp_path / "a.safetensors").write_bytes(DAMAGED[message])
    with pytest.raises(UserError) as raised:
        read_header(tmp_path / "a.safetensors")
    assert message in str(raised.value) and "a.safetensors" in str(raised.value)


def test_a_file_that_became_shorter_is_refused_while_it_is_read(tmp_path):
    file: Path = tmp_path / "a"
    write_tensors(file, {"x": np.ones((4, 4))})
    tensor = read_header(file)["x"]
    file.write_bytes(file.read_bytes()[:-16])
    with pytest.raises(UserError, match="ends at byte"):
        tensor.read((4, 4), [(0, 4), (0, 4)])
