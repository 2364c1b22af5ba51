"""The order of an epoch: a permutation, without structure, of any size in no memory."""

import numpy as np
import pytest

from shmap_tp.data.order import ORDER, shuffled, source_key

KEY = source_key(0, "5e" * 32)


def epoch(count: int, number: int = 0, key: int = KEY) -> np.ndarray:
    """The sequences of an epoch of `count` sequences, in their order."""
    samples = np.arange(number * count, (number + 1) * count)
    return shuffled(samples, np.full(count, count), np.full(count, key, np.uint64))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 35, 36, 37, 1000, 4097])
def test_each_epoch_has_each_sequence_once(count):
    for number in (0, 1, 5):
        assert sorted(epoch(count, number)) == list(range(count))


def test_the_order_differs_between_epochs_seeds_and_sources():
    keys = [source_key(seed, source * 32) for seed in (0, 1, 2**32 - 1) for source in ("00", "01", "ff")]
    orders = {tuple(epoch(37, number, key)) for key in keys for number in (0, 1, 2)}
    assert len(orders) == 27


def test_the_order_of_a_name_never_changes():
    """If this fails, `ORDER` needs another name: checkpoints say by it which sequences their run has read."""
    assert ORDER == "feistel-1" and KEY == 0x1CEAA2DC9A8E742F
    assert epoch(10).tolist() == [2, 7, 8, 1, 0, 6, 3, 5, 9, 4]
    assert epoch(10**6)[:4].tolist() == [795001, 630692, 292634, 618010]


def test_a_row_depends_on_its_own_sample_and_source_only():
    samples, counts = np.array([3, 1000, 5 * 10**9, 0]), np.array([7, 37, 10**9, 1])
    keys = np.array([source_key(1, "ab" * 32), KEY, KEY, 5], np.uint64)
    together = shuffled(samples, counts, keys)
    assert [shuffled(samples[i : i + 1], counts[i : i + 1], keys[i : i + 1])[0] for i in range(4)] == together.tolist()


@pytest.mark.parametrize("count", [1000, 4097, 2**16, 10**5])
def test_the_order_has_no_structure(count):
    """Within 5 standard deviations of a permutation drawn at random; the first sequence is anywhere in every epoch."""
    order = epoch(count).astype(float)
    steps = np.abs(np.diff(order)) / count
    assert abs(steps.mean() - 1 / 3) < 5 * 0.24 / np.sqrt(count)
    for lag in (1, 2, 64):
        assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) < 5 / np.sqrt(count)
    assert abs(np.corrcoef(np.arange(count), order)[0, 1]) < 5 / np.sqrt(count)
    fixed = int((order == np.arange(count)).sum())
    assert fixed <= 8  # 1 is expected, with a deviation of 1


def test_every_place_is_as_likely_for_every_sequence():
    """Chi-square of the places of 16 sequences over 4000 epochs, for 225 degrees of freedom, within 5 deviations."""
    samples = np.arange(4000 * 16)
    places = shuffled(samples, np.full_like(samples, 16), np.full(samples.shape, KEY, np.uint64)).reshape(4000, 16)
    found = np.stack([np.bincount(places[:, place], minlength=16) for place in range(16)])
    assert abs(((found - 250) ** 2 / 250).sum() - 225) < 5 * np.sqrt(2 * 225)
    pairs = np.bincount(places[:, 0] * 16 + places[:, 1], minlength=256).reshape(16, 16)
    unequal = pairs[~np.eye(16, dtype=bool)]
    assert abs(((unequal - 4000 / 240) ** 2 / (4000 / 240)).sum() - 239) < 5 * np.sqrt(2 * 239)
