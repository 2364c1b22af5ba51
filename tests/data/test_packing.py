"""Whole documents in rows: nothing is lost, only what is longer than a row is cut, and little is filling."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from shmap_tp.check import check
from shmap_tp.data.batches import open_data
from shmap_tp.data.preparation import pack
from shmap_tp.errors import UserError
from shmap_tp.layers.context import next_token_batch
from shmap_tp.prepare import main as prepare
from shmap_tp.training.step import CONFIGURED
from tests.helpers.run_fixtures import tiny

END = 0


def documents(lengths: np.ndarray) -> list[np.ndarray]:
    """Document i is i + 1 repeated, and an end."""
    return [np.append(np.full(length, number + 1), END).astype(np.uint32) for number, length in enumerate(lengths)]


def test_rows_hold_every_document_and_cut_only_those_that_are_longer_than_a_row():
    lengths = np.random.default_rng(0).geometric(1 / 20, 300) - 1
    assert lengths.max() > 63 and lengths.min() == 0
    rows = pack(documents(lengths), 32, END)
    stream = rows.reshape(-1)
    assert np.count_nonzero(stream == END) >= len(lengths)
    for number, length in enumerate(lengths):
        places = np.flatnonzero(stream == number + 1)
        assert len(places) == length
        if length:
            assert (np.diff(places) == 1).all() and stream[places[-1] + 1] == END, "its tokens and end stand together"
            first, last = places[0], places[-1] + 1
            assert first // 32 == last // 32 if length < 32 else first % 32 == 0


def test_at_a_mean_length_of_922_and_rows_of_4096_at_least_98_percent_are_tokens_of_documents():
    lengths = np.random.default_rng(0).exponential(922, 4000).astype(int)
    rows = pack(documents(lengths), 4096, END)
    assert np.sum(lengths + 1) / rows.size > 0.98


def test_a_part_of_the_rows_is_a_sample_of_documents_of_all_lengths():
    """Validation reads the first rows of a file."""
    lengths = np.random.default_rng(0).exponential(922, 4000).astype(int)
    ends = np.count_nonzero(pack(documents(lengths), 4096, END) == END, axis=1)
    has_many = ends > np.median(ends)
    assert abs(np.mean(has_many[: len(ends) // 5]) - np.mean(has_many)) < 0.1


@pytest.mark.parametrize("window", [30, 10**6])
def test_prepared_rows_train_each_document_once_and_suit_one_context(tmp_path, capsys, monkeypatch, window):
    """All tokens of a document but its first count as targets, with its end, and no filling; packed at once, or in
    several parts."""
    monkeypatch.setattr("shmap_tp.data.preparation._PACKED", window)
    texts = ["a" * n for n in (1, 2, 3, 5, 8, 13, 14, 15, 7, 40)] + ["b" * n for n in (3, 9, 12)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    given = ["--text", str(tmp_path / "texts.jsonl"), "--out", str(tmp_path / "data"), "--validation", "0.3"]
    assert prepare([*given, "--pack", "16"]) == 0
    assert "packed into rows of 16 tokens" in capsys.readouterr().out
    config = tiny(tmp_path, "model.vocabulary=256")
    files, _, _ = open_data(config.data, config.model, ["train", "validation"])
    rows = np.concatenate([file.read(np.arange(len(file))) for file in files])
    batch = next_token_batch(jnp.asarray(rows), ("dp", "mp"), end_of_text=END)
    assert np.count_nonzero(batch.targets >= 0) == sum(map(len, texts))
    for wrong, words in (
        (["model.context=8", "model.attention_chunk=8"], "packed into rows of 16 tokens, but model.context=8"),
        (["data.documents=joined"], "packed into rows for isolated documents"),
    ):
        config = tiny(tmp_path, "model.vocabulary=256", *wrong)
        with pytest.raises(UserError, match=words):
            open_data(config.data, config.model, ["train"])
        with pytest.raises(UserError, match=words):
            check(config, "", CONFIGURED)
    assert prepare([*given, "--overwrite", "--pack", "1"]) == 2
    assert "--pack 1 must be the model.context of the runs" in capsys.readouterr().err
