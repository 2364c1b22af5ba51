"""config.json to the model section and back; what is not supported is refused with its name and value."""

import json
from pathlib import Path
from typing import Any

import pytest

import shmap_tp
from shmap_tp.errors import UserError
from shmap_tp.pretrained.families import find_family
from shmap_tp.pretrained.writing import target_of
from tests.helpers.paths import ROOT
from tests.helpers.pretrained_models import CASES, reference

every_case = pytest.mark.parametrize("case", CASES)
FINETUNE = str(ROOT / "conf" / "finetune.yaml")


def config_of(directory: Path, case: str, *overrides: str, **changed: Any) -> Any:
    """The configuration of a case whose config.json has `changed` keys; None removes one."""
    directory.mkdir(exist_ok=True)
    content = reference(case)["config"] | changed
    content = {key: value for key, value in content.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(content))
    return shmap_tp.load_config(f"model.from_pretrained={directory}", "mesh.mp=1", *overrides, file=FINETUNE)


def refusal(directory: Path, case: str, *overrides: str, **changed: Any) -> str:
    with pytest.raises(UserError) as raised:
        config_of(directory, case, *overrides, **changed)
    assert len(str(raised.value).splitlines()) <= 2
    return str(raised.value)


@every_case
def test_the_model_section_follows_from_config_json_and_expresses_it_again(tmp_path, case):
    """A model that was never imported gets a config.json with the same meaning."""
    model = config_of(tmp_path, case).model
    family = find_family(reference(case)["config"], "config.json")
    assert not family.differences(model, family.config_of(model))
    written = target_of(model, None)
    assert not written.family.differences(model, written.config)


def test_the_model_section_of_llama_3(tmp_path):
    model = config_of(tmp_path, "llama").model
    assert (model.width, model.layers, model.heads, model.kv_heads, model.head_dim, model.ffn) == (48, 3, 8, 2, 6, 80)
    assert (model.vocabulary, model.vocabulary_multiple, model.context) == (97, 128, 512)
    assert (model.block, model.norm, model.mlp, model.norm_epsilon) == ("sequential", "rmsnorm", "swiglu", 1e-5)
    assert (model.rotary_base, model.rotary_scaling, model.rotary_original_context) == (50_000, "llama3", 64)
    assert not model.tie_embeddings and not model.qkv_bias


def test_rotary_keys_by_the_names_of_transformers_4(tmp_path):
    scaling = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64}
    names = {"rope_parameters": None, "rope_theta": 50_000.0, "rope_scaling": scaling}
    assert config_of(tmp_path, "llama", **names) == config_of(tmp_path, "llama")
    names = {"rope_parameters": None, "rotary_emb_base": 10_000, "rotary_pct": 0.5}
    assert config_of(tmp_path, "gpt_neox", **names).model.rotary_dim == 4


def test_a_rotary_model_gets_a_context_of_at_most_2048_and_learned_positions_all_of_theirs(tmp_path):
    assert config_of(tmp_path, "llama", max_position_embeddings=131072).model.context == 2048
    assert config_of(tmp_path, "llama", "model.context=8192", max_position_embeddings=131072).model.context == 8192
    assert config_of(tmp_path, "gpt2", n_positions=4096).model.context == 4096


