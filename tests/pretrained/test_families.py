"""config.json to the model section and back; what is not supported is refused with its name and value."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

import shmap_tp
from shmap_tp.errors import UserError
from shmap_tp.model.flops import parameter_terms
from shmap_tp.pretrained.configuration import EXPORTABLE, derive_model, describe_target, target_of
from shmap_tp.pretrained.families import find_family
from shmap_tp.pretrained.family import plain
from tests.helpers.paths import ROOT
from tests.helpers.pretrained_models import reference

FINETUNE = str(ROOT / "conf" / "finetune.yaml")


def written(directory: Path, case: str, **changed: Any) -> str:
    """The directory with a config.json of that case with `changed` keys; None removes one."""
    directory.mkdir(exist_ok=True)
    content = reference(case)["config"] | changed
    content = {key: value for key, value in content.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(content))
    return str(directory)


def config_of(directory: Path, case: str, *overrides: str, **changed: Any) -> Any:
    """The configuration of a case."""
    given = [f"model.from_pretrained={written(directory, case, **changed)}", "mesh.mp=1", *overrides]
    return shmap_tp.load_config(*given, file=FINETUNE)


def refusal(directory: Path, case: str, *overrides: str, **changed: Any) -> str:
    """The message, of what `load_config` asks first where that refuses: without Hydra it takes a tenth of the time."""
    with pytest.raises(UserError) as raised:
        derive_model({"from_pretrained": written(directory, case, **changed)})
        config_of(directory, case, *overrides, **changed)
    assert len(str(raised.value).splitlines()) <= 2
    return str(raised.value)


ROPE, SCALING = "rope_parameters", "rope_scaling"
YARN = reference("qwen2")["config"]["rope_parameters"]
LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
LLAMA = {
    **{"width": 48, "layers": 3, "heads": 8, "kv_heads": 2, "head_dim": 6, "ffn": 80, "vocabulary": 97},
    **{"vocabulary_multiple": 128, "context": 512, "block": "sequential", "norm": "rmsnorm", "mlp": "swiglu"},
    **{"norm_epsilon": 1e-5, "rotary_base": 50_000, "rotary_scaling": "llama3", "rotary_original_context": 64},
    **{"tie_embeddings": False, "qkv_bias": False},
}
LONG, LAYER_TYPES = {"max_position_embeddings": 131072}, {"layer_types": None}
SECTIONS = [
    ("llama", {}, LLAMA),
    # the names of transformers 4
    ("llama", {ROPE: None, "rope_theta": 50_000.0, SCALING: LLAMA3}, LLAMA),
    ("gpt_neox", {ROPE: None, "rotary_emb_base": 10_000, "rotary_pct": 0.5}, {"rotary_dim": 4}),
    # where there are rope_scaling and rope_parameters the first counts, as in transformers
    ("llama", {SCALING: {"rope_type": "default", "rope_theta": 7.0}}, {"rotary_base": 7, "rotary_scaling": None}),
    # a rotary model gets a context of at most 2048, and learned positions are kept whole
    ("llama", LONG, {"context": 2048}),
    ("gpt2", {"n_positions": 4096}, {"context": 4096}),
    # the tanh form of gelu of GPT-NeoX-20B
    ("gpt_neox", {"hidden_act": "gelu_fast"}, {"mlp": "gelu"}),
    ("gpt_neox", {}, {"mlp": "gelu_erf"}),
    ("gemma2", {}, {"layer_pattern": ["local", "global"]}),
    ("gemma2", LAYER_TYPES, {"layer_pattern": ["local", "global"]}),
    ("gemma3", {}, {"layer_pattern": ["local", "local", "global"]}),
    ("gemma3", LAYER_TYPES | {"num_hidden_layers": 26}, {"layer_pattern": [*["local"] * 5, "global"]}),
    ("gemma3", {ROPE: None}, {"rotary_base": 1e6, "rotary_local_base": 10_000}),
    ("olmo3", LAYER_TYPES, {"layer_pattern": [*["local"] * 3, "global"]}),
    # an absent key means 4096, as in transformers
    ("mistral", {"sliding_window": 100}, {"window": 100}),
    ("mistral", {"sliding_window": None}, {"window": 4096}),
]


@pytest.mark.parametrize(("case", "changed", "expected"), SECTIONS)
def test_a_key_of_the_model_section_is_what_transformers_takes_from_config_json(tmp_path, case, changed, expected):
    found = derive_model({"from_pretrained": written(tmp_path, case, **changed)})
    assert {key: plain(found.get(key)) for key in expected} == expected


def test_a_context_may_be_longer_than_the_default_and_a_window_that_is_null_is_none(tmp_path):
    assert config_of(tmp_path, "llama", "model.context=8192", **LONG).model.context == 8192
    content = reference("mistral")["config"] | {"sliding_window": None}
    assert find_family(content, "").options(content, "config.json")["window"] is None


REFUSED = [
    ("llama", {"hidden_act": "relu"}, "hidden_act=relu is not supported for LlamaForCausalLM; supported is silu"),
    ("llama", {"hidden_size": None}, "hidden_size is missing, which every LlamaForCausalLM has"),
    ("llama", {"logit_softcap": 30.0}, "logit_softcap=30.0 is not a key that shmap_tp knows for LlamaForCausalLM"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} is not a key"),
    ("llama", {"architectures": ["MambaForCausalLM"]}, "the architecture MambaForCausalLM is not supported; supported"),
    (
        "llama",
        {"model_type": "mistral"},
        "model_type=mistral is not supported for LlamaForCausalLM; supported is llama",
    ),
    ("qwen2", {ROPE: {"rope_type": "yarn"}}, "factor is missing in the yarn scaling of the rotary encoding"),
    ("qwen2", {ROPE: {**YARN, "attention_factor": -1.1}}, "attention_factor=-1.1 must be a number above 0"),
    ("qwen2", {ROPE: {**YARN, "truncate": 0}}, "truncate=0 of the rotary scaling is not supported"),
    ("llama", {ROPE: {"rope_type": "linear"}}, "factor is missing in the linear scaling of the rotary encoding"),
    ("llama", {ROPE: {"rope_type": "llama3"}}, "factor is missing in the llama3 scaling of the rotary"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
    ("llama", {SCALING: {"type": "dynamic", "factor": 2}}, "rope_scaling={'type': 'dynamic', 'factor': 2} is not"),
    ("llama", {SCALING: {"rope_theta": 1e4, "rope_type": "longrope"}}, "'rope_type': 'longrope'} is not supported"),
    ("llama", {ROPE: {"full_attention": {"rope_theta": 1e4}}}, "{'full_attention': {'rope_theta': 10000.0}}"),
    ("llama", {"layer_types": ["full_attention"]}, "layer_types=['full_attention'] is not a key that shmap_tp knows"),
    ("llama", {"sliding_window": 16}, "sliding_window=16 is not a key that shmap_tp knows for LlamaForCausalLM"),
    (
        "qwen2",
        {"layer_types": ["full_attention", "chunked_attention"]},
        "layer_types=chunked_attention is not supported",
    ),
    ("qwen2", {"attention_bias": True}, "attention_bias=true is not a key that shmap_tp knows for Qwen2ForCausalLM"),
    ("gpt2", {"num_attention_heads": 4}, "num_attention_heads=4 is not a key that shmap_tp knows for GPT2LMHeadModel"),
    ("gemma", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not a key that shmap_tp knows"),
    ("gemma2", {"layer_types": ["full_attention"] * 2}, "layer_types has 2 elements, but num_hidden_layers=3"),
    ("gemma2", {"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000 must be at most 10000"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported for Gemma3ForCausalLM"),
    ("gemma3", {ROPE: None, "rope_local_base_freq": "x"}, "rope_local_base_freq=x must be a number above 0"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true is not supported"),
    (
        "gemma3",
        {ROPE: {"sliding_attention": {"rope_type": "linear", "factor": 8.0}}},
        "rope_parameters.sliding_attention={'rope_type': 'linear', 'factor': 8.0} is not supported",
    ),
    ("gemma3", {ROPE: {"rope_type": "linear", "factor": 8.0}}, "rope_parameters.factor is not read by transformers"),
    ("olmo3", {ROPE: {"rope_theta": 1e4}}, "rope_parameters.rope_theta is not read by transformers"),
    ("olmo3", {ROPE: {"full_attention": {**YARN, "truncate": False}}}, "truncate=false is not read by transformers"),
    ("olmoe", {"head_dim": 16}, "head_dim=16 must be hidden_size / num_attention_heads=6 in OlmoeForCausalLM"),
    ("gpt_neox", {ROPE: None, "partial_rotary_factor": 0.5}, "it reads rotary_pct, here 0.25.  Give rotary_pct=0.5"),
    (
        "gpt_neox",
        {ROPE: None, "rope_theta": 5e4},
        "it reads rotary_emb_base, here 10000.  Give rotary_emb_base=50000.0",
    ),
    ("olmo2", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not a key that shmap_tp knows for Olmo2ForCausalLM"),
    ("olmo3", {ROPE: None, "rope_theta": 1e4}, "rope_theta=10000.0 means different bases of local layers"),
    ("phi3", {ROPE: YARN}, "'rope_type': 'yarn'} is not supported; supported is default"),
    ("phi3", {SCALING: {"type": "longrope"}}, "rope_scaling={'type': 'longrope'} is not supported"),
    ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0 is not supported for GptOssForCausalLM; supported is 7.0"),
    ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config says that the weights are q"),
    ("gpt_oss", {ROPE: None}, "rope_scaling is missing, which every GptOssForCausalLM has"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers=[1, 0] must have num_hidden_layers=5 numbers"),
    ("smollm3", {"layer_types": ["sliding_attention"] * 5}, "layer_types=sliding_attention is not supported"),
    ("smollm3", {"use_sliding_window": True}, "use_sliding_window=true is not supported for SmolLM3ForCausalLM"),
    ("gpt_neox", {"hidden_act": "quick_gelu"}, "hidden_act=quick_gelu is not supported for GPTNeoX"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=true is not supported"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=false is not supported"),
    ("gptj", {"tie_word_embeddings": True}, "tie_word_embeddings=true is not supported for GPTJForCausalLM"),
    ("gemma", {"hidden_activation": "gelu_new"}, "hidden_activation=gelu_new is not supported for GemmaForCausalLM"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true is not supported"),
]


@pytest.mark.parametrize(("case", "changed", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_not_supported_is_refused_with_its_name_and_value(tmp_path, case, changed, message):
    said = refusal(tmp_path, case, **changed)
    assert message in said and f"{tmp_path}/config.json" in said


MALFORMED = {
    "llama": {
        "architectures": ["LlamaForCausalLM", 7],
        "hidden_act": [[], {}],
        "max_position_embeddings": [None, "x", 1.5, [], -1, True],
        "num_attention_heads": ["x", 0, 1.5, {}],
        "rope_parameters": ["x", 7, {"rope_theta": "a"}, {"rope_theta": -1}],
        "rms_norm_eps": ["x", -1.0],
        "tie_word_embeddings": ["x", 2],
    },
    "gpt2": {"n_embd": ["x", 0], "n_head": [0, []], "n_inner": [1.5], "n_positions": [None, 0]},
    "gpt_neox": {"hidden_size": [{}, float("nan")], "rope_parameters": [{"partial_rotary_factor": 2.0}]},
    "gemma": {"hidden_size": [-1, []]},
    "mistral": {"sliding_window": ["x", 0, []]},
    "gemma2": {"layer_types": [7, "x", [7]], "sliding_window_pattern": ["x", 0], "attn_logit_softcapping": ["x", -1]},
    "gemma3": {ROPE: ["x", {"full_attention": 7}, {"sliding_attention": {"rope_theta": "a"}, "chunked": {}}]},
    "qwen3": {"layer_types": [7, "x", [7]]},
}


@pytest.mark.parametrize(("case", "key"), [(case, key) for case, keys in MALFORMED.items() for key in keys])
def test_a_value_of_another_type_or_out_of_range_is_refused(tmp_path, case, key):
    for value in MALFORMED[case][key]:
        said = refusal(tmp_path, case, **{key: value})
        named = (key, "model.", *(value if isinstance(value, dict) else ()))
        assert any(name in said for name in named), (value, said)


LLAMA_31 = {ROPE: None, SCALING: reference("llama")["config"][ROPE], "rope_theta": 5e5, "pretraining_tp": 1}
GEMMA_3 = {"layer_types": None, "sliding_window_pattern": 3, ROPE: None, "rope_theta": 5e4, SCALING: None}
PHI_4 = {"original_max_position_embeddings": 16384, "sliding_window": None, SCALING: None, "embd_pdrop": 0.0}
OLMO_3 = {ROPE: None, "rope_theta": 500_000, "attention_bias": False, "layer_types": None}
GPT_OSS = {ROPE: None, "rope_theta": 150000, SCALING: YARN | {"rope_theta": None, "truncate": False}}
GPT_OSS |= {"initial_context_length": 4096, "experts_per_token": 4, "swiglu_limit": 7.0, "attention_bias": True}
PUBLISHED = {
    "Llama-3.1-8B": ("llama", LLAMA_31 | {"mlp_bias": False}),
    "SmolLM2-135M": ("llama", {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}}),
    "Mistral-7B-v0.3": ("mistral", {"sliding_window": None, "head_dim": 6}),
    "Qwen2.5-0.5B": ("qwen2", {"use_mrope": False, "max_window_layers": 24, "use_sliding_window": False}),
    "gpt2": ("gpt2", {"n_ctx": 512, "task_specific_params": {"text-generation": {"max_length": 50}}}),
    "pythia-70m": ("gpt_neox", {"rotary_emb_base": 10000, "rotary_pct": 0.25, ROPE: None}),
    "gpt-neox-20b": ("gpt_neox", {"hidden_act": "gelu_fast", "attention_probs_dropout_prob": 0.1}),
    "gpt-j-6b": ("gptj", {"rotary": True, "scale_attn_weights": True, "gradient_checkpointing": False}),
    "gemma-2-2b": ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"}),
    "gemma-3-1b-pt": ("gemma3", GEMMA_3 | {"rope_local_base_freq": 100.0, "cache_implementation": "hybrid"}),
    "phi-4": ("phi3", PHI_4),
    "Olmo-3-7B": ("olmo3", OLMO_3 | {SCALING: YARN | {"rope_theta": None, "attention_factor": 0.1 * math.log(4) + 1}}),
    "gpt-oss-20b": ("gpt_oss", GPT_OSS),
    "gemma-7b": ("gemma", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}),
}
"""Keys that the config.json of published models has, and this project's tests of logits do not have."""


