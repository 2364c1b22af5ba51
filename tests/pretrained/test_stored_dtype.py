"""The dtype in which parameters are held: that of the computation or int8 for use, float32 for training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shmap_tp
from shmap_tp.parallel.partitioning import decayed, leaves_by_path
from tests.helpers.assertions import assert_close, assert_same_bits, distances
from tests.helpers.paths import ROOT
from tests.helpers.pretrained_models import dequantized, read_tensors, tokens, write_directory

KINDS = ["llama", "gpt_neox", "gemma3", "gpt_oss"]
"""Without biases; with them; with tied embeddings and norms of heads; with experts, sinks and a router."""
LINEAR = [f"attention.{name}" for name in ("query", "key", "value", "out")]
LINEAR += [f"mlp.{name}" for name in ("gate", "up", "down")]
MESH = {"dp": 2, "mp": 4, "tensor_parallel": "sequence", "dtype": "bfloat16"}


def from_float32(directory, **mesh) -> shmap_tp.Model:
    """The model with float32 parameters that computes in bfloat16."""
    given = [f"model.from_pretrained={directory}", *(f"mesh.{key}={value}" for key, value in mesh.items())]
    given += ["train.precision=bfloat16", "train.batch=8"]
    return shmap_tp.Model.initialize(shmap_tp.load_config(*given, file=ROOT / "conf" / "finetune.yaml"))


@pytest.mark.parametrize("case", KINDS)
def test_matrices_in_bfloat16_take_half_the_memory_and_give_the_same_bits(tmp_path, case):
    directory = write_directory(tmp_path / "m", case)
    model = shmap_tp.from_pretrained(directory, **MESH)
    masters = from_float32(directory, dp=2, mp=4, tensor_parallel="sequence")
    leaves = zip(*map(jax.tree.leaves, (model.parameters, masters.parameters, decayed(model.parameters))), strict=True)
    sizes = []
    for held, master, is_matrix in leaves:
        assert held.dtype == (jnp.bfloat16 if is_matrix else jnp.float32) and master.dtype == jnp.float32
        sizes.append([sum(shard.data.nbytes for shard in x.addressable_shards) for x in (held, master)])
    held, master = np.sum(sizes, axis=0)
    assert held < 0.55 * master
    if case == "gpt_oss":  # the loss of gpt_neox: in the next test
        logits = [np.asarray(one.logits(tokens()[:, :-1])) for one in (model, masters)]
        assert np.array_equal(*logits) and np.isfinite(logits[0]).all()


def test_fsdp_holds_them_in_bfloat16_too_and_gradients_have_the_dtype_of_the_parameters(tmp_path):
    directory = write_directory(tmp_path / "m", "gpt_neox")
    mesh = {"dp": 4, "mp": 2, "zero": "fsdp"}
    model, masters = shmap_tp.from_pretrained(directory, dtype="bfloat16", **mesh), from_float32(directory, **mesh)
    found, expected = model.loss_and_gradients(tokens()), masters.loss_and_gradients(tokens())
    assert float(found[0]) == float(expected[0])
    for gradient, parameter, wide in zip(*map(jax.tree.leaves, (found[1], model.parameters, expected[1])), strict=True):
        assert gradient.dtype == parameter.dtype
        assert np.max(np.abs(gradient.astype(np.float32) - wide)) <= 0.02 * np.max(np.abs(wide))


def test_a_directory_of_bfloat16_is_held_and_written_with_its_bits(tmp_path):
    directory = write_directory(tmp_path / "in", "qwen3", dtype="BF16")
    shmap_tp.from_pretrained(directory, **MESH).save_pretrained(tmp_path / "out", dtype="bfloat16")
    before, after = read_tensors(directory), read_tensors(tmp_path / "out")
    assert all(before[name].tobytes() == after[name].tobytes() for name in before) and before.keys() == after.keys()


def test_a_trainer_has_float32_weights_also_where_it_starts_from_a_model_in_bfloat16_and_they_are_written(tmp_path):
    directory = write_directory(tmp_path / "m", "llama")
    given = f"model.from_pretrained={directory} mesh.dp=2 mesh.mp=4 train.batch=2 optimizer.warmup_steps=0"
    config = shmap_tp.load_config(*given.split(), "train.precision=bfloat16", file=ROOT / "conf" / "finetune.yaml")
    trainer = shmap_tp.Trainer(config)
    assert {leaf.dtype for leaf in jax.tree.leaves(trainer.state.params)} == {np.dtype(np.float32)}
    assert_same_bits(trainer.state.params, shmap_tp.from_pretrained(directory, dp=2, mp=4).parameters)
    other = shmap_tp.Trainer(config, model=shmap_tp.from_pretrained(directory, **MESH))
    described = [jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), each.state) for each in (trainer, other)]
    assert described[0] == described[1]
    losses = [float(other.step(tokens())["loss"]) for _ in range(3)]
    assert losses[2] < losses[0]
    other.model().save_pretrained(tmp_path / "out")
    assert_same_bits(shmap_tp.from_pretrained(tmp_path / "out", dp=8).parameters, other.model().parameters)


@pytest.mark.parametrize("case", ["llama", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_matrices_of_blocks_in_int8_are_the_same_on_every_mesh_and_multiply_as_what_they_stand_for(tmp_path, case):
    directory = write_directory(tmp_path / "m", case)
    model = shmap_tp.from_pretrained(directory, dp=2, mp=4, tensor_parallel="sequence", dtype="int8")
    kinds = {name: leaf.dtype.name for name, leaf in leaves_by_path(model.parameters, ".").items()}
    block = {name for name, dtype in kinds.items() if dtype == "int8"}
    assert block == {f"blocks.{name}.weight.values" for name in LINEAR} & kinds.keys() and len(block) >= 6
    if case == "llama":  # its logits: in the next test
        other = shmap_tp.from_pretrained(directory, zero="fsdp", dp=4, mp=2, dtype="int8")
        assert_same_bits(model.parameters, other.parameters)
        return
    whole, masters = dequantized(model), shmap_tp.from_pretrained(directory, dp=2, mp=4)
    assert_close(model.logits(tokens()[:, :-1]), whole.logits(tokens()[:, :-1]), 2e-5)
    found = distances(whole.parameters, masters.parameters)
    assert {name for name in found if found[name]} == {name.removesuffix(".values") for name in block}
    assert max(found.values()) < 0.51 / 127


def test_generation_in_int8_is_that_of_the_same_weights_in_float32(tmp_path):
    directory = write_directory(tmp_path / "m", "llama_tied")
    model = shmap_tp.from_pretrained(directory, dp=2, mp=4, dtype="int8", context=64)
    prompts = [[1, 2, 3], [5, 9, 4]]
    rows = np.array([[*prompt, *answer] for prompt, answer in zip(prompts, model.generate(prompts, 12), strict=True)])
    assert np.array_equal(np.asarray(dequantized(model).logits(rows)).argmax(-1)[:, 2:-1], rows[:, 3:])
    programs, params = model.generation_programs, model.parameters
    layers = programs.unstack(params.blocks)
    wanted = programs.layer_shardings(layers)
    is_there = jax.tree.map(lambda x, at: x.sharding.is_equivalent_to(at, x.ndim), layers, wanted)
    assert all(jax.tree.leaves(is_there))
    for number, layer in enumerate(layers):
        assert_same_bits(layer, jax.tree.map(lambda x, number=number: x[number], params.blocks))


def test_a_model_in_int8_is_not_trained_and_not_written(tmp_path):
    directory = write_directory(tmp_path / "m", "llama")
    model = shmap_tp.from_pretrained(directory, mp=2, dtype="int8", context=16)
    with pytest.raises(shmap_tp.UserError, match="held in int8 cannot be differentiated: read it with dtype="):
        model.loss_and_gradients(tokens()[:, :17])
    with pytest.raises(shmap_tp.UserError, match="held in int8 cannot be written"):
        model.save_pretrained(tmp_path / "out")
    with pytest.raises(shmap_tp.UserError, match="held in int8 cannot be trained"):
        shmap_tp.Trainer(model.config, model=model)
    with pytest.raises(shmap_tp.UserError, match="dtype=int4 must be one of auto, float32, bfloat16, int8"):
        shmap_tp.from_pretrained(directory, dtype="int4")
    assert f"{sum(w.size for w in jax.tree.leaves(model.functions.shapes)):,} parameters" in repr(model)
