"""The order of the data: theorems about which row is read, when, by whom, and how often."""

import hashlib
import json
import os
import socket
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shmap_tp.data import batches as data
from shmap_tp.errors import UserError

CONTEXT, BATCH, MICROBATCHES = 8, 16, 2
SHAPE = (MICROBATCHES, BATCH // MICROBATCHES, CONTEXT + 1)
COUNT = 37  # windows; does not divide by the batch, so that batches straddle epochs
MESHES = [(1, 1), (8, 1), (2, 4), (1, 8)]


def write(path: Path, ids, dtype: str = "<u2") -> Path:
    np.asarray(ids, dtype).tofile(path)
    return path


@pytest.fixture
def windows(tmp_path) -> data.TokenFile:
    """Token i is id i, so a window tells its number; two tokens at the end fill no window."""
    return data.TokenFile(
        write(tmp_path / "train.bin", np.arange(COUNT * CONTEXT + 3)), context=CONTEXT, vocabulary=COUNT * CONTEXT + 3
    )


def batch_at(windows, step, seed=0):
    return data.training_rows(windows, seed, step, BATCH, 0, BATCH)


def test_a_window_is_its_inputs_and_their_targets(windows):
    assert len(windows) == COUNT
    rows = windows.read(np.arange(COUNT))
    assert rows.dtype == np.int32
    assert (rows == np.arange(COUNT)[:, None] * CONTEXT + np.arange(CONTEXT + 1)).all()
    assert (rows[1:, 0] == rows[:-1, -1]).all()  # neighbours share one token; every token but the last is an input once


@pytest.mark.parametrize("tokens, count", [(9, 1), (16, 1), (17, 2), (24, 2), (25, 3)])
def test_a_window_counts_only_with_its_last_target(tmp_path, tokens, count):
    assert len(data.TokenFile(write(tmp_path / "x.bin", np.zeros(tokens)), context=8, vocabulary=1)) == count


def test_each_window_is_read_once_in_every_epoch(windows):
    firsts = np.concatenate([batch_at(windows, step)[:, 0] for step in range(COUNT)])  # COUNT steps are BATCH epochs
    for epoch in firsts.reshape(BATCH, COUNT):
        assert sorted(epoch // CONTEXT) == list(range(COUNT))


def test_the_order_is_the_stated_formula(windows):
    for step in (0, 1, 2, 3, 40):
        samples = step * BATCH + np.arange(BATCH)
        expected = [np.random.default_rng([5, i // COUNT]).permutation(COUNT)[i % COUNT] for i in samples]
        assert (batch_at(windows, step, seed=5)[:, 0] // CONTEXT == expected).all()


def test_the_order_has_no_memory(windows):
    forward = [batch_at(windows, step) for step in range(8)]
    data.permutation.cache_clear()
    backward = [batch_at(windows, step) for step in reversed(range(8))][::-1]
    assert all((a == b).all() for a, b in zip(forward, backward, strict=True))


def test_a_batch_may_be_larger_than_an_epoch(windows):
    rows = data.training_rows(windows, 0, 1, 100, 0, 100)
    assert (rows[:11, 0] // CONTEXT == data.permutation(COUNT, 0, 2)[26:]).all()
    assert (rows[11:48, 0] // CONTEXT == data.permutation(COUNT, 0, 3)).all()


@pytest.mark.parametrize("cuts", [[0, 16], [0, 8, 16], [0, 1, 5, 5, 12, 16], list(range(17))])
def test_rows_do_not_depend_on_who_reads_them(windows, cuts):
    for step in (0, 2):  # step 2 straddles epochs 0 and 1
        pieces = [data.training_rows(windows, 0, step, BATCH, a, b) for a, b in pairwise(cuts)]
        assert (np.concatenate(pieces) == batch_at(windows, step)).all()


def test_epochs_and_seeds_differ():
    orders = {tuple(data.permutation(COUNT, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_validation_is_in_file_order_whatever_was_trained(windows):
    assert data.evaluation_batches(windows, 8, BATCH) == 2
    assert data.evaluation_batches(windows, 1, BATCH) == 1
    before = data.evaluation_rows(windows, 1, BATCH, 0, BATCH)
    batch_at(windows, 7)
    assert (before[:, 0] // CONTEXT == np.arange(16, 32)).all()
    assert (data.evaluation_rows(windows, 1, BATCH, 4, 9) == before[4:9]).all()


class Spy:
    """Hands out rows and keeps the numbers of those that were asked for."""

    def __init__(self, windows):
        self.rows, self.asked = partial(data.training_rows, windows, 0, 2, BATCH), []

    def __call__(self, first, last):
        self.asked += range(first, last)
        return self.rows(first, last)


@pytest.mark.parametrize("dp, mp", MESHES)
def test_the_devices_hold_the_global_batch_and_each_row_is_read_once(windows, dp, mp):
    mesh = jax.make_mesh((dp, mp), ("dp", "mp"), (AxisType.Auto,) * 2, devices=jax.devices()[: dp * mp])
    spy = Spy(windows)
    with jax.transfer_guard("disallow"):
        batch = data.device_batch(spy, NamedSharding(mesh, P(None, "dp", None)), SHAPE)
    assert batch.shape == SHAPE and batch.dtype == np.int32
    assert batch.sharding.spec == P(None, "dp", None)
    assert (np.asarray(batch).reshape(BATCH, -1) == batch_at(windows, 2)).all()
    assert sorted(spy.asked) == list(range(BATCH))


def test_rows_go_by_the_place_of_a_device_in_the_mesh_not_by_its_number(windows):
    """On a TPU the two differ: the mesh follows the torus."""
    shuffled = np.array(jax.devices())[[5, 3, 0, 6, 1, 7, 4, 2]].reshape(2, 4)
    mesh = Mesh(shuffled, ("dp", "mp"), axis_types=(AxisType.Auto,) * 2)
    batch = data.device_batch(Spy(windows), NamedSharding(mesh, P(None, "dp", None)), SHAPE)
    whole = batch_at(windows, 2).reshape(SHAPE)
    assert all((np.asarray(shard.data) == whole[shard.index]).all() for shard in batch.addressable_shards)


WORKER = """
import json, sys
from functools import partial
from pathlib import Path
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from shmap_tp import data
port, process, path, shape = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), tuple(json.loads(sys.argv[4]))
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize("127.0.0.1:" + port, 2, process)
windows = data.Windows(path, context=shape[2] - 1, vocabulary=65536)
size = shape[0] * shape[1]
out = {}
for dp, mp in [(8, 1), (2, 4), (1, 8)]:
    asked = []
    def rows(first, last):
        asked.extend(range(first, last))
        return data.training_rows(windows, 0, 2, size, first, last)
    mesh = jax.make_mesh((dp, mp), ("dp", "mp"), (AxisType.Auto,) * 2)
    batch = data.device_batch(rows, NamedSharding(mesh, P(None, "dp", None)), shape)
    whole = data.training_rows(windows, 0, 2, size, 0, size).reshape(shape)
    right = all((np.asarray(s.data) == whole[s.index]).all() for s in batch.addressable_shards)
    out[f"{dp}x{mp}"] = {"asked": sorted(asked), "right": bool(right), "shards": len(batch.addressable_shards)}
print(json.dumps(out))
jax.distributed.shutdown()
"""


def test_two_processes_read_only_what_their_devices_hold(windows):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    root = str(Path(data.__file__).parents[1])
    command = [sys.executable, "-c", WORKER, port]
    arguments = [str(windows.path), json.dumps(SHAPE)]
    processes = [
        subprocess.Popen(
            [*command, str(process), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu"},
        )
        for process in range(2)
    ]
    try:
        ends = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], ends[0][1] + ends[1][1]
    answers = [json.loads(out) for out, _ in ends]
    assert all(mesh["right"] and mesh["shards"] == 4 for answer in answers for mesh in answer.values())
    for process, half in enumerate([[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]):
        assert answers[process]["8x1"]["asked"] == half  # its half of each of the two microbatches
        assert answers[process]["2x4"]["asked"] == half  # once, though four devices hold it
        assert answers[process]["1x8"]["asked"] == list(range(BATCH))  # mp spans the processes: both need every row


def prepared(directory: Path, ids, dtype: str = "uint16", **changes) -> Path:
    for split in data.SPLITS:
        write(directory / f"{split}.bin", ids, data.DTYPES[dtype])
    digest = hashlib.sha256((directory / "train.bin").read_bytes()).hexdigest()
    meta = {"dtype": dtype, "sha256": dict.fromkeys(data.SPLITS, digest), **changes}
    (directory / data.META).write_text(json.dumps(meta))
    return directory


def test_a_directory_without_meta_is_uint16(tmp_path):
    write(tmp_path / "train.bin", [1, 2, 65535, 4, 5])
    windows = data.open_token_file(tmp_path, "train", context=2, vocabulary=65536)
    assert windows.read(np.arange(2)).tolist() == [[1, 2, 65535], [65535, 4, 5]]


def test_ids_beyond_16_bits(tmp_path):
    windows = data.open_token_file(
        prepared(tmp_path, [70000, 1, 2**20], "uint32"), "validation", context=2, vocabulary=2**20 + 1
    )
    assert windows.read(np.arange(1)).tolist() == [[70000, 1, 2**20]]


def test_identity_names_what_fixes_the_order(tmp_path):
    opened = [
        data.open_token_file(prepared(tmp_path, range(50)), split, context=4, vocabulary=50) for split in data.SPLITS
    ]
    answer = json.loads(json.dumps(data.identity(*opened, seed=3, batch=2)))
    digest = hashlib.sha256((tmp_path / "train.bin").read_bytes()).hexdigest()
    file = {"sha256": digest, "tokens": 50}
    assert answer == {"train": file, "validation": file, "seed": 3, "batch": 2, "context": 4}


def test_the_scan_sees_past_its_first_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_CHUNK", 16)
    path = write(tmp_path / "x.bin", [*range(20), 300, 1])
    assert data.TokenFile(path, context=4, vocabulary=301).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(UserError, match=r"token 20 is id 300, model.vocabulary=300 ends at 299; use .*=301"):
        data.TokenFile(path, context=4, vocabulary=300)


def bad(case: str, directory: Path) -> Path:
    prepared(directory, range(50))
    train, meta = directory / "train.bin", directory / data.META
    match case:
        case "missing":
            train.unlink()
        case "odd":
            train.write_bytes(train.read_bytes()[:-1])
        case "short":
            meta.unlink()
            write(train, range(4))
        case "changed":
            write(train, range(1, 51))
        case "json":
            meta.write_text("{")
        case "dtype":
            meta.write_text('{"dtype": "int8"}')
    return directory


@pytest.mark.parametrize(
    "case, words",
    [
        ("missing", r"train\.bin is not there; prepare it with `python -m shmap_tp\.prepare .* --out "),
        ("odd", r"train\.bin: 99 bytes is not a multiple of the 2 bytes of a token"),
        ("short", r"train\.bin: 4 tokens, and one window of model\.context=4 needs 5"),
        ("changed", r"train\.bin: sha256 is \w{12}\.\.\., meta\.json says \w{12}\.\.\."),
        ("json", r"meta\.json: needs dtype \(uint16 or uint32\)"),
        ("dtype", r"meta\.json: needs dtype \(uint16 or uint32\)"),
    ],
)
def test_a_bad_directory_is_named_with_the_way_out(tmp_path, case, words):
    with pytest.raises(UserError, match=words) as error:
        data.open_token_file(bad(case, tmp_path), "train", context=4, vocabulary=50)
    assert str(error.value).count("\n") <= 1


def test_too_little_validation_and_a_negative_seed(windows):
    with pytest.raises(UserError, match=r"37 windows .* one batch needs train\.batch=64; use train\.batch=37 or less"):
        data.evaluation_batches(windows, 1, 64)
    with pytest.raises(UserError, match=r"run\.seed=-1"):
        batch_at(windows, 0, seed=-1)
