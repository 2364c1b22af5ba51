"""Token files and the data order: which sequence is read at which step, by which process, and how often."""

from functools import partial
from itertools import pairwise

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shmap_tp.data import batches
from shmap_tp.data.device_batch import host_shards, on_devices
from shmap_tp.data.metadata import Meta
from shmap_tp.data.token_files import TokenFile
from tests.helpers.data_orders import order_of
from tests.helpers.preparation import write_ids

CONTEXT, BATCH, MICROBATCHES = 8, 16, 2
SHAPE = (MICROBATCHES, BATCH // MICROBATCHES, CONTEXT + 1)
COUNT = 37  # sequences; not a multiple of the batch, so that batches cross from one epoch into the next
MESHES = [(1, 1), (8, 1), (2, 4), (1, 8)]


@pytest.fixture
def token_file(tmp_path) -> TokenFile:
    """Token i is id i, so a sequence identifies its index; the last two tokens belong to no sequence."""
    tokens = COUNT * CONTEXT + 3
    write_ids(tmp_path / "train.bin", np.arange(tokens))
    return TokenFile(tmp_path, "train", Meta(dtype="uint16"), context=CONTEXT, vocabulary=tokens)


def batch_at(token_file, step, seed=0):
    return batches.training_rows([token_file], order_of(token_file, seed=seed), step, BATCH, 0, BATCH)


def test_a_sequence_consists_of_its_inputs_and_their_targets(token_file):
    assert len(token_file) == COUNT
    rows = token_file.read(np.arange(COUNT))
    assert rows.dtype == np.int32
    assert (rows == np.arange(COUNT)[:, None] * CONTEXT + np.arange(CONTEXT + 1)).all()
    assert (rows[1:, 0] == rows[:-1, -1]).all()  # neighbours share one token; every token but the last is an input once


def test_a_sequence_counts_only_if_its_last_target_exists(tmp_path):
    for tokens, count in [(9, 1), (16, 1), (17, 2), (24, 2), (25, 3)]:
        write_ids(tmp_path / "train.bin", np.zeros(tokens))
        assert len(TokenFile(tmp_path, "train", Meta(dtype="uint16"), context=8, vocabulary=1)) == count


def test_each_sequence_is_read_once_in_every_epoch(token_file):
    firsts = np.concatenate([batch_at(token_file, step)[:, 0] for step in range(COUNT)])  # COUNT steps are BATCH epochs
    for epoch in firsts.reshape(BATCH, COUNT):
        assert sorted(epoch // CONTEXT) == list(range(COUNT))


def test_the_data_order_does_not_depend_on_earlier_steps(token_file):
    order = order_of(token_file)
    forward = [batches.training_rows([token_file], order, step, BATCH, 0, BATCH) for step in range(800)]
    for step in (799, 300, 7, 512):  # beyond the samples that are computed at a time
        assert (batch_at(token_file, step) == forward[step]).all()


def test_a_batch_can_be_larger_than_an_epoch(token_file):
    rows = batches.training_rows([token_file], order_of(token_file), 1, 5000, 0, 5000)
    each = np.concatenate([batch_at(token_file, step) for step in range(312, 626)])  # samples 4992 to 10015
    assert (rows == each[8:5008]).all()


def test_rows_do_not_depend_on_how_they_are_divided_among_readers(token_file):
    for boundaries in ([0, 8, 16], [0, 1, 5, 5, 12, 16], range(17)):
        for step in (0, 2):  # step 2 spans epochs 0 and 1
            rows = partial(batches.training_rows, [token_file], order_of(token_file), step, BATCH)
            pieces = [rows(first, last) for first, last in pairwise(boundaries)]
            assert (np.concatenate(pieces) == batch_at(token_file, step)).all()


def test_validation_rows_are_in_file_order(token_file):
    before = batches.validation_rows(token_file, 1, BATCH, 0, BATCH)
    batch_at(token_file, 7)
    assert (before[:, 0] // CONTEXT == np.arange(16, 32)).all()
    assert (batches.validation_rows(token_file, 1, BATCH, 4, 9) == before[4:9]).all()


class RecordingReader:
    """Returns the rows of step 2 and records the indices that were requested."""

    def __init__(self, token_file):
        self.rows, self.requested = partial(batches.training_rows, [token_file], order_of(token_file), 2, BATCH), []

    def __call__(self, first, last):
        self.requested += range(first, last)
        return self.rows(first, last)


@pytest.mark.parametrize("dp, mp", MESHES)
def test_devices_hold_the_global_batch_and_each_row_is_read_once(token_file, dp, mp):
    mesh = jax.make_mesh((dp, mp), ("dp", "mp"), (AxisType.Auto,) * 2, devices=jax.devices()[: dp * mp])
    reader = RecordingReader(token_file)
    with jax.transfer_guard("disallow"):
        sharding = NamedSharding(mesh, P(None, "dp", None))
        batch = on_devices(host_shards(reader, sharding, SHAPE), sharding, SHAPE)
    assert batch.shape == SHAPE and batch.dtype == np.int32
    assert batch.sharding.spec == P(None, "dp", None)
    assert (np.asarray(batch).reshape(BATCH, -1) == batch_at(token_file, 2)).all()
    assert sorted(reader.requested) == list(range(BATCH))


def test_rows_follow_the_position_of_a_device_in_the_mesh_not_its_id(token_file):
    """On a TPU the two differ, because the mesh follows the torus."""
    shuffled = np.array(jax.devices())[[5, 3, 0, 6, 1, 7, 4, 2]].reshape(2, 4)
    mesh = Mesh(shuffled, ("dp", "mp"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P(None, "dp", None))
    batch = on_devices(host_shards(RecordingReader(token_file), sharding, SHAPE), sharding, SHAPE)
    expected = batch_at(token_file, 2).reshape(SHAPE)
    assert all((np.asarray(shard.data) == expected[shard.index]).all() for shard in batch.addressable_shards)


class OfProcess(jax.sharding.Sharding):
    """`sharding` as a process sees it that has half of the devices."""

    def __init__(self, sharding: NamedSharding, number: int):
        self.sharding, self.number = sharding, number

    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict:
        every = self.sharding.devices_indices_map(shape).items()
        return {device: index for device, index in every if device.id // 4 == self.number}


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("dp, mp", [(8, 1), (2, 4), (1, 8)])
def test_each_process_reads_only_the_rows_of_its_devices(token_file, dp, mp, number):
    mesh, reader = jax.make_mesh((dp, mp), ("dp", "mp"), (AxisType.Auto,) * 2), RecordingReader(token_file)
    sharding = OfProcess(NamedSharding(mesh, P(None, "dp", None)), number)
    shards = host_shards(reader, sharding, SHAPE)
    half = [row + 4 * number for row in (0, 1, 2, 3, 8, 9, 10, 11)]  # half of each of the two microbatches
    assert sorted(reader.requested) == (half if dp > 1 else [*range(BATCH)])  # mp=8 spans both processes
    expected, places = batch_at(token_file, 2).reshape(SHAPE), sharding.addressable_devices_indices_map(SHAPE)
    assert all((found == expected[place]).all() for found, place in zip(shards, places.values(), strict=True))
    assert len(shards) == 4


def test_rows_without_targets_fill_the_last_validation_batch(token_file):
    rows = batches.validation_rows(token_file, 0, 64, 30, 64)
    assert (rows[:7] == token_file.read(np.arange(30, 37))).all() and (rows[7:] == -1).all() and len(rows) == 34
    assert (batches.validation_rows(token_file, 0, 64, 40, 44) == -1).all()
