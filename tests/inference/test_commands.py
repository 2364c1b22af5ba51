"""`shmap_tp.generate` and `shmap_tp.evaluate` on a checkpoint of a short run, and what they refuse."""

import io
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shmap_tp
from shmap_tp import command_model, evaluate, generate
from shmap_tp.command_model import open_model
from tests.helpers.run_fixtures import complete_meta, killed_at_the_end, start_python, write_tokens

GENERATE = ["--max-new-tokens", "6"]


OPENED: dict[str, shmap_tp.Model] = {}


@pytest.fixture(autouse=True)
def programs_are_shared(monkeypatch):
    """Commands that name the same model and mesh open it once, with its compiled programs."""

    def opened(arguments):
        names = "checkpoint", "pretrained", "adapter", "step", "dtype", "mesh", "mesh_keys"
        key = repr([getattr(arguments, name) for name in names])
        if key not in OPENED:
            OPENED[key] = open_model(arguments)
        return OPENED[key]

    monkeypatch.setattr(command_model, "open_model", opened)


def called(command, capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    code = command.main([*arguments])
    return code, *capsys.readouterr()


def test_generate_prints_the_answer_of_the_library_on_every_mesh(run, capsys):
    """A restored model takes texts, and ends at the stop tokens of its tokenizer."""
    model = shmap_tp.Model.restore(run, dp=1, mp=1)
    ids = model.generate([list(b"12+")], max_new_tokens=6, stop_tokens=(0,))
    assert model.generate(["12+"], max_new_tokens=6) == ids and model.tokenizer.decode([65]) == "A"
    for mesh in ([], ["mesh.dp=2", "mesh.mp=4"]):
        code, printed, _ = called(generate, capsys, "--checkpoint", str(run), "--prompt", "12+", *GENERATE, *mesh)
        assert (code, printed.rstrip("\n")) == (0, "12+" + bytes(ids[0]).decode(errors="replace"))


def test_answers_to_a_file_of_prompts_do_not_depend_on_how_many_are_computed_at_a_time(run, capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("1", "22 ", "é")))
    sampled = ["--temperature", "1.5", "--samples", "2", *GENERATE]
    found = []
    for batch in ("16", "2"):
        out = tmp_path / f"{batch}.jsonl"
        given = ["--checkpoint", str(run), "--prompts", str(prompts), "--out", str(out), "--batch", batch]
        assert called(generate, capsys, *given, *sampled)[:2] == (0, "")
        found.append([json.loads(line) for line in out.read_text().splitlines()])
    assert found[0] == found[1]
    asked = [(text, sample) for text in ("1", "22 ", "é") for sample in (0, 1)]
    assert [(line["prompt"], line["sample"]) for line in found[0]] == asked


def test_answers_that_the_context_ends_are_announced(run, capsys):
    given = ["--checkpoint", str(run), "--prompt", "12+", "--max-new-tokens"]
    code, printed, said = called(generate, capsys, *given, "14")
    assert code == 0 and len(printed.rstrip("\n")) <= 16
    assert said == "model.context=16 ends answers after 13 tokens, not --max-new-tokens 14\n"
    assert called(generate, capsys, *given, "13")[2] == ""


