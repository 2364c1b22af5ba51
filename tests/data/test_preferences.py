"""`prepare --preferences`: what a pair's document holds, how pairs are packed, and what is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from shmap_tp.data.chat_template import ChatTemplate
from shmap_tp.data.conversations import samples_of
from shmap_tp.data.messages import pair
from shmap_tp.data.metadata import META, read_meta
from shmap_tp.data.token_files import open_token_file
from shmap_tp.errors import UserError
from tests.helpers.preparation import run

pytest.importorskip("jinja2")

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{{ 'a:' if add_generation_prompt }}"
ASKED, OTHER = {"role": "user", "content": "2?"}, {"role": "user", "content": "3?"}
YES, NO = {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}


def prepared(rows: list, tmp_path: Path, capsys, *more: str) -> tuple[int, str, str]:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = "--template", tmp_path / "chat.jinja", "--out", tmp_path / "data"
    return run(capsys, "--preferences", tmp_path / "pairs.jsonl", *options, *more)


def segments(directory: Path, context: int) -> list[list[tuple[str, str]]]:
    """(text, counted text) of each document of each row of both splits; what fills rows is left out."""
    found = []
    for split in ("train", "validation"):
        file = open_token_file(directory, split, context=context, vocabulary=257)
        for row in file.read(np.arange(len(file)))[:, :-1]:
            ids = np.where(row < 0, ~row, row)
            parts = np.split(np.stack([ids, row]), np.flatnonzero(ids == read_meta(directory).end_of_text) + 1, axis=1)
            found.append([(_text(a), _text(b[b >= 0])) for a, b in parts if len(a) > 1])
    return found


def _text(ids: np.ndarray) -> str:
    return bytes(ids[ids < 256].astype(np.uint8)).decode().replace("\0", "|")


def test_a_row_holds_whole_pairs_of_which_only_the_last_answers_count(tmp_path, capsys):
    rows = [{"prompt": [ASKED, YES, {"role": "user", "content": f"{i}?"}], "chosen": "y" * (i + 1), "rejected": "n"}
            for i in range(20)]  # fmt: skip
    code, printed, error = prepared(rows, tmp_path, capsys, "--pack", "128", "--validation", "0.1")
    assert (code, error) == (0, "") and "18 preference pairs for training, 2 for validation" in printed
    assert read_meta(tmp_path / "data").pairs == {"train": 18, "validation": 2}
    seen = []
    for row in segments(tmp_path / "data", 128):
        for chosen, rejected in zip(row[::2], row[1::2], strict=True):
            seen.append(i := len(chosen[1]) - 3)
            asked = f"u:2?\na:yes\nu:{i}?\na:"
            assert chosen == (f"{asked}{'y' * (i + 1)}\n|", f"{'y' * (i + 1)}\n|")
            assert rejected == (f"{asked}n\n|", "n\n|")
    assert sorted(seen) == [*range(20)]
    meta = json.loads((tmp_path / "data" / META).read_text())
    (tmp_path / "data" / META).write_text(json.dumps(meta | {"pairs": 20}))
    with pytest.raises(UserError, match="pairs must have train and validation, each of type int"):
        read_meta(tmp_path / "data")


def test_the_forms_of_a_pair_are_the_same():
    for row in [
        {"prompt": [ASKED], "chosen": [YES], "rejected": [NO]},
        {"chosen": [ASKED, YES], "rejected": [ASKED, NO, OTHER]},
        {"prompt": "2?", "chosen": [ASKED, YES], "rejected": [ASKED, NO]},  # they may repeat the prompt
    ]:
        assert pair(row, "a") == pair({"prompt": "2?", "chosen": "yes", "rejected": "no"}, "a")


NO_PAIRS = [
    ([1], "a: no preference pair in the fields .none."),
    ({"prompt": "2?", "chosen": "yes"}, "a: no preference pair in the fields prompt, chosen; give"),
    ({"chosen": "2? yes", "rejected": "2? no"}, "a: no preference pair in the fields chosen, rejected; give"),
    ({"prompt": 2, "chosen": "yes", "rejected": "no"}, "a: no preference pair in the fields"),
    ({"prompt": "2?", "chosen": [3], "rejected": "no"}, "a, chosen: message 1 is 3; give an object with a role"),
    ({"prompt": "2?", "chosen": "yes", "rejected": []}, "a, rejected: no assistant turn answers a message"),
    ({"chosen": [ASKED, YES], "rejected": [OTHER, NO]}, "a, chosen: no assistant turn follows the 0 messages with"),
    ({"chosen": [ASKED, YES], "rejected": [ASKED, YES, OTHER, NO]}, "a, chosen: no .* follows the 2 messages with"),
    ({"prompt": "2?", "chosen": [OTHER, YES], "rejected": [NO]}, "a, chosen: no .* 1 messages of the prompt"),
]


def test_a_record_that_is_no_pair_is_refused():
    for row, message in NO_PAIRS:
        with pytest.raises(UserError, match=f"^{message}"):
            pair(row, "a")


def test_long_pairs_are_refused_or_cut_to_half_a_row_each(tmp_path, capsys):
    rows = [{"prompt": "a", "chosen": "y" * 30, "rejected": "n"}, {"prompt": "a" * 20, "chosen": "y", "rejected": "n"},
            *({"prompt": "b", "chosen": "y", "rejected": "n" * i} for i in (1, 2))]  # fmt: skip
    code, _, error = prepared(rows, tmp_path, capsys, "--pack", "32")
    assert code == 2 and re.search(r"2 pairs are longer than --pack 32 tokens; the first, .*line 1, has 47", error)
    code, printed, _ = prepared(rows, tmp_path, capsys, "--pack", "32", "--cut")
    assert code == 0 and "and 1 that have no answer then are left out" in printed
    texts = [each for row in segments(tmp_path / "data", 32) for each in row]
    assert len(texts) == 6 and (f"u:a\na:{'y' * 9}|", "y" * 9) in texts and ("u:a\na:n\n|", "n\n|") in texts


def test_an_answer_of_several_turns_needs_a_template_that_ends_each(tmp_path, capsys):
    row = {"prompt": "2?", "chosen": [YES, OTHER, YES], "rejected": "no"}
    code, _, error = prepared([row, row | {"prompt": "3?"}], tmp_path, capsys)
    assert code == 2 and "line 1, chosen: an answer has several assistant turns" in error
    ended = TEMPLATE.replace("\n", "<|im_end|>\n")
    given = ChatTemplate(ended, "t", {}), re.compile(re.escape("<|im_end|>"))
    document = [samples_of(each, *given) for each in pair(row, "a")]
    counted = [[each.text[first:last] for first, last in each.answers] for (each,) in document]
    assert counted == [["yes<|im_end|>", "yes<|im_end|>"], ["no<|im_end|>"]]


@pytest.mark.parametrize("equal", [1, 3])
def test_a_few_pairs_with_equal_answers_are_left_out_and_counted_and_many_are_refused(tmp_path, capsys, equal):
    rows = [{"prompt": f"{i}?", "chosen": "y", "rejected": "y" if i < equal else "n"} for i in range(20)]
    code, printed, error = prepared(rows, tmp_path, capsys, "--pack", "64", "--validation", "0.2")
    counted = f"{equal} of 20 preference pairs have equal answers"
    if equal == 1:
        assert (code, error) == (0, "") and f"{counted}: they are left out" in printed
        assert sum(read_meta(tmp_path / "data").pairs.values()) == 19
    else:
        assert code == 2 and f"{counted}: more than 10%" in error and not (tmp_path / "data").exists()
