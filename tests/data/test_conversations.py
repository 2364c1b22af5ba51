"""`prepare --chat`: what counts, in the templates of eight families, what is written and read, and what is refused."""

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest

from shmap_tp.data.batches import open_data
from shmap_tp.data.chat_template import ChatTemplate
from shmap_tp.data.conversations import end_of_conversations, marked_tokens, samples_of
from shmap_tp.data.messages import Conversation, conversation
from shmap_tp.data.metadata import read_meta
from shmap_tp.data.text_directory import TextDirectory, open_tokenizer
from shmap_tp.data.tokenizer import Bytes
from shmap_tp.errors import UserError
from tests.helpers.chat_templates import CHATML, FAMILIES, write_chat_model
from tests.helpers.preparation import run
from tests.helpers.run_fixtures import tiny

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

SYSTEM = {"role": "system", "content": "Be brief."}
SAID = [
    {"role": "user", "content": "Is é a letter?"},
    {"role": "assistant", "content": "Yes, é is."},
    {"role": "user", "content": "And %?"},
    {"role": "assistant", "content": "No."},
]
END = re.compile(re.escape("<|im_end|>"))


def prepared(directory: Path, messages: list, template: str | None = None) -> tuple[list[np.ndarray], object]:
    """(the marked tokens of each sample, the tokenizer)."""
    tokenizer = open_tokenizer(str(directory), None)
    chat = TextDirectory.read(directory).template(template)
    tokenizer.end_of_text = end_of_conversations(tokenizer, chat)
    ends = re.compile("|".join(map(re.escape, tokenizer.special_tokens())))
    samples = samples_of(Conversation("here", messages), chat, ends)
    marked = [(each, *tokenizer.encode_with_places(each.text), tokenizer.end_of_text) for each in samples]
    return [marked_tokens(*each) for each in marked], tokenizer


@pytest.mark.parametrize("name", FAMILIES)
def test_the_answers_and_their_end_tokens_count_and_nothing_else(name, tmp_path):
    family = FAMILIES[name]
    directory = write_chat_model(tmp_path / "model", family)
    said = [SYSTEM, *SAID] if family.system else SAID
    found, tokenizer = prepared(directory, said)
    assert tokenizer.special_tokens()[family.separator] == tokenizer.end_of_text
    thought = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    expected = [f"{thought}{each['content']}{family.end}" for each in said if each["role"] == "assistant"]
    answers = [tokenizer.decode(tokens[tokens >= 0].tolist()) for tokens in found]
    # qwen3 writes the first answer differently once there is a second question
    assert answers == (expected if name == "qwen3" else ["".join(expected)])
    for tokens in found:
        whole = np.where(tokens < 0, ~tokens, tokens)
        assert whole[-1] == tokenizer.end_of_text and tokens[-1] < 0
    assert tokenizer.decode(whole[:-1].tolist()) == TextDirectory.read(directory).template().render_marked(said)[0]