def test_an_answer_ends_before_a_stop_text(run, capsys):
    given = ["--checkpoint", str(run), "--prompt", "7", "--temperature", "2", "--max-new-tokens", "12"]
    whole = called(generate, capsys, *given)[1].rstrip("\n").removeprefix("7")
    stop = whole[3:5]
    cut = called(generate, capsys, *given, "--stop", stop)[1].rstrip("\n").removeprefix("7")
    assert cut == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no prompt; give --prompt TEXT or --prompts FILE"),
        (["--prompt", ""], "prompt 0 is empty"),
        (["--prompt", "a", "--top-p", "2"], "top_p=2.0 must be above 0 and at most 1"),
        (["--prompt", "a", "--stop", ""], "a stop text is empty"),
        (["--prompt", "a" * 16], "no room in model.context=16"),
        (["--prompt", "a", "--step", "3"], "holds no checkpoint of step 3"),
        (["--prompt", "a", "mesh.mp=3"], "mesh.mp=3 does not divide heads=8"),
        (["--prompt", "a", "model.width=3"], "is not mesh.dp=N or mesh.mp=N"),
        (["--prompt", "a", "mesh.dp=0"], "is not mesh.dp=N or mesh.mp=N"),
        (["--prompts", "/nowhere.txt"], "--prompts /nowhere.txt cannot be read: No such file or directory"),
        (["--prompts", "/dev/zero"], "/dev/zero is no regular file, but a file is needed; name another"),
        (["--prompt", "a", "--tokenizer", "/nowhere.json"], "--tokenizer /nowhere.json cannot be read: No such file"),
        (["--prompt", "a", "--out", "/nowhere/out.jsonl"], "--out /nowhere/out.jsonl cannot be written"),
        (["--prompt", "a", "--out", "/dev/full"], "/dev/full is no regular file, but a file is needed; name another"),
        (["--prompt", "a", "--out", "a" * 300], "cannot be read: File name too long"),
        (["--prompt", "a", "--batch", "0"], "--batch 0 must be at least 1"),
        (["--prompt", "a", "--top-k", "5"], "--top-k 5 has no effect with --temperature 0"),
        (["--prompt", "a", "--samples", "2"], "--samples 2 has no effect with --temperature 0"),
        (["--prompt", "a", "--out", "a" * 250], "File name too long; choose a shorter one"),
        (["--prompt", "a", "--top-k", "9" * 30], "must be 0 or more and below 2^31"),
        (["--prompt", "a\udcff"], "prompt 0 has bytes that are not UTF-8"),
        (["--prompt", "a", "--tokenizer", "a" * 300], "cannot be read: File name too long"),
    ],
    ids=str,
)
def test_what_generate_refuses(run, capsys, arguments, message):
    code, _, error = called(generate, capsys, "--checkpoint", str(run), *arguments)
    assert code == 2 and message in error and error.count("\n") <= 2


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("lines.txt", b"1\r\n2\x0c3\n", ["1", "2\x0c3"]),
        ("marked.txt", b"\xef\xbb\xbf1", ["1"]),
        ("separator.jsonl", '{"prompt": "1\u2028"}\n'.encode(), ["1\u2028"]),
        ("blank.txt", b"1\n\n2\n", "line 2 must be a prompt that is not empty"),
        (
            "blank.jsonl",
            b'{"prompt": "1"}\n\n',
            'line 2 must be a prompt that is not empty, in an object such as {"prompt": "..."}',
        ),
        ("number.jsonl", b'{"prompt": 1}\n', "line 1 must be a prompt that is not empty"),
        ("latin.txt", b"caf\xe9\n", "is not UTF-8 at byte 3"),
        ("empty.txt", b"", []),
    ],
)
def test_prompts_are_the_lines_of_a_file_or_of_stdin(tmp_path, monkeypatch, name, content, found):
    (file := tmp_path / name).write_bytes(content)
    if isinstance(found, list):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        names = [str(file)] if name.endswith("jsonl") else [str(file), "-"]
        assert [generate._read_prompts(name) for name in names] == [found] * len(names)
    else:
        with pytest.raises(shmap_tp.UserError, match=re.escape(found)):
            generate._read_prompts(str(file))


def test_a_file_of_answers_is_only_replaced_if_that_is_asked_for(run, capsys, tmp_path):
    (out := tmp_path / "answers.jsonl").write_text("of yesterday\n")
    given = ["--checkpoint", str(run), "--prompt", "1", *GENERATE, "--out", str(out)]
    code, _, error = called(generate, capsys, *given)
    assert code == 2 and f"--out {out} exists; choose another file, or replace it with --overwrite" in error
    assert out.read_text() == "of yesterday\n"
    assert called(generate, capsys, *given, "--overwrite", "--step", "3")[0] == 2
    assert out.read_text() == "of yesterday\n" and [file.name for file in tmp_path.iterdir()] == [out.name]
    assert called(generate, capsys, *given, "--overwrite")[0] == 0
    assert [json.loads(line)["prompt"] for line in out.read_text().splitlines()] == ["1"]


def test_answers_before_an_interrupt_stay_beside_the_file(run, capsys, tmp_path, monkeypatch):
    def answers(programs, parameters, tokenizer, prompts, *_, **__):
        if prompts == [list(b"2")]:
            raise KeyboardInterrupt
        return [["x"]]

    monkeypatch.setattr("shmap_tp.inference.text.answers", answers)
    given = ["--checkpoint", str(run), "--prompt", "1", "--prompt", "2", "--batch", "1"]
    assert called(generate, capsys, *given, "--out", str(tmp_path / "out"))[0] == 130
    assert [file.name for file in tmp_path.iterdir()] == ["out.partial"]
    assert json.loads((tmp_path / "out.partial").read_text())["answer"] == "x"


