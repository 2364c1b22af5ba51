"""Models in and out: the logits that transformers computed, the same bits on every mesh, and what is refused."""

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import shmap_tp
from shmap_tp.errors import StorageError, UserError
from shmap_tp.pretrained import reading, tensor_files
from shmap_tp.pretrained.configuration import target_of
from shmap_tp.pretrained.writing import Form, save_model
from tests.helpers.assertions import assert_same_bits
from tests.helpers.pretrained_models import (
    CASES,
    assert_same_tensors,
    model_error,
    read_tensors,
    reference,
    write_directory,
    write_tensors,
)
from tests.helpers.pretrained_processes import full_disk

MESHES = [
    {"dp": 1, "mp": 1},
    {"dp": 2, "mp": 2, "tensor_parallel": "sequence", "zero": "fsdp"},
    {"dp": 1, "mp": 4, "tensor_parallel": "collective_matmul"},
    {"dp": 8, "mp": 1, "zero": "fsdp"},
    {"dp": 2, "mp": 4, "tensor_parallel": "sequence"},
]


@pytest.mark.parametrize(("case", "mesh"), [*zip(CASES, itertools.cycle(MESHES), strict=False)], ids=str)
def test_logits_are_those_of_transformers_and_what_was_read_is_written_with_the_same_bits(tmp_path, case, mesh):
    """Every case on one of the meshes: tests/model compares meshes, and test_tensor_files.py the parts of tensors.
    tests/pretrained/reference was computed by transformers; test_against_transformers.py has all positions.  A model
    that was never imported gets a config.json with the same meaning."""
    assert reference(case)["spread"] > 5
    model = shmap_tp.from_pretrained(write_directory(tmp_path / "in", case), **mesh)
    assert model_error(model, case) < 2e-5
    model.save_pretrained(tmp_path / "out")
    assert_same_tensors(tmp_path / "out", tmp_path / "in")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == reference(case)["config"]
    section, family, target = model.config.model, model.source.family, target_of(model.config.model, None)
    assert not family.differences(section, family.config_of(section))
    assert not target.family.differences(section, target.config)


def test_fused_matrices_give_the_bits_of_those_that_are_not_fused(tmp_path):
    """Phi-3 as Mistral, its q, k and v apart, and its gate and up."""
    fused = write_directory(tmp_path / "fused", "phi3", changed={"rope_parameters": None})
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    config = json.loads((fused / "config.json").read_text()) | mistral
    del config["original_max_position_embeddings"]
    apart = tmp_path / "apart"
    apart.mkdir()
    (apart / "config.json").write_text(json.dumps(config))
    tensors, parts = read_tensors(fused), {"qkv": (("q", "k", "v"), [48, 60]), "gate_up": (("gate", "up"), 2)}
    for name, (module, (names, cuts)) in itertools.product(list(tensors), parts.items()):
        if f".{module}_proj" in name:
            pieces = np.split(tensors.pop(name), cuts)
            tensors |= {name.replace(module, part): values for part, values in zip(names, pieces, strict=True)}
    write_tensors(apart / "model.safetensors", tensors)
    first, second = (shmap_tp.from_pretrained(directory, dp=2, mp=4) for directory in (fused, apart))
    assert_same_bits(first.parameters, second.parameters)
    assert replace(first.config.model, name="apart", from_pretrained=str(apart)) == second.config.model


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_files_of_16_bits_are_read_and_written(tmp_path, dtype):
    directory = write_directory(tmp_path / "in", "llama", dtype=dtype)
    name = {"BF16": "bfloat16", "F16": "float16"}[dtype]
    model = shmap_tp.from_pretrained(directory, dp=2, mp=4)
    assert {leaf.dtype for leaf in jax.tree.leaves(model.parameters)} == {np.dtype(np.float32)}
    model.save_pretrained(tmp_path / "out", dtype=name)
    assert_same_tensors(tmp_path / "out", directory)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == name


def test_a_parameter_is_read_in_pieces_and_each_piece_once_for_all_replicas(tmp_path, monkeypatch):
    directory = write_directory(tmp_path / "in", "llama")
    whole = shmap_tp.from_pretrained(directory, dp=2, mp=4, zero="fsdp").parameters
    requested = []
    read = tensor_files.StoredTensor.read

    def spy(self, box):
        requested.append(np.prod([stop - start for start, stop in box]))
        return read(self, box)

    monkeypatch.setattr(tensor_files.StoredTensor, "read", spy)
    monkeypatch.setattr(reading, "PIECE_BYTES", 4096)
    pieces = shmap_tp.from_pretrained(directory, dp=2, mp=4).parameters
    assert_same_bits(pieces, whole)
    assert sum(requested) == sum(values.size for values in read_tensors(directory).values())
    assert max(requested) <= 1024  # of float32: 4096 bytes


def test_a_sharded_directory_is_written_with_its_index_and_read_again(tmp_path, monkeypatch):
    directory = write_directory(tmp_path / "in", "llama")
    model = shmap_tp.from_pretrained(directory, dp=2, mp=4)
    save_model(tmp_path / "out", model.config, model.parameters, model.source, Form("float32", shard_bytes=100_000))
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert files == names and len(files) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in read_tensors(directory).values())
    assert set(index["weight_map"].values()) == set(files)
    assert_same_bits(*(shmap_tp.from_pretrained(each).parameters for each in (tmp_path / "out", directory)))
    (tmp_path / "out" / files[1]).unlink()
    with pytest.raises(UserError, match=rf"{files[1]} does not exist; copy it there"):
        shmap_tp.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("case", ["other files", "without its head", "with its head"])
