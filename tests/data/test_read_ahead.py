"""The next steps' rows are read from a bucket while the present step runs."""

import asyncio
import signal
import time
from fractions import Fraction
from typing import Any

import jax
import numpy as np
import pytest

from shmap_tp.config.choices import Resume
from shmap_tp.config.schema import Config
from shmap_tp.data import device_batch
from shmap_tp.data.batches import Batches, open_data, training_rows
from shmap_tp.data.device_batch import AHEAD, ReadAhead, host_shards
from shmap_tp.errors import UserError
from shmap_tp.runtime.exit_codes import STOPPED
from shmap_tp.training import loop
from shmap_tp.training.goodput import TimeCategory, WallClock
from tests.data.conftest import Bucket
from tests.helpers.data_orders import order_of
from tests.helpers.run_fixtures import BATCH, CONTEXT, make_runs_quick, signal_during, tiny, tokens_of, values

DELAY = 0.2
"""Seconds that a request takes."""


def seconds_of_waiting(config: Config) -> list[float]:
    """Seconds for which each of some steps of a quarter of a second waits for its batch."""
    batches, waited = Batches(config, tokens_of(config)), []
    Bucket.delay = DELAY
    for step in range(3):
        with WallClock() as clock:
            clock.switch_to(TimeCategory.steps)
            with clock.fetching():
                batches.training(step)
            clock.switch_to(TimeCategory.drawing)
            waited.append(clock.breakdown.seconds(TimeCategory.data))
        time.sleep(0.25)
    return waited


def test_no_step_but_the_first_waits_for_a_bucket_that_takes_200_ms(config, monkeypatch):
    first, *others = seconds_of_waiting(config)
    assert first >= DELAY and sum(others) < DELAY, others
    monkeypatch.setattr(device_batch, "AHEAD", 0)
    assert min(seconds_of_waiting(config)) >= DELAY


class TwoOfFourRanks(jax.sharding.Sharding):
    """The devices of a process that has the first two ranks of four; another one has the others."""

    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict:
        size = shape[1] // 4
        parts = {device: slice(rank * size, rank * size + size) for rank, device in enumerate(jax.devices()[:2])}
        return {device: (slice(None), part, slice(None)) for device, part in parts.items()}


def test_the_rows_of_a_step_are_requested_at_the_same_time_whatever_its_ranks_and_microbatches(config):
    ((file,), *_), asked, shape = open_data(config.data, config.model, ["train"]), [], (8, 4, CONTEXT + 1)
    expected = file.read(np.arange(32)).reshape(shape)
    Bucket.delay = DELAY

    def rows(first: int, last: int) -> np.ndarray:
        asked.append((first, last))
        return file.read(np.arange(first, last))

    begin = time.time()
    shards = host_shards(rows, TwoOfFourRanks(), shape, concurrently=True)
    assert time.time() - begin < 4 * DELAY and sorted(asked) == [(4 * m, 4 * m + 2) for m in range(8)]
    for rank, shard in enumerate(shards):
        np.testing.assert_array_equal(shard, expected[:, rank : rank + 1])


def test_the_sources_of_a_step_are_read_at_the_same_time(config):
    (file,), *_ = open_data(config.data, config.model, ["train"])
    files = [file] * 4
    order = order_of(*files, shares={0: [Fraction(1, 4)] * 4})
    expected = training_rows(files, order, 2, BATCH, 0, BATCH)
    Bucket.delay, begin = DELAY, time.time()
    np.testing.assert_array_equal(training_rows(files, order, 2, BATCH, 0, BATCH), expected)
    assert time.time() - begin < 3 * DELAY


def test_at_most_a_few_batches_are_read_early_and_none_beyond_the_last():
    begun = []
    read = ReadAhead(lambda number: begun.append(number) or number, 7)
    assert read(0) == 0 and sorted(begun) == [*range(AHEAD + 1)]
    assert [read(number) for number in (1, 2, 5, 6, 9)] == [1, 2, 5, 6, 9]  # any is read, in any order
    assert sorted({*begun}) == [*range(7), 9]


def test_a_failing_request_is_the_error_of_the_step_that_needs_it(config):
    batches = Batches(config, tokens_of(config))
    batches.training(0)
    while len(Bucket.requests) < (1 + AHEAD) * BATCH:
        time.sleep(0.01)
    time.sleep(0.05)  # the answers arrive
    Bucket.failure = ConnectionError("no answer\nfor a while")
    for step in range(1, 1 + AHEAD):
        batches.training(step)
    with pytest.raises(UserError, match=r"^data\.dir=gs://.* cannot be read: no answer$"):
        batches.training(1 + AHEAD)


def test_a_run_that_is_stopped_does_not_wait_for_what_it_reads_early_and_resumes_as_it_would_have_gone_on(
    config, tmp_path, monkeypatch
):
    make_runs_quick(monkeypatch)
    small = ["mesh.mp=1", "model.layers=1", "train.steps=5", "evaluate.every=0", "sample.prompts=[]"]
    config = tiny(tmp_path, f"data.dir=gs:/{tmp_path}/data", "data.cache=null", *small)
    answer, silent = Bucket._cat_file, []

    async def late(self: Any, path: str, **more: Any) -> bytes:
        await asyncio.sleep(60 if silent else 0)
        return await answer(self, path, **more)

    def asked_to_stop(step: int) -> bool:
        silent.extend([True] * (step == 2))  # from then on the bucket does not answer, but the next steps are read
        return step == 3

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "_cat_file", late)
        signal_during(patch, Batches, "training", signal.SIGTERM, asked_to_stop)
        begin = time.time()
        assert loop.train(config) == STOPPED and time.time() - begin < 30
    config.checkpoint.resume = Resume.must
    assert loop.train(config) == 0
    (tmp_path / "local").mkdir()
    (tmp_path / "local/data").symlink_to(tmp_path / "data")
    assert loop.train(tiny(tmp_path / "local", *small)) == 0
    assert values(tmp_path) == values(tmp_path / "local")
