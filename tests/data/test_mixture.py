"""Which source and which sequence each sample is: shares, exact epochs, kills on other meshes, and constant memory."""

import time
import tracemalloc
from fractions import Fraction
from random import Random

import numpy as np
import pytest

from shmap_tp.data import batches
from shmap_tp.data.order import DataOrder, turns
from shmap_tp.data.token_files import TokenFile
from tests.helpers.data_orders import order_of

BATCH, MICROBATCHES = 16, 2
SHARES = {
    "one": [1],
    "halves": ["1/2", "1/2"],
    "thirds": ["1/3"] * 3,
    "uneven": ["0.7", "0.2", "0.1"],
    "rare": ["0.9999", "0.0001"],
    "four decimals": ["0.1234", "0.2345", "0.3456", "0.2965"],
    "64": ["1/128"] * 63 + ["65/128"],
}


def fractions(*shares) -> list[Fraction]:
    return [Fraction(share) for share in shares]


@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
def test_after_any_number_of_turns_each_source_has_its_share_within_1(shares):
    shares = fractions(*shares)
    pattern = turns(shares)
    counts = np.cumsum(pattern[:, None] == np.arange(len(shares)), axis=0)
    due = np.arange(1, len(pattern) + 1)[:, None] * np.array(shares, float)
    bound = 1 - 1 / (2 * len(shares) - 2) if len(shares) > 1 else 0
    assert np.abs(counts - due).max() <= bound + 1e-9 < 1
    assert counts[-1].tolist() == [share * len(pattern) for share in shares], "a period is exact"


class Synthetic(TokenFile):
    """A file of `count` sequences, each of its number and of that of the file; nothing is on a disk or in memory."""

    def __init__(self, count: int, number: int):
        self.count, self.number, self.context, self.sha256 = count, number, 1, f"{number:064x}"

    def __len__(self) -> int:
        return self.count

    def read(self, indices: np.ndarray) -> np.ndarray:
        return np.stack([np.full(len(indices), self.number), indices], axis=1).astype(np.int32)


FILES = [Synthetic(37, 0), Synthetic(11, 1), Synthetic(5, 2)]
PHASES = {0: fractions("7/10", "3/10", 0), 40 * BATCH: fractions("14/25", "6/25", "1/5")}
PHASES[90 * BATCH] = fractions(0, "1/3", "2/3")
STEPS = 150


def rows_of(step: int, order: DataOrder, first: int = 0, last: int = BATCH) -> list[tuple[int, ...]]:
    return [tuple(row) for row in batches.training_rows(FILES, order, step, BATCH, first, last).tolist()]


def test_in_each_phase_the_counts_are_within_1_of_the_shares_after_every_step():
    order, read = order_of(*FILES, shares=PHASES), np.zeros(3, int)
    starts = [*PHASES, STEPS * BATCH]
    for step in range(STEPS):
        sample = step * BATCH
        assert (order.counts(sample) == read).all(), "counts are those of what was read"
        start = max(first for first in PHASES if first <= sample)
        due = (sample - start) * np.array(PHASES[start], float)
        assert (np.abs(read - order.counts(start) - due) < 1).all()
        read += np.bincount([file for file, _ in rows_of(step, order)], minlength=3)
    assert read[0] == order.counts(starts[2])[0], "a share of 0 reads nothing"


def test_after_20_kills_on_other_meshes_each_epoch_has_each_sequence_of_its_source_once():
    """A run that is killed after any step goes on from its last checkpoint, of every third step, on another mesh: dp
    ranks in processes that each read the rows of their own ranks only."""
    random, step, read = Random(0), 0, {}
    for start in range(21):
        dp, processes = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 4)][start % 6]
        orders, size = [order_of(*FILES, shares=PHASES) for _ in range(processes)], BATCH // MICROBATCHES // dp
        end = STEPS if start == 20 else step + random.randint(3, 9)
        for now in range(step, end):
            firsts = [(first, first // size % dp) for first in range(0, BATCH, size)]
            pieces = [rows_of(now, orders[rank * processes // dp], first, first + size) for first, rank in firsts]
            read[now] = [row for piece in pieces for row in piece]
        step = end // 3 * 3
    uninterrupted = order_of(*FILES, shares=PHASES)
    assert read == {step: rows_of(step, uninterrupted) for step in range(STEPS)}
    for number, file in enumerate(FILES):
        sequences = [sequence for step in range(STEPS) for source, sequence in read[step] if source == number]
        assert len(sequences) > 2 * file.count
        for first in range(0, len(sequences), file.count):
            epoch = sequences[first : first + file.count]
            assert len({*epoch}) == len(epoch) and (len(epoch) < file.count or sorted(epoch) == [*range(file.count)])


def test_a_source_that_begins_later_changes_nothing_before():
    before = order_of(*FILES[:2], shares={0: PHASES[0][:2]})
    after = order_of(*FILES, shares=PHASES)
    assert all(rows_of(step, before) == rows_of(step, after) for step in range(40))
    assert {source for source, _ in rows_of(40, after)} == {0, 1, 2}


def peak_and_seconds(sources: int, count: int) -> tuple[int, float]:
    """(bytes at most, seconds) of a start at step 10^6 with a batch of 64, of `sources` of `count` sequences each."""
    files, shares = [Synthetic(count, number) for number in range(sources)], [Fraction(1, sources)] * sources
    tracemalloc.start()
    start = time.perf_counter()
    rows = batches.training_rows(files, order_of(*files, shares={0: shares}), 10**6, 64, 0, 64)
    seconds, peak = time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len({tuple(row) for row in rows.tolist()}) == 64
    return peak, seconds


def test_a_start_at_any_step_takes_milliseconds_and_the_same_memory_for_any_data():
    peak_and_seconds(1, 10**5)  # imports
    found = {(k, n): peak_and_seconds(k, n) for k in (1, 64) for n in (10**5, 10**9)}
    peaks = [peak for peak, _ in found.values()]
    assert max(peaks) < 1_000_000 and max(peaks) < 1.2 * min(peaks), found
    assert max(seconds for _, seconds in found.values()) < 0.2
