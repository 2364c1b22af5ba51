"""Models in and out: the logits that transformers computed, the same bits on every mesh, and what is refused."""

import errno
import itertools
import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest

import shmap_tp
from shmap_tp.errors import StorageError, UserError
from shmap_tp.pretrained import reading, tensor_files
from shmap_tp.pretrained.writing import save_model
from tests.helpers.assertions import assert_same_bits
from tests.helpers.pretrained_models import (
    CASES,
    logit_error,
    read_tensors,
    reference,
    tokens,
    write_directory,
    write_tensors,
)

every_case = pytest.mark.parametrize("case", CASES)
MESHES = [
    {"dp": 1, "mp": 1},
    {"dp": 2, "mp": 2, "tensor_parallel": "sequence", "zero": "fsdp"},
    {"dp": 1, "mp": 4, "tensor_parallel": "collective_matmul"},
    {"dp": 8, "mp": 1, "zero": "fsdp"},
    {"dp": 2, "mp": 4, "tensor_parallel": "sequence"},
]
every_mesh = pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"({mesh['dp']},{mesh['mp']})")


@every_case
def test_logits_are_those_of_transformers(tmp_path, case):
    """tests/pretrained/reference was computed by transformers; test_against_transformers.py has all positions."""
    assert reference(case)["spread"] > 5
    assert logit_error(write_directory(tmp_path / "m", case), case, dp=2, mp=4, tensor_parallel="sequence") < 2e-5


@every_mesh
@pytest.mark.parametrize("case", ["llama", "gpt2", "gpt_neox", "phi3", "olmo3", "gpt_oss"])
def test_what_was_read_is_written_with_the_same_bits_from_every_mesh(tmp_path, case, mesh):
    directory = write_directory(tmp_path / "in", case)
    shmap_tp.from_pretrained(directory, **mesh).save_pretrained(tmp_path / "out")
    before, after = read_tensors(directory), read_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert np.array_equal(values.view(np.uint32), after[name].view(np.uint32)), name
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == reference(case)["config"]


def test_fused_matrices_give_the_bits_of_those_that_are_not_fused(tmp_path):
    """Phi-3 as Mistral, its q, k and v apart, and its gate and up."""
    fused = write_directory(tmp_path / "fused", "phi3", changed={"rope_parameters": None})
    config = json.loads((fused / "config.json").read_text()) | {"architectures": ["MistralForCausalLM"]}
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
    mesh = {"dp": 2, "mp": 4, "tensor_parallel": "sequence"}
    logits = [np.asarray(shmap_tp.from_pretrained(one, **mesh).logits(tokens()[:, :-1])) for one in (fused, apart)]
    assert np.array_equal(*logits)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_files_of_16_bits_are_read_and_written(tmp_path, dtype):
    directory = write_directory(tmp_path / "in", "llama", dtype=dtype)
    name = {"BF16": "bfloat16", "F16": "float16"}[dtype]
    model = shmap_tp.from_pretrained(directory, dp=2, mp=4)
    assert {leaf.dtype for leaf in jax.tree.leaves(model.parameters)} == {np.dtype(np.float32)}
    model.save_pretrained(tmp_path / "out", dtype=name)
    before, after = read_tensors(directory), read_tensors(tmp_path / "out")
    assert all(np.array_equal(before[key].view(np.uint16), after[key].view(np.uint16)) for key in before)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == name


def test_a_parameter_is_read_in_pieces_and_each_piece_once_for_all_replicas(tmp_path, monkeypatch):
    directory = write_directory(tmp_path / "in", "llama")
    whole = shmap_tp.from_pretrained(directory, dp=2, mp=4, zero="fsdp").parameters
    requested = []
    read = tensor_files.StoredTensor.read

    def spy(self, view, box):
        requested.append(np.prod([stop - start for start, stop in box]))
        return read(self, view, box)

    monkeypatch.setattr(tensor_files.StoredTensor, "read", spy)
    monkeypatch.setattr(reading, "PIECE_BYTES", 4096)
    pieces = shmap_tp.from_pretrained(directory, dp=2, mp=4).parameters
    assert_same_bits(pieces, whole)
    assert sum(requested) == sum(values.size for values in read_tensors(directory).values())
    assert max(requested) <= 1024  # of float32: 4096 bytes


def test_a_sharded_directory_is_written_with_its_index_and_read_again(tmp_path, monkeypatch):
    directory = write_directory(tmp_path / "in", "llama")
    model = shmap_tp.from_pretrained(directory, dp=2, mp=4)
    save_model(tmp_path / "out", model.config, model.parameters, model.source, "float32", shard_bytes=100_000)
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert (
        files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)] and len(files) > 2
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in read_tensors(directory).values())
    assert set(index["weight_map"].values()) == set(files)
    assert_same_bits(
        shmap_tp.from_pretrained(tmp_path / "out").parameters, shmap_tp.from_pretrained(directory).parameters
    )
    (tmp_path / "out" / files[1]).unlink()
    with pytest.raises(UserError, match=rf"names the file {files[1]}, which is not there"):
        shmap_tp.from_pretrained(tmp_path / "out")