@pytest.mark.parametrize("model", PUBLISHED)
def test_keys_of_published_models_are_known(tmp_path, model):
    case, changed = PUBLISHED[model]
    assert derive_model({"from_pretrained": written(tmp_path, case, **changed)})["vocabulary"] == 97


@pytest.mark.parametrize(
    ("model", "parameters"),
    [("Llama-3.1-8B", 8_030_261_248), ("Llama-3.1-70B", 70_553_706_496), ("Qwen3-8B", 8_190_735_360)],
)
def test_published_shapes_have_the_published_number_of_parameters(model, parameters):
    """benchmarks/pretrained has their config.json."""
    given = [f"model.from_pretrained={ROOT / 'benchmarks' / 'pretrained' / model}", "mesh.mp=1"]
    found = shmap_tp.load_config(*given, file=FINETUNE).model
    assert sum(parameter_terms(found).values()) == parameters


LOCAL = {"layer_types": ["full_attention", *["sliding_attention"] * 2], "sliding_window": 99}
LIMITS = [
    ("llama", {}, "max_position_embeddings=512"),
    ("gpt2", {}, "n_positions=512"),
    ("mistral", {}, "max_position_embeddings=512"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 100, "layer_types": None}, "sliding_window=100"),
    ("qwen2", LOCAL, "sliding_window=99"),
]