REFUSED = [
    ("llama", {"hidden_act": "relu"}, "hidden_act=relu is not supported for LlamaForCausalLM; supported is silu"),
    ("llama", {"hidden_size": None}, "hidden_size is missing, which every LlamaForCausalLM has"),
    ("llama", {"logit_softcap": 30.0}, "logit_softcap=30.0 is not a key that shmap_tp knows for LlamaForCausalLM"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} is not a key"),
    ("llama", {"architectures": ["MambaForCausalLM"]}, "the architecture MambaForCausalLM is not supported; supported"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2}}, "rope_parameters={'rope_type': 'yarn', 'fac"),
    ("llama", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling={'type': 'lin"),
    ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "the llama3 scaling of the rotary encoding has no factor"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True is not supported"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False is not supported"),
    ("gptj", {"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported for GPTJForCausalLM"),
    ("gemma", {"hidden_activation": "gelu_new"}, "hidden_activation=gelu_new is not supported for GemmaForCausalLM"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
]


@pytest.mark.parametrize(("case", "changed", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_not_supported_is_refused_with_its_name_and_value(tmp_path, case, changed, message):
    said = refusal(tmp_path, case, **changed)
    assert message in said and f"{tmp_path}/config.json" in said


@pytest.mark.parametrize(
    ("case", "changed", "limit"),
    [
        ("llama", {}, "max_position_embeddings=512"),
        ("gpt2", {}, "n_positions=512"),
        ("mistral", {"sliding_window": 256}, "sliding_window=256"),
        ("mistral", {"sliding_window": 256, "max_position_embeddings": 1024}, "sliding_window=256"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 100, "layer_types": None}, "sliding_window=100"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 99}, "sliding_window=99"),
    ],
)
def test_a_context_beyond_the_model_or_its_sliding_window_is_refused(tmp_path, case, changed, limit):
    """Within the sliding window, attention is to all earlier positions."""
    said = refusal(tmp_path, case, "model.context=513", **changed)
    assert f"model.context=513 is above {limit} of" in said
    longest = int(limit.rpartition("=")[2])
    assert config_of(tmp_path, case, **changed).model.context == longest


def test_a_key_that_config_json_determines_cannot_be_given_another_value(tmp_path):
    assert "model.ffn=100, but it is 80 in" in refusal(tmp_path, "llama", "model.ffn=100")
    assert config_of(tmp_path, "llama", "model.ffn=80", "model.rotary_base=1e6").model.rotary_base == 1e6
    with pytest.raises(UserError, match=r"model\..*, but it is .* leave it out, as conf/finetune.yaml does"):
        shmap_tp.load_config(f"model.from_pretrained={tmp_path}")


def test_a_mesh_that_does_not_fit_is_refused_with_those_that_do(tmp_path):
    nine = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "intermediate_size": 72}
    said = refusal(tmp_path, "llama", "mesh.mp=2", **nine)
    assert "does not divide heads=9" in said and "use mesh.mp in {1, 3, 9}" in said
    assert config_of(tmp_path, "llama", "mesh.mp=3", **nine).model.vocabulary_multiple == 1152


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("positions=alibi", r"model.positions=alibi \(there "),
        ("block=parallel norm=rmsnorm mlp=swiglu positions=rotary", "model.block=parallel"),
    ],
)
def test_a_model_that_no_architecture_expresses_is_refused(changes, message):
    model = shmap_tp.load_config("model=test", "mesh.mp=1", *(f"model.{one}" for one in changes.split())).model
    with pytest.raises(UserError, match=f"no supported architecture can express model test; .*{message}"):
        target_of(model, None)


def test_defaults_are_written_out():
    """transformers refuses null for them."""
    shape = "block=sequential norm=rmsnorm mlp=swiglu positions=rotary"
    model = shmap_tp.load_config("model=test", "mesh.mp=1", *(f"model.{one}" for one in shape.split())).model
    written = target_of(model, None)
    assert written.family.architecture == "LlamaForCausalLM" and None not in written.config.values()
    assert written.config["rms_norm_eps"] == 1e-6


def test_the_configuration_of_a_run_does_not_need_the_directory(tmp_path):
    """`--resume` reads RUN/config.yaml, which names every key."""
    config = config_of(tmp_path / "model", "llama")
    saved = tmp_path / "config.yaml"
    shmap_tp.config.compose.save(config, saved)
    (tmp_path / "model" / "config.json").unlink()
    (tmp_path / "model").rmdir()
    assert shmap_tp.load_config(file=str(saved)) == config
