"""Several documents in a row: each is computed as if it were alone, and no bit of it depends on the others.

A microbatches, B rows, T context.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from shmap_tp.layers.context import IGNORE, document_segments, next_token_batch, positions_within
from tests.helpers import model_cases as cases
from tests.helpers.assertions import RELATIVE, assert_close, assert_same_bits, by_path
from tests.helpers.model_fixtures import config

CASES = {
    "sequence, offload": (cases.OFFLOAD, (4, 2)), "all_reduce, rings, offload": (cases.SLICES, (4, 2)),
    "collective matmul": (cases.COLLECTIVE_MATMUL, (2, 4)),
}  # fmt: skip
ROWS = {0: [4, 3], 1: [1, 2, 4], 9: [7], 15: [2, 5]}
"""Lengths of the documents in the rows that have any: most ranks of dp have none in a microbatch."""


def packed(vocabulary: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, segments) [2 8 length]: the documents of ROWS in rows, the rest padding."""
    rng = np.random.default_rng(0)
    tokens, segments = np.full((16, length), IGNORE, np.int32), np.zeros((16, length), np.int32)
    for row, lengths in ROWS.items():
        end = sum(lengths)
        tokens[row, :end] = rng.integers(0, vocabulary, end)
        segments[row, :end] = np.repeat(np.arange(len(lengths)), lengths)
        segments[row, end:] = len(lengths)
    tokens[9, 2:4] = ~tokens[9, 2:4]  # targets that do not count
    return tokens.reshape(2, 8, length), segments.reshape(2, 8, length)


def apart(tokens: np.ndarray) -> np.ndarray:
    """The same documents, one in a row, in other microbatches and on other ranks."""
    rows = tokens.reshape(16, -1)
    found, at = np.full_like(rows, IGNORE), 0
    for row, lengths in ROWS.items():
        for start, end in zip(np.cumsum([0, *lengths[:-1]]), np.cumsum(lengths), strict=True):
            found[at, : end - start] = rows[row, start:end]
            at += 1
    return found.reshape(tokens.shape)


@pytest.mark.parametrize("case", CASES)
def test_packed_documents_are_computed_as_if_each_were_alone(case):
    name, shape = CASES[case]
    conf = config(*cases.settings_of(name))
    params, run = cases.random_parameters(conf, "float32"), cases.model_on_mesh(conf, shape, "float32")
    tokens, segments = packed(conf.model.vocabulary, conf.model.context + 1)
    found = run(params, tokens, segments)
    alone = run(params, apart(tokens), np.zeros_like(segments))
    assert_close(found["loss"], alone["loss"], RELATIVE["float32"])
    assert_close(by_path(found["gradients"]), by_path(alone["gradients"]), RELATIVE["float32"])

    changed, second = np.array(tokens), np.full_like(tokens, False, bool)
    changed[0, 0, :4] = (tokens[0, 0, :4] + 1) % conf.model.vocabulary
    second[0, 0, 4:7] = True
    only_second = [np.where(second | (each < 0), each, ~each) for each in (tokens, changed)]
    before, after = (run(params, each, segments) for each in only_second)
    assert_same_bits(by_path(before["gradients"]), by_path(after["gradients"]))
    assert_same_bits(before["loss"], after["loss"])
    assert_same_bits(before["logits"][0, 4:7], after["logits"][0, 4:7])
    joined = [run(params, each, np.zeros_like(segments)) for each in only_second]
    assert np.abs(joined[0]["logits"][0, 4:7] - joined[1]["logits"][0, 4:7]).max() > 1e-4


def test_documents_end_with_their_end_of_text_token_and_no_target_is_across_a_border():
    """7 is the end of text; -1 - 7 is the same token, which does not count as a target."""
    tokens = jnp.array([[[3, 7, 4, 5, -8, 6, 7], [7, 1, 2, 3, -1, -1, -1]]])
    segments = document_segments(tokens, 7)
    assert segments.tolist() == [[[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]]]
    assert positions_within(segments).tolist() == [[[0, 1, 0, 1, 2, 0, 1], [0, 0, 1, 2, 3, 4, 5]]]
    batch = next_token_batch(tokens, ("dp", "mp"), segments)
    assert batch.targets.tolist() == [[[7, ~4, 5, -8, ~6, 7], [~1, 2, 3, -1, -1, -1]]]


def test_a_slot_is_a_token_if_a_target_of_its_document_counts_and_it_is_no_padding():
    """7 is the end of text: it fills a row; -1 - id is an input that is no target."""
    rows = [
        [3, -5, 7, 7, 7, 7, 7],
        [7, 1, 2, 3, -1, -1, -1],
        [-1] * 7,
        [-3, -8, -4, 5, -6, -8, 1],
        [1, 2, 3, 4, 5, 6, 8],
    ]
    tokens = jnp.array([rows])
    expected = [[1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0], [0] * 6, [0, 0, 1, 1, 1, 1], [1] * 6]
    found = next_token_batch(tokens, ("dp", "mp"), end_of_text=7, free_space=True).is_token
    assert found.astype(int).tolist() == [expected]
    joined = next_token_batch(tokens, ("dp", "mp"), free_space=True).is_token.astype(int).tolist()
    assert joined == [[[1] * 6, [1] * 4 + [0] * 2, [0] * 6, [1] * 6, [1] * 6]]