def test_what_a_template_marks_counts_with_its_end_token_as_by_transformers(tmp_path):
    """The mark need not include the end token, which counts all the same."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    directory = write_chat_model(tmp_path / "model", FAMILIES["chatml"], template=template)
    (tokens,), tokenizer = prepared(directory, SAID)
    assert tokenizer.decode(tokens[tokens >= 0].tolist()) == "Yes, é is.<|im_end|>No.<|im_end|>"
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[test-pretrained]'")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    given = {"return_dict": True, "return_assistant_tokens_mask": True, "chat_template": template}
    encoded = theirs.apply_chat_template(SAID, **given)
    assert encoded["input_ids"] == np.where(tokens < 0, ~tokens, tokens)[:-1].tolist()
    ends = np.array(encoded["input_ids"]) == tokenizer.special_tokens()["<|im_end|>"]
    after = np.append([False], np.array(encoded["assistant_masks"][:-1]) == 1) & ends
    assert ((tokens[:-1] >= 0) == ((np.array(encoded["assistant_masks"]) == 1) | after)).all()


def test_a_template_without_an_end_token_makes_one_sample_a_turn_whose_end_of_text_counts():
    template = ChatTemplate("{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}", "t", {})
    samples = samples_of(Conversation("here", SAID), template, re.compile("(?!)"))
    tokens = [marked_tokens(each, *Bytes().encode_with_places(each.text), 0) for each in samples]
    assert [bytes(each[each >= 0].astype(np.uint8)).decode() for each in tokens] == ["a:Yes, é is.\n\0", "a:No.\n\0"]


def test_tool_calls_and_results_are_given_to_the_template():
    text = "{{ tools | tojson if tools }}{% for m in messages %}<{{ m.role }}>{{ m.content or m.tool_calls | tojson }}"
    text += "<|im_end|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    rest = [{"role": "tool", "content": "4"}, {"role": "assistant", "content": "It is 4."}]
    row = {"messages": [{"role": "user", "content": "2+2?"}, call, *rest], "tools": [{"name": "add"}]}
    (sample,) = samples_of(conversation(row, "here"), ChatTemplate(text, "t", {}), END)
    assert sample.text.startswith('[{"name": "add"}]<user>')
    answers = [sample.text[first:last] for first, last in sample.answers]
    assert answers == ['[{"function": {"name": "add"}}]<|im_end|>', "It is 4.<|im_end|>"]


def test_pairs_and_the_form_of_sharegpt_are_the_same_conversations():
    asked, answered = SAID[:2]
    turns = [{"from": "human", "value": asked["content"]}, {"from": "gpt", "value": answered["content"]}]
    for row in [
        {"messages": [asked, answered, SAID[2]]},  # the last has no answer
        {"prompt": asked["content"], "completion": answered["content"]},
        {"prompt": [asked], "completion": [answered]},
        {"conversations": turns},
    ]:
        assert conversation(row, "").messages == [asked, answered]


def test_an_answer_that_does_not_follow_its_prompt_is_refused_with_the_place():
    text = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
    with pytest.raises(UserError, match=r"^here: the chat template writes the answer 1 after another text .*'?Yes"):
        samples_of(Conversation("here", SAID), ChatTemplate(text, "t", {}), END)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat") / "model", FAMILIES["chatml"])


def write_chats(path: Path, count: int, **more: object) -> Path:
    rows = [{"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "a" * (i % 9 + 1)}]}
            for i in range(count)]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *more.values()]))
    return path


def test_conversations_are_read_with_what_counts_and_stop_where_the_template_ends_a_turn(model, tmp_path, capsys):
    file = write_chats(tmp_path / "chats.jsonl", 40)
    given = ["--chat", file, "--tokenizer", model, "--out", tmp_path / "data", "--pack", "60", "--validation", "0.1"]
    code, printed, error = run(capsys, *given)
    answers = sum(i % 9 + 2 for i in range(40))
    assert (code, error) == (0, "") and f"{answers} tokens, those of the answers, count as targets" in printed
    config = tiny(tmp_path, "model.vocabulary=320", "model.context=60", f"data.dir={tmp_path / 'data'}")
    files, meta, companions = open_data(config.data, config.model, ["train", "validation"])
    tokenizer = open_tokenizer(str(model), None)
    rows = np.concatenate([file.read(np.arange(len(file)))[:, :-1] for file in files])
    assert np.count_nonzero(rows >= 0) == answers and meta.row == 60
    said = tokenizer.decode(rows[rows >= 0].tolist()).split("<|im_end|>")[:-1]
    assert sorted(said) == sorted("a" * (i % 9 + 1) for i in range(40))
    ends = json.loads(companions["generation_config.json"])["eos_token_id"]
    assert ends == [tokenizer.special_tokens()["<|im_end|>"]]
    assert companions["chat_template.jinja"].decode() == CHATML and files[0].counted != files[1].counted
    for split, file in zip(("train", "validation"), files, strict=True):
        assert meta.counted[split] == file.counted
    assert len(files[1]) == 2  # 4 of 40 conversations
    (tmp_path / "data" / "train.counted").write_bytes(bytes(-(-files[0].tokens // 8)))
    with pytest.raises(UserError, match=r"train\.counted: sha256 is .* the file has changed"):
        open_data(config.data, config.model, ["train"])


@pytest.mark.parametrize("ending", [".jsonl.gz", ".json", ".parquet"])
def test_the_same_conversations_in_other_files_give_the_same_tokens(ending, model, tmp_path, capsys):
    """A table has every field of every message; one that a message lacks is null there."""
    rows = [json.loads(line) for line in write_chats(tmp_path / "chats.jsonl", 9).read_text().splitlines()]
    rows[0]["messages"][0]["name"] = "Ada"
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    other = tmp_path / f"other{ending}"
    if ending == ".parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="pip install -e '.[data]'")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), other)
    elif ending == ".json":
        other.write_text(json.dumps(rows))
    else:
        other.write_bytes(gzip.compress((tmp_path / "chats.jsonl").read_bytes()))
    for file in (tmp_path / "chats.jsonl", other):
        code, _, error = run(capsys, "--chat", file, "--tokenizer", model, "--out", tmp_path / f"of_{file.name}")
        assert (code, error) == (0, "")
    for name in ("train.bin", "train.counted", "validation.bin", "validation.counted"):
        assert len({(tmp_path / f"of_{file}" / name).read_bytes() for file in ("chats.jsonl", other.name)}) == 1


def test_the_example_conversations_are_prepared_in_rows_of_the_models_limit(model, tmp_path, capsys):
    code, printed, error = run(capsys, "--source", "conversations", "--tokenizer", model, "--out", tmp_path / "data")
    assert (code, error) == (0, "") and "packed into rows of 512 tokens" in printed
    assert read_meta(tmp_path / "data").row == 512


@pytest.mark.parametrize(
    ("row", "more", "message"),
    [
        ({"messages": SAID[:1]}, [], "line 3: no assistant turn answers a message"),
        ({"messages": [SAID[1]]}, [], "line 3: no assistant turn answers a message"),
        ({"messages": []}, [], "line 3: no assistant turn answers a message"),
        ({"messages": [3]}, [], "line 3: message 0 is 3; give an object with a role"),
        ({"text": "a"}, [], "line 3: no conversation in the fields text; .* for text use --text"),
        ({"chosen": [], "rejected": []}, [], "line 3: no conversation in .*; for preference pairs use --preferences"),
        ([1], [], "line 3: no conversation in the fields .none."),
        ({"conversations": [{"value": 1}]}, [], "line 3: message 0 is {'value': 1}; give an object with a role"),
        ({"conversations": [{"from": [1], "value": ""}]}, [], "line 3: message 0 is {'from': .1., 'value': ''}"),
        ({"messages": [SAID[0], {"role": "assistant", "content": 5}]}, [], "line 3: message 1: its content is 5; give"),
        ({"prompt": "a", "completion": "b" * 99}, ["--pack", "64"], "1 sample is longer than --pack 64 tokens; .*"),
        (
            {"prompt": "a", "completion": "<|endoftext|>"},
            ["--special-tokens-in-text"],
            "line 3: '<.endoftext.>' is to end a conversation",
        ),
        ({"prompt": "\ufdd2", "completion": "b"}, [], "line 3: .* noncharacter U.FDD2"),
        (
            {"prompt": "\ufdd31\ufdd4", "completion": "b"},
            [],
            "line 3: .* noncharacter U.FDD3",
        ),  # which would be token 1
        ({"prompt": "a", "completion": "b"}, ["--date", "2026-11-28"], "--date .* has no effect: .* does not ask"),
        ({"prompt": "a", "completion": "b"}, ["--template-argument", "x=1"], "--template-argument x: .* no variable"),
        ({"prompt": "a", "completion": "b"}, ["--template-argument", "x"], "--template-argument x is not NAME=VALUE"),
        ({"prompt": "a\udcff", "completion": "b"}, [], "line 3 has bytes that are not UTF-8"),
        ({"prompt": "a", "completion": "b"}, ["--field", "x"], "--field does not apply to conversations"),
        ({"prompt": "a", "completion": "b"}, ["--train-tokenizer", "300"], "not allowed with"),
    ],
)
def test_conversations_that_cannot_be_used_are_refused_by_their_line(row, more, message, model, tmp_path, capsys):
    file = write_chats(tmp_path / "chats.jsonl", 2, row=row)
    try:
        code, _, error = run(capsys, "--chat", file, "--tokenizer", model, "--out", tmp_path / "data", *more)
    except SystemExit as left:  # by argparse
        code, error = left.code, capsys.readouterr().err
    assert code == 2 and re.search(message, error), error
    assert not (tmp_path / "data").exists()


def test_long_conversations_are_cut_only_if_asked(model, tmp_path, capsys):
    long = {"prompt": "a", "completion": "b" * 99}
    file = write_chats(tmp_path / "chats.jsonl", 4, long=long, without={"prompt": "a" * 99, "completion": "b"})
    given = ["--chat", file, "--tokenizer", model, "--out", tmp_path / "data", "--pack", "64"]
    assert "2 samples are longer" in run(capsys, *given)[2]
    code, printed, _ = run(capsys, *given, "--cut")
    assert code == 0 and "their ends are cut, and 1 that have no answer then are left out" in printed


def test_text_and_conversations_given_to_each_other_are_refused(tmp_path, capsys):
    chats, text = write_chats(tmp_path / "chats.jsonl", 3), tmp_path / "a.jsonl"
    text.write_text('{"text": "a"}\n')
    for given, words in [
        (["--text", chats], "train on conversations with --chat"),
        (["--chat", text], "bytes has no chat template"),
        (["--text", text, "--cut"], "--cut needs --chat"),
    ]:
        code, _, error = run(capsys, *given, "--out", tmp_path / "out")
        assert code == 2 and words in error
