"""Requests of similar lengths are computed together, and little of that is padding."""

import numpy as np
import pytest

from shmap_tp.inference.scoring import MOST_PADDING, length_batches, rounded_length

DRAW = np.random.default_rng(0)
LENGTHS = {
    "multiple choice": np.clip(DRAW.lognormal(4.5, 0.5, 1000), 5, 1024).astype(int),
    "evenly from 1 to 2048": DRAW.integers(1, 2049, 300),
    "each twice the last": 2 ** np.arange(12) + 1,
    "all equal": np.full(37, 129),
    "none": np.zeros(0, int),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_every_request_is_in_one_batch_and_at_most_a_tenth_of_a_batch_is_padding(name):
    lengths, rows = LENGTHS[name].tolist(), 16
    found = length_batches(lengths, rows)
    assert sorted(request for batch in found for request in batch.requests) == list(range(len(lengths)))
    for batch in found:
        slots, tokens = batch.length * len(batch.requests), sum(lengths[request] for request in batch.requests)
        assert 1 <= len(batch.requests) <= rows and batch.length >= max(lengths[request] for request in batch.requests)
        assert slots - tokens <= MOST_PADDING * slots
    assert [batch.length for batch in found] == sorted((batch.length for batch in found), reverse=True)


def test_a_thousand_requests_make_few_shapes_and_four_percent_padding():
    lengths = LENGTHS["multiple choice"].tolist()
    found = length_batches(lengths, 16)
    slots = sum(batch.length * len(batch.requests) for batch in found)
    print(f"{len(found)} batches, padding {1 - sum(lengths) / slots:.1%}")
    assert 1 - sum(lengths) / slots < 0.04
    assert len({(len(batch.requests), batch.length) for batch in found}) < 60


def test_lengths_are_rounded_by_at_most_a_sixteenth_and_to_the_multiple():
    assert all(length <= rounded_length(length) <= length * 17 / 16 for length in range(1, 5000))
    assert len({rounded_length(length) for length in range(1024, 2048)}) == 17
    assert [rounded_length(length, 128) for length in (1, 128, 129)] == [128, 128, 256]