def test_directories_as_other_programs_write_them_are_read(tmp_path, case):
    """Mistral's have a second copy, and a directory may have been written to twice.  Old ones of GPT-2 have buffers and
    no name of the model, and others a head that is the embedding to which it is tied."""
    name = "llama" if case == "other files" else "gpt2"
    directory, expected = write_directory(tmp_path / "in", name), write_directory(tmp_path / "expected", name)
    if case == "other files":
        write_tensors(directory / "consolidated.safetensors", {"output.weight": np.ones((2, 2))})
        (directory / "model.safetensors.index.json").write_text('{"weight_map": {"x": "gone.safetensors"}}')
    elif case == "with its head":
        edited(directory, **{"lm_head.weight": read_tensors(directory)["transformer.wte.weight"]})
    else:
        named = {name.removeprefix("transformer."): values for name, values in read_tensors(directory).items()}
        write_tensors(directory / "model.safetensors", named | {"h.0.attn.bias": np.ones((1, 1, 8, 8), np.float32)})
    assert_same_bits(*(shmap_tp.from_pretrained(each).parameters for each in (directory, expected)))


def edited(directory: Path, **changes: object) -> Path:
    """The directory with tensors replaced, added or (None) removed."""
    tensors = read_tensors(directory)
    tensors |= {name: change(tensors) if callable(change) else change for name, change in changes.items()}
    write_tensors(directory / "model.safetensors", {name: v for name, v in tensors.items() if v is not None})
    return directory


def almost_the_embedding(tensors: dict[str, np.ndarray]) -> np.ndarray:
    """With another last element."""
    head = tensors["transformer.wte.weight"].copy()
    head[-1, -1] += 1
    return head


UP = "model.layers.1.mlp.up_proj.weight"


Q, HEAD = "model.layers.0.self_attn.q_proj", "lm_head.weight"
REFUSED_TENSORS = [
    ("llama", {UP: None}, f"has no tensor {UP}, which .*config.json asks for"),
    ("llama", {UP: np.ones((80, 47))}, rf"{UP} has the shape \[80, 47\], but .*config.json asks for \[80, 48\]"),
    ("llama", {UP: np.ones((48, 80))}, rf"{UP} has the shape \[48, 80\], but"),
    ("llama", {UP.replace("1", "3"): np.ones((80, 48))}, "has the tensor model.layers.3.mlp.up_proj.weight, for"),
    ("llama", {f"{Q}.bias": np.ones(48)}, f"has the tensor {Q}.bias, for"),
    # transformers 5 would use it
    ("gpt2", {HEAD: almost_the_embedding}, rf"{HEAD} differs from the embedding, which .*config.json uses in its"),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED_TENSORS)
def test_tensors_that_are_missing_unexpected_or_of_another_shape_are_refused(tmp_path, case, changes, message):
    directory = edited(write_directory(tmp_path / "m", case), **changes)
    with pytest.raises(UserError, match=message):
        shmap_tp.from_pretrained(directory)


def test_directories_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"nothere is not a directory; name one with config.json and"):
        shmap_tp.from_pretrained(tmp_path / "nothere")
    with pytest.raises(UserError, match=r"has no config.json"):
        shmap_tp.from_pretrained(tmp_path)
    directory = write_directory(tmp_path / "m", "llama")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model.bin is a pickle, which can run any program"):
        shmap_tp.from_pretrained(directory)
    (directory / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match=r"has no \*.safetensors file"):
        shmap_tp.from_pretrained(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json: not JSON"):
        shmap_tp.from_pretrained(directory)


def test_a_place_that_is_not_empty_or_cannot_be_written_to_and_a_dtype_are_refused(tmp_path):
    model = shmap_tp.from_pretrained(write_directory(tmp_path / "m", "llama"))
    (tmp_path / "out").mkdir()
    model.save_pretrained(tmp_path / "out")
    with pytest.raises(UserError, match="out exists and is not an empty directory"):
        model.save_pretrained(tmp_path / "out")
    with pytest.raises(UserError, match="dtype int8 cannot be written; use one of float64, float32"):
        model.save_pretrained(tmp_path / "other", dtype="int8")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/out.incomplete cannot be written: Not a directory; choose another"):
        model.save_pretrained(tmp_path / "file" / "out")


@pytest.mark.parametrize("when", ["posix_fallocate", "pwrite"])
def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch, when):
    """At the creation of a file, and while tensors are written."""
    model = shmap_tp.from_pretrained(write_directory(tmp_path / "m", "llama"), dp=2, mp=2)
    monkeypatch.setattr(os, when, full_disk)
    with pytest.raises(StorageError, match="out could not be written: No space left on device; nothing is left there"):
        model.save_pretrained(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


def test_the_tokenizer_and_the_generation_settings_are_copied(tmp_path):
    directory = write_directory(tmp_path / "m", "llama")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (directory / name).write_text(name)
    (directory / "README.md").write_text("not a tokenizer")
    shmap_tp.from_pretrained(directory).save_pretrained(tmp_path / "out")
    written = {path.name for path in (tmp_path / "out").iterdir()}
    copied = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}
    assert written == copied | {"config.json", "model.safetensors"}
    assert (tmp_path / "out" / "generation_config.json").read_text() == "generation_config.json"
