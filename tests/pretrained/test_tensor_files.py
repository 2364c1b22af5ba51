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
from shmap_tp.pretrained.tensor_files import DTYPES, NewFile, read_header
from tests.helpers.pretrained_models import write_tensors

SIZES = {"d": 6, "h": 4, "n": 2, "k": 3, "f": 10, "v": 7, "t": 5}
VALUES = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(
    "box", [[(0, 2), (0, 3), (0, 4), (0, 5)], [(1, 2), (0, 3), (1, 3), (0, 5)], [(0, 2), (1, 2), (0, 4), (2, 4)]]
)
def test_a_box_of_a_tensor_is_read(tmp_path, box, dtype):
    write_tensors(tmp_path / "a", {"before": np.ones(3), "x": VALUES, "after": np.ones(2)}, dtype)
    found = read_header(tmp_path / "a")["x"].read(box)
    assert np.array_equal(found.astype(np.float32), VALUES[tuple(slice(*one) for one in box)])


def test_boxes_are_written_where_they_are_read(tmp_path):
    shapes = {"x": (6, 20), "y": (3,)}
    file = NewFile(tmp_path / "a", shapes, DTYPES["F32"])
    file.reserve()
    for rows in range(2):
        for columns in ((0, 2), (2, 5)):
            box = [(rows, rows + 1), (0, 3), (0, 4), columns]
            file.tensors["x"].write(VALUES.shape, box, VALUES[tuple(slice(*one) for one in box)])
    with pytest.raises(UserError, match="is truncated, or not a safetensors file"):
        read_header(tmp_path / "a")
    file.finish()
    found = read_header(tmp_path / "a")
    assert np.array_equal(found["x"].read([(0, 6), (0, 20)]).reshape(VALUES.shape), VALUES)
    assert not found["y"].read([(0, 3)]).any()


def test_a_fifo_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UserError, match="fifo is no regular file, but a file is needed"):
        read_header(tmp_path / "fifo")


PATTERNS = {
    "v d -> v d": ((7, 6), lambda x: x),
    "d f -> f d": ((6, 10), lambda x: x.T),
    "(n k) d -> d n k": ((6, 6), lambda x: x.reshape(2, 3, 6).transpose(2, 0, 1)),
    "d (h k) -> (h k) d": ((6, 12), lambda x: x.T),
    "(h 1/3 k) d -> (h k) d": ((36, 6), lambda x: x.reshape(4, 3, 3, 6)[:, 1].reshape(12, 6)),
    "d (2/3 h k) -> (h k) d": ((6, 36), lambda x: x[:, 24:36].T),
    "(1/h+n+n k) d -> d n k": ((24, 6), lambda x: x[12:18].reshape(2, 3, 6).transpose(2, 0, 1)),
    "(1/3 n k) -> n k": ((18,), lambda x: x[6:12].reshape(2, 3)),
    "d (f 1/2) -> d f": ((6, 20), lambda x: x[:, 1::2]),
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
    new = NewFile(tmp_path / "b", {"x": values.shape}, DTYPES["F32"])
    new.reserve()
    for pieces in range(1, 5):
        cuts = np.linspace(0, ours.shape[0], pieces + 1).astype(int).tolist()
        for start, stop in itertools.pairwise(cuts):
            ranges = ((start, stop), *((0, size) for size in ours.shape[1:]))
            part = layout.read(tensor, ranges, np.dtype(np.float32))
            assert np.array_equal(part, ours[start:stop]), (pieces, start)
            layout.write(new.tensors["x"], ranges, part)
    new.finish()
    copy = read_header(tmp_path / "b")["x"]
    whole = tuple((0, size) for size in ours.shape)
    assert np.array_equal(layout.read(copy, whole, np.dtype(np.float32)), ours)


def test_the_hash_of_a_tensor_is_that_of_all_of_its_bytes_a_block_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "HASHED_BYTES", 100)
    write_tensors(tmp_path / "a", {"before": np.ones(3), "x": VALUES, "scalar": np.array(2.0)})
    found = read_header(tmp_path / "a")
    assert found["x"].sha256() == hashlib.sha256(VALUES.tobytes()).digest()
    assert found["scalar"].sample() == np.float32(2).tobytes()


def test_padding_of_the_vocabulary_is_zero_and_is_not_written(tmp_path):
    values = np.random.default_rng(0).normal(size=(7, 6)).astype(np.float32)
    write_tensors(tmp_path / "a", {"x": values})
    tensor, layout = read_header(tmp_path / "a")["x"], Layout("v d -> v d", SIZES)
    padded = layout.read(tensor, ((4, 12), (0, 6)), np.dtype(np.float32))
    assert np.array_equal(padded[:3], values[4:]) and not padded[3:].any()
    new = NewFile(tmp_path / "b", {"x": values.shape, "next": (4,)}, DTYPES["F32"])
    new.reserve()
    layout.write(new.tensors["x"], ((4, 12), (0, 6)), padded + 1)
    new.finish()
    assert np.array_equal(read_header(tmp_path / "b")["x"].read([(4, 7), (0, 6)]), values[4:] + 1)
    assert not read_header(tmp_path / "b")["next"].read([(0, 4)]).any()


def header(**tensors: tuple) -> bytes:
    text = json.dumps(
        {name: {"dtype": code, "shape": shape, "data_offsets": at} for name, (code, shape, at) in tensors.items()}
    ).encode()
    return len(text).to_bytes(8, "little") + text


DAMAGED = {
    "truncated": header(x=("F32", [2], [0, 8])) + bytes(4),
    "longer": header(x=("F32", [2], [0, 8])) + bytes(12),
    "overlapping": header(x=("F32", [2], [0, 8]), y=("F32", [2], [4, 12])) + bytes(12),
    "with a gap": header(x=("F32", [2], [0, 8]), y=("F32", [1], [12, 16])) + bytes(16),
    "of another size": header(x=("F32", [3], [0, 8])) + bytes(8),
    "without a header": bytes(7),
    "of a huge header": (2**40).to_bytes(8, "little") + b"{}",
    "no JSON": (5).to_bytes(8, "little") + b"{{{{{",
    "no object": (2).to_bytes(8, "little") + b"[]",
    "without a shape": (7).to_bytes(8, "little") + b'{"x":1}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_refused(tmp_path, content):
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.safetensors is truncated, or not a safetensors file: .*; copy it again"):
        read_header(tmp_path / "a.safetensors")


def test_a_dtype_that_weights_do_not_have_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(header(x=("I64", [1], [0, 8])) + bytes(8))
    with pytest.raises(UserError, match="x has the dtype I64; weights are of F64, F32, F16, BF16"):
        read_header(tmp_path / "a")


def test_a_file_that_became_shorter_is_refused_while_it_is_read(tmp_path):
    file: Path = tmp_path / "a"
    write_tensors(file, {"x": np.ones((4, 4))})
    tensor = read_header(file)["x"]
    file.write_bytes(file.read_bytes()[:-16])
    with pytest.raises(UserError, match="a is truncated"):
        tensor.read([(0, 4), (0, 4)])
