"""A model tuned on conversations: its run, its samples, its grades, chat with it, its export; and a loop in torch."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import shmap_tp
from shmap_tp import prepare
from shmap_tp.config.choices import Resume
from shmap_tp.config.schema import Config
from shmap_tp.data.batches import Batches
from shmap_tp.data.text_directory import TextDirectory
from shmap_tp.errors import UserError
from shmap_tp.evaluate import main as evaluate
from shmap_tp.inference.text import chat_template_of_model, tokenizer_of_model
from shmap_tp.pretrained.__main__ import main
from shmap_tp.training.step import build_step_functions
from tests.helpers.chat_templates import CHATML, FAMILIES, write_chat_model
from tests.helpers.paths import ROOT
from tests.helpers.run_fixtures import make_runs_quick

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

CONTEXT, STEPS = 64, 20
TEMPLATE = CHATML.replace("m['role'] + '\n'", "m['role'] + ':\n'").replace("assistant\n", "assistant:\n")
"""Another one than the model has."""
RUN = (
    f"mesh.dp=2 mesh.mp=4 model.context={CONTEXT} train.batch=8 train.microbatches=2 train.steps={STEPS} "
    "optimizer.schedule=constant optimizer.warmup_steps=0 optimizer.weight_decay=0 optimizer.learning_rate=3e-4 "
    "evaluate.every=20 sample.every=20 sample.prompts=[Hi] sample.max_new_tokens=4 checkpoint.every=0 "
    "log.tensorboard=false run.compilation_cache=null"
)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, conversations with answers of very different lengths, and a run of 20 steps."""
    work = tmp_path_factory.mktemp("work")
    model = write_chat_model(work / "model", FAMILIES["chatml"])
    (work / "chat.jinja").write_text(TEMPLATE)
    rows = [{"prompt": f"{i}?", "completion": "ab" * (1 if i % 4 else 9)} for i in range(90)]
    (work / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--chat", work / "chats.jsonl", "--tokenizer", model, "--template", work / "chat.jinja"]
    given += ["--out", work / "data", "--pack", CONTEXT, "--validation", "0.4"]  # several batches
    assert prepare.main([str(each) for each in given]) == 0
    with pytest.MonkeyPatch.context() as patch:
        make_runs_quick(patch)
        assert shmap_tp.run_training(configuration(work))
    return work


def configuration(work: Path) -> Config:
    given = [f"model.from_pretrained={work / 'model'}", f"run.dir={work / 'run'}", f"data.dir={work / 'data'}"]
    return shmap_tp.load_config(*given, *RUN.split(), file=str(ROOT / "conf" / "finetune.yaml"))


def lines(work: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (work / "run" / name).read_text().splitlines()]


def test_a_run_is_evaluated_before_its_first_step_and_answers_the_prompts_with_the_template(work):
    validation = [line for line in lines(work, "metrics.jsonl") if line["split"] == "validation"]
    assert [line["step"] for line in validation] == [0, STEPS]
    assert validation[1]["loss"] < validation[0]["loss"] and validation[0]["bits_per_byte"] > 0
    assert {line["prompt"] for line in lines(work, "samples.jsonl")} == {"Hi\n"}


def test_the_grades_of_the_run_are_its_validation_loss(work, capsys):
    assert evaluate(["--checkpoint", str(work / "run"), "--json", "--batch", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    last = lines(work, "metrics.jsonl")[-1]
    assert (found["loss"], found["bits_per_byte"]) == pytest.approx((last["loss"], last["bits_per_byte"]), rel=1e-5)
    assert found["tokens"] == json.loads((work / "data" / "meta.json").read_text())["counted_tokens"]["validation"]


def test_chat_and_export_have_the_template_of_the_conversations_and_stop_at_its_end_of_a_turn(work, capsys):
    model = shmap_tp.Model.restore(work / "run")
    tokenizer = tokenizer_of_model(model, None)
    end = tokenizer.special_tokens()["<|im_end|>"]
    assert chat_template_of_model(model, None).text == TEMPLATE and end in tokenizer.stop_tokens
    in_a_bucket = replace(model, checkpoint="gs://bucket/run/checkpoints/20")  # then it is found in run.dir
    assert chat_template_of_model(in_a_bucket, None).text == TEMPLATE
    assert main(["export", str(work / "run"), "--out", str(work / "out")]) == 0
    assert TextDirectory.read(work / "out").template().text == TEMPLATE
    assert json.loads((work / "out" / "generation_config.json").read_text())["eos_token_id"] == [end]
    assert (work / "out" / "tokenizer.json").read_bytes() == (work / "model" / "tokenizer.json").read_bytes()


def test_a_run_is_not_resumed_with_other_counted_tokens(work, tmp_path):
    data = shutil.copytree(work / "data", tmp_path / "data")
    bits = (data / "train.counted").read_bytes()
    (data / "train.counted").write_bytes(bytes(len(bits)))
    meta = json.loads((data / "meta.json").read_text())
    meta["counted"]["train"] = hashlib.sha256(bytes(len(bits))).hexdigest()
    (data / "meta.json").write_text(json.dumps(meta))
    config = configuration(work)
    config.data.dir, config.checkpoint.resume, config.train.steps = str(data), Resume.must, STEPS + 1
    with pytest.raises(UserError, match=r"is of another run: data\.dir \(train\.counted\) was"):
        shmap_tp.run_training(config)


def test_the_configuration_of_smollm2_is_valid_with_another_model(work):
    file = str(ROOT / "conf" / "finetune_smollm2.yaml")
    config = shmap_tp.load_config(f"model.from_pretrained={work / 'model'}", file=file)
    assert (config.model.context, config.train.steps, config.optimizer.schedule) == (256, 12, "cosine")


def test_twenty_steps_have_the_losses_of_a_loop_in_torch_on_each_conversation_alone(work):
    torch = pytest.importorskip("torch", reason="pip install -e '.[test-pretrained]'")
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[test-pretrained]'")
    config = configuration(work)
    batches = Batches(config, build_step_functions(config, shmap_tp.make_mesh(config), np.float32).tokens)
    end = json.loads((work / "data" / "meta.json").read_text())["end_of_text"]
    model = transformers.AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        total, counted = torch.zeros(()), 0
        for row in np.asarray(batches.training(step)).reshape(-1, CONTEXT + 1).astype(np.int64):
            ids = np.where(row < 0, ~row, row)
            for part in np.split(np.arange(len(ids)), np.flatnonzero(ids == end) + 1):
                targets = np.where(row[part] < 0, -100, row[part])[1:]
                if (targets >= 0).any():
                    logits = model(torch.tensor(ids[part][None, :-1])).logits[0]
                    total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(targets), reduction="sum")
                    counted += int((targets >= 0).sum())
        optimizer.zero_grad()
        (total / counted).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        losses.append(float(total.detach()) / counted)
    ours = [line["loss"] for line in lines(work, "metrics.jsonl") if line["split"] == "train"]
    assert len(ours) == STEPS and losses[-1] < 0.9 * losses[0]
    np.testing.assert_allclose(ours, losses, rtol=1e-4)
