"""The text model of a multimodal checkpoint is read as a checkpoint of its own; its other parts are skipped."""

import json
from dataclasses import replace

import numpy as np
import pytest

import shmap_tp
from shmap_tp.errors import UserError
from shmap_tp.pretrained.source import open_source
from tests.helpers.assertions import assert_same_bits
from tests.helpers.pretrained_models import (
    assert_same_tensors,
    reference,
    tokens,
    weight,
    write_directory,
    write_tensors,
)

CASE = "gemma3"
NAMES = {
    "transformers 4": ("language_model.model.", "vision_tower.post_layernorm.weight"),
    "transformers 5": ("model.language_model.", "model.multi_modal_projector.mm_input_projection_weight"),
}


def write_multimodal(directory, names, **changed):
    """The model of CASE as the text model of another."""
    prefix, other = NAMES[names]
    record = reference(CASE)
    own = {name: weight(name, tuple(shape), CASE) for name, shape in record["tensors"].items()}
    text = {key: value for key, value in record["config"].items() if key not in ("architectures", "eos_token_id")}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    config |= {"vision_config": {"hidden_size": 8}, "mm_tokens_per_image": 4, "eos_token_id": [1, 106]} | changed
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    in_file = {name.replace("model.", prefix, 1): values for name, values in own.items()}
    write_tensors(directory / "model.safetensors", in_file | {other: np.ones((3, 3), np.float32)})
    return directory


@pytest.mark.parametrize("names", NAMES)
def test_the_text_model_is_read_as_it_is_alone_and_is_written_as_a_model_of_its_own(tmp_path, names, capsys):
    directory = write_multimodal(tmp_path / "m", names)
    model, alone = (shmap_tp.from_pretrained(each) for each in (directory, write_directory(tmp_path / "alone", CASE)))
    assert_same_bits(model.parameters, alone.parameters)
    assert replace(model.config.model, name="alone", from_pretrained=str(tmp_path / "alone")) == alone.config.model
    said = capsys.readouterr().out
    assert said.count("1 tensors of other parts are skipped; what is written of it is a Gemma3ForCausalLM") == 1
    model.save_pretrained(tmp_path / "out")
    assert_same_tensors(tmp_path / "out", tmp_path / "alone")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForCausalLM"] and config["eos_token_id"] == [1, 106]


def test_keys_that_a_text_config_leaves_out_have_the_values_of_gemma_3(tmp_path):
    """As published ones do."""
    given = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    given |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    directory = write_multimodal(tmp_path / "m", "transformers 4", text_config=given)
    model = shmap_tp.load_config(f"model.from_pretrained={directory}", "mesh.mp=1", "model=pretrained").model
    assert (model.heads, model.kv_heads, model.head_dim, model.vocabulary) == (8, 4, 256, 262_208)
    assert (model.window, model.rotary_scaling, model.tie_embeddings) == (1024, "linear", True)
    assert list(model.layer_pattern)[:6] == [*5 * ["local"], "global"]


def test_a_text_config_of_another_type_and_an_unknown_key_in_it_are_refused(tmp_path):
    directory = write_multimodal(tmp_path / "m", "transformers 4", text_config=7)
    with pytest.raises(UserError, match="text_config=7 must be an object"):
        open_source(str(directory))
    text = reference(CASE)["config"] | {"new_key": 7}
    directory = write_multimodal(tmp_path / "n", "transformers 4", text_config=text)
    with pytest.raises(UserError, match="new_key=7 is not a key that shmap_tp knows"):
        shmap_tp.load_config(f"model.from_pretrained={directory}", "mesh.mp=1", "model=pretrained")


def test_the_logits_are_those_of_transformers_for_text(tmp_path):
    torch = pytest.importorskip("torch", reason="pip install -e '.[test-pretrained]'")
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[test-pretrained]'")
    options = {key: value for key, value in reference(CASE)["config"].items() if key not in ("architectures", "dtype")}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=options, vision_config=vision, mm_tokens_per_image=4)
    theirs = transformers.Gemma3ForConditionalGeneration(config).eval().float()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(torch.tensor(weight(name, tuple(parameter.shape), CASE)))
        expected = theirs(torch.tensor(tokens()[:1, :-1])).logits.numpy()
    theirs.save_pretrained(tmp_path / "m")
    found = np.asarray(shmap_tp.from_pretrained(tmp_path / "m").logits(tokens()[:1, :-1]))
    assert np.max(np.abs(found - expected)) < 2e-5 * np.max(np.abs(expected))