def test_a_reader_that_leaves_ends_the_command_without_a_traceback(run):
    """As in `... | head -1`."""
    given = ["--checkpoint", str(run), "--prompt", "7", *GENERATE]
    with killed_at_the_end([start_python("-m", "shmap_tp.generate", *given, JAX_PLATFORMS="cpu")]) as (process,):
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait(timeout=60) == 141


def test_a_file_of_prompts_that_cannot_be_used_is_named_and_stays(run, capsys, tmp_path):
    file = tmp_path / "p.jsonl"
    for content, message in (
        (b'{"a":' * 100_000, "line 1 must be a prompt that is not empty, in an object such as"),
        (b'{"prompt": "\\ud800"}', "prompt 0 has bytes that are not UTF-8"),
        (b'{"prompt": "a"}', "is the file of --prompts, which it would replace"),
        (b"", "there is no prompt"),
    ):
        file.write_bytes(content)
        given = ["--checkpoint", str(run), "--prompts", str(file), "--out", str(file), "--overwrite"]
        code, _, error = called(generate, capsys, *given)
        assert code == 2 and message in error and error.count("\n") <= 2
        assert file.read_bytes() == content


@pytest.mark.parametrize(
    ("documents", "mesh"), [("isolated", ["mesh.dp=2", "mesh.cp=2", "mesh.mp=2"]), ("joined", ["mesh.cp=8"])]
)
def test_evaluate_agrees_with_the_logits_on_every_mesh(run, capsys, documents, mesh):
    """5 sequences, some at a time; isolated, as the run's, and joined.  The parts by position add up to the whole
    loss: a token of isolated documents has before it those of its own."""
    given = ["--checkpoint", str(run), "--sequences", "5", "--json"]
    given += ["--documents", documents] if documents == "joined" else []
    code, printed, _ = called(evaluate, capsys, *given, "--batch", "2")
    found = json.loads(printed)
    model = shmap_tp.Model.restore(run, dp=1, mp=1)
    rows = np.fromfile(run.parent / "data" / "validation.bin", np.uint16)[: 5 * 16 + 1]
    rows = np.stack([rows[row * 16 : row * 16 + 17] for row in range(5)]).astype(int)
    ends = (rows[:, :-1] == 0) & (documents == "isolated")
    logits = np.asarray(model.logits(rows[:, :-1], np.cumsum(ends, axis=1) - ends), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    losses = -np.take_along_axis(log_p, rows[:, 1:, None], -1)[..., 0]
    loss, tokens = losses[~ends].mean(), 80 - ends.sum()
    assert code == 0 and found["tokens"] == tokens and found["sequences"] == 5
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    text = (rows[:, 1:] != 0)[~ends].sum()
    assert found["bits_per_byte"] == pytest.approx(loss * tokens / text / math.log(2), rel=1e-5)
    assert found["accuracy"] == pytest.approx((logits.argmax(-1) == rows[:, 1:])[~ends].mean())

    before = np.zeros_like(rows[:, :-1])
    for row, seen in zip(ends, before, strict=True):
        for place in range(16):
            seen[place] = 1 if place == 0 or row[place - 1] else seen[place - 1] + 1
    after = 2 ** (np.frexp(before)[1] - 1)
    assert found["loss_by_position"] == [
        {"after": each, "tokens": part.sum(), "loss": pytest.approx(losses[part].mean(), rel=1e-5)}
        for each in np.unique(after[~ends])
        if (part := ~ends & (after == each)).any()
    ]
    code, printed, _ = called(evaluate, capsys, *given, "--batch", "9" * 30, *mesh)  # is the file
    other = json.loads(printed)
    by_position = other.pop("loss_by_position")
    assert by_position == [each | {"loss": pytest.approx(each["loss"], rel=1e-5)} for each in found["loss_by_position"]]
    assert code == 0 and other == pytest.approx({name: found[name] for name in other}, rel=1e-5)
    assert other["accuracy"] == found["accuracy"]


def test_evaluate_grades_a_file_of_text_to_its_last_token(run, capsys, tmp_path):
    """An end of text is before the first document, and one between them."""
    (tmp_path / "a.md").write_text("12+34=")
    (tmp_path / "b.txt").write_text("the rest of it é")
    given = ["--checkpoint", str(run), "--text", str(tmp_path / "a.md"), "--text", str(tmp_path / "b.txt")]
    code, printed, _ = called(evaluate, capsys, *given, "--documents=joined", "--json")
    found, stream = json.loads(printed), [0, *b"12+34=", 0, *"the rest of it é".encode()]
    model = shmap_tp.Model.restore(run, dp=1, mp=1)
    rows = [np.array([stream[:17]]), np.array([stream[16:]])]
    nats = -sum(float(model.scoring_program(model.parameters, row)[0].sum()) for row in rows)
    assert code == 0 and (found["sequences"], found["tokens"]) == (2, 24)
    assert found["loss"] == pytest.approx(nats / 24, rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats / 23 / math.log(2), rel=1e-5)


def test_of_equal_logits_that_of_the_lowest_id_is_the_most_likely(run):
    model = shmap_tp.Model.restore(run, dp=1, mp=4)
    _, greedy = model.scoring_program(jax.tree.map(jnp.zeros_like, model.parameters), np.array([[5, 0, 1, 0, 200]]))
    assert greedy.tolist() == [[True, False, True, False]]


def test_the_table_says_how_many_tokens_each_token_sees():
    losses = [{"after": after, "tokens": 1, "loss": 2.0} for after in (1, 2, 1024)]
    lines = evaluate._table({"loss": 2.0, "loss_by_position": losses}).splitlines()
    assert [line.removesuffix("2.0000").strip() for line in lines[2:]] == ["1", "2 to 3", "1,024 to 2,047"]


def test_evaluate_warns_of_data_of_another_tokenizer_and_of_pairs(run, capsys, tmp_path):
    given = ["--checkpoint", str(run), "--sequences", "1"]
    assert called(evaluate, capsys, *given)[2] == ""
    code, printed, said = called(evaluate, capsys, *given, "--data", str(write_tokens(tmp_path / "data")))
    assert code == 0 and "accuracy" in printed
    assert "data was tokenized with none.json, which is not the tokenizer of the model (bytes)" in said
    complete_meta(tmp_path / "data", pairs={"train": 2, "validation": 1})
    _, _, said = called(evaluate, capsys, *given, "--data", str(tmp_path / "data"))
    assert f"{tmp_path}/data has preference pairs: this is the loss of the next token over both answers" in said


def test_what_evaluate_refuses(run, capsys, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    for arguments, message in (
        (["--data", "/nowhere"], "does not exist"),
        (["--sequences", "0"], "--sequences 0 must be at least 1"),
        (["mesh.dp=x"], "is not mesh.dp=N"),
        (["mesh.cp=0"], "'mesh.cp=0' is not mesh.dp=N or mesh.mp=N or mesh.cp=N"),
        (["--data", ""], "--data is empty"),
        (["--text", ""], "--text is empty"),
        (["--field", "x"], "--field needs --text PATH"),
        (["--text", str(tmp_path / "empty.txt")], "--text has no text"),
        (["--text", "/nowhere"], "--text=/nowhere cannot be read: No such file or directory"),
        (["--text", "/dev/null"], "--text /dev/null: /dev/null is no regular file"),
        (["--text", "README.md", "--split", "train"], "--text is evaluated instead of --data and --split"),
        *((["--tasks", none], "--tasks names no task") for none in (",", "", " ,")),
        (["--tasks", "x", "--fewshot", "-1"], "--fewshot -1 must be at least 0"),
        (["--tasks", "a", "--data", "d"], "--data does not apply to --tasks; leave one of them out"),
        (["--tasks", "a", "--split", "train"], "--split does not apply to --tasks"),
        (["--limit", "3"], "--limit needs --tasks NAME,..."),
        (["--tasks-dir", "d"], "--tasks-dir needs --tasks"),
        (["--tasks", "a", "--limit", "0"], "--limit 0 must be at least 1"),
        (["--apply-chat-template"], "--apply-chat-template needs --tasks"),
    ):
        code, _, error = called(evaluate, capsys, "--checkpoint", str(run), *arguments)
        assert code == 2 and message in error and error.count("\n") <= 2