@pytest.mark.parametrize(("case", "changed", "limit"), LIMITS)
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
    nine |= {"hidden_size": 72}
    said = refusal(tmp_path, "llama", "mesh.mp=2", **nine)
    assert "does not divide heads=9" in said and "use mesh.mp in {1, 3, 9}" in said
    assert config_of(tmp_path, "llama", "mesh.mp=3", **nine).model.vocabulary_multiple == 1152


def test_a_model_that_an_architecture_expresses_has_its_defaults_written_out_and_another_is_refused():
    """transformers refuses null for all but the ids that begin, end and pad a text."""

    def model(block: str, positions: str, more: str = "") -> Any:
        given = f"block={block} norm=rmsnorm mlp=swiglu positions={positions} {more}".split()
        return shmap_tp.load_config("model=test", "mesh.mp=1", *(f"model.{one}" for one in given)).model

    target = target_of(model("sequential", "rotary"), None)
    assert target.family.architecture == "LlamaForCausalLM"
    empty = {key for key, value in target.config.items() if value is None}
    assert empty == {"bos_token_id", "eos_token_id", "pad_token_id"}
    assert target.config["rms_norm_eps"] == 1e-6
    uneven = "width=32 heads=6 kv_heads=6 head_dim=8"  # which LlamaConfig refuses
    assert target_of(model("sequential", "rotary", uneven), None).family.architecture == "MistralForCausalLM"
    for changed, named in (
        (("sequential", "alibi"), r"positions=alibi \(there "),
        (("parallel", "rotary"), "block=para"),
    ):
        with pytest.raises(UserError, match=f"no supported architecture can express model test; .*model.{named}"):
            target_of(model(*changed), None)
    exportable = shmap_tp.load_config("model=bytes_llama", "model.positions=alibi").model
    with pytest.raises(UserError, match="train with the values there, or another model, such as model=gpt2, llama3_8b"):
        target_of(exportable, None)


def test_the_models_that_are_named_as_exportable_are_and_the_default_one_is_not():
    """And each is said to be where it is chosen: in the summary of --check."""
    models = {name: shmap_tp.load_config(f"model={name}", "mesh.mp=1").model for name in (*EXPORTABLE, "bytes")}
    found = {name: describe_target(model) for name, model in models.items()}
    assert found["bytes_llama"] == "as LlamaForCausalLM" and all(found[name].startswith("as ") for name in EXPORTABLE)
    assert found["bytes"].startswith("not possible") and "model=bytes_llama, " in found["bytes"]


def test_the_configuration_of_a_run_does_not_need_the_directory(tmp_path):
    """`--resume` reads RUN/config.yaml, which names every key."""
    config = config_of(tmp_path / "model", "llama")
    saved = tmp_path / "config.yaml"
    saved.write_text(shmap_tp.config.compose.to_yaml(config))
    (tmp_path / "model" / "config.json").unlink()
    (tmp_path / "model").rmdir()
    assert shmap_tp.load_config(file=str(saved)) == config
