"""The adaptor of lm-evaluation-harness: pip install -e '.[evaluate]'."""

import sys

import numpy as np
import pytest

import shmap_tp
from shmap_tp import evaluate
from shmap_tp.data.chat_template import ChatTemplate
from shmap_tp.data.tokenizer import Bytes
from shmap_tp.errors import UserError
from tests.helpers.harness_task import write_task


def test_tasks_without_lm_eval_are_refused(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "shmap_tp.inference.harness", raising=False)
    assert evaluate.main(["--checkpoint", "runs/none", "--tasks", "arc_easy"]) == 2
    error = capsys.readouterr().err
    assert "--tasks needs lm-evaluation-harness: pip install -e '.[evaluate]'" in error and error.count("\n") <= 2


pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def harness():
    pytest.importorskip("lm_eval", reason="pip install -e '.[evaluate]'")
    from shmap_tp.inference.harness import HarnessModel

    config = shmap_tp.load_config("model=test", "model.vocabulary=256", "model.context=32", "mesh.mp=2")
    return HarnessModel(shmap_tp.Model.initialize(config), Bytes(), batch=3)


def instances(kind: str, *arguments: tuple) -> list:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def nats(model, ids: list[int]) -> np.ndarray:
    """The log-likelihood of each of ids[1:], from the logits."""
    logits = np.asarray(model.logits([ids[:-1]])[0], np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return log_p[np.arange(len(ids) - 1), ids[1:]]


def test_log_likelihoods_are_those_of_the_logits_in_the_order_of_the_requests(harness):
    pairs = [("a", "bc"), ("", "xyz"), ("long " * 20 + "x", "end"), ("a b", " c"), ("éé", "é")]
    found = harness.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
    for (context, continuation), (value, _) in zip(pairs, found, strict=True):
        ids = ([0] if not context else list(context.encode())) + list(continuation.encode())
        count = len(continuation.encode())
        assert value == pytest.approx(nats(harness._model, ids[-33:])[-count:].sum(), rel=1e-5)


def test_a_continuation_that_the_model_would_choose_is_greedy(harness):
    best = harness._model.generate([[65, 66, 67]], max_new_tokens=2)[0]
    scored = [(None, [65, 66, 67], best), (None, [65, 66, 67], [best[0], (best[1] + 1) % 256])]
    assert [greedy for _, greedy in harness._loglikelihood_tokens(scored, disable_tqdm=True)] == [True, False]


def test_a_text_longer_than_the_context_is_scored_once_per_token(harness):
    text = "0123456789" * 7
    (found,) = harness.loglikelihood_rolling(instances("loglikelihood_rolling", (text,)), disable_tqdm=True)
    ids = [0, *text.encode()]
    parts = [(0, 32, 32), (32, 64, 32), (38, 70, 6)]  # (first, last input + 1, targets that count)
    expected = sum(nats(harness._model, ids[first : last + 1])[-count:].sum() for first, last, count in parts)
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_first_token_of_a_tokenizer_is_the_context_of_a_text_and_not_graded(harness):
    from shmap_tp.inference.harness import HarnessModel

    class Begins(Bytes):
        begin_of_text = 1

        def encode(self, text: str, special_tokens: bool | None = None) -> list[int]:
            return [1] * (special_tokens is not False) + super().encode(text)

    begun = HarnessModel(harness._model, Begins(), batch=3)
    (found,) = begun.loglikelihood_rolling(instances("loglikelihood_rolling", ("abc",)), disable_tqdm=True)
    assert found == pytest.approx(nats(harness._model, [1, *b"abc"]).sum(), rel=1e-5)


def test_answers_end_before_stop_texts_and_are_those_of_generate(harness):
    prompts = ["a", "bb" * 30, "c"]
    greedy = {"max_gen_toks": 6, "until": ["\n\n"]}
    asked = instances("generate_until", *[(text, greedy) for text in prompts])
    found = harness.generate_until(asked, disable_tqdm=True)
    ids = [list(text.encode())[-26:] for text in prompts]
    expected = harness._model.generate(ids, max_new_tokens=6, stop_tokens=(0,))
    assert found == [Bytes().decode(tokens).split("\n\n")[0] for tokens in expected]
    with pytest.raises(UserError, match="have num_beams, which is not supported here"):
        harness.generate_until(instances("generate_until", ("a", {"num_beams": 2})))


def test_a_local_task_is_evaluated_and_an_unknown_one_refused(harness, tmp_path, monkeypatch):
    from shmap_tp.inference.harness import evaluate_tasks

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lines = write_task(tmp_path)
    found = evaluate_tasks(harness, ["sums"], str(tmp_path))
    texts = [f"{line['input']} {choice}" for line in lines for choice in "23"]
    scores = [nats(harness._model, list(text.encode()))[-2:].sum() for text in texts]
    expected = np.mean([np.argmax(scores[:2]) == 0, np.argmax(scores[2:]) == 1])
    assert found["results"]["sums"]["acc,none"] == expected
    with pytest.raises(UserError, match=r"--tasks sumz: lm_eval knows no such task, but .*sums") as refused:
        evaluate_tasks(harness, ["sumz"], str(tmp_path))
    assert str(refused.value).count("\n") == 1
    with pytest.raises(UserError, match="is not a directory"):
        evaluate_tasks(harness, ["sums"], str(tmp_path / "none"))


def test_a_task_is_put_as_messages_by_the_chat_template(harness, tmp_path, monkeypatch):
    from shmap_tp.inference.harness import HarnessModel, evaluate_tasks

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lines = write_task(tmp_path)
    text = "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    chat = HarnessModel(harness._model, Bytes(), 3, ChatTemplate(text, "t", {}))
    asked = []
    monkeypatch.setattr(chat, "_loglikelihood_tokens", lambda requests, **_: asked.extend(requests) or [(0, False)] * 4)
    evaluate_tasks(chat, ["sums"], str(tmp_path), apply_chat_template=True)
    assert [pair for pair, _, _ in asked] == [(f"<{line['input']}>:", choice) for line in lines for choice in "23"]
    with pytest.raises(UserError, match="this HarnessModel has no chat template; give one as `template`"):
        harness.apply_chat_template([{"role": "user", "content": "Hi"}])