def test_model_safetensors_is_read_where_there_are_other_files(tmp_path):
    """As by transformers: Mistral's directories have a second copy, and a directory may have been written to twice."""
    directory = write_directory(tmp_path / "in", "llama")
    write_tensors(directory / "consolidated.safetensors", {"output.weight": np.ones((2, 2))})
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"x": "gone.safetensors"}}')
    assert logit_error(directory, "llama") < 2e-5


def test_old_files_with_buffers_and_without_the_head_of_the_model_are_read(tmp_path):
    directory = write_directory(tmp_path / "in", "gpt2")
    named = {name.removeprefix("transformer."): values for name, values in read_tensors(directory).items()}
    named["h.0.attn.bias"] = np.ones((1, 1, 8, 8), np.float32)
    write_tensors(directory / "model.safetensors", named)
    assert logit_error(directory, "gpt2") < 2e-5


def edited(directory: Path, **changes: object) -> Path:
    """The directory with tensors replaced, added or (None) removed."""
    tensors = read_tensors(directory) | changes
    write_tensors(directory / "model.safetensors", {name: v for name, v in tensors.items() if v is not None})
    return directory


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({UP: None}, f"has no tensor {UP}, which .*config.json asks for"),
        ({UP: np.ones((80, 47))}, rf"{UP} has the shape \[80, 47\], but .*config.json asks for \[80, 48\]"),
        ({UP: np.ones((48, 80))}, rf"{UP} has the shape \[48, 80\], but"),
        (
            {"model.layers.3.mlp.up_proj.weight": np.ones((80, 48))},
            "has the tensor model.layers.3.mlp.up_proj.weight, for",
        ),
        (
            {"model.layers.0.self_attn.q_proj.bias": np.ones(48)},
            "has the tensor model.layers.0.self_attn.q_proj.bias, for",
        ),
    ],
)
def test_tensors_that_are_missing_unexpected_or_of_another_shape_are_refused(tmp_path, changes, message):
    directory = edited(write_directory(tmp_path / "m", "llama"), **changes)
    with pytest.raises(UserError, match=message):
        shmap_tp.from_pretrained(directory)


def test_a_head_that_differs_from_the_embedding_that_it_is_tied_to_is_refused(tmp_path):
    """transformers 5 would use it; one that is the same, as older versions wrote it, is skipped."""
    directory = write_directory(tmp_path / "m", "gpt2")
    head = read_tensors(directory)["transformer.wte.weight"].copy()
    edited(directory, **{"lm_head.weight": head})
    assert logit_error(directory, "gpt2") < 2e-5
    head[-1, -1] += 1
    edited(directory, **{"lm_head.weight": head})
    with pytest.raises(UserError, match=r"lm_head.weight differs from the embedding, which .*config.json uses in its"):
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


def test_a_directory_that_is_not_empty_is_not_written_to(tmp_path):
    model = shmap_tp.from_pretrained(write_directory(tmp_path / "m", "llama"))
    (tmp_path / "out").mkdir()
    model.save_pretrained(tmp_path / "out")
    with pytest.raises(UserError, match="out exists and is not an empty directory"):
        model.save_pretrained(tmp_path / "out")
    with pytest.raises(UserError, match="dtype int8 cannot be written; use one of float64, float32"):
        model.save_pretrained(tmp_path / "other", dtype="int8")


@pytest.mark.parametrize("when", ["at its creation", "while tensors are written"])
def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch, when):
    model = shmap_tp.from_pretrained(write_directory(tmp_path / "m", "llama"), dp=2, mp=2)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate" if when == "at its creation" else "pwrite", full)
    with pytest.raises(StorageError, match="out could not be written: No space left on device; nothing is left there"):
        model.save_pretrained(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


def test_a_place_that_cannot_be_written_to_is_refused_with_its_reason(tmp_path):
    model = shmap_tp.from_pretrained(write_directory(tmp_path / "m", "llama"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/out.incomplete cannot be written: Not a directory; choose another"):
        model.save_pretrained(tmp_path / "file" / "out")


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


def test_a_trainer_starts_from_pretrained_weights_and_its_model_is_written(tmp_path):
    directory = write_directory(tmp_path / "m", "llama")
    given = (
        f"model.from_pretrained={directory}",
        "train.batch=2",
        "mesh.dp=2",
        "mesh.mp=4",
        "optimizer.warmup_steps=0",
    )
    config = shmap_tp.load_config(*given, file=str(Path(shmap_tp.__file__).parents[1] / "conf" / "finetune.yaml"))
    trainer = shmap_tp.Trainer(config)
    assert_same_bits(trainer.model().parameters, shmap_tp.from_pretrained(directory, dp=2, mp=4).parameters)
    losses = [float(trainer.step(tokens())["loss"]) for _ in range(3)]
    assert losses[2] < losses[0]
    trainer.model().save_pretrained(tmp_path / "out")
    trained = shmap_tp.from_pretrained(tmp_path / "out", dp=8)
    assert_same_bits(trained.parameters, trainer.model().parameters)
