"""What the README and docs/pretrained.md show of the first run holds for its model, as typed."""

import json

import pytest

from shmap_tp import evaluate, generate, train
from shmap_tp.pretrained import __main__ as pretrained
from tests.helpers.paths import ROOT

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.mark.slow
def test_the_first_run_goes_on_on_other_meshes_and_transformers_writes_its_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    few = ["optimizer.warmup_steps=5", "evaluate.every=0", "checkpoint.every=0", "sample.prompts=[]"]
    assert train.main(["--cfg", str(ROOT / "conf/config.yaml"), "train.steps=30", *few]) == 0
    for steps, (dp, mp) in {31: (8, 1), 32: (1, 8)}.items():
        on = [f"mesh.dp={dp}", f"mesh.mp={mp}", f"train.steps={steps}", "--resume"]
        assert train.main(["--cfg", "runs/first/config.yaml", *on]) == 0
    assert evaluate.main(["--checkpoint", "runs/first", "--sequences", "8"]) == 0
    assert "bits per byte" in capsys.readouterr().out

    given = ["--checkpoint", "runs/first", "--prompt", "class", "--temperature", "0", "--max-new-tokens", "40"]
    assert generate.main([*given, "--out", "ours.jsonl"]) == 0
    ours = "class" + json.loads((tmp_path / "ours.jsonl").read_text())["answer"]
    assert pretrained.main(["export", "runs/first", "--out", "hf"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained("hf")
    words = transformers.AutoTokenizer.from_pretrained("hf")
    found = model.generate(**words("class", return_tensors="pt"), max_new_tokens=40, do_sample=False)[0]
    assert words.decode(found) == ours and len({*found.tolist()}) > 3, ours
