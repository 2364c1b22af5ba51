"""Adapters of every family against PEFT: pip install -e '.[test-pretrained]'."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shmap_tp
from shmap_tp.model.adapters import split_factors
from shmap_tp.pretrained.peft import load_factors, open_adapter
from shmap_tp.pretrained.reading import load_parameters
from shmap_tp.pretrained.source import open_source
from shmap_tp.pretrained.writing import Form, save_model
from shmap_tp.training.step import build_step_functions
from tests.helpers.assertions import distances
from tests.helpers.paths import ROOT
from tests.helpers.pretrained_models import CASES, read_tensors, tokens, write_directory

torch = pytest.importorskip("torch", reason="pip install -e '.[test-pretrained]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[test-pretrained]'")
peft = pytest.importorskip("peft", reason="pip install -e '.[test-pretrained]'")
from tests.helpers.transformers_float64 import float64_throughout, model_in_float64  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")
RANK, ALPHA, STEPS = 4, 8, 20
TOLERANCE = 2e-5
LENGTH = 64
WITH_EXPERTS = "mixtral", "qwen3_moe", "olmoe"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def base_of(directory: Path, case: str) -> Any:
    write_directory(directory, case)
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    ).eval()


def with_peft(model: Any, *, random: bool, **options: Any) -> Any:
    """The model with an adapter on all of its linear layers but the head, which PEFT 0.21 understands to include the
    stacked matrices of experts (`target_parameters`, refused here): those of attention alone for such models.
    `random`: b is not zero."""
    torch.manual_seed(0)
    target = ATTENTION if model.config.model_type in WITH_EXPERTS else "all-linear"
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=target, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if random and "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def logits_of(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(tokens()[:, :LENGTH])).logits.numpy()


def difference(actual: Any, expected: np.ndarray) -> float:
    """max|actual - expected| / max|expected|."""
    return float(np.max(np.abs(np.asarray(actual) - expected)) / np.max(np.abs(expected)))


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_of_peft_has_its_logits_here_and_is_written_as_it_was_read(tmp_path, case):
    reference = with_peft(base_of(tmp_path / "base", case), random=True, use_rslora=case == "qwen3")
    reference.save_pretrained(tmp_path / "theirs")
    model = shmap_tp.from_pretrained(tmp_path / "base", adapter=tmp_path / "theirs", dp=2, mp=4)
    expected = logits_of(reference)
    assert difference(model.logits(tokens()[:, :LENGTH]), expected) < TOLERANCE
    assert difference(logits_of(base_of(tmp_path / "again", case)), expected) > 100 * TOLERANCE
    model.save_pretrained(tmp_path / "ours")
    before, after = read_tensors(tmp_path / "theirs"), read_tensors(tmp_path / "ours")
    assert before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("case", "scale", "rslora"), [
    ("llama", "rank", False),
    ("gpt2", "sqrt_rank", False),
    ("gpt_neox", "sqrt_rank", True),
])  # fmt: skip
def test_an_adapter_of_this_project_has_its_logits_in_peft_merged_or_not(tmp_path, case, scale, rslora):
    """Its factors of q, k and v differ, so that they are block-diagonal where those are fused."""
    base = base_of(tmp_path / "base", case)
    given = [f"model.from_pretrained={tmp_path / 'base'}", f"model.adapter.rank={RANK}", "mesh.dp=2", "mesh.mp=4"]
    given.append(f"model.adapter.scale={scale}")
    config = shmap_tp.load_config(*given, file=str(ROOT / "conf" / "finetune.yaml"))
    model, random = shmap_tp.Model.initialize(config), np.random.default_rng(5)
    factors, frozen = split_factors(model.parameters)
    factors = jax.tree.map(
        lambda w: jax.device_put(random.normal(0, 0.1, w.shape).astype(np.float32), w.sharding), factors
    )
    model = replace(model, parameters=eqx.combine(factors, frozen))
    model.save_pretrained(tmp_path / "out", rslora=rslora)
    assert peft.LoraConfig.from_pretrained(tmp_path / "out").use_rslora == rslora
    expected = logits_of(peft.PeftModel.from_pretrained(base, tmp_path / "out").eval())
    assert difference(model.logits(tokens()[:, :LENGTH]), expected) < TOLERANCE
    model.save_pretrained(tmp_path / "merged", merge=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    assert difference(logits_of(merged.eval()), expected) < TOLERANCE


def steps_of_peft(directory: Path, out: Path, rate: float) -> dict[str, np.ndarray]:
    """The factors after 20 steps of AdamW in float64, from those written to `out`."""
    with float64_throughout():
        model = with_peft(model_in_float64(directory, "llama"), random=False)
        model.save_pretrained(out)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            logits = model(torch.tensor(tokens()[:, :LENGTH])).logits
            targets = torch.tensor(tokens()[:, 1 : LENGTH + 1])
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
        found = peft.get_peft_model_state_dict(model)
    return {name: parameter.detach().numpy() for name, parameter in found.items()}


def test_factors_after_20_steps_are_those_that_peft_trains(tmp_path):
    """In float64: b starts at zero, so that Adam divides rounding errors of its first gradients by themselves."""
    base, rate = write_directory(tmp_path / "base", "llama"), 1e-3
    expected = steps_of_peft(base, tmp_path / "start", rate)
    with jax.enable_x64(True):
        given = [f"model.from_pretrained={base}", f"model.context={LENGTH}", "mesh.dp=2", "mesh.mp=4", "train.batch=2"]
        given += [f"optimizer.learning_rate={rate}", f"optimizer.final_learning_rate={rate}", "optimizer.clip_norm=1e9"]
        given += ["optimizer.warmup_steps=0", "optimizer.weight_decay=0.1", f"model.adapter.rank={RANK}"]
        config = shmap_tp.load_config(*given, f"model.adapter.alpha={ALPHA}", file=str(ROOT / "conf" / "finetune.yaml"))
        functions = build_step_functions(config, shmap_tp.make_mesh(config), jnp.float64)
        source = open_source(str(base))
        factors = load_factors(open_adapter(str(tmp_path / "start"), source), config.model, functions.shapes.params)
        frozen = load_parameters(source, config.model, split_factors(functions.shapes.params)[1])
        state = functions.init_from(eqx.combine(factors, frozen))
        batch = jax.device_put(tokens()[None, :, : LENGTH + 1].astype(np.int32), functions.tokens.sharding)
        for _ in range(STEPS):
            state, _ = functions.step(state, batch)
        save_model(tmp_path / "out", config, state.params, source, Form("float64"))
    found = distances(read_tensors(tmp_path / "out"), expected)
    print(f"PEFT, {STEPS} steps of AdamW: {max(found.values()):.1e}")
    assert max(found.values()) < 1e-6, found
